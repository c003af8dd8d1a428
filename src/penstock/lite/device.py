"""What a model runs on: the target, its threads and the cores that they are bound to."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Final

from penstock.config import check_integer
from penstock.core.context import MAX_THREADS
from penstock.core.library import load_ops
from penstock.errors import InvalidArgumentError, UnsupportedError

__all__ = ["Context", "CpuOptions", "GpuOptions", "ParallelOptions"]

_MAX_WORKERS: Final = 256
_PRECISIONS: Final = ("", "enforce_fp32", "f32", "f16", "bf16", "w8a16", "w8a8", "w4a16", "w4a8")


class CpuOptions:
    """The CPU: how many threads, on which cores, in which precision.

    ``thread_num``: 0 takes as many as the cores that may be used.  ``thread_affinity_mode``: 0 binds nothing, 1 binds
    a thread to each of the fastest cores, 2 to each of the next kind of cores (refused where all are alike).
    ``thread_affinity_core_list``: binds a thread to each core of the list instead; more threads go round it.  The
    thread that calls ``predict`` is one of them, for as long as the call lasts.  ``precision_mode``: "" runs a bundle
    as it is; a scheme ("w8a8" ...) or "enforce_fp32" (scheme f32, keys and values of float32) refuses any other.
    """

    __slots__ = ("_affinity_mode", "_core_list", "_precision_mode", "_thread_num")

    def __init__(self) -> None:
        self._thread_num = self._affinity_mode = 0
        self._core_list: list[int] = []
        self._precision_mode = ""

    @property
    def thread_num(self) -> int:
        """Threads, the caller's included."""
        return self._thread_num

    @thread_num.setter
    def thread_num(self, value: int) -> None:
        self._thread_num = check_integer("thread_num", value, 0, MAX_THREADS)

    @property
    def thread_affinity_mode(self) -> int:
        """0, 1 or 2."""
        return self._affinity_mode

    @thread_affinity_mode.setter
    def thread_affinity_mode(self, value: int) -> None:
        self._affinity_mode = check_integer("thread_affinity_mode", value, 0, 2)

    @property
    def thread_affinity_core_list(self) -> list[int]:
        """Numbers of cores; empty binds none."""
        return list(self._core_list)

    @thread_affinity_core_list.setter
    def thread_affinity_core_list(self, value: Sequence[int]) -> None:
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise InvalidArgumentError(f"thread_affinity_core_list: expected a list of cores, found {value!r:.60}")
        cores = [check_integer("thread_affinity_core_list", core, 0, 1 << 20) for core in value]
        allowed = os.sched_getaffinity(0)
        for core in cores:
            if core not in allowed:
                raise InvalidArgumentError(
                    f"thread_affinity_core_list: this process may run on the cores {sorted(allowed)}, not on {core}"
                )
        if len(set(cores)) != len(cores):
            raise InvalidArgumentError(f"thread_affinity_core_list: expected each core once, found {cores}")
        self._core_list = cores

    @property
    def precision_mode(self) -> str:
        """What a bundle must compute in; "" takes any."""
        return self._precision_mode

    @precision_mode.setter
    def precision_mode(self, value: str) -> None:
        if value not in _PRECISIONS:
            listed = ", ".join(repr(one) for one in _PRECISIONS)
            raise InvalidArgumentError(f"precision_mode: expected one of {listed}, found {value!r:.60}")
        self._precision_mode = value


class GpuOptions:
    """The GPU, which this build has no backend for: everything but what stands here is refused by name."""

    __slots__ = ()
    _FIXED: Final = {"device_id": 0, "rank_id": 0, "group_size": 1, "provider": "", "precision_mode": ""}

    def __getattr__(self, name: str) -> Any:
        if name in self._FIXED:
            return self._FIXED[name]
        raise AttributeError(f"gpu has no option {name!r}: it has {', '.join(self._FIXED)}")

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self._FIXED:
            raise AttributeError(f"gpu has no option {name!r}: it has {', '.join(self._FIXED)}")
        if value != self._FIXED[name]:
            raise UnsupportedError(
                f"gpu.{name}: this build runs nothing on a GPU, so {value!r:.60} means nothing to it"
            )


class ParallelOptions:
    """A ModelParallelRunner's ``workers_num``: predictions at a time; 0 is one for every ``cpu.thread_num`` cores."""

    __slots__ = ("_workers_num",)

    def __init__(self) -> None:
        self._workers_num = 0

    @property
    def workers_num(self) -> int:
        """Programs over one copy of the weights."""
        return self._workers_num

    @workers_num.setter
    def workers_num(self, value: int) -> None:
        self._workers_num = check_integer("workers_num", value, 0, _MAX_WORKERS)


class Context:
    """What a model runs on: ``target``, and the options of each under its name (``cpu``, ``gpu``, ``parallel``).

    The keywords are those of ``cpu``; and ``ops``, shared libraries with ops of one's own, which are loaded at once and
    for the whole process (``load_ops``).  An option that does not exist cannot be set.
    """

    __slots__ = ("_ops", "_target", "cpu", "gpu", "parallel")
    cpu: CpuOptions
    gpu: GpuOptions
    parallel: ParallelOptions

    def __init__(
        self,
        target: str | Sequence[str] = ("cpu",),
        *,
        thread_num: int = 0,
        thread_affinity_mode: int = 0,
        thread_affinity_core_list: Sequence[int] = (),
        precision_mode: str = "",
        ops: Sequence[str | os.PathLike[str]] = (),
    ) -> None:
        self.ops = ops
        self.cpu, self.gpu, self.parallel = CpuOptions(), GpuOptions(), ParallelOptions()
        self.target = target
        self.cpu.thread_num = thread_num
        self.cpu.thread_affinity_mode = thread_affinity_mode
        self.cpu.thread_affinity_core_list = thread_affinity_core_list
        self.cpu.precision_mode = precision_mode

    @property
    def ops(self) -> list[str]:
        """Shared libraries with ops of one's own."""
        return list(self._ops)

    @ops.setter
    def ops(self, value: Sequence[str | os.PathLike[str]]) -> None:
        if isinstance(value, (str, os.PathLike)) or not isinstance(value, Sequence):
            raise InvalidArgumentError(f"ops: expected a list of shared libraries, found {value!r:.60}")
        for path in value:
            load_ops(path)
        self._ops = [os.fspath(path) for path in value]

    @property
    def target(self) -> list[str]:
        """["cpu"]; any other is refused by name, as setting says."""
        return list(self._target)

    @target.setter
    def target(self, value: str | Sequence[str]) -> None:
        self._target = check_target([value] if isinstance(value, str) else value)


def check_target(targets: object) -> list[str]:
    """The targets; UnsupportedError names one that this build has no backend for, InvalidArgumentError any other."""
    if not isinstance(targets, Sequence) or not targets:
        raise InvalidArgumentError(f"target: expected ['cpu'], found {targets!r:.60}")
    for one in targets:
        if one == "gpu":
            raise UnsupportedError("target: 'gpu' is not in this build, which runs on 'cpu'")
        if one != "cpu":
            raise InvalidArgumentError(f"target: expected 'cpu', found {one!r:.60}")
    if len(targets) > 1:
        raise InvalidArgumentError(f"target: expected one, found {list(targets)}")
    return ["cpu"]
