"""AutoModel: a model whose ``generate`` takes and returns token ids."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from penstock.auto.config import AutoConfig, existing_path
from penstock.auto.output import output_kind, output_of, without_padding, without_pads
from penstock.engine.decoding.hook import Callables
from penstock.engine.params import SamplingParams
from penstock.engine.prompts import own_start
from penstock.errors import InvalidArgumentError
from penstock.llm.generate.callables import callables_of
from penstock.llm.generate.hooked import HookedAnswer, check_hooked, run_hooked
from penstock.llm.generate.options import GenerateOptions, GenerationConfig, read_options
from penstock.llm.llm import LLM
from penstock.llm.prompts import split_prompts
from penstock.llm.resolve import end_ids
from penstock.llm.streamers import Streamer
from penstock.offline.backends import llm_options
from penstock.offline.model_file import YAML_SUFFIXES
from penstock.offline.sources import check_pair, find_file
from penstock.validation import missing_attribute, wrong_type

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
                "config has no folder, so there are no weights; use AutoConfig.from_pretrained(folder)", param="config"
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
        input_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        max_new_tokens: int | None = None,
        do_sample: bool | None = None,
        *,
        attention_mask: Any = None,
        streamer: Streamer | None = None,
        generation_config: GenerationConfig | Mapping[str, Any] | None = None,
        return_tensors: str | None = None,
        inputs: Any = None,
        **options: Any,
    ) -> Any:
        """Continue one prompt or several; each returned list begins with its prompt.

        With an encoder-decoder the prompt is the encoder's, and a list begins with the first token of the decoder.

        ``input_ids``, or ``inputs``: a list of token ids, a list of lists, an array or a tensor.  ``attention_mask``: 0
        marks padding on either side, which is not computed; without one it is the padding token that does, unless it
        ends answers.  ``do_sample``: False is greedy; True samples, and filters that the call leaves open are those of
        generation_config.json or of transformers (``temperature`` 1, ``top_k`` 50); None follows the model's defaults.
        ``streamer``: for one prompt, gets the token ids as they are generated.  ``generation_config``: options that the
        call leaves open, ours or transformers'.
        ``return_tensors``: "np" or "pt" return an array or a tensor [num_sequences, longest], whose rows begin with the
        prompts as they were given; None returns lists that begin with the prompts without padding, or a tensor if
        ``input_ids`` is one.

        ``options``: the fields of SamplingParams, and ``max_length``, ``min_length`` (prompt and answer),
        ``min_new_tokens``, ``num_return_sequences``, ``eos_token_id``, ``stop_strings``, ``pad_token_id`` (pads to one
        length), ``output_scores``, ``output_logits`` and ``return_dict_in_generate`` (return a GenerateOutput).
        ``logits_processor`` and ``stopping_criteria``: functions of (input_ids, scores), or lists of them, which see
        one sequence at a time: [1, len] and [1, vocab].  ``num_beams`` above 1 searches with that many beams;
        ``length_penalty`` and ``early_stopping`` as in transformers, and ``prefix_allowed_tokens_fn``,
        ``suppress_tokens`` and ``begin_suppress_tokens`` as well.
        """
        keywords = {"max_new_tokens": max_new_tokens, "do_sample": do_sample, **options}
        read = read_options((self.generation_config, generation_config), keywords, self.llm.generation)
        if (input_ids is None) == (inputs is None):
            raise InvalidArgumentError("input_ids: expected token ids, here or as inputs", param="input_ids")
        input_ids = inputs if input_ids is None else input_ids
        kind = output_kind(return_tensors, input_ids)
        unpadded_ids, _ = split_prompts(input_ids)
        pad_id = read.pad_token(self.llm.generation)
        prompts = self._without_padding(unpadded_ids, attention_mask, read, pad_id)
        params = [read.params_of(self._sequence_len(prompt)) for prompt in prompts]
        if read.needs_hook:
            lens = [self._sequence_len(prompt) for prompt in prompts]
            callables = [
                callables_of(read, kind == "pt", row, length)
                for row, length in enumerate(length for length in lens for _ in range(read.num_rows))
            ]
            answers = self._hooked(prompts, params, read, callables, streamer)
        else:
            if self._has_encoder and len(prompts) == 1 and callable(getattr(streamer, "put", None)):
                streamer = _DecoderStreamer(streamer, self._beginning(prompts[0]))
            results = self.llm.generate(prompts, params, streamer=streamer)
            answers = [[HookedAnswer(answer.token_ids) for answer in result.choices or (result,)] for result in results]
        shown = prompts if kind is None or self._has_encoder else unpadded_ids
        return output_of([self._beginning(prompt) for prompt in shown], answers, read, kind, pad_id)

    def _without_padding(self, given: list[Any], mask: Any, read: GenerateOptions, pad_id: int) -> list[Any]:
        """Return the prompts without their padding; without a mask tokens are padding if they are no end tokens."""
        if mask is not None:
            return without_padding(given, mask)
        if pad_id in end_ids(read.params, frozenset(self.llm.generation.eos_token_ids)):
            return given
        if read.pad_token_id is None and self.llm.generation.pad_token_id is None:
            return given
        return without_pads(given, pad_id, self.llm.engine.program.info.prefix_token)

    @property
    def _has_encoder(self) -> bool:
        """True if an encoder reads the prompt, and the sequences are those of a decoder."""
        engine = self.llm.engine
        return engine.program.info.prefix_token >= 0 and not engine.prompt_masks

    def _beginning(self, prompt: Sequence[int]) -> Sequence[int]:
        """Return the tokens that a sequence begins with: the prompt, or those of the decoder."""
        if not self._has_encoder:
            return prompt
        start = self.llm.engine.program.info.prefix_token
        return list(prompt)[own_start(prompt, start) :] or [start]

    def _sequence_len(self, prompt: Sequence[int]) -> int:
        """Return how many tokens of a prompt ``max_length`` counts: of an encoder-decoder those of the decoder."""
        return len(self._beginning(prompt))

    def _hooked(
        self,
        prompts: list[Any],
        params: list[SamplingParams],
        read: GenerateOptions,
        callables: list[Callables],
        streamer: Streamer | None,
    ) -> list[list[HookedAnswer]]:
        check_hooked(read)
        if streamer is None:
            with self.llm.engine.search_lock if read.num_beams > 1 else nullcontext():
                return run_hooked(self.llm, prompts, params, read, callables)
        try:
            if len(prompts) != 1 or read.params.n > 1 or read.num_beams > 1:
                raise InvalidArgumentError(
                    "streamer: expected one prompt with one answer and num_beams 1", param="streamer"
                )
            streamer.put(np.array([self._beginning(prompts[0])], np.int64))
            callables = [replace(callables[0], put=lambda token: streamer.put(np.array([token], np.int64)))]
            return run_hooked(self.llm, prompts, params, read, callables)
        finally:
            streamer.end()

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


class _DecoderStreamer:
    """Gives a streamer the tokens that the decoder begins with in place of the prompt."""

    def __init__(self, streamer: Any, beginning: Sequence[int]) -> None:
        self._streamer, self._beginning = streamer, beginning
        self._has_begun = False

    def put(self, value: Any) -> None:
        """Pass on token ids, the first of which are those of the prompt."""
        value = value if self._has_begun else np.array([self._beginning], np.int64)
        self._has_begun = True
        self._streamer.put(value)

    def end(self) -> None:
        """End the stream."""
        self._streamer.end()
