"""A model whose engines run in workers."""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from penstock.api_errors import without_folders
from penstock.engine.options import RequestOptions, check_options
from penstock.engine.pooling import check_embedding
from penstock.engine.prompts import check_token_ids
from penstock.errors import InvalidArgumentError, UnavailableError
from penstock.llm.answer import EventAnswer
from penstock.llm.backend import ModelCard, WorkerState
from penstock.llm.local_backend import embedding_of, in_order, score_of
from penstock.llm.result import Embedding, Score
from penstock.logs import tell
from penstock.processes.supervision import CAUSES
from penstock.serving.proto import wire_pb2 as pb
from penstock.serving.workers.crash_tracker import CrashTracker
from penstock.serving.workers.failover import Failover
from penstock.serving.workers.messages import sampling_to, stats_from, stats_to
from penstock.serving.workers.worker_config import ModelOptions, WorkerConfig
from penstock.serving.workers.worker_group import Launcher, WorkerGroup

if TYPE_CHECKING:
    from penstock.engine.params import SamplingParams
    from penstock.engine.stats import EngineStats
    from penstock.llm.backend import Backend
    from penstock.serving.workers.worker_connection import WorkerConnection
    from penstock.text.tokenizer import Tokenizer

    def _fits(backend: RemoteBackend) -> Backend:
        return backend


__all__ = ["RemoteBackend"]

_GAUGES: Final = ("num_running", "num_waiting", "num_pages", "num_held_pages", "num_named_pages")


class RemoteBackend:
    """One model: its workers, and the way of its requests through them."""

    def __init__(self, name: str, launcher: Launcher, options: ModelOptions, num_workers: int = 1) -> None:
        self.name = name
        self.blame = CrashTracker()
        self.suspects = asyncio.Lock()
        self._launcher = launcher
        self._options = options
        self._num_workers = num_workers
        self._fleet: WorkerGroup | None = None
        self._old: list[WorkerGroup] = []
        self._joined: list[WorkerConnection] = []
        self._version = 0
        self._is_updating = False
        self._is_draining = False
        self._changed = asyncio.Event()
        self._deaths: Counter[str] = Counter()
        self._past: dict[str, pb.Stats] = {}
        self._known: dict[str, WorkerConnection] = {}
        self._update_lock = asyncio.Lock()
        self._error = ""
        self.on_change: Callable[[], None] = lambda: None

    async def load(self, path: str, *, verify: str = "") -> None:
        """Run these weights from now on; those that ran before are drained.  On an error they go on.

        ``verify``: when to verify a bundle's checksums, "" as the model's options say.
        """
        async with self._update_lock:
            self._is_updating = True
            version = self._version + 1
            config = WorkerConfig("", "", self.name, path, version, verify or self._options.verify, 0, self._options)
            fleet = WorkerGroup(self._launcher, config, self._num_workers, self._on_change, self._deaths)
            try:
                await fleet.start()
            except BaseException as error:
                why = f"{path}: {str(error) or 'given up'}"
                self._error = without_folders(why, path)
                if version > 1:
                    text = f"{self.name}: version {version} is not taken ({why})"
                    tell("update_failed", text, logging.WARNING, model=self.name, path=path, reason=why)
                raise
            finally:
                self._is_updating = False
            self._version, self._error = version, ""
            old, self._fleet = self._fleet, fleet
            if old is not None:
                self._old.append(old)
                text = f"{self.name}: requests go to version {version} ({path}) now"
                tell("model_updated", text, model=self.name, path=path, version=version)
            self._on_change()
            strangers = [link for link in self._joined if link.weights_id != fleet.weights_id]
            # Whoever asked for the switch may leave now: what ran before ends all the same.
            await asyncio.shield(asyncio.ensure_future(self._retire(old, strangers)))

    async def _retire(self, fleet: WorkerGroup | None, strangers: Sequence[WorkerConnection]) -> None:
        """End what ran before: workers of another machine with other weights, then the processes."""
        try:
            await asyncio.gather(*(self._dismiss(link) for link in strangers))
            if fleet is not None:
                await fleet.drain()
        finally:
            if fleet is not None:
                self._old.remove(fleet)
            self._on_change()

    def adopt(self, link: WorkerConnection) -> None:
        """A worker of another machine shares the load from now on; InvalidArgumentError when its weights are others."""
        wanted = self._fleet.weights_id if self._fleet is not None else ""
        if self._is_draining or not wanted or link.weights_id != wanted:
            raise InvalidArgumentError(
                f"{self.name}: a worker joins with the bundle that runs here; its own is another one"
            )
        if link.card is None or link.card.max_len < self.card.max_len:
            raise InvalidArgumentError(
                f"{self.name}: requests here have up to {self.card.max_len} tokens, which this worker does not hold"
            )
        self._joined.append(link)
        link.on_gone = lambda: self._leave(link)
        tell(
            "worker_joined",
            f"{self.name}: worker {link.name} joined from another machine",
            model=self.name,
            worker=link.name,
        )
        self._on_change()

    def _leave(self, link: WorkerConnection) -> None:
        self._joined.remove(link)
        text = f"{self.name}: worker {link.name} of another machine is gone"
        tell("worker_left", text, logging.WARNING, model=self.name, worker=link.name, open_requests=link.num_lost)

    async def _dismiss(self, link: WorkerConnection) -> None:
        """Let a worker of another machine end what it has, and tell it to stop."""
        link.drain()
        with suppress(TimeoutError):
            await asyncio.wait_for(link.idle(), self._launcher.supervision.drain_s)
        link.stop()

    async def close(self) -> None:
        """Take no more requests, let those that are open end, stop the workers."""
        self._is_draining = True
        self._on_change()
        await asyncio.gather(
            *(fleet.drain() for fleet in self._fleets), *(self._dismiss(link) for link in self._joined)
        )
        await self._close_tokenizer()

    async def stop(self) -> None:
        """End the workers at once; what is open is lost."""
        self._is_draining = True
        for link in self._joined:
            link.stop()
        await asyncio.gather(*(fleet.stop() for fleet in self._fleets))
        await self._close_tokenizer()

    async def _close_tokenizer(self) -> None:
        """End its process, if it has one; for another model of the same files it starts again."""
        tokenizer = self._fleet.tokenizer if self._fleet is not None else None
        if tokenizer is not None and tokenizer.is_isolated:
            await asyncio.to_thread(tokenizer.close)

    def _on_change(self) -> None:
        links = {link.name: link for link in self._all_links}
        for name, link in self._known.items():
            if name not in links and link.stats is not None:
                for gauge in _GAUGES:
                    link.stats.numbers.pop(gauge, None)
                self._past[name] = link.stats
        if len(self._past) > 1:
            total = stats_from(self._past.values())
            self._past = {"": stats_to(total)}
        self._known = links
        for link in links.values():
            link.on_change = self._on_link
        self._on_link()

    def _on_link(self) -> None:
        self._changed.set()
        self.on_change()

    @property
    def _fleets(self) -> list[WorkerGroup]:
        return [*self._old, *([self._fleet] if self._fleet else [])]

    @property
    def _all_links(self) -> list[WorkerConnection]:
        """Those that are being drained included."""
        return [*(link for fleet in self._fleets for link in fleet.links), *self._joined]

    @property
    def _links(self) -> list[WorkerConnection]:
        own = self._fleet.links if self._fleet else []
        return [link for link in (*own, *self._joined) if link.is_ready]

    @property
    def card(self) -> ModelCard:
        """What it is; UnavailableError while nothing was ever loaded."""
        card = self._loaded.card
        if card is None:
            raise UnavailableError(f"{self.name} is not loaded yet")
        return card

    @property
    def tokenizer(self) -> Tokenizer | None:
        """Of the weights that new requests go to, also while no worker is ready; UnavailableError as ``card``."""
        return self._loaded.tokenizer

    @property
    def _loaded(self) -> WorkerGroup:
        if self._fleet is None:
            raise UnavailableError(f"{self.name} is not loaded yet")
        return self._fleet

    @property
    def state(self) -> str:
        """As Backend has it."""
        if self._is_draining:
            return "draining"
        if self._fleet is None:
            return "loading" if self._is_updating else "failed"
        if not self._links:
            return "failed" if self._fleet.is_failing else "loading"
        return "updating" if self._is_updating else "ready"

    @property
    def has_room(self) -> bool:
        """Whether some worker takes one more request; True while there is none, which is said otherwise."""
        links = self._links
        return not links or any(link.has_room for link in links)

    def has_room_for(self, client: str) -> bool:
        """Whether some worker takes one more request of a client; True while there is none."""
        links = self._links
        return not links or any(link.has_room_for(client) for link in links)

    @property
    def is_ready(self) -> bool:
        """Whether some worker takes requests, was heard of lately and has an engine whose loop turns."""
        return not self._is_draining and any(link.is_fresh for link in self._links)

    @property
    def error(self) -> str:
        """What failed last.  The log has the folders of the files that it names."""
        fleet = self._fleet
        return self._error or ("" if fleet is None or self._links else without_folders(fleet.error, fleet.config.path))

    @property
    def heartbeat_age_s(self) -> float:
        """The least age among its workers."""
        return min((link.heartbeat_age_s for link in self._links), default=math.inf)

    def choose(self, names: Sequence[bytes]) -> WorkerConnection:
        """The worker that knows most of the prompt among those with hardly more to do than the least busy one.

        One that stands is chosen where no other is there: it may go on, and else the request is tried again.
        """
        if self._is_draining:
            raise UnavailableError(f"{self.name} is about to end", 5.0)
        links = self._links
        if not links:
            raise self._loaded.unavailable(self.name)
        links = [link for link in links if link.is_fresh] or links
        if len(links) == 1:
            return links[0]
        least = min(link.num_open for link in links)
        near = [link for link in links if link.num_open <= least + _slack(link)]
        return min(near, key=lambda link: (-link.prefixes.num_known(names), link.num_open, link.num_sent))

    async def wait_ready(self, seconds: float) -> None:
        """Until a worker takes requests; UnavailableError when none does in time, or they die again and again."""
        end = asyncio.get_running_loop().time() + seconds
        while not self._links:
            left = end - asyncio.get_running_loop().time()
            if self._is_draining or self._fleet is None or self._fleet.is_failing or left <= 0:
                self.choose([])
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), left)
            except TimeoutError:
                continue

    async def submit(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        options: RequestOptions | None = None,
        *,
        request_id: str = "",
    ) -> EventAnswer:
        """Begin answers; as Backend has it."""
        ids, sampling = self._ids(prompt_ids), sampling_to(params)
        return await self._start(
            ids,
            options,
            lambda how: pb.ToWorker(
                submit=pb.Submit(request_id=request_id, prompt_ids=ids, sampling=sampling, options=how)
            ),
        )

    async def score(
        self,
        prompt_ids: Sequence[int],
        num_top: int = 0,
        options: RequestOptions | None = None,
        *,
        request_id: str = "",
    ) -> Score:
        """Score one prompt."""
        ids = self._ids(prompt_ids)
        answer = await self._start(
            ids,
            options,
            lambda how: pb.ToWorker(
                score=pb.Score(request_id=request_id, prompt_ids=ids, num_top=num_top, options=how)
            ),
        )
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
        """Embed prompts."""
        check_embedding(pooling, normalize)

        async def one(ids: Sequence[int]) -> Embedding:
            answer = await self._start(
                ids,
                options,
                lambda how: pb.ToWorker(
                    embed=pb.Embed(
                        request_id=request_id, prompt_ids=ids, pooling=pooling, normalize=normalize, options=how
                    )
                ),
            )
            async with answer:
                last = await answer.whole()
            return embedding_of(ids, answer, last)

        checked = [self._ids(ids) for ids in prompts]
        return await in_order(checked, lambda ids: asyncio.ensure_future(one(ids)))

    def _ids(self, prompt_ids: Sequence[int]) -> list[int]:
        return check_token_ids(prompt_ids, self.card.vocab_size, 2**31 - 1, 0)

    async def _start(
        self, ids: Sequence[int], options: RequestOptions | None, make: Callable[[pb.Options], pb.ToWorker]
    ) -> EventAnswer:
        return await Failover(self, ids, check_options(options), make).start()

    def figures(self) -> EngineStats | None:
        """The sums over its workers, those that are gone included, as last heard."""
        heard = [link.stats for link in self._all_links if link.stats is not None]
        return stats_from([*heard, *self._past.values()]) if heard or self._past else None

    def deaths(self) -> dict[str, int]:
        """Its workers that ended without being asked to, by cause; each was replaced, or is to be."""
        return {cause: self._deaths[cause] for cause in CAUSES}

    def plans(self) -> list[pb.Plan]:
        """The memory that each of its ready workers planned."""
        return [link.plan for link in self._links if link.plan is not None]

    def workers(self) -> list[WorkerState]:
        """Its processes, those that are being drained included."""
        return [link.state() for link in self._all_links]


def _slack(link: WorkerConnection) -> int:
    """How many more requests than the least busy worker has one may have and still be chosen for its prefixes."""
    most = link.plan.max_requests if link.plan is not None else 0
    return max(1, most // 4)
