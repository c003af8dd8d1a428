"""Finished answers as callers get them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.engine.logprobs import TokenLogprobs
from penstock.engine.params import SamplingParams
from penstock.engine.request import Request, Status
from penstock.errors import PenstockError
from penstock.llm.prompts import of_prompt

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["Choice", "Delta", "Embedding", "Result", "Score", "all_finished", "all_or_error", "make_result", "outcome"]


@dataclass(frozen=True)
class Choice:
    """One of the answers to a prompt.  ``seed`` gives it again, alone (``n`` 1)."""

    text: str
    token_ids: list[int]
    finish_reason: str
    seed: int
    logprobs: list[TokenLogprobs] | None = None


@dataclass(frozen=True)
class Result:
    """A finished answer.

    ``token_ids`` are the answer's, an end token included; ``text`` is without special tokens and stop strings.
    ``finish_reason``: "length", "stop" or "abort".  ``timings`` in seconds, ``decode_tokens_per_s`` after the
    first token.  ``seed`` gives this answer again (``n`` 1).  ``logprobs`` has one entry per answer token,
    ``prompt_logprobs`` one per prompt token, None for the first, which nothing comes before.  ``choices`` are all ``n``
    answers, this one first.  ``num_cached_tokens`` of the prompt were not computed again but shared.
    """

    text: str
    token_ids: list[int]
    finish_reason: str
    timings: dict[str, float]
    prompt_token_ids: list[int]
    seed: int
    num_cached_tokens: int = 0
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    choices: tuple[Choice, ...] = ()

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Delta:
    """What came since the last one; ``finish_reason`` with the last."""

    text: str
    token_ids: list[int]
    finish_reason: str | None
    logprobs: list[TokenLogprobs] | None = None


@dataclass(frozen=True)
class Score:
    """How likely a text is: one entry per token, None for the first, which nothing comes before."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None]

    def total(self, start: int = 1) -> float:
        """The log-probability of the tokens from ``start`` on, given those before."""
        return sum(one.logprob for one in self.logprobs[max(1, start) :] if one is not None)

    def is_greedy(self, start: int = 1) -> bool:
        """Whether greedy decoding would have made the tokens from ``start`` on."""
        return all(one.rank == 1 for one in self.logprobs[max(1, start) :] if one is not None)


@dataclass(frozen=True, eq=False)
class Embedding:
    """A prompt as a vector [hidden_size] float32.

    ``num_cached_tokens`` of its tokens came from the prefix cache and were not computed.
    """

    token_ids: list[int]
    vector: NDArray[np.float32]
    num_cached_tokens: int = 0


def _choice(request: Request, params: SamplingParams) -> Choice:
    return Choice(
        text="" if request.text is None else request.text.text,
        token_ids=list(request.output_ids),
        finish_reason=request.finish_reason or "abort",
        seed=request.sampling.seed,
        logprobs=None if params.logprobs is None else list(request.logprobs),
    )


def _mean_logprob(request: Request) -> float:
    return sum(one.logprob for one in request.logprobs) / max(1, len(request.logprobs))


def make_result(requests: Sequence[Request], params: SamplingParams) -> Result:
    """The result of the requests that answer one prompt; raises the error that one of them ended with."""
    for request in requests:
        if request.error is not None:
            raise request.error
    prompt_logprobs = requests[0].prompt_logprobs  # the first answer's, whichever is the likeliest
    if len(requests) > params.n:  # the likeliest per token, the earlier of equals
        requests = sorted(requests, key=_mean_logprob, reverse=True)[: params.n]
    first = requests[0]
    choices = tuple(_choice(request, params) for request in requests)
    return Result(
        text=choices[0].text,
        token_ids=choices[0].token_ids,
        finish_reason=choices[0].finish_reason,
        timings=first.timings.summary(len(first.output_ids)),
        prompt_token_ids=first.prompt_ids,
        seed=first.sampling.seed,
        num_cached_tokens=first.num_cached,
        logprobs=choices[0].logprobs,
        prompt_logprobs=prompt_logprobs,
        choices=choices,
    )


def all_finished(requests: Sequence[Request]) -> bool:
    """Whether none of them goes on."""
    return all(request.status is Status.FINISHED for request in requests)


def outcome(requests: Sequence[Request], params: SamplingParams) -> Result | PenstockError:
    """The result, or the error that one of the requests ended with."""
    try:
        return make_result(requests, params)
    except PenstockError as error:
        return error


def all_or_error(outcomes: Sequence[Result | PenstockError], is_one: bool) -> list[Result]:
    """The results; raises the first error, which says which prompt's it is and how many others were done."""
    results = [one for one in outcomes if isinstance(one, Result)]
    for index, error in enumerate(outcomes):
        if isinstance(error, PenstockError):
            lost = f" ({len(results)} of {len(outcomes)} prompts were done; generate_each gives each its own outcome)"
            raise of_prompt(index, is_one, error, lost)
    return results
