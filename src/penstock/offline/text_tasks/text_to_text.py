"""The tasks text2text_generation, summarization and translation: the texts that an encoder with a decoder makes."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from penstock.config import ConfigReader, check_flag
from penstock.llm.generate.callables import callables_of
from penstock.llm.generate.hooked import check_hooked, run_hooked
from penstock.llm.generate.options import OPTIONS, GenerateOptions, read_options
from penstock.offline.infer_config import InferConfig
from penstock.offline.text_tasks.text_task import TextTask, texts_of
from penstock.text.tasks.options import Options, read_cut
from penstock.validation import refusal

__all__ = ["TEXT_TO_TEXT", "TextToText", "is_translation"]

TEXT_TO_TEXT: Final = {"text2text_generation": "generated", "summarization": "summary", "translation": "translation"}
"""The tasks, with the beginning of the key of their results."""
_DEFAULTS: Final = {"max_new_tokens": 256, "num_beams": 4}
"""The defaults of transformers' pipelines of these tasks."""
_START_LEN: Final = 1
"""The tokens of the decoder before an answer: the start token."""


def is_translation(name: str) -> bool:
    """Return True for a name such as ``translation_en_to_de``."""
    words = name.split("_")
    return len(words) == 4 and (words[0], words[2]) == ("translation", "to")


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
        read_cut(self.truncation)
        for name in ("return_tensors", "return_text"):
            check_flag(name, getattr(self, name))
        if self.clean_up_tokenization_spaces is not False:
            expected = "False, because texts are those of the tokenizer's decoder"
            raise refusal("clean_up_tokenization_spaces", expected, self.clean_up_tokenization_spaces)


class TextToText(TextTask[TextToTextOptions]):
    """The texts that an encoder with a decoder, such as T5, makes of texts.

    ``task``: one of TEXT_TO_TEXT, or a translation such as ``translation_en_to_de``.  ``task_specific_params`` of
    config.json has the text that is put before each input of the task, and options of its generation.
    """

    name: ClassVar[str] = "text2text_generation"
    options_type = TextToTextOptions

    def __init__(self, config: InferConfig, *, task: str = "text2text_generation", **options: Any) -> None:
        self.task = task
        self._key = TEXT_TO_TEXT[task.split("_")[0] if is_translation(task) else task]
        super().__init__(config, **_nested(options))

    def check_model(self) -> None:
        """Expect an encoder with a decoder; read what config.json says of the task."""
        if self.llm.info.prefix_token < 0:
            raise self.refuse_model("an encoder with a decoder")
        files = self.llm.files
        reader = ConfigReader.parse(files["config.json"]) if "config.json" in files else ConfigReader({}, "config.json")
        of_tasks = reader.object("task_specific_params")
        own = None if of_tasks is None or not of_tasks.has(self.task) else of_tasks.object(self.task)
        values = {} if own is None else dict(own.values)
        prefix = values.pop("prefix", reader.optional_str("prefix") or "")
        if not isinstance(prefix, str):
            raise reader.error("task_specific_params", "a prefix that is a string", prefix)
        self.prefix = prefix
        self._of_task = {name: value for name, value in values.items() if name in OPTIONS}

    def __call__(self, inputs: Any, **options: Any) -> Any:
        """Return ``{"generated_text"}`` of each text, or ``{"summary_text"}`` or ``{"translation_text"}``.

        A single text gives a list, as in transformers.  ``options``: those of ``AutoModel.generate``, of which
        ``max_length`` and ``min_length`` count the tokens of the decoder.
        """
        chosen = self._begin(_nested(options))
        several, is_one = texts_of(inputs)
        results = self.run(several, chosen)
        return results[0] if is_one else [one[0] if len(one) == 1 else one for one in results]

    def run(self, inputs: list[Any], options: TextToTextOptions) -> list[Any]:
        """Return the texts of each input, one unless ``num_return_sequences`` is more."""
        cut = read_cut(options.truncation)
        limit = self.max_len if cut else 0
        prompts = [self.text_ids(self.prefix + text, None, limit, cut) for text in inputs]
        given = dict(self._defaults.generate) | dict(options.generate)
        read = read_options((_DEFAULTS, self._of_task, self._of_file()), given, self.llm.generation)
        answers = self._answers(prompts, read)
        if options.return_tensors or not options.return_text:
            return [[{f"{self._key}_token_ids": ids} for ids in each] for each in answers]
        return [[{f"{self._key}_text": text} for text in self.tokenizer.decode_each(each)] for each in answers]

    def _of_file(self) -> dict[str, Any]:
        """Return the options of generation in a YAML file; one that samples means no beams."""
        values = self._file.generation
        samples = values.get("do_sample", bool(values.get("temperature")))
        return {"num_beams": 1, **values} if samples else values

    def _answers(self, prompts: list[Any], read: GenerateOptions) -> list[list[list[int]]]:
        params = [read.params_of(_START_LEN) for _ in prompts]
        if read.needs_hook:
            check_hooked(read)
            callables = [callables_of(read, False, row, _START_LEN) for row in range(len(prompts) * read.num_rows)]
            with self.llm.engine.search_lock if read.num_beams > 1 else nullcontext():
                found = run_hooked(self.llm, prompts, params, read, callables)
            return [[answer.token_ids for answer in each] for each in found]
        results = self.llm.generate(prompts, params)
        return [[one.token_ids for one in result.choices or (result,)] for result in results]


def _nested(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options whose ``generate`` has those of generation."""
    own = {name: value for name, value in options.items() if name not in OPTIONS}
    generate = {name: value for name, value in options.items() if name in OPTIONS}
    return own | ({"generate": tuple(generate.items())} if generate else {})
