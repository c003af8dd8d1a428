"""A version of a servable that is loaded: its processes, and its methods as the doors have them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from penstock.api_errors import RefusalError
from penstock.errors import DeadlineError, QueueFullError, UnavailableError, UnsupportedError
from penstock.json_schema import MisfitError
from penstock.servables.process.pool import Pool
from penstock.servables.schedule.flow import Queue, Route, Run
from penstock.servables.schedule.per_instance import Found, is_of_instances, room, run_each
from penstock.servables.schedule.unit_queue import UnitQueue
from penstock.tensors import InferRequest, InferResponse, MethodStatistics, Running, Tensor, TensorSpec

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.llm.backend import WorkerState
    from penstock.servables.api.plan import MethodPlan, Plan
    from penstock.servables.lifecycle.language_models import LanguageModels, LanguageQueue
    from penstock.servables.process.open_version import OpenedVersion, Source
    from penstock.tensors import Method

    def _fits(method: LoadedMethod) -> Method:
        return method


__all__ = ["LoadedMethod", "LoadedVersion", "to_its_end"]

MAX_INSTANCES: Final = 65_536


class LoadedMethod:
    """One method."""

    def __init__(self, version: LoadedVersion, plan: MethodPlan, route: Route) -> None:
        self.statistics = route.statistics
        self.inputs = [TensorSpec(name, one.wire_datatype, (-1, *one.shape)) for name, one in plan.inputs.items()]
        self.outputs = [TensorSpec(name, one.wire_datatype, (-1, *one.shape)) for name, one in plan.outputs.items()]
        self._version, self._plan, self._route = version, plan, route
        self._output_specs = [*plan.outputs.items()]
        self._again: Callable[[], Method | None] | None = None

    def floating(self, again: Callable[[], Method | None]) -> LoadedMethod:
        """This, for requests that want whichever version is the newest: ``again`` finds that once this one is gone."""
        found = LoadedMethod(self._version, self._plan, self._route)
        found._again = again
        return found

    @property
    def name(self) -> str:
        """SERVABLE.METHOD."""
        return f"{self._version.source.name}.{self._plan.name}"

    @property
    def version(self) -> str:
        """Its version's number."""
        return self._version.source.version

    @property
    def versions(self) -> Sequence[str]:
        """All that are ready."""
        return self._version.siblings()

    @property
    def max_batch_size(self) -> int:
        """Instances of a request at most."""
        return MAX_INSTANCES

    @property
    def running(self) -> Running:
        """Of the pools that its steps run in; language models have their own configuration."""
        version, route = self._version, self._route
        queues = [one for one in route.queues if isinstance(one, UnitQueue)]
        processes = {one.pool.title: one.pool.size for one in queues}
        policy, counted = version.policy(), route.queues[route.counted]
        if not isinstance(counted, UnitQueue) or counted.unit.rules is None:
            return Running(policy, processes)
        rules = counted.rules
        sizes = (*(one for one in rules.preferred_sizes if one < rules.max_size), rules.max_size)
        return Running(policy, processes, sizes, rules.max_delay_s, rules.max_waiting)

    @property
    def is_ready(self) -> bool:
        """Whether each of its steps has somebody to run it."""
        return self._version.is_ready

    async def infer(self, request: InferRequest) -> InferResponse:
        """Answer; errors as Method has them."""
        version, statistics = self._version, self.statistics
        if version.is_closed:
            current = None if self._again is None else self._again()
            if current is not None:
                return await current.infer(request)
            raise UnavailableError(f"version {self.version} of {version.source.name} is not loaded any more")
        arrays, count = self._taken(request.inputs)
        wanted = self._wanted(request.outputs)
        if request.deadline_s <= 0:
            raise DeadlineError("the deadline was over when the request came")
        route, limit = self._route, self._plan.max_open
        if limit and route.num_open >= limit:
            statistics.num_rejected += 1
            raise QueueFullError(f"{route.num_open} requests of {self.name} are open, which is its max_open")
        began = time.monotonic()
        version.num_open += 1
        route.num_open += 1
        try:
            found = await self._found(arrays, count, request, began + request.deadline_s)
        except asyncio.CancelledError:
            statistics.num_cancelled += 1
            raise
        except QueueFullError:
            statistics.num_rejected += 1
            raise
        except Exception:
            statistics.num_fail += 1
            statistics.fail_ns += int((time.monotonic() - began) * 1e9)
            raise
        finally:
            route.num_open -= 1
            version.let_go()
        self._note(found, count, time.monotonic() - began)
        outputs = [Tensor(name, self._output_specs[n][1].wire_datatype, found.outputs[n]) for n, name in wanted]
        told = {"errors": found.errors_text()} if request.per_instance_errors else {}
        return InferResponse(self.version, outputs, told)

    async def _found(self, arrays: Sequence[NDArray[Any]], count: int, request: InferRequest, until: float) -> Found:
        """All instances together; where that fails and the request wants to know whose fault it is, each by itself."""
        known = {}
        try:
            return Found.of(await self._run(arrays, request, until))
        except RefusalError as error:
            if not request.per_instance_errors or not is_of_instances(error):
                raise
            if count == 1:
                known[0] = error

        async def one(index: int) -> Run:
            while True:
                try:
                    return await self._run([array[index : index + 1] for array in arrays], request, until, index)
                except QueueFullError:
                    left_s = until - time.monotonic()
                    if left_s <= 0:
                        raise DeadlineError(_told_late(request.deadline_s)) from None
                    await room(self._route, left_s)

        return await run_each(one, count, self._route, known)

    async def _run(self, arrays: Sequence[NDArray[Any]], request: InferRequest, until: float, first: int = 0) -> Run:
        """Run what may be a part of a request, until ``until`` of the clock; cancelling this cancels it."""
        run = Run(self._route, len(arrays[0]), request.priority, request.request_id, first)
        timer = None
        try:
            run.start(arrays)
            if until < float("inf"):
                left_s = until - time.monotonic()
                timer = asyncio.get_running_loop().call_later(left_s, _expire, run, request.deadline_s)
            await run.outcome
            return run
        except asyncio.CancelledError:
            run.cancel()
            raise
        finally:
            if timer is not None:
                timer.cancel()

    def _note(self, found: Found, count: int, took_s: float) -> None:
        noted = self.statistics
        noted.num_success += 1
        noted.num_inferences += count - len(found.errors)
        noted.success_ns += int(took_s * 1e9)
        noted.queue_ns += int(found.queue_s * 1e9)
        noted.compute_ns += int(found.compute_s * 1e9)
        noted.last_inference_ms = int(time.time() * 1000)

    def _taken(self, inputs: Mapping[str, Tensor]) -> tuple[list[NDArray[Any]], int]:
        """The inputs' arrays in the method's order, and how many instances they have; MisfitError."""
        plan, count = self._plan.inputs, 0
        arrays: list[NDArray[Any]] = []
        for name, spec in plan.items():
            tensor = inputs.get(name)
            if tensor is None:
                raise MisfitError(name, f"the input {name} is missing: {self.name} takes {', '.join(plan)}", "missing")
            array = tensor.array
            shape = array.shape
            if tensor.datatype != spec.wire_datatype:
                raise MisfitError(name, f"{name} must be {spec.wire_datatype}, not {tensor.datatype}")
            if not shape or not spec.fits(shape[1:]):
                wanted = [-1, *spec.shape]
                raise MisfitError(name, f"{name} must have the shape {wanted}, batch first, not {[*shape]}")
            if not arrays:
                count = shape[0]
                if not 1 <= count <= MAX_INSTANCES:
                    raise MisfitError(name, f"{name} must have from 1 to {MAX_INSTANCES} instances, not {count}")
            elif shape[0] != count:
                first = next(iter(plan))
                raise MisfitError(name, f"{name} has {shape[0]} instances, but {first} has {count}")
            if spec.datatype == "TEXT":
                _check_texts(name, array)
            arrays.append(np.ascontiguousarray(array))
        if len(inputs) != len(plan):
            unknown = next(name for name in inputs if name not in plan)
            raise MisfitError(
                unknown[:128], f"{unknown[:128]!r} is no input: {self.name} takes {', '.join(plan)}", "unknown"
            )
        return arrays, count

    def _wanted(self, names: Sequence[str]) -> list[tuple[int, str]]:
        """The outputs that are asked for, with their places."""
        own = [*self._plan.outputs]
        if not names:
            return [*enumerate(own)]
        for name in names:
            if name not in own:
                raise MisfitError(
                    name[:128], f"{name[:128]!r} is no output: {self.name} gives {', '.join(own)}", "unknown"
                )
        return [(own.index(name), name) for name in names]


def _check_texts(name: str, array: NDArray[Any]) -> None:
    for index, one in enumerate(array.reshape(-1)):
        try:
            one.decode()
        except UnicodeDecodeError:
            raise MisfitError(name, f"{name}: element {index} is not UTF-8") from None


def _expire(run: Run, seconds: float) -> None:
    run.fail(DeadlineError(_told_late(seconds)))


def _told_late(seconds: float) -> str:
    return f"no answer within {seconds:g} s"


async def to_its_end(work: Awaitable[Any]) -> None:
    """Wait until it is over, whatever comes of it; who is cancelled meanwhile learns of that afterwards."""
    task, cancelled = asyncio.ensure_future(work), None
    while not task.done():
        try:
            await asyncio.wait((task,))
        except asyncio.CancelledError as error:
            cancelled = error
    if not task.cancelled():
        task.exception()  # looked at, or asyncio says that nobody did
    if cancelled is not None:
        raise cancelled


class LoadedVersion:
    """A version whose processes run.  ``siblings`` tells the versions of its servable that are ready, ``policy`` which
    are wanted, as Triton's configuration has it.
    """

    def __init__(self, source: Source, plan: Plan) -> None:
        self.source, self.plan = source, plan
        self.siblings: Callable[[], Sequence[str]] = lambda: [source.version]
        self.policy: Callable[[], Mapping[str, Any]] = lambda: {"latest": {"num_versions": 1}}
        self.methods: dict[str, LoadedMethod] = {}
        self.pools: list[Pool] = []
        self.num_open = 0
        self.is_closed = False
        self._idle = asyncio.Event()
        self._languages: list[LanguageQueue] = []

    @staticmethod
    async def load(opening: OpenedVersion, languages: LanguageModels | None = None) -> LoadedVersion:
        """Start the other processes, open and warm the models; raises why not, and leaves nothing then."""
        found = LoadedVersion(opening.source, opening.plan)
        try:
            await found._start(opening, languages)
        except BaseException:
            await to_its_end(found.stop())
            raise
        finally:
            await opening.close()
        return found

    async def _start(self, opening: OpenedVersion, languages: LanguageModels | None) -> None:
        source, settings, supervision = self.source, self.plan.settings, opening.supervision
        for path in self.plan.models:
            await asyncio.to_thread(source.path, path)
        title, limit = f"{source.name} {source.version}", settings.memory_limit_mib
        starting, pools = [], {}
        if self.plan.has_python:
            pool = pools[""] = Pool(f"{title}: stages", source.start(), settings.workers, settings, supervision)
            starting.append(pool.start(opening.take()))
        for path, one in self.plan.models.items():
            start = source.start(one, limit)
            pool = pools[path] = Pool(f"{title}: {path}", start, one.instances, settings, supervision)
            starting.append(pool.start())
        self.pools = [*pools.values()]
        await asyncio.gather(*starting)
        for one_of in self.plan.languages:
            if languages is None:
                raise UnsupportedError(f"{source.name}: no language models are served here")
            self._languages.append(await languages.open(one_of, source))
        self._wire(pools, title)

    def _wire(self, pools: Mapping[str, Pool], title: str) -> None:
        """Make each unit's queue, and each method's way through them."""
        queues: list[Queue] = []
        for index, unit in enumerate(self.plan.units):
            if unit.kind == "language_model":
                queues.append(self._languages[int(unit.names[0])])
            else:
                queues.append(UnitQueue(index, unit, pools["" if unit.kind == "stages" else unit.names[0]], title))
        for plan in self.plan.methods:
            kinds = [self.plan.units[step.unit].kind for step in plan.steps]
            counted = max((n for n, kind in enumerate(kinds) if kind != "stages"), default=len(kinds) - 1)
            route = Route(plan, queues, MethodStatistics(), counted)
            self.methods[plan.name] = LoadedMethod(self, plan, route)

    @property
    def is_ready(self) -> bool:
        """Whether all its pools have a process."""
        return not self.is_closed and (
            all(one.is_ready for one in self.pools) and all(one.is_ready for one in self._languages)
        )

    def workers(self) -> list[WorkerState]:
        """Its processes."""
        return [one for pool in self.pools for one in pool.workers()]

    def let_go(self) -> None:
        """A request has ended."""
        self.num_open -= 1
        if not self.num_open:
            self._idle.set()

    async def drain(self, seconds: float) -> None:
        """Let open requests end, for so long or until all is stopped, and stop."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self.num_open and not self.is_closed:
                    self._idle.clear()
                    await self._idle.wait()
        await self.stop()

    async def stop(self) -> None:
        """End its processes; what is open is refused."""
        self.is_closed = True
        self._idle.set()
        await asyncio.gather(*(one.stop() for one in self.pools), *(one.close() for one in self._languages))
