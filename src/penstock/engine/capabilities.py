"""Checks of what a program can do for a request.

A bundle that ends in argmax or topk chooses the tokens itself and keeps no logits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from penstock.engine.options import RequestOptions, check_options
from penstock.engine.params import ResolvedSampling
from penstock.errors import InvalidArgumentError, UnsupportedError
from penstock.sampling_fields import SAMPLING_FIELDS
from penstock.validation import wrong_type

if TYPE_CHECKING:
    from penstock.engine.params import SamplingParams
    from penstock.engine.prompt_logits import PromptRows
    from penstock.runtime.program import ProgramInfo

__all__ = ["check_continues", "check_halves", "check_sampling", "check_scoring", "refuse_logits", "refuse_sampling"]

_NEED_LOGITS: Final = tuple(row for row in SAMPLING_FIELDS if row.needs_logits)
_FILTERS: Final = tuple(row.name for row in SAMPLING_FIELDS if row.is_filter)
_GREEDY: Final = ResolvedSampling()
_ONE_TOKEN: Final = ResolvedSampling(max_tokens=1)


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
    """Return the sampling parameters of a request; greedy decoding if None.

    Raises UnsupportedError for what the program cannot do, because in a step it would end the other requests as well.
    """
    if sampling is None:
        return _ONE_TOKEN if info.bidirectional else _GREEDY
    if not isinstance(sampling, ResolvedSampling):
        raise wrong_type("sampling", "ResolvedSampling", sampling)
    sampling.check_vocabulary(info.vocab_size)
    if info.bidirectional:
        check_continues(sampling.max_tokens)
    if sampling.hook is not None:
        refuse_logits("generate", info.tail)
        if info.num_stages > 1:
            raise UnsupportedError(
                "pipeline_parallel_size: expected 1 with logits_processor, stopping_criteria or num_beams, got "
                f"{info.num_stages}; use tensor_parallel_size",
                param="pipeline_parallel_size",
            )
    if info.tail:
        for row in _NEED_LOGITS:
            name = row.row_name
            if getattr(sampling, name, None) != getattr(_GREEDY, name, None):
                raise _refusal(name, info.tail)
    return sampling


def check_continues(max_tokens: int) -> None:
    """Raise UnsupportedError if a network whose attention is not causal is asked for more than one token.

    The second token would need all earlier tokens computed again with the first in view, which no cache of keys and
    values can give.
    """
    if max_tokens > 1:
        raise UnsupportedError(
            f"max_tokens: expected 1, got {max_tokens}. The network's attention is not causal, so only the token "
            "after the prompt can be computed.",
            param="max_tokens",
        )


def check_halves(pooling: object, rows: PromptRows | None, info: ProgramInfo) -> None:
    """Raise UnsupportedError if a network with a prefix is asked for a vector or for log-probabilities of a prompt.

    Tokens of a prefix see later ones, or are those of an encoder, so they have no probabilities.
    """
    if info.prefix_token < 0 or (pooling is None and (rows is None or rows.num_logprobs < 0)):
        return
    name = "embed" if pooling is not None else "prompt_logprobs"
    raise UnsupportedError(
        f"{name}: expected a network whose tokens see only earlier ones, got {info.network}",
        param=name,
    )


def refuse_logits(name: str, tail: str) -> None:
    """Raise UnsupportedError naming ``name`` if the bundle keeps no logits."""
    if tail:
        raise _refusal(name, tail)


def check_scoring(tail: str, options: object) -> RequestOptions:
    """Return the options of a prompt that is scored.

    Raises UnsupportedError if the bundle keeps no logits.  ``truncate_prompt`` is refused, because a text is scored
    whole.
    """
    refuse_logits("score", tail)
    fixed = check_options(options)
    if fixed.truncate_prompt:
        raise InvalidArgumentError(
            "truncate_prompt: expected False, got True. A text is scored whole.", param="truncate_prompt"
        )
    return fixed


def _refusal(name: str, tail: str) -> UnsupportedError:
    return UnsupportedError(
        f"{name}: the bundle ends in {tail}: its answers are greedy, and it has no logits to sample or score with",
        param=name,
    )
