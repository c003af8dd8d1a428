"""The task question_answering: the part of a text that answers a question."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from penstock.checkpoint.pooling.head import ANSWER_TASK
from penstock.errors import InvalidArgumentError
from penstock.offline.text_tasks.text_task import TextTask
from penstock.text.tasks.answers import AnswerOptions, answer_prompts
from penstock.validation import refusal, wrong_type

__all__ = ["QuestionAnswering"]


class QuestionAnswering(TextTask[AnswerOptions]):
    """Answers to questions about texts."""

    name = ANSWER_TASK
    options_type = AnswerOptions

    def check_model(self) -> None:
        """Expect a network with a head for the two ends of an answer."""
        if self.head.task != ANSWER_TASK:
            raise self.refuse_model("a network that answers questions about texts")

    def __call__(self, inputs: Any = None, *, question: Any = None, context: Any = None, **options: Any) -> Any:
        """Return ``{"score", "start", "end", "answer"}`` of each question; a list of ``top_k`` if that is above 1.

        ``inputs``: ``{"question", "context"}``, or a list of them; or else ``question`` and ``context``, each a text or
        a list.  One context may have several questions.
        """
        chosen = self._begin(options)
        examples = _examples(inputs, question, context)
        results = self.run(examples, chosen)
        return results[0] if len(results) == 1 else results

    def run(self, inputs: list[Any], options: AnswerOptions) -> list[Any]:
        """Return the answer to each example."""
        asked = answer_prompts(self.tokenizer, inputs, options, self.max_len)
        return asked.results(self.rows(asked.prompts))


def _examples(inputs: Any, question: Any, context: Any) -> list[tuple[str, str]]:
    """Return the pairs of a question and a context."""
    if inputs is None:
        if question is None or context is None:
            raise InvalidArgumentError("question: expected a question and a context", param="question")
        questions = [question] if isinstance(question, str) else list(question)
        contexts = [context] * len(questions) if isinstance(context, str) else list(context)
        if len(questions) != len(contexts):
            raise InvalidArgumentError(
                f"context: expected one for each of {len(questions)} questions, got {len(contexts)}", param="context"
            )
        pairs = list(zip(questions, contexts, strict=True))
    else:
        listed = [inputs] if isinstance(inputs, Mapping) else inputs
        if isinstance(listed, str) or not isinstance(listed, Iterable):
            raise wrong_type("inputs", "a question and a context, {'question': ..., 'context': ...}", inputs)
        pairs = [_pair(item) for item in listed]
    for name, texts in (("question", [q for q, _ in pairs]), ("context", [c for _, c in pairs])):
        for text in texts:
            if not isinstance(text, str) or not text:
                raise refusal(name, "a text that is not empty", text)
    return pairs


def _pair(item: Any) -> tuple[Any, Any]:
    if not isinstance(item, Mapping) or not {"question", "context"} <= item.keys():
        raise wrong_type("inputs", "a mapping with question and context", item)
    return item["question"], item["context"]
