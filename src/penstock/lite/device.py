"""The device that a model runs on: the target, the number of threads, and the cores that they are bound to."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Final

from penstock.config import check_integer
from penstock.core.comm import MAX_RANKS
from penstock.core.context import MAX_THREADS
from penstock.core.library import load_ops
from penstock.errors import InvalidArgumentError, UnsupportedError
from penstock.launch.environment import read_rank_environment
from penstock.validation import refusal

__all__ = ["AscendOptions", "Context", "CpuOptions", "GpuOptions", "ParallelOptions"]

_MAX_WORKERS: Final = 256
_PRECISIONS: Final = (
    *("", "enforce_fp32", "f32", "f16", "bf16"),
    *("w8a16", "w8a8", "w4a16", "w4a8", "w8a8_h32", "w4a8_h32"),
)


class CpuOptions:
    """The options of the CPU: threads, cores and precision.

    ``thread_num``: 0 (the default) uses one thread per available core.
    ``thread_affinity_mode``: 0 (the default) binds no thread, 1 binds a thread to each of the fastest cores, 2 to each
    of the second fastest kind of cores; refused when all cores are of one kind.
    ``thread_affinity_core_list``: binds a thread to each core of the list instead; further threads start at its
    beginning again.  The thread that calls ``predict`` is one of the threads for the duration of the call.
    ``precision_mode``: "" (the default) runs any bundle; a scheme ("w8a8" ...) or "enforce_fp32" (scheme f32 with
    float32 keys and values) refuses bundles of another precision.
    ``rank_id``: the rank of this process, of the bundle of a rank; by default as its launcher says, or 0.
    ``device_id``: binds the threads to a share of this host's cores, which has as many equal shares as ranks; -1 (the
    default) binds none.
    ``group_size``: the number of processes that the launcher started, or 1.
    ``provider``: "" only, because this build has one backend.
    """

    __slots__ = ("_affinity_mode", "_core_list", "_device_id", "_precision_mode", "_rank_id", "_thread_num")

    def __init__(self) -> None:
        self._rank_id: int | None = None
        self._device_id = -1
        self._thread_num = self._affinity_mode = 0
        self._core_list: list[int] = []
        self._precision_mode = ""

    @property
    def thread_num(self) -> int:
        """The number of threads, including the caller's."""
        return self._thread_num

    @thread_num.setter
    def thread_num(self, value: int) -> None:
        self._thread_num = check_integer("thread_num", value, 0, MAX_THREADS)

    @property
    def thread_affinity_mode(self) -> int:
        """The affinity mode: 0, 1 or 2."""
        return self._affinity_mode

    @thread_affinity_mode.setter
    def thread_affinity_mode(self, value: int) -> None:
        self._affinity_mode = check_integer("thread_affinity_mode", value, 0, 2)

    @property
    def thread_affinity_core_list(self) -> list[int]:
        """The numbers of the cores to bind threads to; empty binds none."""
        return list(self._core_list)

    @thread_affinity_core_list.setter
    def thread_affinity_core_list(self, value: Sequence[int]) -> None:
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise refusal("thread_affinity_core_list", "a list of cores", value)
        cores = [check_integer("thread_affinity_core_list", core, 0, 1 << 20) for core in value]
        allowed = os.sched_getaffinity(0)
        for core in cores:
            if core not in allowed:
                raise InvalidArgumentError(
                    f"thread_affinity_core_list: expected cores of {sorted(allowed)}, which this process may use, "
                    f"got {core}",
                    param="thread_affinity_core_list",
                )
        if len(set(cores)) != len(cores):
            raise InvalidArgumentError(
                f"thread_affinity_core_list: expected each core once, got {cores}", param="thread_affinity_core_list"
            )
        self._core_list = cores

    @property
    def precision_mode(self) -> str:
        """The precision that a bundle must have; "" accepts any."""
        return self._precision_mode

    @precision_mode.setter
    def precision_mode(self, value: str) -> None:
        if value not in _PRECISIONS:
            listed = ", ".join(map(repr, _PRECISIONS))
            raise refusal("precision_mode", f"one of {listed}", value)
        self._precision_mode = value

    @property
    def rank_id(self) -> int:
        """The rank of this process.  Raises InvalidArgumentError when two launchers disagree."""
        if self._rank_id is not None:
            return self._rank_id
        place = read_rank_environment()
        return place.rank if place else 0

    @rank_id.setter
    def rank_id(self, value: int) -> None:
        self._rank_id = check_integer("rank_id", value, 0, MAX_RANKS - 1)

    @property
    def explicit_rank(self) -> int | None:
        """The rank that was set; None without."""
        return self._rank_id

    @property
    def device_id(self) -> int:
        """The share of this host's cores; -1 binds no thread."""
        return self._device_id

    @device_id.setter
    def device_id(self, value: int) -> None:
        self._device_id = check_integer("device_id", value, -1, MAX_RANKS - 1)

    @property
    def group_size(self) -> int:
        """The number of processes that the launcher started together."""
        place = read_rank_environment()
        return place.world if place else 1

    @property
    def provider(self) -> str:
        """The backend: ""."""
        return ""

    @provider.setter
    def provider(self, value: str) -> None:
        if value != "":
            raise UnsupportedError(
                f"provider: expected '', since this build has one backend, got {value!r:.60}", param="provider"
            )


class GpuOptions:
    """The options of the GPU, for which this build has no backend: any value except the default is refused by name."""

    __slots__ = ()
    _NAME = "gpu"
    _FIXED: Final = {"device_id": 0, "rank_id": 0, "group_size": 1, "provider": "", "precision_mode": ""}

    def __getattr__(self, name: str) -> Any:
        if name in self._FIXED:
            return self._FIXED[name]
        raise AttributeError(f"{self._NAME}: expected one of the options {', '.join(self._FIXED)}, got {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self._FIXED:
            raise AttributeError(f"{self._NAME}: expected one of the options {', '.join(self._FIXED)}, got {name!r}")
        if value != self._FIXED[name]:
            raise UnsupportedError(
                f"{self._NAME}.{name}: expected {self._FIXED[name]!r}, since this build runs on the CPU only "
                f"(context.cpu), got {value!r:.60}",
                param=f"{self._NAME}.{name}",
            )


class AscendOptions(GpuOptions):
    """The options of Ascend, refused as those of the GPU are."""

    __slots__ = ()
    _NAME = "ascend"


class ParallelOptions:
    """The options of a ModelParallelRunner.

    ``workers_num``: the number of simultaneous predictions; 0 (the default) is one for every ``cpu.thread_num`` cores.
    """

    __slots__ = ("_workers_num",)

    def __init__(self) -> None:
        self._workers_num = 0

    @property
    def workers_num(self) -> int:
        """The number of programs that share one copy of the weights."""
        return self._workers_num

    @workers_num.setter
    def workers_num(self, value: int) -> None:
        self._workers_num = check_integer("workers_num", value, 0, _MAX_WORKERS)


class Context:
    """The device that a model runs on: ``target``, and the options in ``cpu``, ``gpu``, ``ascend`` and ``parallel``.

    The keyword arguments are the options of ``cpu``, and ``ops``: shared libraries of custom ops, which are loaded at
    once and for the whole process (``load_ops``).  Setting an unknown option raises AttributeError.
    """

    __slots__ = ("_ops", "_target", "ascend", "cpu", "gpu", "parallel")
    ascend: AscendOptions
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
        rank_id: int | None = None,
        device_id: int = -1,
        ops: Sequence[str | os.PathLike[str]] = (),
    ) -> None:
        self.ops = ops
        self.cpu, self.gpu, self.parallel = CpuOptions(), GpuOptions(), ParallelOptions()
        self.ascend = AscendOptions()
        self.target = target
        self.cpu.thread_num = thread_num
        self.cpu.thread_affinity_mode = thread_affinity_mode
        self.cpu.thread_affinity_core_list = thread_affinity_core_list
        self.cpu.precision_mode = precision_mode
        if rank_id is not None:
            self.cpu.rank_id = rank_id
        self.cpu.device_id = device_id

    @property
    def ops(self) -> list[str]:
        """The shared libraries of custom ops."""
        return list(self._ops)

    @ops.setter
    def ops(self, value: Sequence[str | os.PathLike[str]]) -> None:
        if isinstance(value, (str, os.PathLike)) or not isinstance(value, Sequence):
            raise refusal("ops", "a list of shared libraries", value)
        for path in value:
            load_ops(path)
        self._ops = [os.fspath(path) for path in value]

    @property
    def target(self) -> list[str]:
        """The target: ["cpu"]; any other is refused by name."""
        return list(self._target)

    @target.setter
    def target(self, value: str | Sequence[str]) -> None:
        self._target = check_target([value] if isinstance(value, str) else value)


def check_target(targets: object) -> list[str]:
    """Return the checked targets.

    Raises UnsupportedError for "gpu", for which this build has no backend, and InvalidArgumentError for any other name.
    """
    if not isinstance(targets, Sequence) or not targets:
        raise refusal("target", "['cpu']", targets)
    for target in targets:
        if target == "gpu":
            raise UnsupportedError(
                "target: expected 'cpu', got 'gpu', for which this build has no backend", param="target"
            )
        if target != "cpu":
            raise refusal("target", "'cpu'", target)
    if len(targets) > 1:
        raise InvalidArgumentError(f"target: expected one target, got {list(targets)}", param="target")
    return ["cpu"]
