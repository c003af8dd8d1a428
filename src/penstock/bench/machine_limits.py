"""The limits of the machine at the time of a measurement: arithmetic peaks and read bandwidth."""

from __future__ import annotations

from typing import Final

from penstock.core import native
from penstock.graph.ir import DType

__all__ = ["MachineLimits"]

_DTYPES: Final = {"f32": DType.F32, "bf16": DType.BF16, "int8": DType.I8}


class MachineLimits:
    """The arithmetic peaks and read bandwidths of a context's threads, as measured so far.

    ``ops_per_s`` keeps the highest peak per type, because another process may have used the cores.  ``bandwidths``
    keeps every bandwidth, in bytes per second, because memory on a shared machine changes speed within seconds.
    """

    def __init__(self, context: native.Context) -> None:
        self._context = context
        self.ops_per_s = dict.fromkeys(_DTYPES, 0.0)
        self.bandwidths: list[float] = []

    def probe_compute(self, seconds: float = 0.1) -> None:
        """Measure the peak of each type for ``seconds``."""
        for name, dtype in _DTYPES.items():
            self.ops_per_s[name] = max(self.ops_per_s[name], native.probe_compute(self._context, int(dtype), seconds))

    def probe_bandwidth(self) -> float:
        """Measure, record and return the read bandwidth."""
        self.bandwidths.append(native.probe_bandwidth(self._context))
        return self.bandwidths[-1]
