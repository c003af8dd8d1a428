"""The readers of ``grid_sample``."""

from __future__ import annotations

from typing import Final

from penstock.graph.general.draft import Tensor
from penstock.graph.general.sampling import grid_sampled
from penstock.graph.general.torch.writer import Writer, reader

__all__: list[str] = []

_MODES: Final = ("linear", "nearest", "cubic")
_PADDINGS: Final = ("zeros", "border", "reflection")


@reader("grid_sampler_2d.default")
def _grid_sampler(w: Writer, x: Tensor, grid: Tensor, mode: int, padding: int, align_corners: bool) -> Tensor:
    return grid_sampled(w, x, grid, _MODES[mode], _PADDINGS[padding], align_corners)
