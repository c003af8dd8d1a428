"""The output of ``penstock run`` for a model that does not continue text: the result of the task that it is for."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

from penstock.errors import InvalidArgumentError
from penstock.text.terminal import write_text

if TYPE_CHECKING:
    from penstock.llm.llm import LLM

__all__ = ["CONTINUES", "print_task"]

CONTINUES: Final = ("text_generation", "text2text_generation")
"""The tasks whose result is a text that is printed while it is made."""


def print_task(llm: LLM, task: str, text: str, *, as_json: bool) -> None:
    """Print the result of a task for a text: one line for each class, filling or entity; a vector as JSON.

    A question and its context are the first line and the others.
    """
    if task == "feature_extraction":
        vector: Any = llm.embed(text)
        result: Any = vector.vector.tolist()
        print(json.dumps({"task": "embed", "result": result} if as_json else result))
        return
    result = _result(llm, task, text)
    if as_json:
        print(json.dumps({"task": task, "result": result}, ensure_ascii=False))
        return
    for line in _lines(task, result):
        write_text(line + "\n")


def _result(llm: LLM, task: str, text: str) -> Any:
    from penstock.offline.pipeline import pipeline

    pipe = pipeline(task, llm)
    if task == "text_classification":
        return pipe(text, top_k=5)
    if task == "token_classification":
        return pipe(text, aggregation_strategy="simple", stride=0)
    if task == "question_answering":
        question, _, context = text.partition("\n")
        if not context.strip():
            raise InvalidArgumentError(
                "prompt: expected a question on the first line, and on the others the text that answers it, got one "
                "line",
                param="prompt",
            )
        return pipe(question=question, context=context)
    return pipe(text)


def _lines(task: str, result: Any) -> Iterable[str]:
    if task == "text_classification":
        return [f"{item['score']:.4f}  {item['label']}" for item in result]
    if task == "token_classification":
        return [
            f"{item['score']:.4f}  {item['entity_group']}  {item['word']}  ({item['start']} to {item['end']})"
            for item in result
        ]
    if task == "question_answering":
        return [f"{result['score']:.4f}  {result['answer']}  ({result['start']} to {result['end']})"]
    masks = result if result and isinstance(result[0], list) else [result]
    return [f"{item['score']:.4f}  {item['token_str']}  {item['sequence']}" for mask in masks for item in mask]
