"""The interface between a service and what runs its models.

``LocalBackend`` (llm/local_backend.py) runs a model here, ``RemoteBackend`` (serving/workers/remote_model.py)
in workers; the service cannot tell them apart.  Everything here is used in one event loop.

Errors are those of the engine by class (InvalidArgumentError, UnsupportedError, QueueFullError, DeadlineError,
InternalError), with NotFoundError for a model that is not there and UnavailableError for one that cannot answer now.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

from penstock.engine.logprobs import TokenLogprobs
from penstock.engine.options import RequestOptions
from penstock.engine.params import SamplingParams
from penstock.engine.stats import EngineStats
from penstock.errors import UnavailableError
from penstock.llm.result import Embedding, Score
from penstock.text.tokenizer import Tokenizer

__all__ = ["Answer", "Backend", "Delta", "ModelCard", "Models", "WorkerState", "known_card"]


@dataclass(frozen=True)
class ModelCard:
    """What a model is.

    ``max_len``: tokens of prompt and answer as it is served; ``created``: unix seconds when its weights were loaded;
    ``version``: 1 for the first weights under this name, one more with each update; ``source``: the file's name without
    its folder; ``tail``: "" or what a bundle without logits ends in.
    """

    name: str
    created: int
    max_len: int
    vocab_size: int
    scheme: str
    network: str
    source: str
    version: int = 1
    has_embeddings: bool = False
    has_tokenizer: bool = False
    has_chat_template: bool = False
    tail: str = ""


@dataclass(slots=True)
class Delta:
    """What is new of answer ``index``, one token or more; ``finish_reason`` with its last: "stop", "length", "abort".

    ``logprobs`` has one entry per token when they were asked for.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    logprobs: list[TokenLogprobs] | None = None


class Answer(Protocol):
    """The answers to one prompt as they grow: ``async for`` gives Deltas, those of several answers mixed.

    A reader who is slow gets larger pieces.  Leaving ``async with``, ``aclose`` and cancelling the reader end the
    request wherever it is.  An error that the request ends with is raised by the iteration.
    """

    num_prompt_tokens: int
    """Tokens of the prompt, of which less was left when it was cut; known from the first Delta on, as the next are."""
    num_cached_tokens: int
    seeds: dict[int, int]
    """By the number of an answer that has begun: what gives it again, alone (``n`` 1)."""
    version: int
    """Which weights answer: ``ModelCard.version``; known at once."""
    prompt_logprobs: list[TokenLogprobs | None] | None
    timings: Mapping[str, float]
    """``Timings.summary`` of the first answer, once it has ended."""
    take_now: Callable[[Delta], bool] | None
    """When set, is offered what comes in the middle of an answer while the reader waits; True: it has taken it."""

    def __aiter__(self) -> Self: ...

    async def __anext__(self) -> Delta: ...

    async def aclose(self) -> None:
        """End the request; nothing happens when it has ended."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


@dataclass(frozen=True)
class WorkerState:
    """One process that runs a model, as operators see it.

    ``status``: "starting", "ready", "draining", "lost".  ``heartbeat_age_s``: since its engine's loop last turned, as
    far as is known here.  ``pid`` is 0 for a process on another machine.
    """

    name: str
    status: str
    pid: int
    version: int
    heartbeat_age_s: float
    num_open: int
    figures: EngineStats | None = None


class Backend(Protocol):
    """One model that answers."""

    @property
    def card(self) -> ModelCard:
        """What it is; UnavailableError while nothing is loaded."""

    @property
    def name(self) -> str:
        """What it is called."""

    @property
    def tokenizer(self) -> Tokenizer | None:
        """Encode, decode and ``chat_template``, for use beside the event loop; None for a model without.

        UnavailableError while nothing is loaded.
        """

    @property
    def state(self) -> str:
        """ "loading", "ready", "updating" (and still answering), "failed", "draining"."""

    @property
    def has_room(self) -> bool:
        """Whether one more request may wait, as far as is known here; True where something else is in its way."""

    def has_room_for(self, client: str) -> bool:
        """Whether one more request of a client may wait: in a full queue it takes the place of the last one of the
        client that has most waiting, which ends with QueueFullError."""

    @property
    def is_ready(self) -> bool:
        """Whether a request that comes now would be taken: some engine's loop turned recently."""

    @property
    def error(self) -> str:
        """Why the last load, update or worker failed; empty when nothing is wrong."""

    @property
    def heartbeat_age_s(self) -> float:
        """Seconds since an engine's loop of its last turned; infinite when there is none."""

    async def submit(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        options: RequestOptions | None = None,
        *,
        request_id: str = "",
    ) -> Answer:
        """Begin ``params.n`` answers to a prompt.  Returns when the engine is known to have taken it, which its first
        token says at the latest; what it refuses raises here.

        ``best_of`` above ``n``: the likeliest are chosen, and all Deltas come at the end.
        """

    async def score(
        self,
        prompt_ids: Sequence[int],
        num_top: int = 0,
        options: RequestOptions | None = None,
        *,
        request_id: str = "",
    ) -> Score:
        """``LLM.score`` of one prompt; cancelling the caller ends it."""

    async def embed(
        self,
        prompts: Sequence[Sequence[int]],
        pooling: str = "mean",
        normalize: bool = False,
        options: RequestOptions | None = None,
        *,
        request_id: str = "",
    ) -> list[Embedding]:
        """``LLM.embed`` of prompts, in their order; cancelling the caller ends them."""

    def figures(self) -> EngineStats | None:
        """The sums over its engines as last heard, without waiting; None before the first."""

    def deaths(self) -> Mapping[str, int]:
        """Its processes that ended without being asked to, by cause; empty for one that has none of its own."""

    def workers(self) -> list[WorkerState]:
        """Its processes; empty for one that has none of its own."""


def known_card(backend: Backend) -> ModelCard | None:
    """The card of a model that was loaded, also while no worker of it is ready; None during its first load."""
    try:
        return backend.card
    except UnavailableError:
        return None


class Models(Protocol):
    """The models of a service."""

    @property
    def is_draining(self) -> bool:
        """Whether the service is about to end and takes no new requests."""

    def list(self) -> Sequence[Backend]:
        """All of them, in the order of loading, also those that are not ready."""

    def get(self, name: str) -> Backend:
        """The model of that name; NotFoundError."""

    async def load(self, model: str, name: str = "") -> Backend:
        """Load a bundle under a name (that of its file unless given); returns when it is ready.

        InvalidArgumentError for a name that is taken or cannot be one, OutOfMemoryError for a plan that does not fit,
        else what opening the file raises; nothing is left of it then.
        """

    async def unload(self, name: str) -> None:
        """Take no more requests, let those that run end, and give the memory back; NotFoundError."""

    async def update(self, name: str, model: str) -> Backend:
        """Load other weights under the name; when they are warm, new requests go to them, and the old are drained.

        On an error the old weights go on; errors as ``load`` has them.
        """
