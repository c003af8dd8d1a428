"""``penstock.LLM``: text or token ids in, text and token ids out."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeAlias, Unpack, overload

from penstock.engine.engine import Engine
from penstock.engine.options import EngineFields, EngineOptions, RequestOptions
from penstock.engine.request import Request, ResolvedSampling, SamplingParams, Status
from penstock.engine.text import TextStream, Tokenizer
from penstock.errors import InvalidArgumentError, UnsupportedError
from penstock.models.generation import GenerationConfig, read_generation_config
from penstock.runtime.open import Opened, open_program
from penstock.runtime.program import ProgramInfo, ProgramLimits

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["LLM", "Delta", "Prompt", "Result", "Stream"]

Prompt: TypeAlias = str | Sequence[int]


@dataclass(frozen=True)
class Result:
    """A finished answer.

    ``token_ids`` are the answer's, an end token included; ``text`` is without special tokens and stop strings.
    ``finish_reason``: "length", "stop" or "abort".  ``timings`` in seconds, ``decode_tokens_per_s`` after the
    first token.  ``seed`` gives the same answer again.  ``num_cached_tokens`` of the prompt were shared with an
    earlier request's instead of computed.
    """

    text: str
    token_ids: list[int]
    finish_reason: str
    timings: dict[str, float]
    prompt_token_ids: list[int]
    seed: int
    num_cached_tokens: int = 0


@dataclass(frozen=True)
class Delta:
    """What came since the last one; ``finish_reason`` with the last."""

    text: str
    token_ids: list[int]
    finish_reason: str | None


def _result(request: Request) -> Result:
    if request.error is not None:
        raise request.error
    return Result(
        text="" if request.text is None else request.text.text,
        token_ids=list(request.output_ids),
        finish_reason=request.finish_reason or "abort",
        timings=request.timings.summary(len(request.output_ids)),
        prompt_token_ids=request.prompt_ids,
        seed=request.sampling.seed,
        num_cached_tokens=request.num_cached,
    )


class Stream:
    """An answer as it grows: iterate for Deltas.  ``abort`` may be called from any thread."""

    def __init__(self, engine: Engine, request: Request) -> None:
        self._engine = engine
        self._request = request
        self._num_given = 0
        self._ended = False

    def __iter__(self) -> Iterator[Delta]:
        return self

    def __next__(self) -> Delta:
        """The next piece: one token or more, or the end."""
        if self._ended:
            raise StopIteration
        try:
            running = self._engine.wait(self._request, self._num_given)
        except BaseException:
            self.abort()
            self._ended = True
            raise
        self._ended = not running
        if self._request.error is not None:
            raise self._request.error
        ids = self._request.output_ids[self._num_given :]
        self._num_given += len(ids)
        text = "" if self._request.text is None else self._request.text.take()
        return Delta(text, ids, self._request.finish_reason if self._ended else None)

    @property
    def id(self) -> int:
        """The request's number in its engine."""
        return self._request.id

    @property
    def has_news(self) -> bool:
        """Whether the next piece is there without a step."""
        request = self._request
        return self._ended or request.status is Status.FINISHED or len(request.output_ids) > self._num_given

    def abort(self) -> None:
        """End the answer here; its memory is free when the running step ends."""
        self._engine.abort(self._request)

    def __del__(self) -> None:
        if self._request.status is not Status.FINISHED:
            self._engine.abort(self._request)

    def result(self) -> Result:
        """The whole answer, once the stream has ended or was aborted; until then InvalidArgumentError."""
        if self._request.status is not Status.FINISHED:
            raise InvalidArgumentError("the stream has not ended: iterate over it or abort it first")
        return _result(self._request)


class LLM:
    """A model that continues text.

    ``model``: a ``.psm`` bundle or a checkpoint folder.  ``scheme``: how weights are stored ("w8a8" ...; None: as in
    the file).  ``mode``: "graph" (the native core) or "eager" (PyTorch, for debugging).  ``threads``: 0 for as many
    as the machine allows.  ``network``: "file.py:Class", a network script of your own.  ``limits``: the sizes that
    memory is planned for.  ``use_cache``: keep the bundle that a folder makes for the next time.  ``prefix_cache``,
    ``max_waiting``, ``max_chunk``: see EngineOptions.

    Any number of threads may use one LLM; their requests share each step and get the tokens they would get alone.
    """

    def __init__(
        self,
        model: Path | str,
        scheme: str | None = None,
        mode: str = "graph",
        threads: int = 0,
        network: str | None = None,
        *,
        limits: ProgramLimits | None = None,
        use_cache: bool = True,
        progress: Callable[[Any], None] | None = None,
        **engine: Unpack[EngineFields],
    ) -> None:
        options = EngineOptions(**engine)
        start = time.perf_counter()
        opened = open_program(
            model,
            scheme=scheme,
            mode=mode,
            threads=threads,
            limits=limits,
            network=network,
            use_cache=use_cache,
            progress=progress,
        )
        try:
            longest = opened.program.info.context_len
            if limits is not None and limits.context_len > longest:
                raise InvalidArgumentError(f"context_len {limits.context_len} is more than the model's {longest}")
            self._start(opened, options)
        except BaseException:
            opened.program.close()
            raise
        self.load_s = time.perf_counter() - start - opened.populate_s
        self.populate_s = opened.populate_s

    @classmethod
    def of_program(cls, opened: Opened, options: EngineOptions | None = None) -> LLM:
        """An LLM over a program that is open already."""
        llm = cls.__new__(cls)
        llm.load_s, llm.populate_s = 0.0, opened.populate_s
        llm._start(opened, options)
        return llm

    def _start(self, opened: Opened, options: EngineOptions | None = None) -> None:
        self._files = opened.files
        self.notes = opened.notes
        self._tokenizer: Tokenizer | None = None
        self.generation: GenerationConfig = read_generation_config(opened.files)
        self.engine = Engine(opened.program, options)
        self._stop_ids = frozenset(self.generation.eos_token_ids)
        self._defaults = ResolvedSampling(
            max_tokens=self.generation.max_new_tokens or ResolvedSampling.max_tokens,
            temperature=self.generation.temperature,
            top_k=self.generation.top_k,
            top_p=self.generation.top_p,
        )

    @property
    def info(self) -> ProgramInfo:
        """What runs: network, scheme, context length, threads, the memory plan."""
        return self.engine.program.info

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer; UnsupportedError when it has none."""
        if self._tokenizer is None:
            self._tokenizer = Tokenizer(self._files)
        return self._tokenizer

    @overload
    def generate(self, prompts: Prompt, params: SamplingParams | None = None) -> Result: ...  # type: ignore[overload-overlap]

    @overload
    def generate(
        self, prompts: Iterable[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Result]: ...

    def generate(
        self, prompts: Prompt | Iterable[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> Result | list[Result]:
        """Continue one prompt (a Result) or several (a list of Results in their order).

        A prompt is text or a list of token ids.  ``params`` goes for all prompts, or is a list with one for each.
        All prompts are checked before any runs; errors name the prompt.
        """
        several, is_one = _split_prompts(prompts)
        each = _split_params(params, len(several))
        requests: list[Request] = []
        try:
            prepared = []
            for index, (prompt, one) in enumerate(zip(several, each, strict=True)):
                try:
                    prepared.append((self.engine.check_prompt(self._ids(prompt)), one))
                except InvalidArgumentError as error:
                    raise error if is_one else InvalidArgumentError(f"prompts[{index}]: {error}") from None
            requests += [self._submit(ids, one) for ids, one in prepared]
            for request in requests:
                while self.engine.wait(request, len(request.output_ids)):
                    pass
            results = [_result(request) for request in requests]
        except BaseException:
            for request in requests:
                self.engine.abort(request)
            raise
        return results[0] if is_one else results

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, options: RequestOptions | None = None
    ) -> Stream:
        """Continue one prompt, piece by piece.  The prompt is checked now; a stream that is dropped is aborted."""
        several, is_one = _split_prompts(prompt)
        if not is_one:
            raise InvalidArgumentError("stream takes one prompt; generate takes several")
        return Stream(self.engine, self._submit(self._ids(several[0]), _split_params(params, 1)[0], options))

    def chat(self, messages: Sequence[Mapping[str, Any]], params: SamplingParams | None = None) -> Result:
        """Answer a conversation: messages with "role" and "content", rendered by the model's own chat template.

        UnsupportedError when the model has no template.
        """
        return self.generate(self.chat_prompt(messages), params)

    def chat_prompt(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """The token ids that a conversation becomes, the opening of the answer included."""
        from penstock.engine.chat import render_chat

        if self.tokenizer.chat_template is None:
            raise UnsupportedError("the model has no chat template: give it a plain prompt to continue")
        text = render_chat(self.tokenizer.chat_template, messages, self.tokenizer.special_tokens)
        return self.tokenizer.encode(text, add_special_tokens=False)

    def logits(self, prompt: Prompt) -> NDArray[np.float32]:
        """Logits [len, vocab] float32, one row per position of the prompt."""
        from penstock.engine.logits import prompt_logits

        return prompt_logits(self.engine, self._ids(prompt))

    def abort(self) -> None:
        """End every request with "abort", from any thread."""
        self.engine.abort_all()

    def close(self) -> None:
        """End every request and give the memory back.  Calling it again does nothing."""
        self.engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _ids(self, prompt: Prompt) -> Sequence[int]:
        return self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt

    def _submit(
        self, prompt_ids: Sequence[int], params: SamplingParams, options: RequestOptions | None = None
    ) -> Request:
        has_text = self._tokenizer is not None or "tokenizer.json" in self._files
        if params.stop and not has_text:
            raise UnsupportedError("stop: the model has no tokenizer.json, so its answers have no text to search")
        stop_ids = frozenset() if params.ignore_eos else self._stop_ids
        text = TextStream(self.tokenizer, params.stop, stop_ids) if has_text else None
        sampling = ResolvedSampling.of(params, self._defaults)
        return self.engine.submit(prompt_ids, sampling, stop_ids=stop_ids, text=text, options=options)


def _split_prompts(prompts: object) -> tuple[list[Any], bool]:
    """Prompts as a list, and whether it was a single one."""
    if isinstance(prompts, str):
        return [prompts], True
    if hasattr(prompts, "tolist"):  # a numpy array
        prompts = prompts.tolist()
    if isinstance(prompts, (bytes, Mapping)) or not isinstance(prompts, Iterable):
        raise InvalidArgumentError(f"prompts must be text, token ids, or a list of those, not {type(prompts).__name__}")
    several = list(prompts)
    if not several:
        raise InvalidArgumentError("prompts is empty: a prompt must have at least one token")
    if all(isinstance(item, (str, list, tuple)) or hasattr(item, "__len__") for item in several):
        return several, False
    return [several], True


def _split_params(params: object, num_prompts: int) -> list[SamplingParams]:
    """Sampling parameters for each prompt."""
    if params is None:
        return [SamplingParams()] * num_prompts
    if isinstance(params, SamplingParams):
        return [params] * num_prompts
    if not isinstance(params, Sequence) or not all(isinstance(one, SamplingParams) for one in params):
        raise InvalidArgumentError(f"params must be SamplingParams or a list of them, not {type(params).__name__}")
    if len(params) != num_prompts:
        raise InvalidArgumentError(f"params has {len(params)} entries for {num_prompts} prompts")
    return list(params)
