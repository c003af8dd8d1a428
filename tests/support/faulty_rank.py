"""A fault of one rank at one exchange of a step; the ranks' processes import this through a sitecustomize.py.

A rank may be a process of this machine, or of ``penstock stage``, or of ``penstock.lite`` over MPI.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any, ClassVar

import penstock

VARIABLE = "PENSTOCK_TEST_FAULT"
_INTERNAL = 6
_STEP_BEGINS = ("broadcast", "await")


def plant(folder: Path, **fault: object) -> dict[str, str]:
    """Return the variables of ranks with a fault that waits for ``folder / "armed"`` and writes ``folder / "done"``.

    ``rank``; ``function`` of its ps_comm; ``number``: of the calls since the step began, from 1, or 0 for as many as
    the step before had; ``kind``: "SIGKILL", "SIGSTOP", "exception", or "cut": it writes ``folder / "cut"`` and goes on
    when the test has written ``folder / "done"``.
    """
    (folder / "sitecustomize.py").write_text("from tests.support import faulty_rank\nfaulty_rank.install()\n")
    packages = (Path(penstock.__file__).parents[1], Path(__file__).parents[2])  # the one under test, and the tests
    path = os.pathsep.join(map(str, (folder, *packages)))
    return {"PYTHONPATH": path, VARIABLE: json.dumps(fault | {"folder": str(folder)})}


def install() -> None:
    """Make the rank that the variable names fail as it says."""
    fault = json.loads(os.environ[VARIABLE])
    if "stage" in sys.orig_argv:
        _install_in_stage(fault)
        return
    if "penstock.runtime.ranks.rank_process" not in sys.orig_argv or sys.orig_argv[-1] != str(fault["rank"]):
        return
    from penstock.core import comm

    opened = comm.SharedComm.__init__

    def open_faulty(self: comm.SharedComm, *arguments: Any, **options: Any) -> None:
        opened(self, *arguments, **options)
        _Faulty(self.struct, fault)

    comm.SharedComm.__init__ = open_faulty  # type: ignore[method-assign]


def install_over_mpi(rank: int) -> None:
    """The same of a rank of ``penstock.lite`` over MPI, which is this process."""
    fault = json.loads(os.environ[VARIABLE])
    if rank != fault["rank"]:
        return
    from penstock.core import comm

    opened = comm.MpiComm.__init__

    def open_faulty(self: comm.MpiComm, *arguments: Any, **options: Any) -> None:
        opened(self, *arguments, **options)
        _Faulty(self.struct, fault)

    comm.MpiComm.__init__ = open_faulty  # type: ignore[method-assign]


def _install_in_stage(fault: dict[str, Any]) -> None:
    from penstock.core import link_comm

    opened = link_comm.LinkComm.__init__

    def open_faulty(self: link_comm.LinkComm, rank: int, *arguments: Any, **options: Any) -> None:
        opened(self, rank, *arguments, **options)
        if rank == fault["rank"]:
            _Faulty(self._struct, fault)

    link_comm.LinkComm.__init__ = open_faulty  # type: ignore[method-assign]


class _Faulty:
    """Calls the functions of a ps_comm, and counts those since the step began."""

    kept: ClassVar[list[object]] = []  # what the core calls must stay

    def __init__(self, struct: Any, fault: dict[str, Any]) -> None:
        self.fault, self.folder = fault, Path(fault["folder"])
        self.count = self.before = 0
        types = {field[0]: field[1] for field in struct._fields_}
        for name in {*_STEP_BEGINS, fault["function"]}:
            address = ctypes.cast(getattr(struct, name), ctypes.c_void_p).value
            if address is None:  # await, which is optional
                continue
            function = types[name](self.wrapped(name, types[name](address)))
            self.kept.append(function)
            setattr(struct, name, function)

    def wait_for_cut(self) -> None:
        (self.folder / "cut").touch()
        while not (self.folder / "done").exists():
            time.sleep(0.001)

    def wrapped(self, name: str, original: Any) -> Any:
        def call(*arguments: Any) -> int:
            if name == self.fault["function"]:
                self.count += 1
                if self.count == (self.fault["number"] or self.before) and (self.folder / "armed").exists():
                    if self.fault["kind"] == "cut":
                        self.wait_for_cut()
                        return int(original(*arguments))
                    (self.folder / "done").touch()
                    if self.fault["kind"] == "exception":
                        return fail()
                    signal.raise_signal(signal.Signals[self.fault["kind"]])
            status = int(original(*arguments))
            if name in _STEP_BEGINS:
                self.before, self.count = self.count or self.before, 0
            return status

        return call


def fail() -> int:
    """Return an error as a function of a ps_comm does."""
    from penstock.core.library import library

    return int(library().ps_fail(_INTERNAL, b"a planted fault"))
