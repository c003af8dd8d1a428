"""The base of tasks that read texts: opens the model, reads the options of a call, and computes rows of prompts."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Generic, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from penstock.checkpoint.pooling.head import PoolingHead
from penstock.checkpoint.tokenizer_frames import TextWindow, WindowRequest
from penstock.core.forked import check_process, is_forked
from penstock.errors import InvalidArgumentError, UnsupportedError
from penstock.lite.model import Model
from penstock.llm.embed import embed
from penstock.llm.llm import LLM
from penstock.llm.prompts import check_each
from penstock.offline.backends import (
    backend_named,
    check_running,
    default_backend,
    open_generator,
    read_run_options,
)
from penstock.offline.infer_config import FileConfig, InferConfig
from penstock.offline.sources import check_pair, find_source
from penstock.offline.text_tasks.natural import natural_task
from penstock.offline.tokenizer import OtherTokenizer, open_tokenizer
from penstock.text.tasks.options import CUTS, Options, changed_options
from penstock.text.tokenizer import Tokenizer
from penstock.validation import refusal, wrong_type

__all__ = ["TextTask", "texts_of"]

Rows = NDArray[np.float32]

OptionsT = TypeVar("OptionsT", bound=Options)


class TextTask(ABC, Generic[OptionsT]):
    """A task over one model; made by ``penstock.pipeline``, which has the arguments.

    ``defaults``: options of a call, which hold for every call that does not name them.
    """

    name: ClassVar[str]
    options_type: ClassVar[type[Options]]

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
        **defaults: Any,
    ) -> None:
        self._pid = os.getpid()
        self._closed, self._is_owner = False, running is None
        if running is None and not config.prefill_model_path:
            config = find_source(config, {}, None)
        self._file = config if isinstance(config, FileConfig) else FileConfig()
        own = self.options_type()
        self._defaults: OptionsT = self._options(own, defaults)  # type: ignore[arg-type]
        self.backend = default_backend(running) if backend is None else backend_named(backend)
        if self.backend == "lite":
            raise UnsupportedError(f"backend: the task {self.name} runs with graph or eager, not lite", param="backend")
        opening = {"scheme": scheme, "network": network, "threads": threads, "verify": verify}
        if running is not None:
            check_running(opening)
            if not isinstance(running, LLM) or running.info.mode != self.backend:
                raise refusal("backend", "the mode of an open LLM", self.backend)
            self.llm = running
        else:
            self.llm = _open(config, self.backend, dict(opening, scheme=scheme or self._file.scheme))
        self._tokenizer: Tokenizer | None = None
        try:
            if tokenizer is not None:
                self._tokenizer = open_tokenizer(tokenizer)
                if isinstance(self._tokenizer, OtherTokenizer):
                    raise wrong_type("tokenizer", "a folder, a bundle or a tokenizer.json", tokenizer)
                self._tokenizer.pooling_head = self.llm.engine.pooling_head
            self.check_model()
            if self._tokenizer is not None:
                self.llm.tokenizer = self._tokenizer
        except BaseException:
            self.close()
            raise

    @abstractmethod
    def check_model(self) -> None:
        """Raise UnsupportedError for a model that cannot do the task; see ``refuse_model``."""

    @abstractmethod
    def run(self, inputs: list[Any], options: OptionsT) -> list[Any]:
        """Return the result of each input."""

    def __call__(self, inputs: Any, **options: Any) -> Any:
        """Return the result of one input, or the list of those of several.

        ``options``: those of the task, by the names of transformers' pipeline.  Errors name the input or the option.
        """
        chosen = self._begin(options)
        several, is_one = texts_of(inputs)
        results = self.run(several, chosen)
        return results[0] if is_one else results

    def _begin(self, options: Mapping[str, Any]) -> OptionsT:
        """Return the options of a call of an open task."""
        check_process(self._pid, "pipeline")
        if self._closed:
            raise InvalidArgumentError("The pipeline is closed.", code="closed")
        return self._options(self._defaults, options)

    def _options(self, base: OptionsT, changes: Mapping[str, Any]) -> OptionsT:
        return changed_options(base, changes, self.name)

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that was given, or the model's."""
        return self.llm.tokenizer if self._tokenizer is None else self._tokenizer

    @property
    def head(self) -> PoolingHead:
        """The model's head; one without layers if it has none."""
        return self.llm.engine.pooling_head or PoolingHead()

    @property
    def max_len(self) -> int:
        """The most tokens of an input: what the tokenizer's files say, if the model has so many positions."""
        return min(self.tokenizer.max_len or self.llm.engine.max_len, self.llm.engine.max_len)

    def refuse_model(self, expected: str) -> UnsupportedError:
        """Return the error for a model of another kind, which names the task that it is for."""
        own = natural_task(self.llm)
        return UnsupportedError(
            f"task: {self.name} expects {expected}; this model is one for {own}. Use pipeline({own!r}, ...).",
            param="task",
        )

    def windows(self, request: WindowRequest) -> list[TextWindow]:
        """Return the windows of a text; the first one only, unless the request has a stride."""
        return self.tokenizer.windows(request)

    def text_ids(self, text: str, pair: str | None, max_len: int, cut: str = "longest_first") -> Sequence[int]:
        """Return the token ids of a text or a pair, cut to ``max_len`` tokens unless that is 0."""
        if not max_len and pair is None:
            return self.tokenizer.encode(text)
        return self.windows(WindowRequest(text, pair, max_len, cut=cut or CUTS[0]))[0].ids

    def rows(self, prompts: Iterable[Sequence[int]], pooling: str = "auto") -> list[Rows]:
        """Return the vectors, or the matrices of all rows, of prompts of token ids."""
        engine = self.llm.engine
        checked = check_each(prompts, False, lambda ids: engine.check_prompt(ids, answer_len=0))
        return [embedding.vector for embedding in embed(engine, checked, pooling, None)]

    def close(self) -> None:
        """Free the memory.  Calling it again, or in a forked child, does nothing."""
        if is_forked(self._pid):
            return
        self._closed = True
        if self._is_owner:
            self.llm.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _open(config: InferConfig, backend: str, options: Mapping[str, Any]) -> LLM:
    if config.increment_model_path:
        check_pair(config.bundle, Path(config.increment_model_path))
    llm = open_generator(config.bundle, read_run_options(config, backend, **options))
    if not isinstance(llm, LLM):
        raise UnsupportedError(f"backend: expected graph or eager, got {backend}", param="backend")
    return llm


def texts_of(inputs: Any, kind: type | tuple[type, ...] = str) -> tuple[list[Any], bool]:
    """Return inputs as a list, and whether it was a single one.  ``kind`` is the type of each."""
    if isinstance(inputs, kind):
        return [inputs], True
    if isinstance(inputs, (str, bytes, Mapping)) or not isinstance(inputs, Iterable):
        raise wrong_type("inputs", "a text or a list of texts", inputs)
    several = list(inputs)
    for index, item in enumerate(several):
        if not isinstance(item, kind):
            raise wrong_type(f"inputs[{index}]", "a text", item)
    return several, False
