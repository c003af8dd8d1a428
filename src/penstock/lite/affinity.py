"""Binding a context's threads to cores."""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from penstock.core import native as core
from penstock.errors import InvalidArgumentError, UnsupportedError
from penstock.lite.device import CpuOptions

__all__ = ["BoundContext", "chosen_cores"]

_TASKS: Final = Path("/proc/self/task")
_CPUS: Final = Path("/sys/devices/system/cpu")


def chosen_cores(options: CpuOptions) -> list[int]:
    """The cores that threads are bound to, in the order of the threads; none for threads that run anywhere.

    InvalidArgumentError when both ways of choosing are used, UnsupportedError for a second kind of cores where there is
    one kind.
    """
    mode, listed = options.thread_affinity_mode, options.thread_affinity_core_list
    if mode and listed:
        raise InvalidArgumentError(
            "thread_affinity_core_list: expected none beside a thread_affinity_mode, which chooses"
        )
    if not mode:
        return listed
    cores = sorted(os.sched_getaffinity(0))
    speeds = {core: _speed(core) for core in cores}
    kinds = sorted(set(speeds.values()), reverse=True)
    if mode > len(kinds):
        raise UnsupportedError(
            f"thread_affinity_mode: 2 takes the second fastest kind of cores, but the cores {cores} are alike"
        )
    return [core for core in cores if speeds[core] == kinds[mode - 1]]


def _speed(core: int) -> int:
    """How fast a core is beside others: what the kernel says of its capacity, or its highest frequency in kHz."""
    for name in ("cpu_capacity", "cpufreq/cpuinfo_max_freq"):
        try:
            return int((_CPUS / f"cpu{core}" / name).read_text())
        except (OSError, ValueError):
            continue
    return 0


class BoundContext:
    """A native context whose threads are bound to ``cores``, or to none; ``num_threads`` 0 takes one for each."""

    def __init__(self, num_threads: int, cores: Sequence[int] = ()) -> None:
        self._cores = tuple(cores)
        if not self._cores:
            self.native = core.Context(num_threads)
            return
        made: list[core.Context | BaseException] = []
        thread = threading.Thread(target=self._make, args=(num_threads, made))
        thread.start()
        thread.join()
        if isinstance(made[0], BaseException):
            raise made[0]
        self.native = made[0]

    def _make(self, num_threads: int, made: list[core.Context | BaseException]) -> None:
        """In a thread of its own, since threads inherit cores and name of the one that starts them.  The name tells
        those of this context from those that others start meanwhile."""
        try:
            name = f"ps-{secrets.token_hex(5)}"
            (_TASKS / str(threading.get_native_id()) / "comm").write_text(name)
            os.sched_setaffinity(0, self._cores)
            made.append(core.Context(num_threads))
            own = threading.get_native_id()
            workers = sorted(task for task in _tasks_named(name) if task != own)
            for index, task in enumerate(workers, 1):
                os.sched_setaffinity(task, [self._cores[index % len(self._cores)]])
        except BaseException as error:
            made.insert(0, error)

    @contextmanager
    def bound(self) -> Iterator[None]:
        """Binds the caller, who is the first of the threads, to the first core meanwhile."""
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
    found = []
    for task in _TASKS.iterdir():
        try:
            if (task / "comm").read_text().strip() == name:
                found.append(int(task.name))
        except OSError:  # it ended meanwhile
            continue
    return found
