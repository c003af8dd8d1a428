"""A rank over MPI fails before a batch, inside an exchange of a layer, or before its reply: the other one ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.support.command import environment
from tests.support.faulty_rank import plant
from tests.support.network_hosts import Hosts, hosts
from tests.support.rank_processes import SHARED_MEMORY, left_in_shared_memory
from tests.support.rank_programs import mpiexec, pattern
from tests.support.waiting import until

__all__ = ["hosts"]

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("mpich")]

PHASES = {
    "before the batch": ("broadcast", 1),
    "first gather of layer 0": ("all_gather", 2),
    "gather inside a later layer": ("all_gather", 11),
    "before the reply": ("all_gather", 0),
}
ENDS = {"SIGKILL": "rank 1 ended", "SIGSTOP": "rank 1 is lost: no heartbeat for 1700 ms", "exception": "rank 1 ended"}
OUTLIVES = '"$@"; while [ ! -e "$0" ]; do sleep 0.02; done'
"""A shell that outlives its rank: the launcher would kill the other rank before that can say what it has noticed."""
RANK = """
import json, os, sys, time
from pathlib import Path
from penstock import lite
from penstock.errors import PenstockError
from penstock.launch.environment import read_rank_environment
from tests.support import faulty_rank
rank, folder = read_rank_environment().rank, Path(sys.argv[2])
faulty_rank.install_over_mpi(rank)
(folder / f"pid {rank}").write_text(str(os.getpid()))
model = lite.Model()
options = {"transport": "mpi", "trusted_network": True}
path = sys.argv[1].replace("{rank}", str(rank))
model.build_from_file(path, lite.ModelType.PENSTOCK, lite.Context(thread_num=1), options)
try:
    for number in range(10**9):
        model.predict(model.get_inputs())
        if number == 3:
            (folder / f"ready {rank}").touch()
except PenstockError as error:
    values = {"error": str(error), "code": error.code}
    if rank == 0:
        (folder / "new").write_text(json.dumps(values))
        (folder / "new").rename(folder / "ended")
    sys.exit(3)
"""


class Ranks:
    """Two ranks that predict until one of them fails."""

    def __init__(self, folder: Path, bundles: Path, fault: dict[str, Any], launcher: list[str]) -> None:
        self.folder = folder
        env = environment(PYTHONUNBUFFERED="") | plant(folder, rank=1, **fault)
        command = [*launcher, sys.executable, "-c", RANK, pattern(bundles), str(folder)]
        with (folder / "err").open("w") as err:
            self._process = subprocess.Popen(command, env=env, stdout=err, stderr=err)

    def wait_for(self, name: str) -> Path:
        path = self.folder / name
        until(path.exists, (self.folder / "err").read_text)
        return path

    def fail(self) -> dict[str, Any]:
        """Let the fault happen; return what rank 0 says of it."""
        for rank in (0, 1):
            self.wait_for(f"ready {rank}")
        (self.folder / "armed").touch()
        self.wait_for("done")
        return dict(json.loads(self.wait_for("ended").read_text()))

    def close(self) -> None:
        (self.folder / "closed").touch()
        for path in self.folder.glob("pid *"):
            with suppress(ProcessLookupError):
                os.kill(int(path.read_text()), signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(5)
        self._process.kill()
        self._process.wait(300)


@pytest.mark.parametrize("kind", ENDS)
@pytest.mark.parametrize("phase", PHASES)
def test_the_other_rank_ends(phase: str, kind: str, demo_ranks: Path, tmp_path: Path) -> None:
    function, number = PHASES[phase]
    shared = set(os.listdir(SHARED_MEMORY))
    launcher = [mpiexec(), "-n", "2", "sh", "-c", OUTLIVES, str(tmp_path / "closed")]
    ranks = Ranks(tmp_path, demo_ranks, {"function": function, "number": number, "kind": kind}, launcher)
    try:
        found = ranks.fail()
    finally:
        ranks.close()
    assert ENDS[kind] in found["error"]
    assert found["code"] == "unavailable"  # retry later
    assert not left_in_shared_memory(shared)


@pytest.mark.parametrize("phase", PHASES)
def test_a_cut_link_ends_the_other_rank(phase: str, hosts: Hosts, demo_ranks: Path, tmp_path: Path) -> None:
    function, number = PHASES[phase]
    fault = {"function": function, "number": number, "kind": "cut"}
    ranks = Ranks(tmp_path, demo_ranks, fault, hosts.command())
    try:
        threading.Thread(target=cut_when_asked, args=(ranks, hosts.cut), daemon=True).start()
        found = ranks.fail()
    finally:
        ranks.close()
    assert ENDS["SIGSTOP"] in found["error"]
    assert found["code"] == "unavailable"


def cut_when_asked(ranks: Ranks, cut: Callable[[], None]) -> None:
    ranks.wait_for("cut")
    cut()
    (ranks.folder / "done").touch()
