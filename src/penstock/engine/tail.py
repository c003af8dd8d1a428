"""What a program can be asked for.  A bundle that ends in argmax or topk chooses the tokens itself, and keeps no
logits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from penstock.engine.options import RequestOptions, check_options
from penstock.engine.params import ResolvedSampling
from penstock.errors import InvalidArgumentError, UnsupportedError

if TYPE_CHECKING:
    from penstock.engine.params import SamplingParams
    from penstock.runtime.program import ProgramInfo

__all__ = ["check_continues", "check_sampling", "check_scoring", "refuse_logits", "refuse_sampling"]

_GREEDY: Final[dict[str, tuple[Any, ...]]] = {
    "temperature": (None, 0.0),
    "repetition_penalty": (None, 1.0),
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "min_tokens": (0,),
    "logit_bias": (None, {}),
    "allowed_token_ids": (None,),
    "bad_words": ((),),
    "best_of": (None, 1),
    "logprobs": (None,),
    "prompt_logprobs": (None,),
}
_FILTERS: Final = ("top_k", "top_p", "min_p", "typical_p")  # they ask for a temperature unless one is given
_CHOSEN: Final = (
    "temperature", "repetition_penalty", "presence_penalty", "frequency_penalty", "min_tokens", "logit_bias",
    "allowed_token_ids", "bad_words", "num_logprobs",
)  # fmt: skip


def refuse_sampling(params: SamplingParams, tail: str) -> None:
    """UnsupportedError naming a field that is more than greedy decoding without log-probabilities."""
    for name, off in _GREEDY.items():
        if getattr(params, name) not in off:
            raise _refusal(name, tail)
    for name in _FILTERS:
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
        greedy = ResolvedSampling()
        for name in _CHOSEN:
            if getattr(sampling, name) != getattr(greedy, name):
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
