"""The interface between a service and the models that it serves.

``LocalBackend`` (llm/local_backend.py) runs a model in this process, ``RemoteBackend``
(serving/workers/remote_model.py) in workers.  The service does not know which it has.  Use everything here in one event
loop.

Errors have the engine's classes (InvalidArgumentError, UnsupportedError, QueueFullError, DeadlineError,
InternalError).  NotFoundError is raised for an unknown model, and UnavailableError for one that cannot answer now.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, Self

from penstock.engine.logprobs import TokenLogprobs
from penstock.engine.options import BeamSettings, RequestOptions
from penstock.engine.params import SamplingParams
from penstock.engine.prompt_logits import Places
from penstock.engine.stats import EngineStats
from penstock.errors import UnavailableError, UnsupportedError
from penstock.llm.result import Embedding, Score
from penstock.text.tokenizer import Tokenizer

__all__ = [
    "Answer",
    "Backend",
    "ModelCard",
    "Models",
    "ProfileSettings",
    "TokenDelta",
    "WorkerState",
    "isolated_tokenizer",
    "known_card",
    "tokenizer_of",
]  # fmt: skip


@dataclass(frozen=True)
class ModelCard:
    """The description of a model.

    ``max_len``: maximum number of tokens of prompt and answer.  ``created``: Unix time in seconds when its weights were
    loaded.  ``version``: 1 for the first weights under this name, and one more with each update.  ``source``: the name
    of the file without its folder.  ``tail``: the op that a bundle without logits ends in, or "".
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
class TokenDelta:
    """The new tokens of answer ``index``, one or more.

    ``finish_reason`` is set on the answer's last TokenDelta: "stop", "length", "abort".  ``logprobs`` has one entry for
    each token if they were requested.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    logprobs: list[TokenLogprobs] | None = None


class Answer(Protocol):
    """The answers to one prompt as they grow: ``async for`` gives Deltas, those of several answers mixed.

    A slow reader gets larger Deltas.  Leaving ``async with``, ``aclose`` and cancelling the reader end the request in
    any state.  The iteration raises the error that the request ends with.
    """

    num_prompt_tokens: int
    """Tokens of the prompt as it runs, possibly cut.  This and the next two are known from the first TokenDelta on."""
    num_cached_tokens: int
    seeds: dict[int, int]
    """Maps the number of each answer that has begun to the seed that gives it again alone (``n`` 1)."""
    version: int
    """The version of the weights that answer (``ModelCard.version``); known at once."""
    prompt_logprobs: list[TokenLogprobs | None] | None
    timings: Mapping[str, float]
    """``Timings.summary`` of the first answer once it has ended."""
    take_now: Callable[[TokenDelta], bool] | None
    """The function that is offered each Delta within an answer while the reader waits; True means that it took it."""

    def __aiter__(self) -> Self: ...

    async def __anext__(self) -> TokenDelta: ...

    async def aclose(self) -> None:
        """End the request.  Does nothing if it has ended."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *_: object) -> None: ...


@dataclass(frozen=True)
class WorkerState:
    """The state of one process that runs a model.

    ``status``: "starting", "ready", "draining", "lost".  ``heartbeat_age_s``: seconds since the last known turn of its
    engine's loop.  ``pid``: on its own machine, 0 if it joined from another one by itself.  ``node``: the address of
    that machine, "" for the service's own.  ``role``: "prefill" or "decode", "" for both.
    """

    name: str
    status: str
    pid: int
    version: int
    heartbeat_age_s: float
    num_open: int
    figures: EngineStats | None = None
    node: str = ""
    role: str = ""


@dataclass(frozen=True)
class ProfileSettings:
    """The number of steps of a running model to record, and the limit in seconds.

    ``limits``: measure the peaks and the bandwidth of the machine as well.  No step runs meanwhile, for half a second.
    """

    steps: int
    seconds: float
    limits: bool = False


class Backend(Protocol):
    """One model that answers requests."""

    @property
    def card(self) -> ModelCard:
        """The description of the model.  Raises UnavailableError while nothing is loaded."""

    @property
    def name(self) -> str:
        """The name of the model."""

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer, to be used in a thread: encode, decode and ``chat_template``; None if the model has none.

        Raises UnavailableError while nothing is loaded.
        """

    @property
    def state(self) -> str:
        """One of "loading", "ready", "updating" (and still answering), "failed", "draining"."""

    @property
    def has_room(self) -> bool:
        """True if one more request may wait, as far as is known; also True if something else prevents the request."""

    def has_room_for(self, client: str) -> bool:
        """Return True if one more request of a client may wait.

        In a full queue it takes the place of the last request of the client with the most waiting requests, which ends
        with QueueFullError.
        """

    @property
    def is_ready(self) -> bool:
        """True if a new request would be accepted: the loop of at least one engine turned recently."""

    @property
    def error(self) -> str:
        """The reason why the last load, update or worker failed; "" if nothing is wrong."""

    @property
    def heartbeat_age_s(self) -> float:
        """Seconds since the last turn of any of its engines' loops; infinite if it has none."""

    async def submit(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        options: RequestOptions | None = None,
        *,
        request_id: str = "",
        beams: BeamSettings | None = None,
    ) -> Answer:
        """Begin ``params.n`` answers to a prompt.

        Returns when the engine is known to have accepted the request, at the latest with its first token.  Raises the
        error if the engine refuses it.  With ``best_of`` above ``n`` the likeliest answers are chosen, and all Deltas
        come at the end.  So they do with ``beams``: the answers are the ``n`` best ones of a beam search.
        """

    async def score(
        self,
        prompt_ids: Sequence[int],
        num_top: int = 0,
        options: RequestOptions | None = None,
        *,
        request_id: str = "",
        places: Places | None = None,
    ) -> Score:
        """Score one prompt as ``LLM.score`` does.  Cancelling the caller ends the request.

        With ``places`` the score has an entry for each of these positions after the first None, with the ``num_top``
        likeliest tokens in the place of the position's own.
        """

    async def embed(
        self,
        prompts: Sequence[Sequence[int]],
        pooling: str = "mean",
        normalize: bool = False,
        options: RequestOptions | None = None,
        *,
        request_id: str = "",
    ) -> list[Embedding]:
        """Embed prompts as ``LLM.embed`` does, in their order.  Cancelling the caller ends the requests."""

    def figures(self) -> EngineStats | None:
        """Return the sums over its engines as last reported, without waiting; None before the first report."""

    def deaths(self) -> Mapping[str, int]:
        """Return how many of its processes ended unexpectedly, by cause; empty if it has no processes."""

    def lost_requests(self) -> Mapping[str, int]:
        """Return how many requests were in a process that ended unexpectedly, by what came of them.

        "retried": another process ran it from its beginning.  "continued": another one went on after the tokens that
        had been delivered.  "failed": it ended with an error.  Empty if the model has no processes.
        """

    def num_wanted(self) -> int:
        """Return how many processes of its own should run now; 0 if it has none."""

    def workers(self) -> list[WorkerState]:
        """Return the state of its processes; empty if it has none."""


def known_card(backend: Backend) -> ModelCard | None:
    """Return the card of a model that was loaded, even if no worker of it is ready; None during its first load."""
    try:
        return backend.card
    except UnavailableError:
        return None


def tokenizer_of(backend: Backend) -> Tokenizer:
    """Return a model's tokenizer.  Raises UnsupportedError if it has none."""
    if backend.tokenizer is None:
        raise UnsupportedError("This model has no tokenizer. Pass token ids instead of text.")
    return backend.tokenizer


def isolated_tokenizer(backend: Backend) -> Tokenizer | None:
    """Return a model's tokenizer if it runs in another process, which the event loop must not wait for; else None."""
    tokenizer = backend.tokenizer
    return tokenizer if tokenizer is not None and tokenizer.is_isolated else None


class Models(Protocol):
    """The models of a service."""

    @property
    def is_draining(self) -> bool:
        """True if the service is about to end and accepts no new requests."""

    def list(self) -> Sequence[Backend]:
        """Return all models in the order of loading, including those that are not ready."""

    def get(self, name: str) -> Backend:
        """Return the model of that name.  Raises NotFoundError."""

    async def load(self, model: str, name: str = "") -> Backend:
        """Load a bundle under a name (default: the name of its file), and return when it is ready.

        Raises InvalidArgumentError for a name that is taken or not allowed, OutOfMemoryError for a plan that does not
        fit, and the errors of opening the file.  Nothing remains of a load that failed.
        """

    async def unload(self, name: str) -> None:
        """Accept no more requests, let running ones end, and free the memory.  Raises NotFoundError."""

    async def update(self, name: str, model: str) -> Backend:
        """Load other weights under the name.

        When they are warm, new requests use them, and the old weights are drained.  On an error the old weights stay
        in use.  Raises the errors of ``load``.
        """

    async def drain_worker(self, name: str, worker: str, *, replaces: bool = False) -> Backend:
        """Let the other workers of a model go on with the open requests of one, and end it.

        With ``replaces`` a new worker starts first; if it fails to start, the old one stays.  Raises NotFoundError for
        an unknown model or worker, InvalidArgumentError for the only worker without ``replaces`` and for one of another
        machine with it, and the errors of ``load``.
        """

    async def profile(self, name: str, settings: ProfileSettings, worker: str = "") -> tuple[str, bytes]:
        """Record steps of a model while it answers.

        Returns the worker's name and the report of ``penstock.bench.live_profile`` as JSON.

        ``worker``: the one to record; "": the one with most open requests.  Raises NotFoundError for an unknown model
        or worker, UnsupportedError if its steps cannot be recorded, UnavailableError if it is being profiled already.
        """
