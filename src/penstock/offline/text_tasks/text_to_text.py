"""The tasks text2text_generation, summarization and translation: the texts that an encoder with a decoder makes."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any, ClassVar

from penstock.llm.generate.callables import callables_of
from penstock.llm.generate.hooked import check_hooked, run_hooked
from penstock.llm.generate.options import OPTIONS, GenerateOptions, read_options
from penstock.offline.infer_config import InferConfig
from penstock.offline.text_tasks.text_task import TextTask, texts_of
from penstock.text.tasks.options import read_cut
from penstock.text.tasks.text_to_text import (
    DEFAULTS,
    START_LEN,
    TextToTextOptions,
    TextToTextTasks,
    input_limit,
    result_key,
)

__all__ = ["TextToText"]


class TextToText(TextTask[TextToTextOptions]):
    """The texts that an encoder with a decoder, such as T5, makes of texts.

    ``task``: one of TEXT_TO_TEXT, or a translation such as ``translation_en_to_de``.  ``task_specific_params`` of
    config.json has the text that is put before each input of the task, and options of its generation.
    """

    name: ClassVar[str] = "text2text_generation"
    options_type = TextToTextOptions

    def __init__(self, config: InferConfig, *, task: str = "text2text_generation", **options: Any) -> None:
        self.task = task
        self._key = result_key(task)
        super().__init__(config, **_nested(options))

    def check_model(self) -> None:
        """Expect an encoder with a decoder; read what config.json says of the task."""
        if self.llm.info.prefix_token < 0:
            raise self.refuse_model("an encoder with a decoder")
        tasks = TextToTextTasks.read(self.llm.files)
        self.prefix = tasks.prefix_of(self.task)
        self._of_task = {name: value for name, value in tasks.options_of(self.task).items() if name in OPTIONS}

    def __call__(self, inputs: Any, **options: Any) -> Any:
        """Return ``{"generated_text"}`` of each text, or ``{"summary_text"}`` or ``{"translation_text"}``.

        A single text gives a list, as in transformers.  ``options``: those of ``AutoModel.generate``, of which
        ``max_length`` and ``min_length`` count the tokens of the decoder.
        """
        chosen = self._begin(_nested(options))
        several, is_one = texts_of(inputs)
        results = self.run(several, chosen)
        return results[0] if is_one else [answers[0] if len(answers) == 1 else answers for answers in results]

    def run(self, inputs: list[Any], options: TextToTextOptions) -> list[Any]:
        """Return the texts of each input, one unless ``num_return_sequences`` is more."""
        generate_options = dict(self._defaults.generate) | dict(options.generate)
        read = read_options((DEFAULTS, self._of_task, self._of_file()), generate_options, self.llm.generation)
        cut, answer_len = read_cut(options.truncation), read.params_of(START_LEN).max_tokens or 0
        limit = input_limit(self.tokenizer.max_len or 0, self.llm.engine.max_len, answer_len) if cut else 0
        prompts = [self.text_ids(self.prefix + text, None, limit, cut) for text in inputs]
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
        params = [read.params_of(START_LEN) for _ in prompts]
        if read.needs_hook:
            check_hooked(read)
            callables = [callables_of(read, False, row, START_LEN) for row in range(len(prompts) * read.num_rows)]
            with self.llm.engine.search_lock if read.num_beams > 1 else nullcontext():
                answers = run_hooked(self.llm, prompts, params, read, callables)
            return [[answer.token_ids for answer in each] for each in answers]
        results = self.llm.generate(prompts, params)
        return [[choice.token_ids for choice in result.choices or (result,)] for result in results]


def _nested(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options whose ``generate`` has those of generation."""
    own = {name: value for name, value in options.items() if name not in OPTIONS}
    generate = {name: value for name, value in options.items() if name in OPTIONS}
    return own | ({"generate": tuple(generate.items())} if generate else {})
