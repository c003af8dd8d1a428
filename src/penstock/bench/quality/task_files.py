"""Multiple-choice tasks from local files: lines of JSON, or a configuration of lm-eval with a local data file."""

from __future__ import annotations

import ast
import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import jinja2

from penstock.bench.quality.texts import read_bytes, read_lines
from penstock.config import is_integer, show
from penstock.errors import FileAccessError, InvalidFileError, UnsupportedError
from penstock.offline.yaml_file import read_yaml
from penstock.text.template_sandbox import deadline, template_environment

__all__ = ["Question", "Task", "open_tasks"]

_QUESTIONS: Final = ("question", "query", "ctx", "prompt", "text", "code")
_CHOICES: Final = ("choices", "endings", "options")
_GOLDS: Final = ("gold", "answer", "label", "answerKey", "target")
_IGNORED: Final = frozenset((
    "task", "task_alias", "tag", "group", "metadata", "test_split", "validation_split", "training_split",
    "fewshot_split", "dataset_path", "dataset_name", "dataset_kwargs", "output_type", "doc_to_text", "doc_to_choice",
    "doc_to_target", "target_delimiter", "description", "metric_list", "should_decontaminate", "fewshot_delimiter",
    "doc_to_decontamination_query", "generation_kwargs", "repeats", "num_fewshot", "unsafe_code",
))  # fmt: skip
"""Keys of a configuration that are read here, or that change nothing for multiple choice without examples."""


_RENDER_ERRORS: Final = (
    jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError, TypeError,
    ValueError,
)  # fmt: skip
"""The errors of a template: wrong syntax, or operations that the values do not have."""


@dataclass(frozen=True)
class Question:
    """A document of a task: what the model reads, the continuations to choose from, and the number of the right one.

    ``choices`` are the texts without ``delimiter``, which lies between context and choice.
    """

    context: str
    choices: tuple[str, ...]
    gold: int
    delimiter: str = " "


@dataclass(frozen=True)
class Task:
    """A multiple-choice task.  ``sha256``: of the bytes of its questions' file."""

    name: str
    sha256: str
    questions: tuple[Question, ...]


def open_tasks(path: Path | str) -> list[Task]:
    """Read a file of tasks.

    A name that ends in .yaml or .yml is a configuration of lm-eval for ``multiple_choice`` whose ``dataset_path`` is
    json with local ``data_files``.  Any other file has a question in each line: "question", "choices" (texts, or an
    object with "text" and "label") and "gold" (the number of the right choice from 0, its label or its text).  Names of
    known data sets are taken, too: "query", "ctx", "prompt"; "endings", "options"; "answer", "label", "answerKey".

    Raises FileAccessError, InvalidFileError and UnsupportedError with the parameter ``tasks``.
    """
    source = Path(path)
    if source.suffix in (".yaml", ".yml"):
        return [_read_configuration(source)]
    data = read_bytes("tasks", source)
    questions = [
        _plain_question(f"{source}: line {number}", value) for number, value in read_lines("tasks", source, data)
    ]
    return [_task(source.stem, data, questions, source)]


def _task(name: str, data: bytes, questions: Sequence[Question], source: Path) -> Task:
    if not questions:
        raise _invalid(f"{source}: expected at least one question, got none")
    return Task(name, hashlib.sha256(data).hexdigest(), tuple(questions))


def _invalid(message: str) -> InvalidFileError:
    return InvalidFileError(f"tasks: {message}", param="tasks", code="invalid_task")


def _plain_question(where: str, value: Any) -> Question:
    if not isinstance(value, dict):
        raise _invalid(f"{where}: expected an object with question, choices and gold, got {type(value).__name__}")
    context = _field(where, value, _QUESTIONS)
    if not isinstance(context, str):
        raise _invalid(f"{where}: question: expected a string, got {show(context)}")
    listed = _field(where, value, _CHOICES)
    labels: tuple[Any, ...] = ()
    if isinstance(listed, dict):
        labels = _labels(where, listed.get("label"))
        listed = listed.get("text")
    choices = _choices(where, listed)
    if labels and len(labels) != len(choices):
        raise _invalid(f"{where}: choices.label: expected {len(choices)} labels, one a choice, got {len(labels)}")
    gold = _gold(where, _field(where, value, _GOLDS), choices, labels)
    spaced = context[-1:].isspace() or any(choice[:1].isspace() for choice in choices)
    return Question(context, choices, gold, "" if spaced else " ")


def _field(where: str, value: Mapping[str, Any], names: Sequence[str]) -> Any:
    name = next((name for name in names if name in value), None)
    if name is None:
        fields = ", ".join(map(show, value)) or "no fields"
        raise _invalid(f"{where}: expected a field {names[0]} (or {', '.join(names[1:])}), got {fields}")
    return value[name]


def _labels(where: str, value: Any) -> tuple[str, ...]:
    """Return the labels of choices as texts; () for none."""
    if value is None:
        return ()
    labels = value if isinstance(value, list) else [None]
    if not all(isinstance(label, str) or is_integer(label, 0, 1 << 20) for label in labels):
        raise _invalid(f"{where}: choices.label: expected a list of strings or integers, got {show(value)}")
    return tuple(map(str, labels))


def _choices(where: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, (list, tuple)) or len(value) < 2 or not all(isinstance(c, str) and c for c in value):
        raise _invalid(f"{where}: choices: expected at least two strings, got {show(value)}")
    return tuple(value)


def _gold(where: str, value: Any, choices: Sequence[str], labels: Sequence[str] = ()) -> int:
    """Return the number of the right choice: from a label, a number, a text, or a letter."""
    if is_integer(value, 0, 1 << 20) and str(value) in labels:
        value = str(value)
    if isinstance(value, str):
        letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"[: len(choices)]
        if value in labels:
            value = list(labels).index(value)
        elif value in choices:
            value = list(choices).index(value)
        elif not labels and len(value) == 1 and value in letters:
            value = letters.index(value)
        elif value.isdecimal():
            value = int(value)
    if not is_integer(value, 0, len(choices) - 1):
        raise _invalid(
            f"{where}: gold: expected a number from 0 to {len(choices) - 1}, a label or the text of a choice, "
            f"got {show(value)}"
        )
    return int(value)


def _read_configuration(source: Path) -> Task:
    """Return the task of a configuration of lm-eval."""
    try:
        values = read_yaml(source)
    except InvalidFileError as error:
        raise InvalidFileError(f"tasks: {error}", param="tasks", code="invalid_task") from None
    except OSError as error:
        raise FileAccessError(f"tasks: cannot read {source}: {error.strerror or error}", param="tasks") from None
    for name, expected in (("output_type", "multiple_choice"), ("dataset_path", "json")):
        if values.get(name) != expected:
            raise _unsupported(source, name, expected, values.get(name))
    unknown = [name for name, value in values.items() if name not in _IGNORED and value not in (None, False, [], {})]
    if unknown:
        raise _unsupported(source, unknown[0], "none", values[unknown[0]])
    if values.get("num_fewshot") not in (None, 0):
        raise _unsupported(source, "num_fewshot", "0", values["num_fewshot"])
    for name in ("doc_to_text", "doc_to_choice", "doc_to_target"):
        if values.get(name) is None:
            raise _invalid(f"{source}: expected a key {name}, got none")
    path = _data_file(source, values)
    data = read_bytes("tasks", path)
    template = _Templates(source, values)
    questions = [template.question(f"{path}: line {n}", value) for n, value in read_lines("tasks", path, data)]
    return _task(str(values.get("task") or source.stem), data, questions, path)


def _unsupported(source: Path, name: str, expected: str, actual: object) -> UnsupportedError:
    return UnsupportedError(
        f"tasks: {source}: {name}: expected {expected}, got {show(actual)}. Other tasks run in lm-eval "
        "(docs/guides/evaluation.md).",
        param="tasks",
        code="unsupported_task",
    )


def _data_file(source: Path, values: Mapping[str, Any]) -> Path:
    """Return the file with the documents, named relative to the working folder as in lm-eval, or to its own folder."""
    arguments = values.get("dataset_kwargs") or {}
    if not isinstance(arguments, Mapping):
        raise _invalid(f"{source}: dataset_kwargs: expected a mapping with data_files, got {show(arguments)}")
    files = arguments.get("data_files")
    if isinstance(files, Mapping):
        names = [_split(source, key, values.get(key)) for key in ("test_split", "validation_split", "training_split")]
        split = next((name for name in names if name in files), None)
        files = files.get(split) if split is not None else next(iter(files.values()), None)
    if isinstance(files, list) and len(files) == 1:
        files = files[0]
    if not isinstance(files, str) or "://" in files or "\0" in files:
        raise _unsupported(source, "dataset_kwargs.data_files", "the name of a local file", files)
    path = Path(files)
    return path if path.is_absolute() or os.path.exists(path) else source.parent / path  # os.path.exists raises nothing


def _split(source: Path, key: str, value: object) -> str | None:
    if value is not None and not isinstance(value, str):
        raise _invalid(f"{source}: {key}: expected the name of a split, got {show(value)}")
    return value


class _Templates:
    """The templates of a configuration: names of fields, or jinja in the sandbox of chat templates."""

    def __init__(self, source: Path, values: Mapping[str, Any]) -> None:
        self._values = values
        self._delimiter = values.get("target_delimiter", " ")
        self._description = values.get("description") or ""
        if not isinstance(self._delimiter, str) or not isinstance(self._description, str):
            raise _invalid(f"{source}: target_delimiter, description: expected strings")
        self._environment = template_environment()
        self._environment.trim_blocks = self._environment.lstrip_blocks = False
        self._environment.keep_trailing_newline, self._environment.undefined = True, jinja2.StrictUndefined

    def question(self, where: str, document: Any) -> Question:
        """Return the question of a document."""
        if not isinstance(document, dict):
            raise _invalid(f"{where}: expected an object, got {type(document).__name__}")
        choices = _choices(where, self._value(where, "doc_to_choice", document))
        context, target = (self._value(where, name, document) for name in ("doc_to_text", "doc_to_target"))
        if not isinstance(context, str):
            raise _invalid(f"{where}: doc_to_text: expected a string, got {show(context)}")
        return Question(self._description + context, choices, _gold(where, target, choices), self._delimiter)

    def _value(self, where: str, name: str, document: Mapping[str, Any]) -> Any:
        template = self._values[name]
        if isinstance(template, list):
            return [self._render(where, name, str(item), document) for item in template]
        if is_integer(template, 0, 1 << 20):
            return template
        if not isinstance(template, str):
            raise _invalid(f"{where}: {name}: expected a string or a list, got {show(template)}")
        if template in document:
            return document[template]
        text = self._render(where, name, template, document)
        is_list = text[:1] == "[" and text[-1:] == "]"
        if name == "doc_to_choice" or (name == "doc_to_target" and is_list):
            try:
                return ast.literal_eval(text)
            except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
                if name == "doc_to_choice":
                    raise _invalid(f"{where}: {name}: expected a list, got {show(text)}") from None
        return text

    def _render(self, where: str, name: str, template: str, document: Mapping[str, Any]) -> str:
        try:
            with deadline():
                return self._environment.from_string(template).render(document)
        except _RENDER_ERRORS as error:
            raise _invalid(f"{where}: {name}: {type(error).__name__}: {error}") from None
