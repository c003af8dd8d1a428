"""A model in this process: the reference for how a Backend behaves, for tests and for embedding in an application."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Final

from penstock.engine.options import check_options
from penstock.errors import InvalidArgumentError, NotFoundError, UnavailableError, UnsupportedError
from penstock.llm.answer import EventAnswer
from penstock.llm.backend import ModelCard, ProfileSettings
from penstock.llm.engine_thread import EngineThread, StepEvent
from penstock.llm.result import Embedding, Score

if TYPE_CHECKING:
    from penstock.engine.options import BeamSettings, RequestOptions
    from penstock.engine.params import SamplingParams
    from penstock.engine.prompt_logits import Places
    from penstock.engine.stats import EngineStats
    from penstock.llm.backend import Backend, Models, WorkerState
    from penstock.llm.llm import LLM
    from penstock.text.tokenizer import Tokenizer

    def _fits(backend: LocalBackend, models: LocalModels) -> tuple[Backend, Models]:
        return backend, models


__all__ = ["LocalBackend", "LocalModels", "card_of", "embedding_of", "in_order", "score_of"]

STALE_S: Final = 30.0
_MAX_OPEN_EMBEDDINGS: Final = 64


def card_of(llm: LLM, name: str, source: str, version: int = 1) -> ModelCard:
    """Return the description of an open LLM."""
    info = llm.info
    tokenizer = llm.tokenizer if llm.has_text else None
    return ModelCard(
        name=name,
        created=int(time.time()),
        max_len=llm.engine.max_len,
        vocab_size=info.vocab_size,
        scheme=info.scheme,
        network=info.network,
        source=Path(source).name,
        version=version,
        has_embeddings=info.hidden_size > 0,
        has_tokenizer=tokenizer is not None,
        has_chat_template=tokenizer is not None and tokenizer.chat_template is not None,
        tail=info.tail,
    )


def score_of(prompt_ids: Sequence[int], answer: EventAnswer, last: StepEvent) -> Score:
    """Return the score that the last event of a scored prompt brought."""
    if last.finish_reason != "length":
        raise UnavailableError("The model was closed before the prompt was scored.")
    return Score(list(prompt_ids), answer.prompt_logprobs or [])


def embedding_of(
    prompt_ids: Sequence[int], answer: EventAnswer, last: StepEvent, *, is_matrix: bool = False
) -> Embedding:
    """Return the embedding that the last event of a prompt brought.  If the prompt was cut, its end was embedded.

    ``is_matrix``: the vector has the rows of all tokens one after another.
    """
    if last.vector is None:
        raise UnavailableError("The model was closed before the prompt was embedded.")
    token_ids = list(prompt_ids)[-answer.num_prompt_tokens :]
    vector = last.vector.reshape(len(token_ids), -1) if is_matrix else last.vector
    return Embedding(token_ids, vector, answer.num_cached_tokens)


async def in_order(
    prompts: Sequence[Sequence[int]], embed_one: Callable[[Sequence[int]], asyncio.Future[Embedding]]
) -> list[Embedding]:
    """Embed prompts, a limited number at a time.  The first error, or cancelling the caller, ends the others."""
    done: list[Embedding] = []
    tasks: list[asyncio.Future[Embedding]] = []
    try:
        for index in range(len(prompts)):
            while len(tasks) < len(prompts) and len(tasks) < index + _MAX_OPEN_EMBEDDINGS:
                tasks.append(embed_one(prompts[len(tasks)]))
            done.append(await tasks[index])
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return done


class LocalBackend:
    """A Backend over an open LLM, which this object closes.  Use it in one event loop."""

    def __init__(self, llm: LLM, name: str = "model", source: str = "") -> None:
        self.llm = llm
        self.name = name
        self.card = card_of(llm, name, source or name)
        self.tokenizer: Tokenizer | None = llm.tokenizer if self.card.has_tokenizer else None
        self.error = ""
        self._loop = asyncio.get_running_loop()
        self._keys = count()
        self._answers: dict[int, EventAnswer] = {}
        self._closed = False
        self._engine_thread = EngineThread(llm, self._hand_over)

    @property
    def state(self) -> str:
        """One of "ready" and, once it is closed, "draining"."""
        return "draining" if self._closed else "ready"

    @property
    def has_room(self) -> bool:
        """True if one more request may wait."""
        return self._closed or self.llm.engine.has_room

    def has_room_for(self, client: str) -> bool:
        """Return True if one more request of a client may wait."""
        return self._closed or self.llm.engine.has_room_for(client)

    @property
    def is_ready(self) -> bool:
        """True if the engine's loop turned within STALE_S seconds."""
        return not self._closed and self.heartbeat_age_s < STALE_S

    @property
    def heartbeat_age_s(self) -> float:
        """Seconds since the engine's loop last turned."""
        return time.monotonic() - self._engine_thread.last_turn

    async def submit(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        options: RequestOptions | None = None,
        *,
        request_id: str = "",
        beams: BeamSettings | None = None,
    ) -> EventAnswer:
        """Begin answers, as Backend defines it.  ``request_id`` is for logs and is not used here."""
        compiling = self.llm.compile_grammar(params)
        if compiling is not None:
            _grammar = await asyncio.wrap_future(compiling)  # kept until it is found again
        return self._begin(lambda key: self._engine_thread.submit(key, prompt_ids, params, options, beams=beams))

    async def score(
        self,
        prompt_ids: Sequence[int],
        num_top: int = 0,
        options: RequestOptions | None = None,
        *,
        request_id: str = "",
        places: Places | None = None,
    ) -> Score:
        """Score one prompt."""
        async with self._begin(
            lambda key: self._engine_thread.score(key, prompt_ids, num_top, options, places)
        ) as answer:
            last = await answer.whole()
        return score_of(prompt_ids, answer, last)

    async def embed(
        self,
        prompts: Sequence[Sequence[int]],
        pooling: str = "mean",
        normalize: bool = False,
        options: RequestOptions | None = None,
        *,
        request_id: str = "",
    ) -> list[Embedding]:
        """Embed prompts."""
        start, request_options = time.monotonic(), check_options(options)

        async def embed_one(ids: Sequence[int]) -> Embedding:
            async with self._begin(
                lambda key: self._engine_thread.embed(key, ids, pooling, normalize, request_options.since(start))
            ) as answer:
                last = await answer.whole()
            return embedding_of(ids, answer, last)

        return await in_order(prompts, lambda ids: asyncio.ensure_future(embed_one(ids)))

    def figures(self) -> EngineStats:
        """Return the engine's counters of this moment."""
        return self.llm.engine.figures()

    def deaths(self) -> dict[str, int]:
        """Return an empty mapping: the model runs in this process."""
        return {}

    def lost_requests(self) -> dict[str, int]:
        """Return an empty mapping: the model runs in this process."""
        return {}

    def num_wanted(self) -> int:
        """Return 0: the model runs in this process."""
        return 0

    def workers(self) -> list[WorkerState]:
        """Return an empty list: the model runs in this process."""
        return []

    async def close(self) -> None:
        """End every request with "abort" and free the memory."""
        if not self._closed:
            self._closed = True
            await asyncio.to_thread(self._engine_thread.close)

    def _begin(self, call: Callable[[int], None]) -> EventAnswer:
        if self._closed:
            raise UnavailableError(f"{self.name} is closed")
        key = next(self._keys)
        answer = self._answers[key] = EventAnswer(lambda: self._abort(key))
        try:
            call(key)
        except BaseException:
            del self._answers[key]
            raise
        return answer

    def _abort(self, key: int) -> None:
        self._answers.pop(key, None)
        self._engine_thread.abort(key)

    def _hand_over(self, events: list[StepEvent]) -> None:
        """Pass events to the event loop.  Called in the engine's thread."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._put, events)

    def _put(self, events: list[StepEvent]) -> None:
        for event in events:
            answer = self._answers.get(event.key)
            if answer is not None:
                if event.is_last:
                    del self._answers[event.key]
                answer.put(event)


class LocalModels:
    """The Backends of this process by name."""

    def __init__(self, backends: Sequence[LocalBackend]) -> None:
        self._backends = {backend.name: backend for backend in backends}
        self.is_draining = False

    def list(self) -> list[LocalBackend]:
        """Return all Backends."""
        return [*self._backends.values()]

    def get(self, name: str) -> LocalBackend:
        """Return the Backend of that name.  Raises NotFoundError."""
        if name not in self._backends:
            raise NotFoundError(f"no model {name!r}; the models are {', '.join(self._backends) or 'none'}")
        return self._backends[name]

    async def load(self, model: str, name: str = "") -> LocalBackend:
        """Open a bundle in this process."""
        from penstock.llm.llm import LLM

        name = name or Path(model).stem
        if name in self._backends:
            raise InvalidArgumentError(f"the name {name!r} is taken", param="name")
        self._backends[name] = LocalBackend(await asyncio.to_thread(LLM, model), name, model)
        return self._backends[name]

    async def unload(self, name: str) -> None:
        """Close a model.  Its running requests end with "abort"."""
        backend = self.get(name)
        del self._backends[name]
        await backend.close()

    async def update(self, name: str, model: str) -> LocalBackend:
        """Open other weights, then close the old ones."""
        from penstock.llm.llm import LLM

        old = self.get(name)
        new = LocalBackend(await asyncio.to_thread(LLM, model), name, model)
        self._backends[name] = new
        await old.close()
        return new

    async def drain_worker(self, name: str, worker: str, *, replaces: bool = False) -> LocalBackend:
        """Raise NotFoundError: these models run without workers."""
        self.get(name)
        message = f"worker: expected a worker of {name}, which runs without workers, got {worker!r:.140}"
        raise NotFoundError(message, param="worker", code="worker_not_found")

    async def profile(self, name: str, settings: ProfileSettings, worker: str = "") -> tuple[str, bytes]:
        """Raise UnsupportedError: a profile is taken in a worker."""
        self.get(name)
        raise UnsupportedError(f"profile: expected a model with workers, which {name} does not have", param="profile")

    async def close(self) -> None:
        """Close all models."""
        self.is_draining = True
        for backend in self.list():
            await backend.close()
