"""Answers of models to multiple-choice tasks, with their standard errors and the paired difference of two models.

The likelihoods are those of lm-eval's requests (``penstock.offline.lm_eval``).  ``acc`` takes the choice with the
largest log-probability, ``acc_norm`` the one with the largest log-probability by character of the choice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from penstock.bench.quality.task_files import Question, Task
from penstock.errors import InvalidArgumentError
from penstock.offline.lm_eval import Evaluator

if TYPE_CHECKING:
    from penstock.llm.llm import LLM

__all__ = ["Accuracy", "TaskChange", "TaskScores", "compare_tasks", "score_task"]

_AT_ONCE: Final = 32
"""Questions that are given to the engine together."""


@dataclass(frozen=True)
class Accuracy:
    """Shares of right answers with their standard errors, which one question does not have."""

    acc: float
    acc_stderr: float | None
    acc_norm: float
    acc_norm_stderr: float | None


@dataclass(frozen=True)
class TaskScores:
    """The answers of a model.  ``is_right`` and ``is_right_norm``: of each question.

    ``margins``: how much likelier the right choice is than the best of the others, in nats.
    """

    is_right: NDArray[np.bool_]
    is_right_norm: NDArray[np.bool_]
    margins: NDArray[np.float64]

    @property
    def accuracy(self) -> Accuracy:
        """The shares of right answers."""
        acc, error = _mean_and_error(self.is_right)
        return Accuracy(acc, error, *_mean_and_error(self.is_right_norm))


@dataclass(frozen=True)
class TaskChange:
    """The paired difference of a model and another one on the same questions.

    ``acc``: of the shares of right answers.  ``lost`` and ``won``: questions that only the other one, or only the model
    answers correctly.  ``margin``: of the margins in nats, which shows smaller changes than ``acc`` does.
    """

    acc: float
    acc_stderr: float | None
    lost: int
    won: int
    margin: float
    margin_stderr: float | None


def score_task(llm: LLM, task: Task, progress: Callable[[int, int], Any] | None = None) -> TaskScores:
    """Answer the questions of a task.  ``progress(done, total)`` counts questions.

    Raises InvalidArgumentError for a question whose choice does not fit into the context.
    """
    evaluator = Evaluator(llm, add_bos_token=_adds_bos(llm))
    right, right_norm, margins = [], [], []
    for begin in range(0, len(task.questions), _AT_ONCE):
        questions = task.questions[begin : begin + _AT_ONCE]
        for question, scores in zip(questions, _likelihoods(evaluator, task, questions), strict=True):
            lengths = np.array([len(choice) for choice in question.choices], np.float64)
            right.append(int(scores.argmax()) == question.gold)
            right_norm.append(int((scores / lengths).argmax()) == question.gold)
            margins.append(float(scores[question.gold] - np.delete(scores, question.gold).max()))
        if progress is not None:
            progress(begin + len(questions), len(task.questions))
    return TaskScores(np.array(right), np.array(right_norm), np.array(margins))


def _adds_bos(llm: LLM) -> bool:
    """Return True if the tokenizer begins texts with a token: models are trained with it."""
    tokenizer = llm.tokenizer
    return len(tokenizer.encode("a")) > len(tokenizer.encode("a", add_special_tokens=False))


def _likelihoods(evaluator: Evaluator, task: Task, questions: Sequence[Question]) -> list[NDArray[np.float64]]:
    pairs = [(q.context, q.delimiter + choice) for q in questions for choice in q.choices]
    try:
        totals = np.array([total for total, _ in evaluator.loglikelihood(pairs)])
    except InvalidArgumentError as error:
        raise InvalidArgumentError(
            f"tasks: {task.name}: {error}", param="tasks", code="context_length_exceeded"
        ) from None
    ends = np.cumsum([len(question.choices) for question in questions])
    return np.split(totals, ends[:-1])


def compare_tasks(scores: TaskScores, other: TaskScores) -> TaskChange:
    """Return the difference of a model and another one, question by question."""
    changes = scores.is_right.astype(np.float64) - other.is_right
    acc, error = _mean_and_error(changes)
    lost, won = int((changes < 0).sum()), int((changes > 0).sum())
    return TaskChange(acc, error, lost, won, *_mean_and_error(scores.margins - other.margins))


def _mean_and_error(values: NDArray[Any]) -> tuple[float, float | None]:
    """Return the mean and its standard error; None for one value."""
    numbers = np.asarray(values, np.float64)
    error = float(numbers.std(ddof=1)) / math.sqrt(len(numbers)) if len(numbers) > 1 else None
    return float(numbers.mean()), error
