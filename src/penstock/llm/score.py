"""Score prompts: the log-probability of each of their tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from penstock.engine.capabilities import check_scoring
from penstock.engine.engine import Engine
from penstock.engine.options import RequestOptions
from penstock.engine.params import check_num_top
from penstock.engine.prompt_logits import PromptScores
from penstock.llm.open_requests import OpenRequests, run_prompts
from penstock.llm.prompts import Prompt, check_each, split_prompts
from penstock.llm.result import Score

__all__ = ["score_prompts"]


def score_prompts(
    engine: Engine,
    encode: Callable[[Prompt], Sequence[int]],
    prompts: Prompt | Iterable[Prompt],
    num_top: int,
    options: RequestOptions | None,
    opened: OpenRequests | None = None,
) -> Score | list[Score]:
    """Score one prompt or several, as ``LLM.score`` documents it.

    ``encode`` turns a prompt into token ids.  ``opened`` holds the requests, so that another thread can abort them.
    """
    info = engine.program.info
    options = check_scoring(info.tail, options)
    several, is_one = split_prompts(prompts)
    num_top = check_num_top(num_top, info.vocab_size)
    checked = check_each(several, is_one, lambda prompt: engine.check_prompt(encode(prompt), answer_len=0))
    with_rows = ((ids, PromptScores(num_top)) for ids in checked)
    requests = run_prompts(engine, with_rows, is_one, options, opened)
    scores = [Score(ids, request.prompt_logprobs or []) for ids, request in zip(checked, requests, strict=True)]
    return scores[0] if is_one else scores
