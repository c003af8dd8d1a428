"""Says in one sentence whether a model is worth what it costs in quality, beside another one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from penstock.bench.quality.bootstrap import MIN_WINDOWS
from penstock.bench.quality.report import Divergence, ModelReport, WorthVerdict

__all__ = ["change_in_percent", "judge", "names_of"]

_MAX_DETECTABLE: Final = 0.05
"""A perplexity that changes by more than 5 % matters to everyone: a text must be able to show it."""
_NEAR: Final = 0.02
"""Ratios of sizes and speeds within this share of 1 count as equal."""


def judge(model: ModelReport, other: ModelReport, divergence: Divergence) -> WorthVerdict:
    """Weigh size and speed against the loss.

    A speed counts as different if no run of one model is as fast as any of the other, and they differ by 2 %.
    """
    size = _rounded(other.weight_bytes / model.weight_bytes)
    has_keys = model.kv_token_bytes > 0 and other.kv_token_bytes > 0
    kv_size = _rounded(other.kv_token_bytes / model.kv_token_bytes) if has_keys else 1.0
    prefill = decode = None
    if model.speed is not None and other.speed is not None:
        prefill = _ratio(model.speed.prefill_runs, other.speed.prefill_runs)
        decode = _ratio(model.speed.decode_runs, other.speed.decode_runs)
    ratios = [ratio for ratio in (size, kv_size, prefill, decode) if ratio is not None]
    has_gain, has_loss = max(ratios) > 1, min(ratios) < 1
    change = math.expm1(divergence.nll_change.value)
    measurable = divergence.nll_change.excludes_zero
    worse = measurable and change > 0
    if not has_gain:
        worth = "no" if has_loss or not measurable or worse else "yes"
    else:
        worth = "mixed" if has_loss else "trade" if worse else "yes"
    if divergence.max != 0 and worth != "no" and not _is_enough_text(divergence):
        worth = "unknown"
    first, second = names_of((model, other))
    return WorthVerdict(
        worth,
        f"{_SENTENCES[worth]}{first} is {_gains(size, kv_size, prefill, decode)} {second}, {_cost(divergence)}.",
        size,
        kv_size,
        prefill,
        decode,
        change,
        measurable,
    )


def _is_enough_text(divergence: Divergence) -> bool:
    """Return True if the cost is measured, or the text would have shown one that matters."""
    change = divergence.nll_change
    return change.detectable is not None and (change.excludes_zero or change.detectable <= _MAX_DETECTABLE)


_SENTENCES: Final = {
    "unknown": "Too little text to judge: ",
    "yes": "Worth it: ",
    "trade": "Worth it if the cost is acceptable: ",
    "mixed": "Worth it only for what it gains: ",
    "no": "Not worth it: ",
}


def names_of(models: Sequence[ModelReport]) -> list[str]:
    """Return the names of models in tables and sentences; those that are alike tell the type of keys and values."""
    names = [(model.model.rstrip("/").rsplit("/", 1)[-1], model.scheme) for model in models]
    if len(set(names)) < len(names):
        return [f"{name} ({scheme}, {model.kv_cache})" for (name, scheme), model in zip(names, models, strict=True)]
    return [f"{name} ({scheme})" for name, scheme in names]


def change_in_percent(log_ratio: float) -> str:
    """Return the change of a perplexity in percent, with two significant digits at least."""
    share = 100 * math.expm1(log_ratio)
    digits = 2 if abs(share) >= 0.095 or share == 0 else min(6, 1 - math.floor(math.log10(abs(share))))
    return f"{share:+,.{digits}f} %"


def _rounded(ratio: float) -> float:
    return 1.0 if abs(ratio - 1) < _NEAR else ratio


def _ratio(runs: Sequence[float], others: Sequence[float]) -> float:
    """Return how many times faster runs are than others; 1 if both overlap."""
    if max(runs) >= min(others) and max(others) >= min(runs):
        return 1.0
    return _rounded(sorted(runs)[len(runs) // 2] / sorted(others)[len(others) // 2])


def _gains(size: float, kv_size: float, prefill: float | None, decode: float | None) -> str:
    """Return what is smaller or faster, up to "than"."""
    parts = [_part(size, "smaller", "larger")] if size != 1 else []
    parts += [f"{_part(kv_size, 'smaller', 'larger')} in keys and values"] if kv_size != 1 else []
    speeds = [(name, ratio) for name, ratio in (("prefill", prefill), ("decode", decode)) if ratio is not None]
    parts += [f"{_part(ratio, 'faster', 'slower')} in {name}" for name, ratio in speeds if ratio != 1]
    equal = [name for name, ratio in speeds if ratio == 1]
    if not parts:
        return "neither smaller nor measurably faster than" if speeds else "not smaller than"
    text = parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
    if equal:
        text += f" (no measurable difference in {' and '.join(equal)})"
    return f"{text} than"


def _part(ratio: float, above: str, below: str) -> str:
    return f"{ratio:.2f} times {above}" if ratio > 1 else f"{1 / ratio:.2f} times {below}"


def _cost(divergence: Divergence) -> str:
    change, kl = divergence.nll_change, divergence.mean.value
    if divergence.max == 0:
        return "and computes the same distributions"
    cost = f"{change_in_percent(change.value)} perplexity, KL {kl:.2g} nats per token"
    if change.low is None or change.detectable is None:
        return f"at {cost}; fewer than {MIN_WINDOWS} windows are too little text to say whether that is a difference"
    if change.excludes_zero:
        verb = "at a cost of" if change.value > 0 else "with"
        return f"{verb} {cost}"
    return f"at no measurable cost in perplexity ({cost}; detectable from {change_in_percent(change.detectable)} on)"
