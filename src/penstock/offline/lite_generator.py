"""Generation over ``penstock.lite``: a Model computes one token after another, without an engine."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence

import numpy as np

from penstock.checkpoint.generation import read_generation_config
from penstock.checkpoint.side_files import SIDE_FILES
from penstock.core import native
from penstock.core.forked import check_process, is_forked
from penstock.core.tokenizer import TOKENIZER_SEGMENT
from penstock.engine.capabilities import check_continues
from penstock.engine.params import SamplingParams
from penstock.engine.prompts import check_token_ids
from penstock.engine.request import Request, RequestStatus
from penstock.engine.sampler import SamplingRows, accept_row, mask_errors
from penstock.errors import InvalidArgumentError, PenstockError, UnsupportedError
from penstock.lite.model import Model
from penstock.lite.tensor import Tensor
from penstock.llm.prompts import check_each, split_params
from penstock.llm.resolve import answer_text, default_sampling, end_ids, resolve_params
from penstock.llm.result import Delta, Result, make_result
from penstock.text.grammar.compiler import GrammarCompiler
from penstock.text.tokenizer import Tokenizer

__all__ = ["LiteGenerator", "LiteStream"]


class LiteGenerator:
    """Continues prompts with a Model: up to ``max_batch`` sequences at a time, one token of each per call.

    Logits, sampling and tokens equal those of the engine.  Several threads may use it.  Lists of prompts run one after
    another; a stream whose sequences another call has replaced computes them again.
    """

    def __init__(self, model: Model, max_batch: int, owns_model: bool = False) -> None:
        self.model = model
        self._owns_model = owns_model
        info = model.get_model_info()
        self.tail: str = info["tail"]
        self.vocab_size: int = info["vocab_size"]
        self.context_len: int = info["context_len"]
        self._max_batch = max_batch
        names = (*SIDE_FILES, TOKENIZER_SEGMENT)
        self._files = {name: data for name in names if (data := model.get_file(name)) is not None}
        self.generation = read_generation_config(self._files)
        self._ends = frozenset(self.generation.eos_token_ids)
        self._is_bidirectional = model.native.info.bidirectional
        self._defaults = default_sampling(self.generation, self.tail, self._is_bidirectional)
        self._tokenizer: Tokenizer | None = None
        self._grammars = self._new_grammars()
        self._sampler = native.Context(1)
        self._pid = os.getpid()
        self._busy = threading.Lock()
        self._owner: _LiteRun | None = None

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that was set, or the bundle's own; UnsupportedError if it has none."""
        if self._tokenizer is None:
            self._tokenizer = Tokenizer(self._files)
        return self._tokenizer

    @tokenizer.setter
    def tokenizer(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._grammars = self._new_grammars()

    def _new_grammars(self) -> GrammarCompiler:
        return GrammarCompiler(lambda: self.tokenizer, self.vocab_size, self._ends)

    def generate(self, prompts: Sequence[Sequence[int]], params: SamplingParams | list[SamplingParams]) -> list[Result]:
        """Return a Result for each prompt.  All prompts are checked before any of them runs.

        ``params``: those of all prompts, or one for each.
        """
        self.check_process()
        each = split_params(params, len(prompts))
        ordered = iter(each)
        groups = check_each(prompts, False, lambda prompt: self._requests(prompt, next(ordered)))
        requests = [request for group in groups for request in group]
        with self._busy:
            for first in range(0, len(requests), self._max_batch):
                run = _LiteRun(self, requests[first : first + self._max_batch])
                while run.is_open:
                    run.step()
        return [make_result(group, own) for group, own in zip(groups, each, strict=True)]

    def stream(self, prompt: Sequence[int], params: SamplingParams) -> LiteStream:
        """Begin the answer to one prompt."""
        if (params.best_of or params.n) > 1:
            raise InvalidArgumentError("n and best_of must be 1 for a stream, which has one answer")
        self.check_process()
        (request,) = self._requests(prompt, params)
        return LiteStream(_LiteRun(self, [request]), self._busy, params)

    def check_process(self) -> None:
        """Raise InvalidArgumentError in a forked child, before it waits for a lock that the parent held."""
        check_process(self._pid, "pipeline")

    def close(self) -> None:
        """Free the memory, and that of a model that this object owns.  Does nothing in a forked child."""
        if is_forked(self._pid):
            return
        self._sampler.close()
        if self._tokenizer is not None:
            self._tokenizer.close()
        if self._owns_model:
            self.model.close()

    def _requests(self, prompt: Sequence[int], params: SamplingParams) -> list[Request]:
        if params.prompt_logprobs is not None:
            raise UnsupportedError(
                "prompt_logprobs: not supported by the backend lite, which keeps only the last row; use graph",
                param="prompt_logprobs",
            )
        if self._is_bidirectional:
            check_continues(params.max_tokens or 1)
        ends = end_ids(params, self._ends)
        has_text = self._tokenizer is not None or "tokenizer.json" in self._files
        resolved = resolve_params(
            params,
            self._defaults,
            ends=ends,
            vocab_size=self.vocab_size,
            tail=self.tail,
            tokenizer=(lambda: self.tokenizer) if has_text else None,
            grammars=self._grammars,
        )
        ids = check_token_ids(prompt, self.vocab_size, self.context_len, 1)
        limit = min(resolved.max_tokens, self.context_len - len(ids))
        requests = []
        for index in range(params.best_of or params.n):
            text = answer_text(self.tokenizer, params, ends, ids) if has_text else None
            requests.append(Request(index, ids, limit, resolved.answer(index), ends, text))
        return requests


class _LiteRun:
    """Sequences that run in one batch until the last one has ended."""

    def __init__(self, generator: LiteGenerator, requests: list[Request]) -> None:
        self.generator = generator
        self.requests = requests
        self._rows = SamplingRows(generator.vocab_size)
        for request in requests:
            request.timings.scheduled = time.perf_counter()

    @property
    def is_open(self) -> bool:
        """True if any sequence has not ended."""
        return any(request.status is not RequestStatus.FINISHED for request in self.requests)

    def step(self) -> None:
        """Generate one token for each open request; the caller holds the generator's lock."""
        generator = self.generator
        continues = generator._owner is self
        generator._owner = self
        waiting = [i for i, request in enumerate(self.requests) if request.status is not RequestStatus.FINISHED]
        try:
            outputs = generator.model.predict(self._inputs(waiting, continues))
        except BaseException:
            generator._owner = None
            raise
        requests = [self.requests[index] for index in waiting]
        first = outputs[0].get_data_to_numpy()[waiting]
        if generator.tail:
            for request, ids in zip(requests, first.tolist(), strict=True):
                request.accept(ids[0])
            return
        for request, error in mask_errors(requests):
            request.finish("error", error)
        sampled = native.sample_logits(generator._sampler, first, self._rows.of(requests))
        for row, request in enumerate(requests):
            if request.status is RequestStatus.FINISHED:
                continue
            try:
                accept_row(request, sampled, row)
            except PenstockError as error:
                request.finish("error", error)

    def _inputs(self, waiting: list[int], continues: bool) -> list[Tensor]:
        """Return the last token of each open sequence, or all its tokens if another run used the model since."""
        starts = {i: self.requests[i].num_tokens - 1 if continues else 0 for i in waiting}
        fed = {i: self.requests[i].tokens(start, self.requests[i].num_tokens) for i, start in starts.items()}
        num_rows, width = len(self.requests), max(map(len, fed.values()))
        token_ids, counts = np.zeros((num_rows, width), np.int32), np.zeros(num_rows, np.int32)
        for index, ids in fed.items():
            token_ids[index, : len(ids)], counts[index] = ids, len(ids)
        resets = np.full(num_rows, not continues, np.int32)
        inputs = [Tensor(token_ids), Tensor(counts), Tensor(resets)]
        self.generator.model.resize(inputs, [tensor.shape for tensor in inputs])
        return inputs


class LiteStream:
    """An answer that is being generated; iterate for its Deltas."""

    def __init__(self, run: _LiteRun, busy: threading.Lock, params: SamplingParams) -> None:
        self._run, self._busy, self._params = run, busy, params
        self._ended = False

    def __iter__(self) -> Iterator[Delta]:
        return self

    def __next__(self) -> Delta:
        """Return the next token; StopIteration at the end."""
        if self._ended:
            raise StopIteration
        (request,) = self._run.requests
        self._run.generator.check_process()
        try:
            with self._busy:
                self._run.step()
        except BaseException:
            self._ended = True
            raise
        if request.error is not None:
            self._ended = True
            raise request.error
        self._ended = request.status is RequestStatus.FINISHED
        text = "" if request.text is None else request.text.take()
        logprobs = None if self._params.logprobs is None else request.logprobs[-1:]
        return Delta(text, request.output_ids[-1:], request.finish_reason, logprobs)

    def abort(self) -> None:
        """Stop generating."""
        (request,) = self._run.requests
        if request.status is not RequestStatus.FINISHED:
            request.finish("abort")
        self._ended = True

    def result(self) -> Result:
        """Return the complete answer; InvalidArgumentError before the stream has ended or was aborted."""
        if not self._ended:
            raise InvalidArgumentError("The stream has not ended. Iterate over it or abort it first.", code="not_ended")
        return make_result(self._run.requests, self._params)
