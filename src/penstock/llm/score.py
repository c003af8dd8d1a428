"""Prompts that nothing follows: scored or embedded, one or many in a call."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from penstock.engine.options import RequestOptions, check_options
from penstock.engine.params import check_num_top
from penstock.engine.pooling import Embedding, check_embedding, embed
from penstock.engine.prompt_logits import PromptScores
from penstock.engine.prompts import Prompt, check_each, split_prompts
from penstock.engine.tail import check_scoring
from penstock.engine.waiting import OpenRequests, run_prompts
from penstock.llm.result import Score

if TYPE_CHECKING:
    from penstock.llm.llm import LLM

__all__ = ["embed_prompts", "score_prompts"]


def score_prompts(
    llm: LLM,
    prompts: Prompt | Iterable[Prompt],
    num_top: int,
    options: RequestOptions | None,
    opened: OpenRequests | None = None,
) -> Score | list[Score]:
    """``LLM.score``; ``opened`` takes the requests, so that another thread may end them."""
    options = check_scoring(llm.info.tail, options)
    several, is_one = split_prompts(prompts)
    num_top = check_num_top(num_top, llm.info.vocab_size)
    checked = check_each(several, is_one, lambda prompt: llm.engine.check_prompt(llm._ids(prompt), answer_len=0))
    wanted = ((ids, PromptScores(num_top)) for ids in checked)
    requests = run_prompts(llm.engine, wanted, is_one, options, opened)
    scores = [Score(ids, one.prompt_logprobs or []) for ids, one in zip(checked, requests, strict=True)]
    return scores[0] if is_one else scores


def embed_prompts(
    llm: LLM,
    prompts: Prompt | Iterable[Prompt],
    pooling: str,
    normalize: bool,
    options: RequestOptions | None,
    opened: OpenRequests | None = None,
) -> Embedding | list[Embedding]:
    """``LLM.embed``; ``opened`` takes the requests, so that another thread may end them."""
    check_embedding(pooling, normalize)
    fixed = check_options(options)
    several, is_one = split_prompts(prompts)
    checked = check_each(several, is_one, lambda prompt: llm.engine.fit_prompt(llm._ids(prompt), 0, fixed))
    embeddings = embed(llm.engine, checked, pooling, normalize, is_one=is_one, options=fixed, opened=opened)
    return embeddings[0] if is_one else embeddings
