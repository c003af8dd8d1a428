"""The tasks that a pipeline can be made for."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, NamedTuple

from penstock.errors import InvalidArgumentError, UnsupportedError
from penstock.offline.infer_config import InferConfig, checked_copy
from penstock.offline.text_generation import TextGeneration

__all__ = ["InferTask"]

PROCESSORS = ("tokenizer", "image_processor", "audio_processor")


class _Task(NamedTuple):
    make: Callable[..., Any]
    uses: frozenset[str]


class InferTask:
    """The tasks by name; ``register`` adds one's own."""

    _tasks: ClassVar[dict[str, _Task]] = {"text_generation": _Task(TextGeneration, frozenset({"tokenizer"}))}

    @classmethod
    def register(cls, task_type: str, make: Callable[..., Any], uses: Iterable[str] = ("tokenizer",)) -> None:
        """Add a task: ``make(config, **options)`` returns what is called with inputs.

        ``uses`` are those of tokenizer, image_processor and audio_processor that it takes among its options; others are
        refused before it is called.  InvalidArgumentError for a name that is taken.
        """
        if not isinstance(task_type, str) or not task_type.isidentifier():
            raise InvalidArgumentError(f"task_type must be a name, not {task_type!r:.60}", param="task_type")
        if task_type in cls._tasks:
            raise InvalidArgumentError(f"task_type {task_type!r} is there already", param="task_type")
        if not callable(make):
            raise InvalidArgumentError(f"make must be a function, not {type(make).__name__}", param="make")
        wanted = frozenset(uses)
        if not wanted <= set(PROCESSORS):
            raise InvalidArgumentError(
                f"uses must be some of {', '.join(PROCESSORS)}, not {sorted(wanted)}", param="uses"
            )
        cls._tasks[task_type] = _Task(make, wanted)

    @classmethod
    def get_infer_task(cls, task_type: str, task_config: InferConfig, **options: Any) -> Any:
        """The pipeline of a task.

        ``options``: ``tokenizer``, ``image_processor``, ``audio_processor``, ``backend`` and what else the task takes.
        Raises InvalidArgumentError for a task that there is not, and UnsupportedError for a processor that it has no
        use for, by name.
        """
        if not cls.check_task_valid(task_type):
            raise InvalidArgumentError(
                f"task must be one of {', '.join(cls.support_list())}, not {task_type!r:.60}", param="task"
            )
        if not isinstance(task_config, InferConfig):
            raise InvalidArgumentError(
                f"task_config must be an InferConfig, not {type(task_config).__name__}", param="task_config"
            )
        task, config = cls._tasks[task_type], checked_copy(task_config)
        for name in PROCESSORS:
            if name not in task.uses and options.pop(name, None) is not None:
                raise UnsupportedError(f"{name}: the task {task_type} has no use for one", param=name)
        try:
            inspect.signature(task.make).bind(config, **options)
        except TypeError as error:
            raise InvalidArgumentError(f"{task_type}: {error}") from None
        return task.make(config, **options)

    @classmethod
    def check_task_valid(cls, task_type: str) -> bool:
        """Whether there is such a task."""
        return isinstance(task_type, str) and task_type in cls._tasks

    @classmethod
    def support_list(cls) -> list[str]:
        """The names of all tasks, sorted."""
        return sorted(cls._tasks)
