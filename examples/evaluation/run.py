"""Evaluate a model with lm-eval (pip install 'penstock[eval]'), in this process.

    python examples/evaluation/run.py demo/demo.psm --tasks python_lines

Tasks are lm-eval's own, or those of this folder.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.tasks import TaskManager
from lm_eval.utils import make_table

from penstock import LLM
from penstock.offline.lm_eval import Evaluator


class PenstockLM(LM):
    """A model of lm-eval's over an open LLM."""

    def __init__(self, llm: LLM, add_bos_token: bool = False) -> None:
        super().__init__()
        self._evaluator = Evaluator(llm, add_bos_token)

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        return self._answer("loglikelihood", requests, self._evaluator.loglikelihood)

    def loglikelihood_rolling(self, requests: list[Instance]) -> list[float]:
        return self._answer(
            "loglikelihood_rolling", requests, lambda args: self._evaluator.loglikelihood_rolling(a[0] for a in args)
        )

    def generate_until(self, requests: list[Instance]) -> list[str]:
        return self._answer("generate_until", requests, self._evaluator.generate_until)

    def _answer(self, name: str, requests: list[Instance], ask: Callable[[Sequence[Any]], list[Any]]) -> list[Any]:
        answers = ask([request.args for request in requests])
        for request, answer in zip(requests, answers, strict=True):
            self.cache_hook.add_partial(name, request.args, answer)
        return answers


def main() -> None:
    parser = argparse.ArgumentParser(description="Evaluate a model with lm-eval.")
    parser.add_argument("model", help="a .psm bundle or a checkpoint folder")
    parser.add_argument("--scheme", help="for a folder: f32, bf16, w8a8, w4a8 ...")
    parser.add_argument("--tasks", default="python_lines", help="names of tasks, separated by commas")
    parser.add_argument("--limit", type=int, help="documents of each task at most")
    parser.add_argument("--num-fewshot", type=int, help="examples in front of each document")
    args = parser.parse_args()
    tasks = TaskManager(include_path=str(Path(__file__).parent))
    with LLM(args.model, scheme=args.scheme) as llm:
        results = simple_evaluate(
            model=PenstockLM(llm),
            tasks=args.tasks.split(","),
            task_manager=tasks,
            limit=args.limit,
            num_fewshot=args.num_fewshot,
        )
    print(make_table(results))


if __name__ == "__main__":
    main()
