"""The registry of pipeline tasks."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Final, NamedTuple

from penstock.errors import InvalidArgumentError, UnsupportedError
from penstock.offline.infer_config import InferConfig
from penstock.offline.text_generation import TextGeneration
from penstock.offline.text_tasks.feature_extraction import FeatureExtraction
from penstock.offline.text_tasks.fill_mask import FillMask
from penstock.offline.text_tasks.question_answering import QuestionAnswering
from penstock.offline.text_tasks.text_classification import TextClassification, ZeroShotClassification
from penstock.offline.text_tasks.text_to_text import TextToText
from penstock.offline.text_tasks.token_classification import TokenClassification
from penstock.text.tasks.text_to_text import TEXT_TO_TEXT, is_translation
from penstock.validation import refusal, wrong_type

__all__ = ["InferTask", "task_name"]

PROCESSORS = ("tokenizer", "image_processor", "audio_processor")


class _Task(NamedTuple):
    make: Callable[..., Any]
    uses: frozenset[str]


_TEXT: Final = frozenset({"tokenizer"})
_TEXT_TASKS: Final = (
    TextClassification, TokenClassification, QuestionAnswering, ZeroShotClassification, FillMask, FeatureExtraction,
)  # fmt: skip
_ALIASES: Final = {"sentiment_analysis": "text_classification", "ner": "token_classification"}
"""Names of transformers for a task."""


def task_name(name: str) -> str:
    """Return the name of a task, which may be written with hyphens, or be another name of it in transformers."""
    own = name.replace("-", "_")
    return _ALIASES.get(own, own)


def _translation(name: str) -> _Task:
    """Return the task of a name such as translation_en_to_de."""
    return _Task(partial(TextToText, task=name), _TEXT)


class InferTask:
    """The registry of tasks by name; ``register`` adds your own."""

    _tasks: ClassVar[dict[str, _Task]] = {
        "text_generation": _Task(TextGeneration, _TEXT),
        **{task.name: _Task(task, _TEXT) for task in _TEXT_TASKS},
        **{name: _Task(partial(TextToText, task=name), _TEXT) for name in TEXT_TO_TEXT},
    }

    @classmethod
    def register(cls, task_type: str, make: Callable[..., Any], uses: Iterable[str] = ("tokenizer",)) -> None:
        """Add a task: ``make(config, **options)`` returns a callable for inputs.

        ``uses`` names the options among tokenizer, image_processor and audio_processor that ``make`` accepts; the
        others are refused before it is called.  InvalidArgumentError if the name is taken.
        """
        if not isinstance(task_type, str) or not task_type.isidentifier():
            raise refusal("task_type", "a name", task_type)
        if task_type in cls._tasks:
            raise InvalidArgumentError(f"task_type {task_type!r} is registered already", param="task_type")
        if not callable(make):
            raise wrong_type("make", "a function", make)
        used = frozenset(uses)
        if not used <= set(PROCESSORS):
            raise InvalidArgumentError(
                f"uses must be some of {', '.join(PROCESSORS)}, not {sorted(used)}", param="uses"
            )
        cls._tasks[task_type] = _Task(make, used)

    @classmethod
    def get_infer_task(cls, task_type: str, task_config: InferConfig, **options: Any) -> Any:
        """Return the pipeline of a task.

        ``options``: ``tokenizer``, ``image_processor``, ``audio_processor``, ``backend`` and further options of the
        task. InvalidArgumentError for an unknown task, UnsupportedError for a processor that the task does not use.
        """
        if not cls.check_task_valid(task_type):
            raise refusal("task", f"one of {', '.join(cls.support_list())}", task_type)
        if task_type not in cls._tasks:
            task_type = task_name(task_type)
        if not isinstance(task_config, InferConfig):
            raise wrong_type("task_config", "an InferConfig", task_config)
        task, config = cls._tasks.get(task_type) or _translation(task_type), replace(task_config)  # checks its fields
        for name in PROCESSORS:
            if name not in task.uses and options.pop(name, None) is not None:
                raise UnsupportedError(f"{name}: not used by the task {task_type}", param=name)
        signature = inspect.signature(task.make)
        try:
            signature.bind(config, **options)
        except TypeError as error:
            unknown = next((name for name in options if name not in signature.parameters), None)
            known = ", ".join(list(signature.parameters)[1:])
            raise InvalidArgumentError(f"{task_type}: {error}; it takes {known}", param=unknown) from None
        return task.make(config, **options)

    @classmethod
    def check_task_valid(cls, task_type: str) -> bool:
        """Return True if a task of that name is registered."""
        if not isinstance(task_type, str):
            return False
        return task_type in cls._tasks or task_name(task_type) in cls._tasks or is_translation(task_name(task_type))

    @classmethod
    def support_list(cls) -> list[str]:
        """Return the names of all tasks, sorted."""
        return sorted(cls._tasks)
