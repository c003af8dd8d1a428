"""Texts of texts: the tasks of an encoder with a decoder, and what config.json says of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from penstock.config import ConfigReader, check_flag
from penstock.errors import InvalidArgumentError
from penstock.text.tasks.options import Options, read_cut
from penstock.validation import refusal

__all__ = [
    "DEFAULTS", "START_LEN", "TEXT_TO_TEXT", "TextToTextOptions", "TextToTextTasks", "input_limit", "is_translation",
    "result_key",
]  # fmt: skip

TEXT_TO_TEXT: Final = {"text2text_generation": "generated", "summarization": "summary", "translation": "translation"}
"""The tasks, with the beginning of the key of their results."""
DEFAULTS: Final = {"max_new_tokens": 256, "num_beams": 4}
"""The defaults of transformers' pipelines of these tasks."""
START_LEN: Final = 1
"""The tokens of the decoder before an answer: the start token."""


def is_translation(name: str) -> bool:
    """Return True for a name such as ``translation_en_to_de``."""
    words = name.split("_")
    return len(words) == 4 and (words[0], words[2]) == ("translation", "to")


def input_limit(tokenizer_len: int, context_len: int, answer_len: int) -> int:
    """Return the most tokens of an input that is cut.

    The context has room for the answer behind it, up to half of the context; ``tokenizer_len`` 0 is no limit.
    """
    room = max(1, context_len - START_LEN - min(answer_len, context_len // 2))
    return min(tokenizer_len or room, room)


def result_key(task: str) -> str:
    """Return the beginning of the key of a task's results."""
    return TEXT_TO_TEXT[task.split("_")[0] if is_translation(task) else task]


@dataclass(frozen=True)
class TextToTextOptions(Options):
    """``truncation`` cuts a text to what the model reads; ``return_tensors`` returns token ids in place of texts.

    ``clean_up_tokenization_spaces`` must be False.  ``generate``: the options of ``AutoModel.generate``.
    """

    truncation: bool | str | None = None
    return_tensors: bool = False
    return_text: bool = True
    clean_up_tokenization_spaces: bool = False
    generate: Any = ()

    def __post_init__(self) -> None:
        """Check the options."""
        if read_cut(self.truncation) == "only_second":
            expected = "True, False, longest_first, only_first or do_not_truncate, because an input is one text"
            raise refusal("truncation", expected, self.truncation)
        for name in ("return_tensors", "return_text"):
            check_flag(name, getattr(self, name))
        if self.clean_up_tokenization_spaces is not False:
            expected = "False, because texts are those of the tokenizer's decoder"
            raise refusal("clean_up_tokenization_spaces", expected, self.clean_up_tokenization_spaces)


@dataclass(frozen=True)
class TextToTextTasks:
    """The tasks that ``task_specific_params`` of config.json names.

    ``prefixes`` and ``options`` have the text before each input of a task, and its options of generation; ``prefix`` is
    the text before inputs of other tasks.
    """

    prefix: str = ""
    prefixes: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @classmethod
    def read(cls, files: Mapping[str, bytes | memoryview]) -> TextToTextTasks:
        """Read config.json among the files beside the weights.  InvalidFileError names the key at fault."""
        name = "config.json"
        reader = ConfigReader.parse(files[name]) if name in files else ConfigReader({}, name)
        prefix, of_tasks = reader.optional_str("prefix") or "", reader.object("task_specific_params")
        prefixes, options = {}, {}
        for task in () if of_tasks is None else of_tasks.values:
            own = of_tasks.object(task) if of_tasks is not None else None
            values = {} if own is None else dict(own.values)
            prefixes[task] = values.pop("prefix", prefix)
            if not isinstance(prefixes[task], str):
                raise reader.error("task_specific_params", "a prefix that is a string", prefixes[task])
            options[task] = values
        return cls(prefix, prefixes, options)

    @property
    def translations(self) -> list[str]:
        """The tasks that translate."""
        return [task for task in self.prefixes if is_translation(task)]

    @property
    def pairs(self) -> str:
        """The pairs of languages that a request may name, in words."""
        known = ", ".join(task.removeprefix("translation_").replace("_", " ") for task in self.translations)
        return f"one of {known}" if known else "no languages, because config.json names no translation"

    def prefix_of(self, task: str) -> str:
        """Return the text before each input of a task."""
        return self.prefixes.get(task, self.prefix)

    def options_of(self, task: str) -> Mapping[str, Any]:
        """Return the options of generation of a task."""
        return self.options.get(task, {})

    def choose(self, source: str | None, target: str | None) -> str:
        """Return the task of a request that names languages, or none.

        With languages it is the translation between them, without them the summarization, or else the only translation,
        or else text2text_generation.  Raises InvalidArgumentError for languages that the file has no translation
        between, and for one language without the other.
        """
        if source is None and target is None:
            translations = self.translations
            if "summarization" in self.prefixes:
                return "summarization"
            return translations[0] if len(translations) == 1 else "text2text_generation"
        if source is None or target is None:
            name, other = ("src_lang", "tgt_lang") if source is None else ("tgt_lang", "src_lang")
            message = f"{name}: expected a language, because {other} is given; got none"
            raise InvalidArgumentError(message, param=name)
        task = f"translation_{source}_to_{target}"
        if not is_translation(task) or task not in self.prefixes:
            raise InvalidArgumentError(
                f"tgt_lang: expected {self.pairs}, got {source!r:.40} to {target!r:.40}", param="tgt_lang"
            )
        return task
