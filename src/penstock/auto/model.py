"""AutoModel: a model whose ``generate`` takes and returns token ids."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from penstock.auto.config import AutoConfig, existing_path
from penstock.auto.generation import GenerateOptions, GenerateOutput, GenerationConfig, read_options
from penstock.errors import InvalidArgumentError
from penstock.llm.llm import LLM
from penstock.llm.prompts import split_prompts
from penstock.llm.result import Result
from penstock.llm.streamers import Streamer
from penstock.offline.backends import llm_options
from penstock.offline.model_file import YAML_SUFFIXES
from penstock.offline.sources import check_pair, find_file
from penstock.validation import missing_attribute, wrong_type

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["AutoModel"]

_HINTS: Final = {
    "save_pretrained": "penstock.export(FOLDER, OUT)",
    "export": "penstock.export(FOLDER, OUT)",
    "forward": "llm.logits(token_ids)",
    "infer": "generate",
    "predict": "generate",
    "to": "LLM's options; this build runs on the CPU",
    "tokenizer": "llm.tokenizer",
    "config": "AutoConfig.from_pretrained(model)",
}


class AutoModel:
    """A model whose ``generate`` takes and returns token ids.

    ``generation_config``: options that ``generate`` uses where its call leaves them open.
    """

    def __init__(self, llm: LLM, generation_config: GenerationConfig | None = None) -> None:
        if not isinstance(llm, LLM):
            raise wrong_type("llm", "an LLM (AutoModel.from_pretrained(PATH) opens a model)", llm)
        self.llm = llm
        self.generation_config = generation_config

    @classmethod
    def from_config(cls, config: AutoConfig | Path | str, **options: Any) -> AutoModel:
        """Open the model of a config; ``options`` as for ``penstock.LLM``.

        ``config``: what ``AutoConfig.from_pretrained`` returned, or the path of a YAML file: one of
        ``penstock.pipeline``, or one of MindFormers whose ``load_checkpoint`` is a checkpoint folder or a bundle.
        """
        if isinstance(config, (str, os.PathLike)):
            path = Path(config)
            if path.suffix not in YAML_SUFFIXES:
                return cls.from_pretrained(path.parent if path.name == "config.json" else path, **options)
            return cls._from_file(path, options)
        if not isinstance(config, AutoConfig):
            raise wrong_type("config", "an AutoConfig or the path of a YAML file", config)
        if config.folder is None:
            raise InvalidArgumentError(
                "config has no folder, so there are no weights; use AutoConfig.from_pretrained(folder)"
            )
        return cls.from_pretrained(config.folder, **options)

    @classmethod
    def _from_file(cls, path: Path, options: dict[str, Any]) -> AutoModel:
        """Open the model of a YAML file as ``penstock.pipeline`` does."""
        file = find_file(path)
        if file.increment_model_path:
            check_pair(file.bundle, Path(file.increment_model_path))
        model = cls.from_pretrained(file.bundle, **llm_options(file) | options)
        model.generation_config = GenerationConfig(**file.generation)
        return model

    @classmethod
    def from_pretrained(cls, model: Path | str, **options: Any) -> AutoModel:
        """Open a checkpoint folder, a bundle or a downloaded model; ``options`` as for ``penstock.LLM``."""
        return cls(LLM(existing_path(model), **options))

    def generate(
        self,
        input_ids: Sequence[int] | Sequence[Sequence[int]],
        max_new_tokens: int | None = None,
        do_sample: bool | None = None,
        *,
        attention_mask: Any = None,
        streamer: Streamer | None = None,
        generation_config: GenerationConfig | Mapping[str, Any] | None = None,
        **options: Any,
    ) -> list[list[int]] | GenerateOutput:
        """Continue one prompt or several; each returned list begins with its prompt.

        ``input_ids``: a list of token ids, a list of lists, or an array.  ``attention_mask``: 0 marks padding, which is
        removed.  ``do_sample``: False is greedy; True samples with ``temperature``, by default the model's or 1; None
        follows the model's defaults.  ``streamer``: for one prompt, gets the token ids as they are generated.
        ``generation_config``: options that the call leaves open, ours or transformers'.

        ``options``: the fields of SamplingParams, and ``max_length``, ``min_length`` (prompt and answer),
        ``min_new_tokens``, ``num_return_sequences``, ``eos_token_id``, ``stop_strings``, ``pad_token_id`` (pads the
        lists to one length), ``output_scores``, ``output_logits`` and ``return_dict_in_generate`` (return a
        GenerateOutput).  ``num_beams`` must be 1.
        """
        keywords = {"max_new_tokens": max_new_tokens, "do_sample": do_sample, **options}
        read = read_options((self.generation_config, generation_config), keywords, self.llm.generation)
        prompts, _ = split_prompts(input_ids)
        if attention_mask is not None:
            prompts = _without_padding(prompts, attention_mask)
        params = [read.params_of(len(prompt)) for prompt in prompts]
        results = self.llm.generate(prompts, params, streamer=streamer)
        sequences = [
            result.prompt_token_ids + answer.token_ids for result in results for answer in result.choices or (result,)
        ]
        output = self._output(read, results, sequences) if read.returns_dict else None
        if read.pad_token_id is not None:
            longest = max(map(len, sequences), default=0)
            for ids in sequences:
                ids += [read.pad_token_id] * (longest - len(ids))
        return sequences if output is None else output

    def _output(self, read: GenerateOptions, results: list[Result], sequences: list[list[int]]) -> GenerateOutput:
        """Return the sequences, with the rows of logits that their tokens were chosen from where they are asked for."""
        if not read.output_scores and not read.output_logits:
            return GenerateOutput(sequences)
        num_answers = read.params.n
        logits: list[NDArray[np.float32]] = []
        for i, ids in enumerate(sequences):
            start = len(results[i // num_answers].prompt_token_ids)
            logits.append(self.llm.logits(ids[:-1])[start - 1 :])
        own = read.params.temperature
        temperature = (self.llm.generation.temperature if own is None else own) or 1.0
        scores = [rows / np.float32(temperature) for rows in logits] if read.output_scores else None
        return GenerateOutput(sequences, scores, logits if read.output_logits else None)

    if not TYPE_CHECKING:  # type checkers know the attributes

        def __getattr__(self, name: str) -> Any:
            raise missing_attribute("AutoModel", name, ("generate", "llm", "close"), _HINTS)

    def close(self) -> None:
        """Free the memory."""
        self.llm.close()

    def __enter__(self) -> AutoModel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _without_padding(prompts: list[Any], attention_mask: Any) -> list[list[int]]:
    """Return the prompts without the tokens whose mask is 0."""
    masks, _ = split_prompts(attention_mask)
    if [len(mask) for mask in masks] != [len(prompt) for prompt in prompts]:
        raise InvalidArgumentError("attention_mask: expected the shape of input_ids", param="attention_mask")
    return [
        [token for token, is_real in zip(*pair, strict=True) if is_real] for pair in zip(prompts, masks, strict=True)
    ]
