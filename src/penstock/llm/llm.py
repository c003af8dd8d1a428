"""``penstock.LLM``: text or token ids in, text and token ids out."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import count, islice
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Unpack, overload

import numpy as np

from penstock.checkpoint.generation import GenerationConfig, read_generation_config
from penstock.engine.capabilities import check_continues, refuse_logits
from penstock.engine.engine import Engine
from penstock.engine.options import EngineOptions, LLMFields, RequestOptions, check_options, engine_options
from penstock.engine.params import ResolvedSampling, SamplingParams
from penstock.engine.prompt_logits import PromptLogits, PromptScores
from penstock.engine.request import Request, Status
from penstock.errors import InvalidArgumentError, PenstockError
from penstock.llm.embed import embed_prompts
from penstock.llm.open_requests import finish_all, run_prompts, when_room
from penstock.llm.prompts import Prompt, check_each, check_items, split_item, split_params, split_prompts
from penstock.llm.resolve import answer_text, end_ids, resolve_params
from penstock.llm.result import Embedding, Result, Score, all_finished, all_or_error, outcome
from penstock.llm.score import score_prompts
from penstock.llm.stream import Stream
from penstock.llm.streamers import Streamer
from penstock.runtime.open import Opened, OpenOptions, check_network, open_program
from penstock.runtime.program import ProgramInfo, ProgramLimits
from penstock.text.tokenizer import Tokenizer
from penstock.validation import flag, given_number, whole

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.llm.conversation import Conversation

__all__ = ["LLM", "Prompt"]

_OPTIONS: Final = ("scheme", "mode", "threads", "network", "limits", "use_cache", "progress", "verify")


class LLM:
    """A model that continues text.

    ``model``: a ``.psm`` bundle or a checkpoint folder.  ``scheme``: how weights are stored ("w8a8" ...; None: as in
    the file).  ``mode``: "graph" (the native core) or "eager" (PyTorch, for debugging).  ``threads``: 0 for as many
    as the machine allows.  ``network``: "file.py:Class", a network script of your own.  ``limits``: the sizes that
    memory is planned for.  ``use_cache``: keep the bundle that a folder makes for the next time.  ``verify``: check the
    checksums of a bundle "once" (default; a verified file is remembered in the cache folder), "always" or "never";
    damage is an InvalidFileError that names the segment.  ``prefix_cache``,
    ``max_waiting``, ``max_chunk``, ``max_mixed_tokens``: see EngineOptions.

    Any number of threads may use one LLM; their requests share each step and get the tokens they would get alone.
    """

    def __init__(
        self,
        model: Path | str = "",
        scheme: str | None = None,
        mode: str = "graph",
        threads: int = 0,
        network: str | None = None,
        *,
        limits: ProgramLimits | None = None,
        use_cache: bool = True,
        progress: Callable[[Any], None] | None = None,
        **others: Unpack[LLMFields],
    ) -> None:
        verify = others.pop("verify", "once")
        options = engine_options(others, _OPTIONS)
        check_network(network)  # before the model, which a caller with a class may leave out
        start = time.perf_counter()
        opened = open_program(
            model,
            scheme=scheme,
            mode=mode,
            threads=threads,
            limits=limits,
            network=network,
            options=OpenOptions(use_cache, progress, verify),
        )
        try:
            longest = opened.program.info.context_len
            if limits is not None and limits.context_len > longest:
                raise InvalidArgumentError(
                    f"context_len {limits.context_len} is more than the model's {longest}", param="context_len"
                )
            self._start(opened, options)
        except BaseException:
            opened.program.close()
            raise
        self.load_s = time.perf_counter() - start - opened.populate_s - opened.verify_s
        self.populate_s, self.verify_s = opened.populate_s, opened.verify_s

    @classmethod
    def of_program(cls, opened: Opened, options: EngineOptions | None = None) -> LLM:
        """An LLM over a program that is open already."""
        llm = cls.__new__(cls)
        llm.load_s, llm.populate_s, llm.verify_s = 0.0, opened.populate_s, opened.verify_s
        llm._start(opened, options)
        return llm

    def _start(self, opened: Opened, options: EngineOptions | None = None) -> None:
        self._files = opened.files
        self.notes = opened.notes
        self._tokenizer: Tokenizer | None = None
        self._families = count(1)
        self.generation: GenerationConfig = read_generation_config(opened.files)
        self.engine = Engine(opened.program, options)
        self._stop_ids = frozenset(self.generation.eos_token_ids)
        self._defaults = ResolvedSampling() if self.info.tail else ResolvedSampling.of_model(self.generation)
        if self.info.bidirectional:
            self._defaults = replace(self._defaults, max_tokens=1)

    @property
    def info(self) -> ProgramInfo:
        """What runs: network, scheme, context length, threads, the memory plan."""
        return self.engine.program.info

    @property
    def files(self) -> dict[str, bytes]:
        """The files beside the weights by name: tokenizer.json and what goes with it."""
        return dict(self._files)

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer; UnsupportedError when it has none."""
        if self._tokenizer is None:
            self._tokenizer = Tokenizer(self._files)
        return self._tokenizer

    @tokenizer.setter
    def tokenizer(self, tokenizer: Tokenizer) -> None:
        """Another one that writes the same ids."""
        self._tokenizer = tokenizer

    @overload
    def generate(  # type: ignore[overload-overlap]
        self,
        prompts: Prompt,
        params: SamplingParams | None = None,
        *,
        progress: bool = False,
        options: RequestOptions | None = None,
        streamer: Streamer | None = None,
    ) -> Result: ...

    @overload
    def generate(
        self,
        prompts: Iterable[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
        options: RequestOptions | None = None,
        streamer: Streamer | None = None,
    ) -> list[Result]: ...

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
        options: RequestOptions | None = None,
        streamer: Streamer | None = None,
    ) -> Result | list[Result]:
        """Continue one prompt (a Result) or several (a list of Results in their order).

        A prompt is text or a list of token ids.  ``params`` goes for all prompts, or is a list with one for each;
        ``options`` go for all.  ``progress`` shows on stderr how far it is.  All prompts are checked before any runs;
        errors name the prompt.  An error of one ends the call; ``generate_each`` gives the others' results, too.
        ``streamer``: of one prompt, gets its token ids and each one of the answer as it comes (see Streamer).
        """
        if streamer is not None:
            result, is_one = self._generate_into(prompts, params, options, streamer, progress)
            return result if is_one else [result]
        several, is_one = split_prompts(prompts)
        each = split_params(params, len(several))
        options, progress = check_options(options), flag("progress", progress)
        prepared = check_each(zip(several, each, strict=True), is_one, lambda pair: self.prepare(*pair, options))
        requests: list[list[Request]] = []
        try:
            for submits in prepared:
                requests.append([])
                for submit in submits:
                    requests[-1].append(when_room(self.engine, submit))
            finish_all(self.engine, [request for group in requests for request in group], progress and bool(several))
        except BaseException:
            for group in requests:
                for request in group:
                    self.engine.abort(request)
            raise
        results = all_or_error([outcome(group, one) for group, one in zip(requests, each, strict=True)], is_one)
        return results[0] if is_one else results

    def _generate_into(
        self, prompts: object, params: object, options: RequestOptions | None, streamer: Streamer, progress: bool
    ) -> tuple[Result, bool]:
        """Continue one prompt and put its token ids and those of the answer into ``streamer``.

        Returns the result, and whether ``prompts`` was a single prompt.  ``end`` is called in any case once the
        streamer is accepted, because another thread may wait for it.  An error that the streamer raises ends the
        answer.
        """
        if not all(callable(getattr(streamer, name, None)) for name in ("put", "end")):
            raise InvalidArgumentError(
                f"streamer must have put(token_ids) and end(), which {streamer!r:.60} has not", param="streamer"
            )
        try:
            if progress:
                raise InvalidArgumentError(
                    "progress must be False beside a streamer, which shows how far it is", param="progress"
                )
            several, is_one = split_prompts(prompts)
            each = split_params(params, len(several))
            if len(several) != 1 or (each[0].best_of or each[0].n) > 1:
                answers = sum(one.best_of or one.n for one in each)
                raise InvalidArgumentError(f"a streamer takes one answer, n and best_of being 1: here are {answers}")
            stream = self.stream(several[0], each[0], options)
            streamer.put(np.array([stream.prompt_token_ids], np.int64))
            for delta in stream:
                for token in delta.token_ids:
                    streamer.put(np.array([token], np.int64))
        except BaseException:
            with suppress(Exception):
                streamer.end()
            raise
        streamer.end()
        return stream.result(), is_one

    def generate_each(
        self,
        items: Iterable[tuple[Prompt, SamplingParams] | tuple[Prompt, SamplingParams, RequestOptions] | PenstockError],
        max_open: int = 0,
        options: RequestOptions | None = None,
    ) -> Iterator[tuple[int, Result | PenstockError]]:
        """Continue prompts as they come: pairs of an item's number and its result or error, in the order they end.

        An error ends its own item alone.  At most ``max_open`` items are taken ahead (0: four times the requests of a
        step).  An item that is an error already is handed on.  ``options`` go for all that bring none of their own.
        Leaving the loop early aborts what is still open.
        """
        options = check_options(options)
        source = enumerate(check_items(items))
        most = given_number("max_open", whole("max_open", max_open, 0, 2**31 - 1))
        most = most or 4 * self.engine.scheduler.max_requests
        unfinished: dict[int, tuple[list[Request], SamplingParams]] = {}
        try:
            is_exhausted = False
            while unfinished or not is_exhausted:
                batch = list(islice(source, most - len(unfinished)))
                is_exhausted = is_exhausted or len(batch) < most - len(unfinished)
                for index, item in batch:
                    try:
                        unfinished[index] = self._submit_all(item, options)
                    except PenstockError as error:
                        yield index, error
                if not unfinished:
                    continue
                group = next(iter(unfinished.values()))[0]
                oldest = next((r for r in group if r.status is not Status.FINISHED), None)
                if oldest is not None:  # another thread's step may have ended the group
                    self.engine.wait(oldest, len(oldest.output_ids))
                for index in [i for i, (group, _) in unfinished.items() if all_finished(group)]:
                    yield index, outcome(*unfinished.pop(index))
        finally:
            for group, _ in unfinished.values():
                for request in group:
                    self.engine.abort(request)

    def _submit_all(self, item: object, options: RequestOptions) -> tuple[list[Request], SamplingParams]:
        prompt, params, options = split_item(item, options)
        requests: list[Request] = []
        try:
            for submit in self.prepare(prompt, params, options):
                requests.append(when_room(self.engine, submit))
        except PenstockError:
            for request in requests:
                self.engine.abort(request)
            raise
        return requests, params

    def prepare(self, prompt: Prompt, params: SamplingParams, options: RequestOptions) -> list[Callable[[], Request]]:
        """Check a prompt with its parameters, and return one function for each answer that submits its request.

        There are ``best_of`` answers, or else ``n``.  The log-probabilities of the prompt come with the first.
        """
        sampling = self._resolve(params)
        ids = self.engine.fit_prompt(self.prompt_ids(prompt), sampling.max_tokens, options)
        num_answers = params.best_of or params.n
        family = next(self._families) if num_answers > 1 else 0
        others = params if params.prompt_logprobs is None else replace(params, prompt_logprobs=None)
        return [
            partial(self._submit, ids, params if i == 0 else others, sampling.answer(i), prompt, options, family)
            for i in range(num_answers)
        ]

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, options: RequestOptions | None = None
    ) -> Stream:
        """Continue one prompt, piece by piece.  The prompt is checked now; a stream that is dropped is aborted."""
        several, is_one = split_prompts(prompt)
        if not several:
            raise InvalidArgumentError("prompt is empty: it must have at least one token", param="prompt")
        if not is_one:
            raise InvalidArgumentError("stream takes one prompt; generate takes several", param="stream")
        one = split_params(params, 1)[0]
        if (one.best_of or one.n) > 1:
            raise InvalidArgumentError("n and best_of must be 1 for a stream, which gives one answer")
        request = self._submit(self.prompt_ids(several[0]), one, self._resolve(one), several[0], options)
        return Stream(self.engine, request, one)

    def score(
        self, prompts: Prompt | Iterable[Prompt], num_top: int = 0, *, options: RequestOptions | None = None
    ) -> Score | list[Score]:
        """How likely texts are: a Score for one prompt, a list of them for several.

        Each token's log-probability given those before, and its ``num_top`` (0 to 20) likeliest alternatives.
        ``options`` go for all, but a text is scored whole: ``truncate_prompt`` is refused.  All prompts are checked
        before any runs; errors name the prompt.
        """
        return score_prompts(self.engine, self.prompt_ids, prompts, num_top, options)

    def embed(
        self,
        prompts: Prompt | Iterable[Prompt],
        pooling: str = "mean",
        normalize: bool = False,
        *,
        options: RequestOptions | None = None,
    ) -> Embedding | list[Embedding]:
        """Texts as vectors: an Embedding for one prompt, a list of them for several.

        The hidden rows behind the last norm, ``pooling`` them by "mean" or taking the "last"; with ``normalize`` of
        length 1.  ``options`` go for all; of a prompt that is too long ``truncate_prompt`` keeps a context's worth of
        its end.  UnsupportedError for a network that has no such rows; errors name the prompt.
        """
        return embed_prompts(self.engine, self.prompt_ids, prompts, pooling, normalize, options)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        *,
        options: RequestOptions | None = None,
    ) -> Result:
        """Answer messages with "role" and "content", rendered by the model's own chat template.  They are encoded anew
        each time: for several turns see ``conversation``.

        UnsupportedError when the model has no template.
        """
        return self.generate(self.chat_prompt(messages), params, options=options)

    def conversation(self, messages: Sequence[Mapping[str, Any]] = (), *, drop_oldest: bool = False) -> Conversation:
        """A conversation that begins with ``messages``, remembers, and computes only what is new: see Conversation."""
        from penstock.llm.conversation import Conversation

        return Conversation(self, messages, drop_oldest=drop_oldest)

    def chat_prompt(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """The token ids that a conversation becomes, the opening of the answer included."""
        from penstock.text.chat_template import encode_chat

        return encode_chat(self.tokenizer, messages)

    def logits(self, prompt: Prompt) -> NDArray[np.float32]:
        """Logits [len, vocab] float32, one row per position of the prompt."""
        refuse_logits("logits", self.info.tail)
        ids = self.engine.check_prompt(self.prompt_ids(prompt), answer_len=0)
        rows = PromptLogits(len(ids), self.info.vocab_size)
        run_prompts(self.engine, [(ids, rows)], True, RequestOptions())
        return rows.array

    def abort(self) -> None:
        """End every request with "abort", from any thread."""
        self.engine.abort_all()

    def close(self) -> None:
        """End every request and give the memory back.  Calling it again, or in a forked child, does nothing."""
        self.engine.close()
        if self._tokenizer is not None:
            self._tokenizer.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def prompt_ids(self, prompt: Prompt) -> Sequence[int]:
        """Return the token ids of a prompt: text is encoded, token ids stay as they are and are not checked."""
        self.engine.check_process()
        return self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt

    def _resolve(self, params: SamplingParams) -> ResolvedSampling:
        """What a request runs with; refuses what this model cannot honour, by name."""
        if self.info.bidirectional:
            check_continues(params.max_tokens or 1)
        return resolve_params(
            params,
            self._defaults,
            ends=end_ids(params, self._stop_ids),
            vocab_size=self.info.vocab_size,
            tail=self.info.tail,
            tokenizer=(lambda: self.tokenizer) if self.has_text else None,
        )

    @property
    def has_text(self) -> bool:
        """Whether there is a tokenizer."""
        return self._tokenizer is not None or "tokenizer.json" in self._files

    def _submit(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        sampling: ResolvedSampling,
        prompt: Prompt,
        options: RequestOptions | None = None,
        family: int = 0,
    ) -> Request:
        stop_ids, text, rows = end_ids(params, self._stop_ids), None, None
        if self.has_text:
            text = answer_text(self.tokenizer, params, stop_ids, prompt if isinstance(prompt, str) else prompt_ids)
        if params.prompt_logprobs is not None:
            rows = PromptScores(params.prompt_logprobs)
        return self.engine.submit(
            prompt_ids, sampling, stop_ids=stop_ids, text=text, options=options, prompt_rows=rows, family=family
        )
