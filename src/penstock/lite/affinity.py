"""Bind the threads of a context to cores."""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from penstock.core import native as core
from penstock.core.comm import SharedComm
from penstock.errors import InvalidArgumentError, UnsupportedError
from penstock.lite.device import CpuOptions

__all__ = ["BoundContext", "chosen_cores", "default_threads"]

_TASKS: Final = Path("/proc/self/task")
_CPUS: Final = Path("/sys/devices/system/cpu")


def chosen_cores(options: CpuOptions) -> list[int]:
    """Return the cores to bind threads to, in the order of the threads; an empty list binds none.

    Raises InvalidArgumentError when the options set both a mode and a list, and UnsupportedError when mode 2 asks for
    the second fastest kind of cores on a machine with one kind.
    """
    mode, listed = options.thread_affinity_mode, options.thread_affinity_core_list
    if mode and listed:
        raise InvalidArgumentError(
            f"thread_affinity_core_list: expected none with thread_affinity_mode {mode}, got {listed}",
            param="thread_affinity_core_list",
        )
    if not mode:
        return listed
    cores = sorted(os.sched_getaffinity(0))
    speeds = {core: _speed(core) for core in cores}
    kinds = sorted(set(speeds.values()), reverse=True)
    if mode > len(kinds):
        raise UnsupportedError(
            f"thread_affinity_mode: expected 0 or 1, got 2: the cores {cores} are of one kind",
            param="thread_affinity_mode",
        )
    return [core for core in cores if speeds[core] == kinds[mode - 1]]


def default_threads() -> int:
    """Return the number of threads that the affinity mask and the cgroup allow this process."""
    with core.Context() as context:
        return context.num_threads


def _speed(core: int) -> int:
    """Return the relative speed of a core: its capacity as the kernel reports it, or its highest frequency in kHz."""
    for name in ("cpu_capacity", "cpufreq/cpuinfo_max_freq"):
        try:
            return int((_CPUS / f"cpu{core}" / name).read_text())
        except (OSError, ValueError):
            continue
    return 0


class BoundContext:
    """A native context whose threads are bound to ``cores``; without cores they run anywhere.

    ``num_threads`` 0 uses one thread per core.  ``comm``: connects its programs with those of other ranks.
    """

    def __init__(self, num_threads: int, cores: Sequence[int] = (), comm: SharedComm | None = None) -> None:
        self._cores, self._comm = tuple(cores), comm
        if not self._cores:
            self.native = core.Context(num_threads, comm=comm)
            return
        made: list[core.Context | BaseException] = []
        thread = threading.Thread(target=self._make, args=(num_threads, made))
        thread.start()
        thread.join()
        if isinstance(made[0], BaseException):
            raise made[0]
        self.native = made[0]

    def _make(self, num_threads: int, made: list[core.Context | BaseException]) -> None:
        """Create the context in a new thread, because threads inherit the cores and the name of their creator.

        The name distinguishes the threads of this context from those that others start meanwhile.
        """
        try:
            name = f"ps-{secrets.token_hex(5)}"
            (_TASKS / str(threading.get_native_id()) / "comm").write_text(name)
            os.sched_setaffinity(0, self._cores)
            made.append(core.Context(num_threads, comm=self._comm))
            own = threading.get_native_id()
            workers = sorted(task for task in _tasks_named(name) if task != own)
            for index, task in enumerate(workers, 1):
                os.sched_setaffinity(task, [self._cores[index % len(self._cores)]])
        except BaseException as error:
            made.insert(0, error)

    @contextmanager
    def bound(self) -> Iterator[None]:
        """Bind the calling thread, which is the first of the context's threads, to the first core during the block."""
        if not self._cores:
            yield
            return
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, [self._cores[0]])
        try:
            yield
        finally:
            os.sched_setaffinity(0, before)


def _tasks_named(name: str) -> list[int]:
    tasks = []
    for task in _TASKS.iterdir():
        try:
            if (task / "comm").read_text().strip() == name:
                tasks.append(int(task.name))
        except OSError:  # the thread ended meanwhile
            continue
    return tasks
