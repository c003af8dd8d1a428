"""Resize, Upsample and GridSample."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.graph.general.draft import Tensor
from penstock.graph.general.sampling import grid_sampled
from penstock.graph.general.sizes import SizeLike, product
from penstock.graph.ir import DType
from penstock.graph.onnx.context import Site, rational
from penstock.graph.onnx.images import from_rows, to_rows
from penstock.graph.onnx.registry import reads

__all__: list[str] = []


@reads("Upsample")
def _upsample(site: Site) -> Tensor:
    x = site.x()
    scales = [float(n) for n in (site.numbers(1).reshape(-1) if site.version >= 9 else site.attr("scales", []))]
    return _resized(site, x, scales, _scaled(site, x, scales), _old_rules(site, scales))


def _old_rules(site: Site, scales: Sequence[float]) -> dict[str, Any]:
    """Return the rules before opset 11: coordinates divided by the scale."""
    mode = site.str_attr("mode", "nearest")
    down = any(scale < 1 for scale in scales)
    return {
        "mode": "linear" if mode in ("linear", "bilinear") else mode,
        "coordinates": "asymmetric",
        "rounding": "ceil" if down else "floor",
    }


@reads("Resize")
def _resize(site: Site) -> Tensor:
    x = site.x()
    if site.version < 11:
        scales = [float(n) for n in site.numbers(1).reshape(-1)]
        return _resized(site, x, scales, _scaled(site, x, scales), _old_rules(site, scales))
    axes = [site.axis(axis, x.rank) for axis in site.ints("axes") or range(x.rank)]
    scales, sizes = [0.0] * x.rank, list(x.shape)
    if site.has(3) and (not site.is_raw(3) or site.raw(3).size):
        new_sizes = site.sizes(3)
        site.expect(len(new_sizes) == len(axes), f"{len(axes)} sizes")
        for axis, size in zip(axes, new_sizes, strict=True):
            sizes[axis] = size
        _keep_ratio(site, x, axes, scales, sizes)
    else:
        numbers = site.numbers(2).reshape(-1)
        site.expect(len(numbers) == len(axes), f"{len(axes)} scales")
        scales = [1.0] * x.rank
        for axis, number in zip(axes, numbers, strict=True):
            scales[axis] = float(number)
        sizes = _scaled(site, x, scales)
    rules = {
        "mode": site.str_attr("mode", "nearest"),
        "coordinates": site.str_attr("coordinate_transformation_mode", "half_pixel"),
        "rounding": site.str_attr("nearest_mode", "round_prefer_floor"),
        "cubic_a": site.float_attr("cubic_coeff_a", -0.75),
        "exclude_outside": site.flag("exclude_outside"),
    }
    site.require(rules["coordinates"] != "tf_crop_and_resize", "tf_crop_and_resize is not supported")
    if site.flag("antialias") and rules["mode"] != "nearest":
        smaller = any(size != now and _is_smaller(size, now) for size, now in zip(sizes, x.shape, strict=True))
        site.require(not smaller, "antialias is not supported")
    return _resized(site, x, scales, sizes, rules)


def _is_smaller(size: SizeLike, than: SizeLike) -> bool:
    return not (isinstance(size, int) and isinstance(than, int) and size >= than)


def _keep_ratio(site: Site, x: Tensor, axes: Sequence[int], scales: list[float], sizes: list[SizeLike]) -> None:
    policy = site.str_attr("keep_aspect_ratio_policy", "stretch")
    if policy == "stretch":
        return
    site.expect(policy in ("not_larger", "not_smaller"), "a policy of stretch, not_larger or not_smaller")
    ratios = [site.fixed(sizes[axis], "a size") / max(site.fixed(x.shape[axis], "a size"), 1) for axis in axes]
    scale = min(ratios) if policy == "not_larger" else max(ratios)
    for axis in axes:
        sizes[axis] = int(scale * site.fixed(x.shape[axis], "a size") + 0.5)
        scales[axis] = scale


def _scaled(site: Site, x: Tensor, scales: Sequence[float]) -> list[SizeLike]:
    site.expect(len(scales) == x.rank and all(0 < scale < 1 << 20 for scale in scales), f"{x.rank} scales above 0")
    sizes: list[SizeLike] = []
    for size, scale in zip(x.shape, scales, strict=True):
        if isinstance(size, int):
            sizes.append(int(size * scale))
            continue
        ratio = rational(scale)
        if ratio is None:
            raise site.refused(f"a scale of {scale} of the free size {size} is not supported; fix the size")
        sizes.append(size * ratio[0] // ratio[1])
    return sizes


def _resized(
    site: Site, x: Tensor, scales: Sequence[float], sizes: Sequence[SizeLike], rules: dict[str, Any]
) -> Tensor:
    changed = [at for at in range(x.rank) if sizes[at] != x.shape[at] or scales[at] not in (0.0, 1.0)]
    if not changed:
        return x
    kind = x.dtype
    if kind != DType.F32:
        site.require(rules["mode"] == "nearest" and kind in (DType.I8, DType.U8), "its type is not supported")
    y = site.cast(x, DType.F32)
    if x.rank in (3, 4) and set(changed) <= {x.rank - 2, x.rank - 1} and (x.rank == 4 or changed == [2]):
        h, w = (sizes[2], sizes[3]) if x.rank == 4 else (1, sizes[2])
        factors = (scales[2], scales[3]) if x.rank == 4 else (1.0, scales[2])
        rows = site.add("resize", to_rows(site, y), sizes=(h, w), scale_h=factors[0], scale_w=factors[1], **rules)
        return site.cast(from_rows(site, rows, x.rank), kind)
    while changed:  # two axes at a time, the others as channels
        pair, changed = changed[-2:], changed[:-2]
        y = _resized_axes(site, y, pair, scales, sizes, rules)
    return site.cast(y, kind)


def _resized_axes(
    site: Site,
    x: Tensor,
    axes: Sequence[int],
    scales: Sequence[float],
    sizes: Sequence[SizeLike],
    rules: dict[str, Any],
) -> Tensor:
    others = [at for at in range(x.rank) if at not in axes]
    order = [*axes, *others]
    front = site.permute(x, order)
    now = [x.shape[at] for at in axes]
    wanted = [sizes[at] for at in axes]
    factors = [scales[at] for at in axes]
    if len(axes) == 1:
        now, wanted, factors = [1, *now], [1, *wanted], [1.0, *factors]
    rows = site.reshape(front, (1, *now, product(x.shape[at] for at in others)))
    made = site.add("resize", rows, sizes=tuple(wanted), scale_h=factors[0], scale_w=factors[1], **rules)
    back = site.reshape(made, [sizes[at] for at in axes] + [x.shape[at] for at in others])
    return site.permute(back, [order.index(at) for at in range(x.rank)])


@reads("GridSample")
def _grid_sample(site: Site) -> Tensor:
    x, grid = site.x(0), site.x(1)
    axes = x.rank - 2
    site.require(axes in (1, 2, 3), f"images of {axes} dimensions are not supported; 1 to 3 are")
    site.expect(grid.rank == x.rank, f"a grid of {x.rank} dimensions")
    count = site.fixed(grid.shape[-1], "the last size of the grid")
    site.expect(count == axes, f"a grid of {axes} numbers for each place")
    mode = site.str_attr("mode", "linear").removeprefix("bi")
    site.expect(mode in ("nearest", "linear", "cubic"), "a mode of nearest, linear or cubic")
    padding = site.str_attr("padding_mode", "zeros")
    site.expect(padding in ("zeros", "border", "reflection"), "a padding_mode of zeros, border or reflection")
    kind = x.dtype
    sampled = grid_sampled(
        site, site.cast(x, DType.F32), site.cast(grid, DType.F32), mode, padding, site.flag("align_corners")
    )
    return site.cast(sampled, kind)
