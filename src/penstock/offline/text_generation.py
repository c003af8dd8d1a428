"""The task text_generation: continue prompts and return complete answers or streams."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from penstock.checkpoint.generation import GenerationDefaults
from penstock.config import check_flag
from penstock.core.forked import check_process, is_forked
from penstock.engine.params import SamplingParams
from penstock.errors import InvalidArgumentError, UnsupportedError
from penstock.lite.model import Model
from penstock.llm.llm import LLM
from penstock.llm.prompts import check_each, split_prompts
from penstock.llm.result import Result
from penstock.llm.sampling_keywords import sampling_of_keywords, sampling_params, with_sampled_defaults
from penstock.offline.backends import (
    Answers,
    Generator,
    RunOptions,
    backend_named,
    check_running,
    default_backend,
    open_accelerated,
    open_generator,
    read_run_options,
)
from penstock.offline.infer_config import FileConfig, InferConfig
from penstock.offline.lite_generator import LiteGenerator
from penstock.offline.sources import check_pair, find_source
from penstock.offline.tokenizer import open_tokenizer
from penstock.validation import refusal, wrong_type

__all__ = ["TextGeneration"]


class TextGeneration:
    """Continues texts; made by ``penstock.pipeline``.

    ``config``: the files to run.  ``tokenizer``: None is the bundle's own.  ``backend``: "graph" (the engine over the
    native core), "lite" (``penstock.lite``) or "eager" (PyTorch, for a checkpoint folder), which give the same tokens;
    None is the backend of ``running``, or "graph".  ``scheme`` and ``network`` apply to checkpoint folders.
    ``threads``: 0 is all allowed cores.  ``verify``: check a bundle's checksums "once", "always" or "never"; None takes
    the value of the file ``config_path``, or "once".  ``running``: an open model, which ``close`` leaves open.
    """

    def __init__(
        self,
        config: InferConfig,
        *,
        tokenizer: object = None,
        backend: str | None = None,
        scheme: str | None = None,
        network: str | None = None,
        threads: int = 0,
        verify: str | None = None,
        running: LLM | Model | None = None,
    ) -> None:
        if running is not None:
            check_running({"scheme": scheme, "network": network, "threads": threads, "verify": verify})
        elif not config.prefill_model_path:
            config = find_source(config, {}, None)
        file = config if isinstance(config, FileConfig) else FileConfig()
        self._defaults = file.generation
        self.config = config
        self.backend = default_backend(running) if backend is None else backend_named(backend)
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._accelerated: Generator | None = None
        self._closed = False
        self._is_owner = running is None
        self._tokenizer = None if tokenizer is None else open_tokenizer(tokenizer)
        self._options: RunOptions = read_run_options(
            config, self.backend, scheme=scheme or file.scheme, threads=threads, network=network, verify=verify
        )
        self._generator = self._open(config, running)
        if self._tokenizer is not None:
            self._generator.tokenizer = self._tokenizer

    def _open(self, config: InferConfig, running: LLM | Model | None) -> Generator:
        if running is None:
            if config.increment_model_path:
                check_pair(config.bundle, Path(config.increment_model_path))
            return open_generator(config.bundle, self._options)
        if isinstance(running, LLM):
            if running.info.mode != self.backend:
                raise refusal("backend", f"{running.info.mode!r}, that of the LLM", self.backend)
            return running
        if self.backend != "lite":
            raise refusal("backend", "'lite' for a lite.Model", self.backend)
        return LiteGenerator(running, 1)

    def __call__(
        self,
        inputs: object,
        *,
        stream: bool = False,
        add_special_tokens: bool = True,
        is_sample_acceleration: bool | None = None,
        params: SamplingParams | None = None,
        **sampling: Any,
    ) -> Result | list[Result] | Answers:
        """Continue one prompt (returns a Result) or several (a list of Results); with ``stream``, one (Deltas).

        A prompt is a text or a list of token ids.  ``add_special_tokens``: add the tokenizer's special tokens to a
        text. ``is_sample_acceleration``: True lets the graph choose the likeliest token: the tokens of ``temperature``
        0 with less work, whatever the model's defaults are; None keeps the graph of the file.  Pass sampling as
        ``params`` or as its fields (``max_tokens``, ``temperature``, ``seed`` ...) or by transformers' names
        (``max_new_tokens``, ``do_sample`` ...); ``do_sample=True`` fills the filters as transformers does.  Raises
        InvalidArgumentError or UnsupportedError, which names the prompt or the field.
        """
        for name, value in (("stream", stream), ("add_special_tokens", add_special_tokens)):
            check_flag(name, value)
        check_process(self._pid, "pipeline")
        generator = self._choose(is_sample_acceleration)
        call_params = self._params(params, sampling)
        samples, is_accelerated = bool(sampling.get("do_sample")), generator is self._accelerated
        several, is_one = split_prompts(inputs)
        ids = check_each(several, is_one, lambda prompt: self._encode(prompt, add_special_tokens))
        each_params = check_each(
            ids, is_one, lambda prompt: self._with_defaults(call_params, samples, len(prompt), is_accelerated)
        )
        if stream:
            if not is_one:
                raise InvalidArgumentError(f"stream takes one prompt, not {len(several)}", param="stream")
            answers: Answers = generator.stream(ids[0], each_params[0])
            return answers
        results: list[Result] = generator.generate(ids, each_params)
        return results[0] if is_one else results

    def _params(self, params: object, keywords: Mapping[str, Any]) -> SamplingParams:
        temperature = getattr(getattr(self._generator, "generation", None), "temperature", 0.0)
        built = sampling_params(params, keywords, temperature, "text_generation")
        if built is not None and not isinstance(built, SamplingParams):
            raise wrong_type("params", "SamplingParams", built)
        if keywords.get("do_sample") and keywords.get("temperature") is None:  # that of the YAML file or of the model
            return replace(built or SamplingParams(), temperature=None)
        return built or SamplingParams()

    def _with_defaults(
        self, params: SamplingParams, samples: bool, num_prompt_tokens: int, is_accelerated: bool
    ) -> SamplingParams:
        """Return the sampling of a prompt: what the call leaves open is as the YAML file says.

        ``samples``: the call has ``do_sample``, which fills the filters as in transformers; that of the file does, too.
        """
        if not self._defaults and not samples:
            return params
        values = dict(self._defaults)
        max_len = values.pop("max_length", None)
        if is_accelerated:  # the graph chooses the likeliest token
            values = {name: values[name] for name in ("max_new_tokens",) if name in values}
        if samples:
            values["do_sample"] = True
        generation = getattr(self._generator, "generation", GenerationDefaults())
        base = sampling_of_keywords(with_sampled_defaults(values, generation), generation.temperature)
        names = ("temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty", "max_tokens")
        chosen = {name: getattr(base, name) for name in names if getattr(params, name) is None}
        if max_len is not None and params.max_tokens is None:
            if max_len <= num_prompt_tokens:
                raise InvalidArgumentError(
                    f"max_length: expected more than the {num_prompt_tokens} tokens of the prompt, got {max_len}; "
                    "max_tokens counts only new tokens",
                    param="max_length",
                )
            chosen["max_tokens"] = max_len - num_prompt_tokens
        return replace(params, **chosen)

    def _encode(self, prompt: Any, add_special_tokens: bool) -> Sequence[int]:
        if isinstance(prompt, str):
            return self._generator.tokenizer.encode(prompt, add_special_tokens=add_special_tokens)
        ids: Sequence[int] = prompt
        return ids

    def _choose(self, accelerated: bool | None) -> Generator:
        """Return the generator with the requested end of the graph; the second one is opened on first use."""
        if accelerated not in (None, True, False):
            raise refusal("is_sample_acceleration", "True, False or None", accelerated)
        if self._closed:
            raise InvalidArgumentError("The pipeline is closed.", code="closed")
        tail = tail_of(self._generator)
        if accelerated is False and tail:
            raise UnsupportedError(
                f"is_sample_acceleration must be True or None: the bundle ends in {tail}",
                param="is_sample_acceleration",
            )
        if not accelerated or tail:
            return self._generator
        if not self._is_owner:
            raise UnsupportedError(
                "is_sample_acceleration: not supported for a model that is already open; pass its path",
                param="is_sample_acceleration",
            )
        with self._lock:
            if self._accelerated is None:
                self._accelerated = open_accelerated(self.config.bundle, self._options)
                if self._tokenizer is not None:
                    self._accelerated.tokenizer = self._tokenizer
            return self._accelerated

    def close(self) -> None:
        """Free the memory.  Calling it again, or in a forked child, does nothing."""
        if is_forked(self._pid):
            return
        self._closed = True
        with self._lock:
            if self._accelerated is not None:
                self._accelerated.close()
        if self._is_owner or isinstance(self._generator, LiteGenerator):
            self._generator.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def tail_of(generator: Generator) -> str:
    """Return the tail of the graph, or "" if it ends in logits."""
    return generator.tail if isinstance(generator, LiteGenerator) else generator.info.tail  # type: ignore[attr-defined]
