"""Answers whose rows are seen or changed in Python: processors, criteria, scores, beam search."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.engine.decoding.beam_search import BeamSearch
from penstock.engine.decoding.hook import AnswerHook, Callables, hooked
from penstock.engine.options import RequestOptions
from penstock.engine.params import ResolvedSampling, SamplingParams
from penstock.engine.prompt_logits import PromptLogits
from penstock.engine.request import Request
from penstock.errors import UnsupportedError
from penstock.llm.beams import check_beams, new_search
from penstock.llm.generate.options import GenerateOptions
from penstock.llm.llm import LLM
from penstock.llm.open_requests import run_prepared, run_prompts
from penstock.llm.prompts import check_each, of_prompt

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["HookedAnswer", "check_hooked", "run_hooked"]


@dataclass(frozen=True)
class HookedAnswer:
    """One answer.

    ``scores`` and ``logits``: a row for each token, None if they were not asked for.  Of a beam search ``step_scores``
    and ``step_logits`` have the rows of all beams by step, ``path`` the beam of each token, and ``score`` the answer's
    own score.
    """

    token_ids: list[int]
    scores: Sequence[NDArray[np.float32]] | None = None
    logits: Sequence[NDArray[np.float32]] | None = None
    step_scores: Sequence[NDArray[np.float32]] | None = None
    step_logits: Sequence[NDArray[np.float32]] | None = None
    path: tuple[int, ...] = ()
    score: float = 0.0


def run_hooked(
    llm: LLM, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], read: GenerateOptions,
    callables: Sequence[Callables],
) -> list[list[HookedAnswer]]:  # fmt: skip
    """Return the answers to each prompt, ``num_return_sequences`` each.  ``callables``: those of each row."""
    # The steps of a pipeline are sampled where its last stage runs, so rows that nothing changes are computed later.
    is_later = llm.engine.program.info.num_stages > 1 and not read.needs_rows
    hooks: list[list[AnswerHook]] = []
    searches: list[BeamSearch] = []

    def of_answers(sampling: ResolvedSampling) -> list[ResolvedSampling]:
        hooks.append(
            [
                AnswerHook(
                    sampling.answer(index),
                    callables[len(hooks) * read.params.n + index],
                    [] if read.output_logits else None,
                    [] if read.output_scores else None,
                )
                for index in range(read.params.n)
            ]
        )
        return [hook.sampling if is_later else hooked(hook.sampling, hook) for hook in hooks[-1]]

    def of_beams(sampling: ResolvedSampling) -> list[ResolvedSampling]:
        keeps_rows = read.output_scores or read.output_logits
        searches.append(
            new_search(llm.engine, sampling, read.params.n, read.beams, callables[len(searches)], keeps_rows=keeps_rows)
        )
        return searches[-1].samplings

    hook: Callable[[ResolvedSampling], list[ResolvedSampling]] = of_beams if read.num_beams > 1 else of_answers
    prepared = check_each(
        zip(prompts, params, strict=True),
        len(prompts) == 1,
        lambda pair: llm.prepare(*pair, RequestOptions(), hook=hook),
    )
    groups = run_prepared(llm.engine, prepared)
    for index, group in enumerate(groups):
        for request in group:
            if request.error is not None:
                raise of_prompt(index, len(prompts) == 1, request.error)
    if searches:
        return [_answers_of(search, read) for search in searches]
    for group, own_hooks in zip(groups, hooks if is_later else (), strict=is_later):
        for request, own in zip(group, own_hooks, strict=True):
            _compute_rows(llm, request, own)
    return [
        [_answer(request, own) for request, own in zip(group, own_hooks, strict=True)]
        for group, own_hooks in zip(groups, hooks, strict=True)
    ]


def _compute_rows(llm: LLM, request: Request, hook: AnswerHook) -> None:
    """Give a hook the rows and the tokens of an answer that has ended."""
    if not request.output_ids:
        return
    ids = request.tokens(0, request.num_tokens - 1)
    rows = PromptLogits(len(ids), llm.info.vocab_size, len(request.prompt_ids) - 1)
    run_prompts(llm.engine, [(ids, rows)], True, RequestOptions())
    again = Request(request.id, request.prompt_ids, request.max_tokens, request.sampling, request.stop_ids)
    again.enter(request.num_encoded)
    for row, token in zip(rows.array, request.output_ids, strict=True):
        hook.process(again, row)
        hook.accept(again, token)


def _answer(request: Request, hook: AnswerHook) -> HookedAnswer:
    return HookedAnswer(list(request.output_ids), hook.scores, hook.logits)


def _answers_of(search: BeamSearch, read: GenerateOptions) -> list[HookedAnswer]:
    scores, logits = search.scores if read.output_scores else None, search.logits if read.output_logits else None

    def along(rows: list[NDArray[np.float32]] | None, path: Sequence[int]) -> list[NDArray[np.float32]] | None:
        return None if rows is None else [step[beam] for step, beam in zip(rows, path, strict=False)]

    return [
        HookedAnswer(
            list(result.token_ids), along(scores, result.path), along(logits, result.path), scores, logits, result.path,
            float(result.score),
        )
        for result in search.results
    ]  # fmt: skip


def check_hooked(read: GenerateOptions) -> None:
    """Refuse the options of sampling that answers with rows in Python, or beams, cannot have."""
    params = read.params
    if params.best_of is not None and params.best_of > params.n:
        raise UnsupportedError(f"best_of: expected n ({params.n}) here, got {params.best_of}", param="best_of")
    if read.num_beams > 1:
        check_beams(params, read.num_beams)
