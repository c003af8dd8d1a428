"""``penstock.LLM``: text or token ids in, text and token ids out."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Unpack, overload

import numpy as np

from penstock.checkpoint.generation import GenerationDefaults, read_generation_config
from penstock.checkpoint.pooling.files import has_language_head
from penstock.checkpoint.pooling.head import read_pooling_head
from penstock.config import ConfigReader, check_flag, check_integer
from penstock.engine.capabilities import check_continues, refuse_logits
from penstock.engine.engine import Engine
from penstock.engine.options import EngineOptions, RequestOptions, check_options
from penstock.engine.params import ResolvedSampling, SamplingParams
from penstock.engine.pooling import check_heads
from penstock.engine.prompt_logits import PromptLogits, PromptScores
from penstock.engine.request import BegunAnswer, Request, RequestStatus
from penstock.errors import InvalidArgumentError, PenstockError
from penstock.llm.llm_options import LLMFields, check_quantization, local_path, network_name, read_llm_options
from penstock.llm.open_requests import run_prepared, run_prompts, submit_when_room
from penstock.llm.prompts import Prompt, check_each, check_items, split_item, split_params, split_prompts
from penstock.llm.resolve import answer_text, default_sampling, end_ids, resolve_params
from penstock.llm.result import Embedding, Result, Score, all_finished, all_or_error, outcome
from penstock.llm.sampling_keywords import sampling_params
from penstock.llm.stream import Stream
from penstock.llm.streamers import Streamer
from penstock.models.families import prompt_masks
from penstock.runtime.open import Opened, OpenOptions, check_network, open_program
from penstock.runtime.program import ProgramInfo, ProgramLimits
from penstock.text.grammar.compiler import GrammarCompiler
from penstock.text.tokenizer import Tokenizer
from penstock.validation import missing_attribute

if TYPE_CHECKING:
    from concurrent.futures import Future

    from numpy.typing import NDArray

    from penstock.llm.classify import Classification, Pair, Ranked
    from penstock.llm.conversation import Conversation
    from penstock.text.grammar.compiler import Grammar

__all__ = ["LLM", "Prompt"]

_HINTS: Final = {"model": "info, files", "get_tokenizer": "tokenizer", "llm_engine": "engine", "config": "info"}


class LLM:
    """A model that continues text.

    ``model``: a ``.psm`` bundle, a checkpoint folder, or ORG/NAME of a downloaded model (``penstock pull``).
    ``scheme``: how weights are stored ("w8a8", ...); None keeps the scheme of the file.
    ``mode``: "graph" (the native core) or "eager" (PyTorch, for debugging).
    ``threads``: number of threads; 0 uses as many as the machine allows.
    ``network``: your own network: a class at the top of a file, or "file.py:Class".
    ``context_len``: the most tokens of prompt and answer of a request.  ``max_requests``: requests per step.
    ``kv_cache``: the type of keys and values ("auto", "f32", "bf16", "int8", "int4").  ``weights``: "mmap" or "huge".
    ``limits``: the same four, and more, as ProgramLimits: the sizes that memory is planned for.
    ``use_cache``: keep the bundle that is made of a folder for the next time.
    ``verify``: check the checksums of a bundle "once" (default; a verified file is remembered in the cache folder),
    "always" or "never".  Damage raises InvalidFileError with the name of the segment.
    ``tensor_parallel_size``: number of processes on this host that the network is divided over (1); ``threads`` is then
    per process.  ``pipeline_parallel_size``: number of stages that its layers are divided into (1), each of
    ``tensor_parallel_size`` processes.  ``context_parallel_size``: number of processes that each context and the
    network are divided over (1), for long prompts.  Tokens and logits do not depend on any of them.
    ``stage_server``: where the stages of other machines join, a StageServer of ``penstock.runtime.ranks.stage_server``;
    None starts them here.
    ``quantization``: None, or the method that the model's files are quantized with ("awq", "gguf", ...), as in vLLM.
    ``prefix_cache``, ``max_waiting``, ``max_chunk``, ``max_mixed_tokens``, ``priority_s``: see EngineOptions.

    Any number of threads may use one LLM.  Their requests share each step and get the tokens that they would get alone.
    """

    def __init__(
        self,
        model: Path | str = "",
        scheme: str | None = None,
        mode: str = "graph",
        threads: int = 0,
        network: str | type | None = None,
        *,
        limits: ProgramLimits | None = None,
        use_cache: bool = True,
        progress: Callable[[Any], None] | None = None,
        **others: Unpack[LLMFields],
    ) -> None:
        options = read_llm_options(others, limits, scheme)
        limits, network = options.limits, network_name(network)
        check_network(network)  # before the model
        path = local_path(model)
        check_quantization(options.quantization, path)
        start = time.perf_counter()
        opened = open_program(
            path,
            scheme=options.scheme,
            mode=mode,
            threads=threads,
            limits=limits,
            network=network,
            options=OpenOptions(
                use_cache,
                progress,
                options.verify,
                tensor_parallel_size=options.tensor_parallel_size,
                pipeline_parallel_size=options.pipeline_parallel_size,
                context_parallel_size=options.context_parallel_size,
                stage_server=options.stage_server,
            ),
        )
        try:
            context_len = opened.program.info.context_len
            if limits is not None and limits.context_len > context_len:
                raise InvalidArgumentError(
                    f"context_len {limits.context_len} is more than the model's {context_len}", param="context_len"
                )
            self._start(opened, options.engine)
        except BaseException:
            opened.program.close()
            raise
        self.load_s = time.perf_counter() - start - opened.populate_s - opened.verify_s
        self.populate_s, self.verify_s = opened.populate_s, opened.verify_s

    @classmethod
    def of_program(cls, opened: Opened, options: EngineOptions | None = None) -> LLM:
        """Create an LLM over a program that is already open."""
        llm = cls.__new__(cls)
        llm.load_s, llm.populate_s, llm.verify_s = 0.0, opened.populate_s, opened.verify_s
        llm._start(opened, options)
        return llm

    def _start(self, opened: Opened, options: EngineOptions | None = None) -> None:
        self._files = opened.files
        self.notes = opened.notes
        self._tokenizer: Tokenizer | None = None
        self._families = count(1)
        self.generation: GenerationDefaults = read_generation_config(opened.files)
        self.engine = Engine(opened.program, options)
        self.engine.pooling_head = read_pooling_head(opened.files)
        if "config.json" in opened.files:
            config = ConfigReader.parse(opened.files["config.json"])
            self.engine.has_language_head, self.engine.prompt_masks = has_language_head(config), prompt_masks(config)
        self._stop_ids = frozenset(self.generation.eos_token_ids)
        self._defaults = default_sampling(self.generation, self.info.tail, self.info.bidirectional)
        self._grammars = self._new_grammars()

    @property
    def info(self) -> ProgramInfo:
        """The description of the running model: network, scheme, context length, threads, memory plan."""
        return self.engine.program.info

    @property
    def files(self) -> dict[str, bytes]:
        """The files beside the weights by name: tokenizer.json and related files."""
        return dict(self._files)

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer.  Raises UnsupportedError if it has none."""
        if self._tokenizer is None:
            self._tokenizer = Tokenizer(self._files)
        return self._tokenizer

    @tokenizer.setter
    def tokenizer(self, tokenizer: Tokenizer) -> None:
        """Use another tokenizer with the same ids."""
        self._tokenizer = tokenizer
        self._grammars = self._new_grammars()

    def _new_grammars(self) -> GrammarCompiler:
        return GrammarCompiler(lambda: self.tokenizer, self.info.vocab_size, self._stop_ids)

    @overload
    def generate(
        self,
        prompts: Prompt,
        params: SamplingParams | None = None,
        *,
        progress: bool = False,
        options: RequestOptions | None = None,
        streamer: Streamer | None = None,
        **sampling: Any,
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
        **sampling: Any,
    ) -> list[Result]: ...

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
        options: RequestOptions | None = None,
        streamer: Streamer | None = None,
        **sampling: Any,
    ) -> Result | list[Result]:
        """Continue one prompt (returns a Result) or several (returns a list of Results in their order).

        A prompt is a string or a list of token ids.
        ``params``: for all prompts, or a list with one for each.  Instead of it ``sampling`` takes its fields as
        keywords, and transformers' names (``max_new_tokens``, ``do_sample``).  ``options``: for all prompts.
        ``progress``: show the progress on stderr.
        ``streamer``: for one prompt; gets its token ids and then those of the answer as they are generated (see
        Streamer).

        All prompts are checked before any runs, and errors name the prompt.  An error of one prompt ends the call;
        ``generate_each`` returns the results of the others, too.
        """
        params = self._sampling(params, sampling, "generate")
        if streamer is not None:
            result, is_one = self._generate_into(prompts, params, options, streamer, progress)
            return result if is_one else [result]
        several, is_one = split_prompts(prompts)
        params_each = split_params(params, len(several))
        options, progress = check_options(options), check_flag("progress", progress)
        prepared = check_each(zip(several, params_each, strict=True), is_one, lambda pair: self.prepare(*pair, options))
        requests = run_prepared(self.engine, prepared, progress)
        results = all_or_error(
            [outcome(group, prompt_params) for group, prompt_params in zip(requests, params_each, strict=True)], is_one
        )
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
                f"streamer: expected an object with put(token_ids) and end(), got {streamer!r:.60}", param="streamer"
            )
        try:
            if progress:
                raise InvalidArgumentError(
                    f"progress: expected False, got {progress!r:.60}. A streamer shows the progress itself.",
                    param="progress",
                )
            several, is_one = split_prompts(prompts)
            params_each = split_params(params, len(several))
            if len(several) != 1 or (params_each[0].best_of or params_each[0].n) > 1:
                answers = sum(item.best_of or item.n for item in params_each)
                raise InvalidArgumentError(
                    f"A streamer takes one answer, with n and best_of 1. This call has {answers}.", param="n"
                )
            stream = self.stream(several[0], params_each[0], options)
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
        """Continue prompts as they arrive, and yield each item's index with its result or error, in the order they end.

        An error ends only its own item.  At most ``max_open`` items are read ahead (0: four times the requests of a
        step).  An item that is an error is passed on.  ``options`` apply to items without options.  Leaving
        the loop early aborts what is still open.
        """
        options = check_options(options)
        source = enumerate(check_items(items))
        max_open = check_integer("max_open", max_open, 0, 2**31 - 1)
        max_open = max_open or 4 * self.engine.scheduler.max_requests
        unfinished: dict[int, tuple[list[Request], SamplingParams]] = {}
        try:
            is_exhausted = False
            while unfinished or not is_exhausted:
                batch = list(islice(source, max_open - len(unfinished)))
                is_exhausted = is_exhausted or len(batch) < max_open - len(unfinished)
                for index, item in batch:
                    try:
                        unfinished[index] = self._submit_all(item, options)
                    except PenstockError as error:
                        yield index, error
                if not unfinished:
                    continue
                group = next(iter(unfinished.values()))[0]
                oldest = next((r for r in group if r.status is not RequestStatus.FINISHED), None)
                if oldest is not None:  # else another thread's step ended the group
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
                requests.append(submit_when_room(self.engine, submit))
        except PenstockError:
            for request in requests:
                self.engine.abort(request)
            raise
        return requests, params

    def prepare(
        self,
        prompt: Prompt,
        params: SamplingParams,
        options: RequestOptions,
        begun: Mapping[int, BegunAnswer] | None = None,
        hook: Callable[[ResolvedSampling], Sequence[ResolvedSampling]] | None = None,
    ) -> list[Callable[[], Request]]:
        """Check a prompt with its parameters, and return one function for each answer that submits its request.

        There are ``best_of`` answers, or else ``n``.  The log-probabilities of the prompt come with the first.
        ``begun``: by index, what another engine has delivered of the answers.  Those that have ended are left out.
        ``hook`` returns the parameters of each answer's request, with hooks.
        """
        sampling = self._resolve(params)
        ids = self.engine.fit_prompt(self.prompt_ids(prompt), sampling.max_tokens, options)
        samplings = hook(sampling) if hook is not None else None
        num_answers = params.best_of or params.n if samplings is None else len(samplings)
        family = next(self._families) if num_answers > 1 else 0
        others = params if params.prompt_logprobs is None else replace(params, prompt_logprobs=None)
        answers = ((begun or {}).get(i, BegunAnswer(i)) for i in range(num_answers))
        return [
            partial(
                self._submit, ids, others if answer.index else params,
                sampling.answer(answer.index) if samplings is None else samplings[answer.index],
                prompt, options, family, answer,
            )
            for answer in answers
            if not answer.has_ended
        ]  # fmt: skip

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        options: RequestOptions | None = None,
        **sampling: Any,
    ) -> Stream:
        """Continue one prompt, piece by piece.  The prompt is checked now.  A stream that is dropped is aborted.

        ``sampling``: as in ``generate``.
        """
        params = self._sampling(params, sampling, "stream")
        several, is_one = split_prompts(prompt)
        if not several:
            raise InvalidArgumentError("prompt: expected at least one token, got none", param="prompt")
        if not is_one:
            message = f"prompt: expected one, got {len(several)}. LLM.generate takes several, AsyncLLM a task for each."
            raise InvalidArgumentError(message, param="prompt")
        stream_params = split_params(params, 1)[0]
        if (stream_params.best_of or stream_params.n) > 1:
            num_answers = stream_params.best_of or stream_params.n
            raise InvalidArgumentError(f"n: expected 1, got {num_answers}. A stream returns one answer.", param="n")
        request = self._submit(
            self.prompt_ids(several[0]), stream_params, self._resolve(stream_params), several[0], options
        )
        return Stream(self.engine, request, stream_params)

    def score(
        self, prompts: Prompt | Iterable[Prompt], num_top: int = 0, *, options: RequestOptions | None = None
    ) -> Score | list[Score]:
        """Return how likely texts are: a Score for one prompt, a list of Scores for several.

        A Score has each token's log-probability given those before, and its ``num_top`` (0 to 20) likeliest
        alternatives. ``options`` apply to all prompts.  A text is scored whole, so ``truncate_prompt`` is refused.  All
        prompts are checked before any runs, and errors name the prompt.
        """
        from penstock.llm.score import score_prompts

        return score_prompts(self.engine, self.prompt_ids, prompts, num_top, options)

    def embed(
        self,
        prompts: Prompt | Iterable[Prompt],
        pooling: str = "auto",
        normalize: bool | None = None,
        *,
        options: RequestOptions | None = None,
        prompt_name: str | None = None,
        dimensions: int | None = None,
    ) -> Embedding | list[Embedding]:
        """Return texts as vectors: an Embedding for one prompt, a list of Embeddings for several.

        ``pooling`` takes the "mean" or the "max" of the hidden rows after the last norm, the "last" one, or the first
        ("cls"); "all" keeps a row for each token, [len, hidden_size].  "auto" does what the model's files say (those of
        sentence-transformers), with the layers behind the pooling, and takes the mean without such files.
        ``normalize`` scales the vector to length 1; by default "auto" does as the files say, and other poolings do not.
        ``prompt_name``: which of the model's prompts is put before each text, by default the model's own choice; token
        ids stay as they are.  ``dimensions``: return only so many elements of the vector, for models trained for that.

        ``options`` apply to all prompts; of a prompt that is too long ``truncate_prompt`` keeps the end, as much as a
        context holds.  Raises UnsupportedError for a network without such rows.  Errors name the prompt.
        """
        from penstock.llm.embed import EmbedSettings, embed_prompts

        settings = EmbedSettings(pooling, normalize, prompt_name, dimensions)
        return embed_prompts(self.engine, self.prompt_ids, prompts, settings, options)

    def classify(
        self, prompts: Prompt | Pair | Iterable[Prompt | Pair], *, options: RequestOptions | None = None
    ) -> Classification | list[Classification]:
        """Return the classes of texts: a Classification for one, a list of them for several.

        A pair of texts is a tuple.  ``options`` apply to all texts; ``truncate_prompt`` cuts the second text of a pair
        that is too long.  Scores are those of transformers' pipeline (softmax, or sigmoid for one class and for
        several at once), or what the folder's key ``activation_fn`` of sentence-transformers names.  Raises
        UnsupportedError for a model that is no classifier.  Errors name the text.
        """
        from penstock.llm.classify import classify_prompts, ids_of

        max_len = self.engine.max_len if check_options(options).truncate_prompt else None
        encode = partial(ids_of, lambda: self.tokenizer, max_len=max_len)
        return classify_prompts(self.engine, encode, prompts, options)

    def rerank(
        self,
        query: str,
        documents: Iterable[str],
        *,
        top_n: int | None = None,
        options: RequestOptions | None = None,
        instruction: str | None = None,
    ) -> list[Ranked]:
        """Return documents ordered by their relevance to ``query``, the ``top_n`` best or all.

        The model is a cross-encoder: a classifier with one class, which reads the query and a document together; or a
        causal reranker, whose score is that of a token.  ``instruction`` tells a causal reranker what is relevant; None
        is the model's own.  A pair that is too long is refused; ``truncate_prompt`` in ``options`` cuts the document.
        """
        from penstock.llm.classify import rerank_documents

        return rerank_documents(self.engine, self.tokenizer, query, documents, top_n, options, instruction)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        *,
        options: RequestOptions | None = None,
        continue_final_message: bool = False,
        **sampling: Any,
    ) -> Result:
        """Answer messages with "role" and "content", rendered by the model's own chat template.

        ``sampling``: as in ``generate``.  ``continue_final_message``: continue the text of the last message instead of
        beginning an answer.  All messages are encoded in each call; for several turns see ``conversation``.  Raises
        UnsupportedError if the model has no template.
        """
        params = self._sampling(params, sampling, "chat")
        prompt = self.chat_prompt(messages, continue_final_message=continue_final_message)
        return self.generate(prompt, params, options=options)

    def conversation(self, messages: Sequence[Mapping[str, Any]] = (), *, drop_oldest: bool = False) -> Conversation:
        """Return a conversation that begins with ``messages``.  It computes only what is new: see Conversation."""
        from penstock.llm.conversation import Conversation

        return Conversation(self, messages, drop_oldest=drop_oldest)

    def chat_prompt(self, messages: Sequence[Mapping[str, Any]], *, continue_final_message: bool = False) -> list[int]:
        """Return the token ids of messages, including the opening of the answer.

        ``continue_final_message``: they end after the text of the last message instead.
        """
        from penstock.text.chat_template import encode_chat

        return encode_chat(self.tokenizer, messages, continue_final_message=continue_final_message)

    def logits(self, prompt: Prompt) -> NDArray[np.float32]:
        """Return logits [len, vocab] float32, one row for each position of the prompt."""
        refuse_logits("logits", self.info.tail)
        ids = self.engine.check_prompt(self.prompt_ids(prompt), answer_len=0)
        rows = PromptLogits(len(ids), self.info.vocab_size)
        run_prompts(self.engine, [(ids, rows)], True, RequestOptions())
        return rows.array

    def abort(self) -> None:
        """End every request with "abort", from any thread."""
        self.engine.abort_all()

    def close(self) -> None:
        """End every request and free the memory.  Calling it again, or in a forked child, does nothing."""
        self.engine.close()
        if self.engine.is_closed:  # not in a forked child
            self._grammars.close()
        if self._tokenizer is not None:
            self._tokenizer.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def prompt_ids(self, prompt: Prompt) -> Sequence[int]:
        """Return the token ids of a prompt: text is encoded, token ids stay as they are and are not checked."""
        self.engine.check_process()
        return self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt

    def _sampling(self, params: object, keywords: Mapping[str, Any], where: str) -> Any:
        return sampling_params(params, keywords, self.generation.temperature, where) if keywords else params

    if not TYPE_CHECKING:  # type checkers know the attributes

        def __getattr__(self, name: str) -> Any:
            raise missing_attribute("LLM", name, dir(type(self)), _HINTS)

    def _resolve(self, params: SamplingParams) -> ResolvedSampling:
        """Return the parameters that a request runs with.

        Raises an error naming the field that this model cannot do.
        """
        check_heads(None, self.info.hidden_size, self.engine.has_language_head)
        if self.info.bidirectional:
            check_continues(params.max_tokens or 1)
        return resolve_params(
            params,
            self._defaults,
            ends=end_ids(params, self._stop_ids),
            vocab_size=self.info.vocab_size,
            tail=self.info.tail,
            tokenizer=(lambda: self.tokenizer) if self.has_text else None,
            grammars=self._grammars,
        )

    def compile_grammar(self, params: SamplingParams) -> Future[Grammar] | None:
        """Begin to compile the grammar of a later request in another thread; None without one.

        That request begins at once if the result is still referred to, which has the errors of the grammar.  Cancel the
        result if the request is no longer wanted.
        """
        source = params.answer_grammar
        if source is None or self.info.tail or not self.has_text:  # the request is refused
            return None
        return self._grammars.begin(source)

    def prepare_grammars(self) -> None:
        """Make what the first grammar would make while other requests wait: 0.7 s for 131,072 tokens."""
        self._grammars.prepare()

    @property
    def has_text(self) -> bool:
        """True if the model has a tokenizer."""
        return self._tokenizer is not None or "tokenizer.json" in self._files

    def _submit(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        sampling: ResolvedSampling,
        prompt: Prompt,
        options: RequestOptions | None = None,
        family: int = 0,
        begun: BegunAnswer | None = None,
    ) -> Request:
        stop_ids, text, rows = end_ids(params, self._stop_ids), None, None
        if self.has_text:
            text = answer_text(self.tokenizer, params, stop_ids, prompt if isinstance(prompt, str) else prompt_ids)
        if begun is not None and begun.token_ids:
            if text is not None and text.replay(begun.token_ids, begun.num_chars):
                raise InvalidArgumentError(
                    f"begun: answer {begun.index} has a stop string, so it has ended", param="begun"
                )
            return self.engine.resume(
                prompt_ids, begun, sampling, stop_ids=stop_ids, text=text, options=options, family=family
            )
        if params.prompt_logprobs is not None:
            rows = PromptScores(params.prompt_logprobs)
        return self.engine.submit(
            prompt_ids, sampling, stop_ids=stop_ids, text=text, options=options, prompt_rows=rows, family=family
        )
