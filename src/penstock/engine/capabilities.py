"""What a program can be asked for.  A bundle that ends in argmax or topk chooses the tokens itself, and keeps no
logits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from penstock.engine.options import RequestOptions, check_options
from penstock.engine.params import ResolvedSampling
from penstock.errors import InvalidArgumentError, UnsupportedError
from penstock.sampling_fields import SAMPLING_FIELDS

if TYPE_CHECKING:
    from penstock.engine.params import SamplingParams
    from penstock.runtime.program import ProgramInfo

__all__ = ["check_continues", "check_sampling", "check_scoring", "refuse_logits", "refuse_sampling"]

_NEED_LOGITS: Final = tuple(row for row in SAMPLING_FIELDS if row.needs_logits)
_FILTERS: Final = tuple(row.name for row in SAMPLING_FIELDS if row.is_filter)
_GREEDY: Final = ResolvedSampling()


def refuse_sampling(params: SamplingParams, tail: str) -> None:
    """Raise UnsupportedError naming a field that asks for more than greedy decoding without log-probabilities."""
    for row in _NEED_LOGITS:
        value = getattr(params, row.name)
        if value if row.kind == "biases" else value not in (row.default, row.off):
            raise _refusal(row.name, tail)
    for name in _FILTERS:  # a filter asks for a temperature unless one is given
        if getattr(params, name) is not None and params.temperature is None:
            raise _refusal(name, tail)


def check_sampling(sampling: object, info: ProgramInfo) -> ResolvedSampling:
    """What a request runs with, greedy decoding when nobody said; refuses what the program cannot do, because in a step
    it would end the neighbours, too.
    """
    if sampling is None:
        return ResolvedSampling(max_tokens=1) if info.bidirectional else ResolvedSampling()
    if not isinstance(sampling, ResolvedSampling):
        raise InvalidArgumentError(
            f"sampling must be ResolvedSampling, not {type(sampling).__name__}", param="sampling"
        )
    sampling.check_vocabulary(info.vocab_size)
    if info.bidirectional:
        check_continues(sampling.max_tokens)
    if info.tail:
        for row in _NEED_LOGITS:
            name = row.row_name
            if getattr(sampling, name, None) != getattr(_GREEDY, name, None):
                raise _refusal(name, info.tail)
    return sampling


def check_continues(max_tokens: int) -> None:
    """UnsupportedError for a second token of a network whose attention is not causal.

    The tokens before it would have to be computed again with it in view, which no cache of keys and values can give.
    """
    if max_tokens > 1:
        raise UnsupportedError(
            f"max_tokens: expected 1, found {max_tokens}: the network's attention is not causal, so only the token "
            "after the prompt can be computed",
            param="max_tokens",
        )


def refuse_logits(name: str, tail: str) -> None:
    """UnsupportedError when there is a tail."""
    if tail:
        raise _refusal(name, tail)


def check_scoring(tail: str, options: object) -> RequestOptions:
    """The options of a text that is scored; UnsupportedError when there is a tail, and no text is scored in part."""
    refuse_logits("score", tail)
    fixed = check_options(options)
    if fixed.truncate_prompt:
        raise InvalidArgumentError(
            "truncate_prompt must be False here: a text is scored whole", param="truncate_prompt"
        )
    return fixed


def _refusal(name: str, tail: str) -> UnsupportedError:
    return UnsupportedError(
        f"{name}: the bundle ends in {tail}: its answers are greedy, and it has no logits to sample or score with",
        param=name,
    )
