"""The actor that runs a group on a node of a Ray cluster: a detached, named supervisor of one worker process.

It outlives the service's driver, not its worker: a worker ends when its service does, and a supervisor whose worker has
ended gives its reservation back a few seconds later, which ends the supervisor too.  So a service that was killed
leaves nothing in the cluster.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final

from penstock.errors import InvalidArgumentError

__all__ = ["Supervisor"]

_GRACE_S: Final = 10.0
"""The time for which the exit status of a worker may be asked for."""
_START_S: Final = 60.0
"""A supervisor that has not been told to start a worker for this long ends."""
_LAST_S: Final = 5.0
"""A supervisor whose reservation was not given back within this time, for lack of a head, ends by itself."""


class Supervisor:
    """Starts, watches and ends the worker of one group.

    Each call names the ``epoch`` of the group, and does nothing new if it is repeated.  Another epoch is refused with
    InvalidArgumentError: it belongs to a group that was lost.
    """

    def __init__(self, epoch: int) -> None:
        self._epoch = epoch
        self._process: subprocess.Popen[bytes] | None = None
        self._error = ""
        self._lock = threading.Lock()
        self._started, self._ended = threading.Event(), threading.Event()
        self._reservation = _reservation()
        threading.Thread(target=self._end_unused, daemon=True).start()

    def start(self, epoch: int, command: Sequence[str], config: str, share_bytes: int = 0) -> int:
        """Start the worker with ``config`` on its standard input and return its process id; OSError.

        ``share_bytes``: the memory that it may plan; 0 is no limit.
        """
        self._check(epoch)
        with self._lock:
            if not self._started.is_set():
                # The thread that starts the process must live as long as it does (PR_SET_PDEATHSIG).
                threading.Thread(target=self._run, args=([*command], config, share_bytes), daemon=True).start()
                self._started.wait()
        if self._process is None:
            raise OSError(self._error)
        return self._process.pid

    def wait(self, epoch: int) -> int | None:
        """Wait until the worker has ended and return its exit status."""
        self._check(epoch)
        self._ended.wait()
        return None if self._process is None else self._process.returncode

    def kill(self, epoch: int) -> None:
        """End the worker and its ranks at once."""
        self._check(epoch)
        if self._process is not None and not self._ended.is_set():
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def _check(self, epoch: int) -> None:
        if epoch != self._epoch:
            raise InvalidArgumentError(f"epoch: expected {self._epoch}, got {epoch}", param="epoch")

    def _run(self, command: list[str], config: str, share_bytes: int) -> None:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        if share_bytes:
            environment["PENSTOCK_MEMORY_SHARE"] = str(share_bytes)
        try:
            process = subprocess.Popen(
                [sys.executable if command[0] == "python" else command[0], *command[1:]],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                env=environment,
                start_new_session=True,
            )
        except OSError as error:
            self._error = str(error)
            self._started.set()
            self._ended.set()
            self._give_back()
            return
        self._process = process
        self._started.set()
        if process.stdin is not None:  # stays open: the worker ends when it closes
            with suppress(OSError):
                process.stdin.write(config.encode() + b"\n")
                process.stdin.flush()
        process.wait()
        self._ended.set()
        self._give_back()

    def _end_unused(self) -> None:
        if not self._started.wait(_START_S):
            self._give_back()

    def _give_back(self) -> None:
        """Give the reservation back after a while, which ends this actor.

        Without a head of the cluster the call fails or waits, so the process then ends by itself.
        """
        threading.Event().wait(_GRACE_S)
        if self._reservation is not None:
            from ray.util import remove_placement_group

            threading.Thread(target=remove_placement_group, args=(self._reservation,), daemon=True).start()
            threading.Event().wait(_LAST_S)
        os._exit(0)


def _reservation() -> Any:
    """Return the placement group that this actor runs in."""
    from ray.util import get_current_placement_group

    return get_current_placement_group()
