"""The arguments of methods that have other values than their defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Self

from penstock.calibration.smooth import STRENGTH
from penstock.quant.methods.gptq import DAMPING

__all__ = ["GRID", "MethodArguments"]

GRID: Final = tuple(step / 20 for step in range(20))
"""The exponents that AWQ tries; 0 changes nothing."""


@dataclass(frozen=True)
class MethodArguments:
    """``strength``: of smoothing, 0 to 1.  ``damping``: of GPTQ's Hessians.  ``grid``: the exponents that AWQ tries."""

    strength: float = STRENGTH
    damping: float = DAMPING
    grid: tuple[float, ...] = GRID

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> Self:
        """Return them by the names of ``PTQConfig.algo_args``."""
        names = {"strength": "alpha", "damping": "damp_percent", "grid": "smooth_alpha"}
        return cls(**{own: arguments[name] for own, name in names.items() if name in arguments})
