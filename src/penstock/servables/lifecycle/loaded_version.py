"""A loaded version of a servable: its processes, and its methods as the protocols use them."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from penstock.api_errors import FieldError, RefusalError
from penstock.errors import DeadlineError, QueueFullError, UnavailableError, UnsupportedError
from penstock.servables.process.pool import Pool
from penstock.servables.schedule.method_run import MethodGraph, MethodRun, StepQueue
from penstock.servables.schedule.per_instance import (
    MethodResult,
    is_instance_error,
    run_each_instance,
    wait_for_room,
)
from penstock.servables.schedule.unit_queue import UnitQueue
from penstock.tensors import InferRequest, InferResponse, MethodStatistics, Running, Tensor, TensorSpec

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.llm.backend import WorkerState
    from penstock.servables.api.manifest import MethodManifest, ServableManifest
    from penstock.servables.lifecycle.language_models import LanguageModels, LanguageQueue
    from penstock.servables.lifecycle.open_version import OpenedVersion, VersionSource
    from penstock.tensors import ServedMethod

    def _fits(method: LoadedMethod) -> ServedMethod:
        return method


__all__ = ["LoadedMethod", "LoadedVersion", "wait_until_done"]

MAX_INSTANCES: Final = 65_536


class LoadedMethod:
    """One method of a loaded version.

    A method found without a version follows the newest one: ``infer`` passes requests on once its version is stopped.
    """

    def __init__(self, version: LoadedVersion, manifest: MethodManifest, route: MethodGraph) -> None:
        self.statistics = route.statistics
        self.inputs = [
            TensorSpec(name, spec.wire_datatype, (-1, *spec.shape)) for name, spec in manifest.inputs.items()
        ]
        self.outputs = [
            TensorSpec(name, spec.wire_datatype, (-1, *spec.shape)) for name, spec in manifest.outputs.items()
        ]
        self._version, self._manifest, self._route = version, manifest, route
        self._output_specs = [*manifest.outputs.items()]
        self._find_newest: Callable[[], ServedMethod | None] | None = None

    def following_newest(self, find_newest: Callable[[], ServedMethod | None]) -> LoadedMethod:
        """Return a copy for requests without a version; ``find_newest`` is called once this version is stopped."""
        method = LoadedMethod(self._version, self._manifest, self._route)
        method._find_newest = find_newest
        return method

    @property
    def name(self) -> str:
        """The name in the protocol: SERVABLE.METHOD."""
        return f"{self._version.source.name}.{self._manifest.name}"

    @property
    def version(self) -> str:
        """The number of its version."""
        return self._version.source.version

    @property
    def versions(self) -> Sequence[str]:
        """The versions of the servable that are ready."""
        return self._version.ready_versions()

    @property
    def max_batch_size(self) -> int:
        """The maximum number of instances in a request."""
        return MAX_INSTANCES

    @property
    def running(self) -> Running:
        """The configuration of the pools that run its steps; language models have their own configuration."""
        version, route = self._version, self._route
        queues = [queue for queue in route.queues if isinstance(queue, UnitQueue)]
        processes = {queue.pool.title: queue.pool.size for queue in queues}
        policy, counted = version.policy(), route.queues[route.counted]
        if not isinstance(counted, UnitQueue) or counted.unit.rules is None:
            return Running(policy, processes)
        rules = counted.rules
        sizes = (*(size for size in rules.preferred_sizes if size < rules.max_size), rules.max_size)
        return Running(policy, processes, sizes, rules.max_delay_s, rules.max_waiting)

    @property
    def is_ready(self) -> bool:
        """Return True if each of its steps has a process or backend that runs it."""
        return self._version.is_ready

    async def infer(self, request: InferRequest) -> InferResponse:
        """Run a request.  Raises the errors that ServedMethod.infer lists."""
        version, statistics = self._version, self.statistics
        if version.is_closed:
            current = None if self._find_newest is None else self._find_newest()
            if current is not None:
                return await current.infer(request)
            raise UnavailableError(
                f"version {self.version} of {version.source.name} is no longer loaded", param="model_version"
            )
        arrays, count = self._check_inputs(request.inputs)
        requested = self._check_outputs(request.outputs)
        if request.deadline_s <= 0:
            raise DeadlineError("the deadline had passed when the request arrived")
        route, limit = self._route, self._manifest.max_open
        if limit and route.num_open >= limit:
            statistics.num_rejected += 1
            raise QueueFullError(f"{self.name} has {route.num_open} open requests, its max_open")
        began = time.monotonic()
        version.num_open += 1
        route.num_open += 1
        try:
            result = await self._run_request(arrays, count, request, began + request.deadline_s)
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
            version.request_done()
        self._note_success(result, count, time.monotonic() - began)
        outputs = [Tensor(name, self._output_specs[n][1].wire_datatype, result.outputs[n]) for n, name in requested]
        parameters = {"errors": result.errors_json()} if request.per_instance_errors else {}
        return InferResponse(self.version, outputs, parameters)

    async def _run_request(
        self, arrays: Sequence[NDArray[Any]], count: int, request: InferRequest, until: float
    ) -> MethodResult:
        """Run all instances together; if that fails, run each separately if ``per_instance_errors`` is set."""
        errors = {}
        try:
            return MethodResult.of(await self._run(arrays, request, until))
        except RefusalError as error:
            if not request.per_instance_errors or not is_instance_error(error):
                raise
            if count == 1:
                errors[0] = error

        async def run_instance(index: int) -> MethodRun:
            while True:
                try:
                    return await self._run([array[index : index + 1] for array in arrays], request, until, index)
                except QueueFullError:
                    left_s = until - time.monotonic()
                    if left_s <= 0:
                        raise _deadline_error(request.deadline_s) from None
                    await wait_for_room(self._route, left_s)

        return await run_each_instance(run_instance, count, self._route, errors)

    async def _run(
        self, arrays: Sequence[NDArray[Any]], request: InferRequest, until: float, first: int = 0
    ) -> MethodRun:
        """Run a request or part of it until ``until`` of the monotonic clock; cancelling this cancels the run."""
        run = MethodRun(self._route, len(arrays[0]), request.priority, request.request_id, first)
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

    def _note_success(self, result: MethodResult, count: int, took_s: float) -> None:
        statistics = self.statistics
        statistics.num_success += 1
        statistics.num_inferences += count - len(result.errors)
        statistics.success_ns += int(took_s * 1e9)
        statistics.queue_ns += int(result.queue_s * 1e9)
        statistics.compute_ns += int(result.compute_s * 1e9)
        statistics.last_inference_ms = int(time.time() * 1000)

    def _check_inputs(self, inputs: Mapping[str, Tensor]) -> tuple[list[NDArray[Any]], int]:
        """Return the inputs in the order of the method, and their number of instances.  Raises FieldError."""
        manifest, count = self._manifest.inputs, 0
        arrays: list[NDArray[Any]] = []
        for name, spec in manifest.items():
            tensor = inputs.get(name)
            if tensor is None:
                raise FieldError(name, f"{name}: input missing; {self.name} takes {', '.join(manifest)}", "missing")
            array = tensor.array
            shape = array.shape
            if tensor.datatype != spec.wire_datatype:
                raise FieldError(name, f"{name}: expected the datatype {spec.wire_datatype}, got {tensor.datatype}")
            if not shape or not spec.fits(shape[1:]):
                expected = [-1, *spec.shape]
                raise FieldError(name, f"{name}: expected the shape {expected}, batch first, got {[*shape]}")
            if not arrays:
                count = shape[0]
                if not 1 <= count <= MAX_INSTANCES:
                    raise FieldError(name, f"{name}: expected 1 to {MAX_INSTANCES} instances, got {count}")
            elif shape[0] != count:
                first = next(iter(manifest))
                raise FieldError(name, f"{name}: expected {count} instances as in {first}, got {shape[0]}")
            if spec.datatype == "TEXT":
                _check_texts(name, array)
            arrays.append(np.ascontiguousarray(array))
        if len(inputs) != len(manifest):
            unknown = next(name for name in inputs if name not in manifest)
            raise FieldError(
                unknown[:128], f"unknown input {unknown[:128]!r}; {self.name} takes {', '.join(manifest)}", "unknown"
            )
        return arrays, count

    def _check_outputs(self, names: Sequence[str]) -> list[tuple[int, str]]:
        """Return the requested outputs with their indexes.  Raises FieldError."""
        own = [*self._manifest.outputs]
        if not names:
            return [*enumerate(own)]
        for name in names:
            if name not in own:
                raise FieldError(
                    name[:128], f"unknown output {name[:128]!r}; {self.name} returns {', '.join(own)}", "unknown"
                )
        return [(own.index(name), name) for name in names]


def _check_texts(name: str, array: NDArray[Any]) -> None:
    for index, element in enumerate(array.reshape(-1)):
        try:
            element.decode()
        except UnicodeDecodeError:
            raise FieldError(name, f"{name}: element {index} is not valid UTF-8") from None


def _expire(run: MethodRun, seconds: float) -> None:
    run.fail(_deadline_error(seconds))


def _deadline_error(seconds: float) -> DeadlineError:
    return DeadlineError(f"not finished within {seconds:g} s")


async def wait_until_done(work: Awaitable[Any]) -> None:
    """Wait until ``work`` has ended, and ignore its result.  A cancellation of the caller is raised afterwards."""
    task, cancelled = asyncio.ensure_future(work), None
    while not task.done():
        try:
            await asyncio.wait((task,))
        except asyncio.CancelledError as error:
            cancelled = error
    if not task.cancelled():
        task.exception()  # retrieved, so that asyncio does not log it
    if cancelled is not None:
        raise cancelled


class LoadedVersion:
    """A version whose processes run.

    ``ready_versions`` returns the versions of its servable that are ready.
    ``policy`` returns the version policy in the form of Triton's model configuration.
    """

    def __init__(self, source: VersionSource, manifest: ServableManifest) -> None:
        self.source, self.manifest = source, manifest
        self.ready_versions: Callable[[], Sequence[str]] = lambda: [source.version]
        self.policy: Callable[[], Mapping[str, Any]] = lambda: {"latest": {"num_versions": 1}}
        self.methods: dict[str, LoadedMethod] = {}
        self.pools: list[Pool] = []
        self.num_open = 0
        self.is_closed = False
        self._idle = asyncio.Event()
        self._languages: list[LanguageQueue] = []

    @staticmethod
    async def load(opened: OpenedVersion, languages: LanguageModels | None = None) -> LoadedVersion:
        """Start the other processes, open the models and warm them up.  If this raises, everything was stopped."""
        version = LoadedVersion(opened.source, opened.manifest)
        try:
            await version._start(opened, languages)
        except BaseException:
            await wait_until_done(version.stop())
            raise
        finally:
            await opened.close()
        return version

    async def _start(self, opened: OpenedVersion, languages: LanguageModels | None) -> None:
        source, settings, supervision = self.source, self.manifest.settings, opened.supervision
        for path in self.manifest.models:
            await asyncio.to_thread(source.check_file, path)
        title, limit = f"{source.name} {source.version}", settings.memory_limit_mib
        starting, pools = [], {}
        if self.manifest.has_python:
            pool = pools[""] = Pool(f"{title}: stages", source.start_message(), settings.workers, settings, supervision)
            starting.append(pool.start(opened.take_process()))
        for path, model in self.manifest.models.items():
            start = source.start_message(model, limit)
            pool = pools[path] = Pool(f"{title}: {path}", start, model.instances, settings, supervision, model.cores)
            starting.append(pool.start())
        self.pools = [*pools.values()]
        await asyncio.gather(*starting)
        for language in self.manifest.languages:
            if languages is None:
                raise UnsupportedError(f"{source.name}: this service does not run language models")
            self._languages.append(await languages.open(language, source))
        self._connect(pools, title)

    def _connect(self, pools: Mapping[str, Pool], title: str) -> None:
        """Make the queue of each unit, and the route of each method through them."""
        queues: list[StepQueue] = []
        for index, unit in enumerate(self.manifest.units):
            if unit.kind == "language_model":
                queues.append(self._languages[int(unit.names[0])])
            else:
                queues.append(UnitQueue(index, unit, pools["" if unit.kind == "stages" else unit.names[0]], title))
        for manifest in self.manifest.methods:
            kinds = [self.manifest.units[step.unit].kind for step in manifest.steps]
            counted = max((n for n, kind in enumerate(kinds) if kind != "stages"), default=len(kinds) - 1)
            route = MethodGraph(manifest, queues, MethodStatistics(), counted)
            self.methods[manifest.name] = LoadedMethod(self, manifest, route)

    @property
    def is_ready(self) -> bool:
        """Return True if each pool has a process and each language model is ready."""
        return not self.is_closed and (
            all(pool.is_ready for pool in self.pools) and all(model.is_ready for model in self._languages)
        )

    @property
    def deaths(self) -> Counter[str]:
        """The number of processes that ended unexpectedly, by cause."""
        deaths: Counter[str] = Counter()
        for pool in self.pools:
            deaths.update(pool.deaths)
        return deaths

    def worker_states(self) -> list[WorkerState]:
        """Return the states of its processes."""
        return [state for pool in self.pools for state in pool.worker_states()]

    def request_done(self) -> None:
        """Note that a request has ended."""
        self.num_open -= 1
        if not self.num_open:
            self._idle.set()

    async def drain(self, seconds: float) -> None:
        """Wait up to ``seconds`` until open requests have ended, then stop."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self.num_open and not self.is_closed:
                    self._idle.clear()
                    await self._idle.wait()
        await self.stop()

    async def stop(self) -> None:
        """Stop its processes; open requests are refused."""
        self.is_closed = True
        self._idle.set()
        await asyncio.gather(*(pool.stop() for pool in self.pools), *(model.close() for model in self._languages))
