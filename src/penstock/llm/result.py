"""The results that callers get."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from penstock.engine.logprobs import TokenLogprobs
from penstock.engine.params import SamplingParams
from penstock.engine.request import Request, RequestStatus
from penstock.errors import PenstockError
from penstock.llm.prompts import of_prompt
from penstock.validation import missing_attribute

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["Choice", "Delta", "Embedding", "Result", "Score", "all_finished", "all_or_error", "make_result", "outcome"]


_HINTS: Final = {"outputs": "choices, text and token_ids", "generated_text": "text", "usage": "prompt_token_ids"}
"""Names that other libraries give to what a Result has."""


@dataclass(frozen=True)
class Choice:
    """One of the answers to a prompt.  A request with this ``seed`` and ``n`` 1 gives the same answer."""

    text: str
    token_ids: list[int]
    finish_reason: str
    seed: int
    logprobs: list[TokenLogprobs] | None = None


@dataclass(frozen=True)
class Result:
    """A finished answer.

    ``text`` is without special tokens and stop strings.  ``token_ids`` are those of the answer, including an end token.
    ``finish_reason``: "length", "stop" or "abort".
    ``timings``: durations in seconds, and ``decode_tokens_per_s`` after the first token (``Timings.summary``). ``seed``
    gives this answer again (with ``n`` 1). ``num_cached_tokens`` of the prompt were shared and not computed again.
    ``logprobs`` has one entry for each token of the answer, ``prompt_logprobs`` one for each token of the prompt.  The
    first token of the prompt has None, because no token precedes it. ``choices`` are all ``n`` answers, this one first.
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

    if not TYPE_CHECKING:  # type checkers know the attributes

        def __getattr__(self, name: str) -> Any:
            raise missing_attribute("Result", name, self.__dataclass_fields__, _HINTS)


@dataclass(frozen=True)
class Delta:
    """Text and tokens generated since the previous Delta.  ``finish_reason`` is set on the last one."""

    text: str
    token_ids: list[int]
    finish_reason: str | None
    logprobs: list[TokenLogprobs] | None = None


@dataclass(frozen=True)
class Score:
    """The log-probabilities of a text: one entry for each token, None for the first, which no token precedes."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None]

    def total(self, start: int = 1) -> float:
        """Return the log-probability of the tokens from index ``start`` on, given those before."""
        return sum(token.logprob for token in self.logprobs[max(1, start) :] if token is not None)

    def is_greedy(self, start: int = 1) -> bool:
        """Return True if greedy decoding would generate the tokens from index ``start`` on."""
        return all(token.rank == 1 for token in self.logprobs[max(1, start) :] if token is not None)


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
    return sum(token.logprob for token in request.logprobs) / max(1, len(request.logprobs))


def make_result(requests: Sequence[Request], params: SamplingParams) -> Result:
    """Return the result of the requests that answer one prompt.  Raises the error of a request that failed."""
    for request in requests:
        if request.error is not None:
            raise request.error
    prompt_logprobs = requests[0].prompt_logprobs  # those of the first request: the prompt is the same for all
    if len(requests) > params.n:  # the highest mean logprob first; ties keep their order
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
    """Return True if all requests have ended."""
    return all(request.status is RequestStatus.FINISHED for request in requests)


def outcome(requests: Sequence[Request], params: SamplingParams) -> Result | PenstockError:
    """Return the result, or the error of a request that failed."""
    try:
        return make_result(requests, params)
    except PenstockError as error:
        return error


def all_or_error(outcomes: Sequence[Result | PenstockError], is_one: bool) -> list[Result]:
    """Return the results.  Raises the first error, with the index of its prompt and how many others are complete."""
    results = [outcome for outcome in outcomes if isinstance(outcome, Result)]
    for index, error in enumerate(outcomes):
        if isinstance(error, PenstockError):
            note = f" ({len(results)} of {len(outcomes)} prompts were done; generate_each returns each result or error)"
            raise of_prompt(index, is_one, error, note)
    return results
