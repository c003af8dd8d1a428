"""A model that runs in workers."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Final

from penstock.api_errors import without_folders
from penstock.cluster.autoscale import Load
from penstock.cluster.scale_loop import ScaleLoop
from penstock.engine.options import BeamSettings, RequestOptions, check_options
from penstock.engine.pooling import check_embedding, keeps_rows
from penstock.engine.prompts import check_token_ids
from penstock.errors import InvalidArgumentError, NotFoundError, UnavailableError
from penstock.llm.answer import EventAnswer
from penstock.llm.backend import ModelCard, ProfileSettings, WorkerState
from penstock.llm.local_backend import embedding_of, in_order, score_of
from penstock.llm.result import Embedding, Score
from penstock.logs import tell
from penstock.processes.supervision import CAUSES
from penstock.serving.proto import wire_pb2 as pb
from penstock.serving.workers.crash_tracker import OUTCOMES, CrashTracker
from penstock.serving.workers.failover import Failover
from penstock.serving.workers.messages import beams_to, places_to, sampling_to
from penstock.serving.workers.past_stats import PastStats
from penstock.serving.workers.worker_config import WorkerConfig, WorkerModelOptions
from penstock.serving.workers.worker_group import Launcher, WorkerGroup
from penstock.serving.workers.worker_roles import NO_ROLES, WorkerRoles, of_role, role_for, takes_over, warn_of_roles
from penstock.serving.workers.worker_routing import RoutedRequest, WorkerRouting

if TYPE_CHECKING:
    from penstock.cluster.autoscale import ScalePolicy
    from penstock.engine.params import SamplingParams
    from penstock.engine.prompt_logits import Places
    from penstock.engine.stats import EngineStats
    from penstock.llm.backend import Backend
    from penstock.serving.workers.worker_connection import WorkerConnection
    from penstock.text.tokenizer import Tokenizer

    def _fits(backend: RemoteBackend) -> Backend:
        return backend


__all__ = ["RemoteBackend"]

_EMPTY_S: Final = 20.0
"""Limit on the time that a worker's requests take to move or end before another request runs alone there."""


class RemoteBackend:
    """One model: it starts and replaces its workers, and sends each request to one of them.

    ``scale``: how their number follows the load; ``num_workers`` start at first.  ``roles``: of its own workers.
    """

    def __init__(
        self,
        name: str,
        launcher: Launcher,
        options: WorkerModelOptions,
        num_workers: int = 1,
        route_policy: str = "prefix",
        scale: ScalePolicy | None = None,
        roles: WorkerRoles = NO_ROLES,
    ) -> None:
        self.name = name
        self._roles = roles
        self.crashes = CrashTracker()
        self.suspects = asyncio.Lock()
        self._launcher = launcher
        self._options = options
        self._num_workers = num_workers
        self._routing = WorkerRouting(route_policy)
        self._group: WorkerGroup | None = None
        self._old: list[WorkerGroup] = []
        self._joined: list[WorkerConnection] = []
        self._dismissing: set[asyncio.Task[None]] = set()
        self._version = 0
        self._is_updating = False
        self._is_draining = False
        self._scaling = None if scale is None else ScaleLoop(scale, num_workers, self._load_now, self._resize)
        self._num_waiting = 0
        self._changed = asyncio.Event()
        self._deaths: Counter[str] = Counter()
        self._past = PastStats()
        self._update_lock = asyncio.Lock()
        self._error = ""
        self.on_change: Callable[[], None] = lambda: None

    async def load(self, path: str, *, verify: str = "") -> None:
        """Load weights, switch new requests to them and drain the workers of the previous ones.

        If loading fails, the previous weights stay in use.  ``verify``: when to verify a bundle's checksums; "" follows
        the model's options.
        """
        async with self._update_lock:
            self._is_updating = True
            version = self._version + 1
            config = WorkerConfig("", "", self.name, path, version, verify or self._options.verify, 0, self._options)
            group = WorkerGroup(
                self._launcher, config, max(1, self.num_wanted()), self._on_change, self._deaths,
                is_elastic=self._scaling is not None, roles=self._roles,
            )  # fmt: skip
            try:
                await group.start()
            except BaseException as error:
                reason = f"{path}: {str(error) or 'cancelled'}"
                self._error = without_folders(reason, path)
                if version > 1:
                    text = f"{self.name}: failed to load version {version} ({reason})"
                    tell("update_failed", text, logging.WARNING, model=self.name, path=path, reason=reason)
                raise
            finally:
                self._is_updating = False
            self._version, self._error = version, ""
            warn_of_roles(self.name, self._roles, group.connections)
            old, self._group = self._group, group
            if old is not None:
                self._old.append(old)
                text = f"{self.name}: new requests go to version {version} ({path})."
                tell("model_updated", text, model=self.name, path=path, version=version)
            if self._scaling is not None:
                group.resize(self._scaling.wanted)  # it may have changed meanwhile
                self._scaling.start()
            self._on_change()
            outdated = [connection for connection in self._joined if connection.weights_id != group.weights_id]
            # The caller may be cancelled now; the previous workers still end.
            await asyncio.shield(asyncio.ensure_future(self._retire(old, outdated)))

    async def _retire(self, group: WorkerGroup | None, outdated: Sequence[WorkerConnection]) -> None:
        """Drain the workers of previous weights: those of other machines, then the processes."""
        try:
            await asyncio.gather(*(self._dismiss(connection) for connection in outdated))
            if group is not None:
                await group.drain()
        finally:
            if group is not None:
                self._old.remove(group)
            self._on_change()

    def adopt(self, connection: WorkerConnection) -> None:
        """Let a worker of another machine share the load.

        Raises InvalidArgumentError if its weights or its context length do not suit this model, and UnavailableError
        while the model is loaded or unloaded.
        """
        weights_id = self._group.weights_id if self._group is not None else ""
        if self._is_draining or not weights_id:  # the worker joins again later
            raise UnavailableError(f"{self.name} is {'being unloaded' if self._is_draining else 'still loading'}")
        if connection.weights_id != weights_id:
            raise InvalidArgumentError(
                f"{self.name}: the worker's bundle differs from the bundle that this service runs"
            )
        if connection.card is None or connection.card.max_len < self.card.max_len:
            raise InvalidArgumentError(
                f"{self.name}: requests may have up to {self.card.max_len} tokens; the worker's context is shorter"
            )
        self._joined.append(connection)
        connection.on_gone = lambda: self._leave(connection)
        connection.on_leave = lambda: self._start_to_dismiss(connection)
        tell(
            "worker_joined",
            f"{self.name}: worker {connection.name} joined from {connection.node}.",
            model=self.name,
            worker=connection.name,
            node=connection.node,
        )
        self._on_change()

    def _leave(self, connection: WorkerConnection) -> None:
        self._joined.remove(connection)
        text = f"{self.name}: worker {connection.name} of {connection.node} has left."
        tell(
            "worker_left",
            text,
            logging.WARNING,
            model=self.name,
            worker=connection.name,
            node=connection.node,
            open_requests=connection.num_lost,
        )

    async def _dismiss(self, connection: WorkerConnection) -> None:
        """Move the open requests of a worker of another machine or wait for their end, and tell it to stop."""
        connection.drain()
        await connection.empty(self._launcher.supervision.drain_s)
        connection.stop()

    async def profile(self, settings: ProfileSettings, worker: str = "") -> tuple[str, bytes]:
        """Record steps of a worker; see ``Models.profile``."""
        if not self._connections:
            raise self._loaded.unavailable(self.name)
        busiest = max(self._connections, key=lambda one: one.num_open)
        connection = self._ready_worker(worker) if worker else busiest
        message = pb.Profile(steps=settings.steps, seconds=settings.seconds, limits=settings.limits)
        return connection.name, await connection.profile(message)

    def _ready_worker(self, name: str) -> WorkerConnection:
        connection = next((worker for worker in self._connections if worker.name == name), None)
        if connection is None:
            names = ", ".join(worker.name for worker in self._connections) or "none is ready"
            message = f"worker: expected a ready worker of {self.name} ({names}), got {name!r:.140}"
            raise NotFoundError(message, param="worker", code="worker_not_found")
        return connection

    async def drain_worker(self, name: str, *, replaces: bool = False) -> None:
        """Let other workers go on with the open requests of one worker, and end it; see ``Models.drain_worker``."""
        async with self._update_lock:
            connection = self._ready_worker(name)
            is_own = connection not in self._joined
            if replaces and not is_own:
                message = f"replace: worker {name} joined from another machine. Start the next one there"
                raise InvalidArgumentError(message, param="replace")
            if not replaces and len(self._connections) == 1:
                message = f"worker: {name} is the only ready worker of {self.name}. Replace it, or unload the model"
                raise InvalidArgumentError(message, param="worker")
            tell("worker_drained", f"{self.name}: draining worker {name}.", model=self.name, worker=name)
            if is_own:
                await self._loaded.drain_worker(connection, replaces=replaces)
                if not replaces:
                    self._roles = self._roles.without(connection.role)
                    self._num_workers = self._roles.num_workers or max(1, self._num_workers - 1)
            else:
                await self._dismiss(connection)

    def _start_to_dismiss(self, connection: WorkerConnection) -> None:
        task = asyncio.ensure_future(self._dismiss(connection))
        self._dismissing.add(task)
        task.add_done_callback(self._dismissing.discard)

    async def close(self) -> None:
        """Accept no more requests, wait for open ones, and stop the workers."""
        self._is_draining = True
        if self._scaling is not None:
            await self._scaling.stop()
        self._on_change()
        await asyncio.gather(
            *(group.drain() for group in self._groups), *(self._dismiss(connection) for connection in self._joined)
        )
        await self._close_tokenizer()

    async def stop(self) -> None:
        """End the workers at once and lose their open requests."""
        self._is_draining = True
        if self._scaling is not None:
            await self._scaling.stop()
        for connection in self._joined:
            connection.stop()
        await asyncio.gather(*(group.stop() for group in self._groups))
        await self._close_tokenizer()

    def num_wanted(self) -> int:
        """Return how many workers of its own the model should have now."""
        return self._num_workers if self._scaling is None else self._scaling.wanted

    def _load_now(self) -> Load:
        """Return the load of the workers, and of the requests that wait for the first one."""
        group = self._group
        connections = [] if group is None else [member for member in group.connections if member.is_ready]
        places, pages = self._num_waiting / max(1, self._options.limits.max_requests), 0.0
        for connection in connections:
            max_requests = 0 if connection.plan is None else connection.plan.max_requests
            places += connection.num_open / max(1, max_requests or self._options.limits.max_requests)
            stats = connection.stats
            if stats is not None:
                numbers = stats.numbers
                pages += numbers.get("num_held_pages", 0) / max(1, numbers.get("num_pages", 0))
        return Load(self._routing.queued_s(connections), max(places, pages))

    def _resize(self, num_workers: int) -> None:
        group = self._group
        if group is None or self._is_draining:
            return
        text = f"{self.name}: workers wanted: {num_workers}, ready: {len(self._connections)}"
        tell("scaled", text, model=self.name, wanted=num_workers, ready=len(self._connections))
        group.resize(num_workers)
        self._on_change()

    async def _close_tokenizer(self) -> None:
        """End the tokenizer's process, if it has one.  It starts again if another model uses the same files."""
        tokenizer = self._group.tokenizer if self._group is not None else None
        if tokenizer is not None and tokenizer.is_isolated:
            await asyncio.to_thread(tokenizer.close)

    def _on_change(self) -> None:
        connections = self._all_connections
        self._past.note(connections)
        for connection in connections:
            connection.on_change = self._on_connection_change
        self._on_connection_change()

    def _on_connection_change(self) -> None:
        self._changed.set()
        self.on_change()

    @property
    def _groups(self) -> list[WorkerGroup]:
        return [*self._old, *([self._group] if self._group else [])]

    @property
    def _all_connections(self) -> list[WorkerConnection]:
        """The connections, including those of workers that are being drained."""
        return [*(connection for group in self._groups for connection in group.connections), *self._joined]

    @property
    def _connections(self) -> list[WorkerConnection]:
        own = self._group.connections if self._group else []
        return [connection for connection in (*own, *self._joined) if connection.is_ready]

    @property
    def card(self) -> ModelCard:
        """The description of the model; UnavailableError before the first load is complete."""
        card = self._loaded.card
        if card is None:
            raise UnavailableError(f"{self.name} is still loading.")
        return card

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer of the current weights, also while no worker is ready; UnavailableError as for ``card``."""
        return self._loaded.tokenizer

    @property
    def _loaded(self) -> WorkerGroup:
        if self._group is None:
            raise UnavailableError(f"{self.name} is still loading.")
        return self._group

    @property
    def state(self) -> str:
        """See ``Backend.state``."""
        if self._is_draining:
            return "draining"
        if self._group is None:
            return "loading" if self._is_updating else "failed"
        if not self._connections and not self._is_asleep:
            return "failed" if self._group.is_failing else "loading"
        return "updating" if self._is_updating else "ready"

    @property
    def has_room(self) -> bool:
        """True if a worker has room for one more request, or if there are no workers, which ``choose`` reports."""
        connections = self._connections
        return any(connection.has_room for connection in connections) if connections else self._may_wait

    def has_room_for(self, client: str) -> bool:
        """Return True if a worker has room for one more request of a client, or if there are no workers."""
        connections = self._connections
        return any(connection.has_room_for(client) for connection in connections) if connections else self._may_wait

    @property
    def _is_asleep(self) -> bool:
        """True if there is no worker because there was nothing to do; a request has one started."""
        group, scaling = self._group, self._scaling
        can_sleep = group is not None and scaling is not None and not scaling.policy.min_replicas
        return can_sleep and group is not None and not self._connections and not group.is_failing

    @property
    def _may_wait(self) -> bool:
        """True if one more request may wait for the first worker: no more than a worker takes."""
        max_open = 0 if self._scaling is None or self._group is None else self._group.max_open
        return not max_open or self._num_waiting < max_open

    @property
    def is_ready(self) -> bool:
        """True if a worker accepts requests, has sent a message lately and its engine makes progress."""
        if self._is_draining:
            return False
        return self._is_asleep or any(connection.is_fresh for connection in self._connections)

    @property
    def error(self) -> str:
        """The last failure, without folders; the log has them."""
        group = self._group
        return self._error or (
            "" if group is None or self._connections else without_folders(group.error, group.config.path)
        )

    @property
    def heartbeat_age_s(self) -> float:
        """Seconds since the last engine iteration of the worker whose iteration is the most recent."""
        return min((connection.heartbeat_age_s for connection in self._connections), default=math.inf)

    def choose(
        self,
        num_tokens: int = 0,
        keys: Sequence[bytes] = (),
        session: str = "",
        state_id: str = "",
        only: WorkerConnection | None = None,
    ) -> RoutedRequest:
        """Return the worker for a prompt of so many tokens, whose leading pages have these keys.

        A worker that makes no progress is chosen only if all are like that: it may continue, and otherwise the request
        is retried.  With ``state_id`` the worker has that id, and a free place if possible; ``only`` is the only choice
        if it is ready.  Raises UnavailableError if there is no worker.
        """
        if self._is_draining:
            raise UnavailableError(f"{self.name} is shutting down.", 5.0)
        if only is not None and only.is_reserved and only.is_ready:
            return self._routing.choose([only], num_tokens, keys, session)
        connections = self._with_state(state_id)
        if not connections:
            raise self._loaded.unavailable(self.name)
        connections = [connection for connection in connections if connection.is_fresh] or connections
        if state_id:
            connections = [connection for connection in connections if connection.has_place] or connections
        connections = [*of_role(connections, role_for(num_tokens, has_begun=bool(state_id)))]
        if only in connections:
            connections = [only]
        return self._routing.choose(connections, num_tokens, keys, session)

    def hands_over(self, source: WorkerConnection, target: WorkerConnection | None = None) -> bool:
        """Return True if another worker, or ``target``, goes on with what this one, for prefill, has begun."""
        others = self._with_state(source.state_id) if source.state_id and not self._is_draining else []
        return any(target in (None, one) and takes_over(source, one) for one in others)

    def can_take(self, state_id: str, client: str) -> bool:
        """Return True if a worker can go on with a request of a worker with this id; "": one that has not begun."""
        if self._is_draining:
            return False
        return any(
            connection.is_fresh and (connection.has_place if state_id else connection.has_room_for(client))
            for connection in self._with_state(state_id)
        )

    def may_go_on(self, state_id: str) -> bool:
        """Return True if a worker with this id, not "", accepts requests or is started in place of a lost one."""
        group = self._group
        if not state_id or self._is_draining or group is None:
            return False
        is_started = state_id == group.state_id and not group.is_failing
        return is_started or any(connection.state_id == state_id for connection in self._connections)

    def _with_state(self, state_id: str) -> list[WorkerConnection]:
        """Return the ready workers with this id that are not kept for a request that runs alone."""
        return [
            connection
            for connection in self._connections
            if not connection.is_reserved and state_id in ("", connection.state_id)
        ]

    @property
    def is_reserved(self) -> bool:
        """True if every ready worker is kept for a request that runs alone; see ``reserve``."""
        connections = self._connections
        return bool(connections) and all(connection.is_reserved for connection in connections)

    @asynccontextmanager
    async def reserve(self, *, waits: bool, state_id: str = "") -> AsyncIterator[WorkerConnection | None]:
        """Keep one worker for a request that runs alone; see ``WorkerRoutes.reserve``."""
        connection = min(self._with_state(state_id), key=lambda one: (not one.is_fresh, one.num_open), default=None)
        if connection is None:
            raise self._loaded.unavailable(self.name)
        if connection.num_open and not waits:
            yield None
            return
        connection.is_reserved = True
        try:
            await connection.empty(_EMPTY_S)
            is_empty = not connection.num_open
            try:
                await asyncio.wait_for(connection.confirm_empty(), _EMPTY_S if is_empty else 0)
            except TimeoutError:
                is_empty = False
            if not is_empty or connection.gone.is_set():
                raise UnavailableError(f"{self.name}: this request has to run alone, and no worker is free.", 1.0)
            yield connection
        finally:
            connection.is_reserved = False
            self._on_connection_change()

    async def wait_ready(self, seconds: float, state_id: str = "") -> None:
        """Wait until a worker accepts requests; with ``state_id`` one of that id.

        Raises UnavailableError on timeout, and at once if the workers crash again and again or none can get that id.
        """
        end = asyncio.get_running_loop().time() + seconds
        self._num_waiting += 1
        try:
            while not self._with_state(state_id):
                remaining_s = end - asyncio.get_running_loop().time()
                is_hopeless = self._is_draining or self._group is None or self._group.is_failing
                if is_hopeless or remaining_s <= 0 or (state_id and not self.may_go_on(state_id)):
                    self.choose(state_id=state_id)
                if self._scaling is not None:
                    self._scaling.look()
                self._changed.clear()
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), remaining_s)
        finally:
            self._num_waiting -= 1

    async def wake(self, seconds: float | None) -> None:
        """Wait for a worker if there is none now and their number follows the load, up to ``seconds``.

        Raises UnavailableError as ``wait_ready`` does.
        """
        if self._scaling is not None and self._group is not None and not self._connections:
            load_s = self._launcher.supervision.load_s
            await self.wait_ready(load_s if seconds is None else min(load_s, seconds))

    async def submit(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        options: RequestOptions | None = None,
        *,
        request_id: str = "",
        beams: BeamSettings | None = None,
    ) -> EventAnswer:
        """Begin the answers to a prompt; see ``Backend.submit``."""
        ids, sampling = self._ids(prompt_ids), sampling_to(params)
        submit = partial(pb.Submit, request_id=request_id, prompt_ids=ids, sampling=sampling, beams=beams_to(beams))
        return await self._start(ids, options, lambda options: pb.ToWorker(submit=submit(options=options)))

    async def score(
        self,
        prompt_ids: Sequence[int],
        num_top: int = 0,
        options: RequestOptions | None = None,
        *,
        request_id: str = "",
        places: Places | None = None,
    ) -> Score:
        """Score one prompt; see ``Backend.score``."""
        ids, at = self._ids(prompt_ids), places_to(places)
        score = partial(pb.Score, request_id=request_id, prompt_ids=ids, num_top=num_top, places=at)
        answer = await self._start(ids, options, lambda options: pb.ToWorker(score=score(options=options)))
        async with answer:
            last = await answer.whole()
        return score_of(ids, answer, last)

    async def embed(
        self,
        prompts: Sequence[Sequence[int]],
        pooling: str = "mean",
        normalize: bool = False,
        options: RequestOptions | None = None,
        *,
        request_id: str = "",
    ) -> list[Embedding]:
        """Embed prompts; see ``Backend.embed``."""
        check_embedding(pooling, normalize)
        start, request_options = time.monotonic(), check_options(options)
        is_matrix = keeps_rows(pooling, None if self.tokenizer is None else self.tokenizer.pooling_head)

        async def embed_one(ids: Sequence[int]) -> Embedding:
            answer = await self._start(
                ids,
                request_options.since(start),
                lambda options: pb.ToWorker(
                    embed=pb.Embed(
                        request_id=request_id, prompt_ids=ids, pooling=pooling, normalize=normalize, options=options
                    )
                ),
            )
            async with answer:
                last = await answer.whole()
            return embedding_of(ids, answer, last, is_matrix=is_matrix)

        checked = [self._ids(ids) for ids in prompts]
        return await in_order(checked, lambda ids: asyncio.ensure_future(embed_one(ids)))

    def _ids(self, prompt_ids: Sequence[int]) -> list[int]:
        return check_token_ids(prompt_ids, self.card.vocab_size, 2**31 - 1, 0)

    async def _start(
        self, ids: Sequence[int], options: RequestOptions | None, make: Callable[[pb.Options], pb.ToWorker]
    ) -> EventAnswer:
        return await Failover(self, ids, check_options(options), make).start()

    def figures(self) -> EngineStats | None:
        """Return the sums of the last counters of all workers, including past ones; None before the first heartbeat."""
        return self._past.total(self._all_connections)

    def deaths(self) -> dict[str, int]:
        """Return how many workers ended without being told to, by cause.  Each one is replaced."""
        return {cause: self._deaths[cause] for cause in CAUSES}

    def lost_requests(self) -> dict[str, int]:
        """Return how many requests lost their worker, by what came of them; see ``Backend.lost_requests``."""
        return {outcome: self.crashes.outcomes[outcome] for outcome in OUTCOMES}

    def plans(self) -> list[pb.Plan]:
        """Return the memory plan of each ready worker."""
        return [connection.plan for connection in self._connections if connection.plan is not None]

    def workers(self) -> list[WorkerState]:
        """Return the state of each worker, including those that are being drained."""
        return [connection.state() for connection in self._all_connections]
