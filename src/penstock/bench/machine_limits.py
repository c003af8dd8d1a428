"""What the machine can do just now: the limits that figures are compared with."""

from __future__ import annotations

from typing import Final

from penstock.core import native
from penstock.graph.ir import DType

__all__ = ["MachineLimits"]

_DTYPES: Final = {"f32": DType.F32, "bf16": DType.BF16, "int8": DType.I8}


class MachineLimits:
    """Arithmetic peaks and read bandwidths of a context's threads, as they were seen so far.

    ``ops_per_s`` has the highest of each type, for another process may have had the cores; ``bandwidths`` has every
    bandwidth in bytes per second, because memory on a shared machine changes within seconds.
    """

    def __init__(self, context: native.Context) -> None:
        self._context = context
        self.ops_per_s = dict.fromkeys(_DTYPES, 0.0)
        self.bandwidths: list[float] = []

    def probe_compute(self, seconds: float = 0.1) -> None:
        """Look at every type for so long."""
        for name, dtype in _DTYPES.items():
            self.ops_per_s[name] = max(self.ops_per_s[name], native.probe_compute(self._context, int(dtype), seconds))

    def probe_bandwidth(self) -> float:
        """The read bandwidth now, noted."""
        self.bandwidths.append(native.probe_bandwidth(self._context))
        return self.bandwidths[-1]
