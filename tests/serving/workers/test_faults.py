"""Injected faults of workers.

Each fault ends with correct answers, a retriable error or a refusal, and with the model ready again.  No request waits
forever, and no process, file or descriptor is left.

``PENSTOCK_CHAOS=n`` repeats the storms n times (``make chaos``).
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
from dataclasses import replace
from unittest.mock import patch

import psutil
import pytest

from penstock.cluster.placement.local import COMMAND, LocalPlacement
from penstock.engine.options import RequestOptions
from penstock.engine.params import SamplingParams
from penstock.errors import FileAccessError, InternalError, UnavailableError
from penstock.processes.supervision import SupervisionPolicy
from penstock.serving.metrics import Metrics
from penstock.serving.workers import remote_model
from penstock.serving.workers.crash_tracker import Loss
from penstock.serving.workers.failover import Failover
from penstock.serving.workers.remote_model import RemoteBackend
from penstock.serving.workers.worker_connection import OpenRequest, WorkerConnection
from tests.support.errors import raises
from tests.support.faulty_worker import CROWD, DEADLY, KILLED, LATER, STUCK
from tests.support.marks import mostly_long
from tests.support.placements import PLACEMENTS, RAY
from tests.support.worker_processes import (
    CALM,
    HASTY,
    IMPATIENT,
    OPTIONS,
    SEEDED,
    faulty,
    pids,
    service,
    still,
    switch_under,
    tokens_of,
    until,
    wait_for_causes,
)

CHAOS = int(os.environ.get("PENSTOCK_CHAOS", "1"))
GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    wait_for_causes(monkeypatch)
    monkeypatch.setattr(remote_model, "_EMPTY_S", 600.0)


class Traffic:
    """Clients that send requests continuously and record the answers."""

    def __init__(self, backend: RemoteBackend, expected: list[dict[int, list[int]]], num_clients: int = 3) -> None:
        self.backend, self.expected = backend, expected
        self.versions, self.num_lost = set(), 0
        self.wrong: list[str] = []
        self._num_right = [0] * num_clients
        self._tasks = [asyncio.ensure_future(self._client(seed)) for seed in range(num_clients)]

    async def _client(self, seed: int) -> None:
        rng = random.Random(seed)
        while True:
            number, ids = rng.randrange(32), []
            own = RequestOptions(cache_salt=f"{rng.random()}")  # no request is blamed for what another one met
            try:
                async with await self.backend.submit([number, 7, 9], SEEDED, own) as answer:
                    async for delta in answer:
                        ids += delta.token_ids
            except UnavailableError:
                self.num_lost += 1
                await asyncio.sleep(0.01)
                continue
            except Exception as error:
                self.wrong.append(f"{type(error).__name__}: {error}")
                return
            version = answer.version
            self.versions.add(version)
            if ids == self.expected[(version - 1) % 2][number]:
                self._num_right[seed] += 1
            else:
                self.wrong.append(f"version {version} answered {number} with {ids}")

    async def more(self) -> None:
        """Wait until each client has got two more correct answers.  The second one, and the request that is open now,
        began after this call."""
        before = [*self._num_right]
        await until(lambda: self.wrong or all(a >= b + 2 for a, b in zip(self._num_right, before, strict=True)))
        assert not self.wrong, self.wrong

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        assert not self.wrong, self.wrong


@pytest.mark.long
@pytest.mark.parametrize("placement", [*mostly_long(PLACEMENTS, "local"), RAY])
def test_killed_workers_are_replaced_under_load(versions, expected, placed, placement) -> None:
    async def main() -> None:
        async with service(num_workers=2, supervision=HASTY, **placed(placement)) as running:
            backend = await running.models.load(str(versions[0]))
            traffic = Traffic(backend, expected)
            for _ in range(3 * CHAOS):
                await traffic.more()
                victim = random.choice(pids(backend))
                os.kill(victim, signal.SIGKILL)
                await until(lambda victim=victim: victim not in pids(backend))
                assert not psutil.pid_exists(victim), "it is no zombie"
                await until(lambda: sum(worker.status == "ready" for worker in backend.workers()) == 2)
                assert backend.state == "ready"
            assert backend.deaths() == {"signal": 3 * CHAOS, "exit": 0, "hang": 0, "start": 0}
            await traffic.more()
            await traffic.stop()
            await until(lambda: all(worker.num_open == 0 for worker in backend.workers()))

    asyncio.run(main())


@pytest.mark.long
@pytest.mark.parametrize("placement", [*mostly_long(PLACEMENTS, "local"), RAY])
def test_a_stopped_worker_is_replaced_under_load(versions, expected, placed, placement) -> None:
    """SIGSTOP: the worker sends nothing.  With one worker its requests are retried on the next one."""

    async def main() -> None:
        async with service(supervision=IMPATIENT, **placed(placement)) as running:
            backend = await running.models.load(str(versions[0]))
            traffic = Traffic(backend, expected)
            await traffic.more()
            victim = psutil.Process(pids(backend)[0])
            await until(lambda: not still(victim))
            await traffic.more()
            await traffic.stop()
            assert pids(backend) != [victim.pid]

    asyncio.run(main())


@pytest.mark.long
def test_a_hung_engine_is_noticed_while_its_process_answers(versions) -> None:
    """The worker's event loop continues and sends heartbeats; the engine's loop hangs in a step."""

    async def main() -> None:
        async with service(supervision=IMPATIENT, command=faulty("tokens")) as running:
            backend = await running.models.load(str(versions[0]))
            victim = pids(backend)[0]
            with pytest.raises(InternalError, match="refused"):  # it hangs the second one, too
                await tokens_of(backend, [STUCK, 5], GREEDY)
            assert not psutil.pid_exists(victim)
            await until(lambda: backend.deaths()["hang"] >= 2)
            assert len(await tokens_of_when_ready(backend, [5])) == 12

    asyncio.run(main())


@pytest.mark.long
def test_without_the_detector_a_hang_would_last(versions) -> None:
    """The negative control of the two tests above: nothing else ends a stalled worker."""

    async def main() -> None:
        async with service(supervision=SupervisionPolicy(hang_s=1000.0)) as running:
            backend = await running.models.load(str(versions[0]))
            worker = psutil.Process(pids(backend)[0])
            still(worker)
            asked = asyncio.ensure_future(tokens_of(backend, [5], GREEDY))
            await until(lambda: still(worker) and backend.heartbeat_age_s > 1.5 * IMPATIENT.hang_s)
            assert pids(backend) == [worker.pid]
            worker.resume()
            assert len(await asked) == 12
            await until(lambda: backend.heartbeat_age_s < 1.0)

    asyncio.run(main())


@pytest.mark.parametrize("placement", [*PLACEMENTS, RAY])
def test_a_request_that_crashes_workers_is_refused(versions, placed, placement) -> None:
    async def main() -> None:
        async with service(supervision=HASTY, **placed(placement, faulty("tokens"))) as running:
            backend = await running.models.load(str(versions[0]))
            first = pids(backend)
            innocent = [asyncio.ensure_future(tokens_of(backend, [number, 3], GREEDY)) for number in range(4)]
            assert await num_losses_until_refused(backend, [DEADLY, 5]) < 3
            await until(lambda: backend.is_ready)
            second = pids(backend)
            assert second != first
            with pytest.raises(InternalError, match="refused"):  # at once: nobody dies of it again
                await tokens_of(backend, [DEADLY, 5], GREEDY)
            assert pids(backend) == second
            for outcome in await asyncio.gather(*innocent, return_exceptions=True):
                assert isinstance(outcome, UnavailableError) or len(outcome) == 12
            assert len(await tokens_of(backend, [1, 3], GREEDY)) == 12

    asyncio.run(main())


def test_a_request_that_crashes_later_is_refused(versions) -> None:
    """It goes on in the next worker, and is refused after a crash that it had alone.

    It crashes two workers, or three if no token had been delivered in the first crash.
    """

    async def main() -> None:
        async with service(supervision=HASTY, command=faulty("tokens")) as running:
            backend = await running.models.load(str(versions[0]))
            assert await num_losses_until_refused(backend, [LATER, 5]) == 0
            await until(lambda: backend.is_ready)
            assert backend.deaths()["signal"] in (2, 3)
            with pytest.raises(InternalError, match="refused"):
                await tokens_of(backend, [LATER, 5], GREEDY)

    asyncio.run(main())


def test_workers_killed_from_outside_are_no_requests_fault(versions) -> None:
    """A request is open in every worker that is killed: it ends with retriable errors, never as a cause of crashes."""

    async def main() -> None:
        async with service(supervision=HASTY, command=faulty("tokens")) as running:
            backend = await running.models.load(str(versions[0]))
            asked = asyncio.ensure_future(until_paused(backend, [STUCK, 5]))
            while not asked.done():
                await until(lambda: asked.done() or open_requests(backend))
                if asked.done():
                    break
                for pid in pids(backend):
                    os.kill(pid, signal.SIGKILL)
                    await until(lambda pid=pid: pid not in pids(backend))
            assert (await asked).retry_after_s > 0
            assert backend.deaths() == {"signal": 4, "exit": 0, "hang": 0, "start": 0}
            assert len(await tokens_of_when_ready(backend, [6, 5])) == 12

    asyncio.run(main())


@pytest.mark.long
def test_a_request_that_has_workers_killed_is_paused(versions) -> None:
    """It has the worker killed without a crash of its own: the number of workers that end with it is bounded."""

    async def main() -> None:
        async with service(supervision=HASTY, command=faulty("tokens")) as running:
            backend = await running.models.load(str(versions[0]))
            await until_paused(backend, [KILLED, 5])
            assert backend.deaths()["signal"] == 4
            assert len(await tokens_of_when_ready(backend, [6, 5])) == 12

    asyncio.run(main())


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_suspect_runs_alone_before_it_is_refused(versions, num_workers) -> None:
    """It was open in two crashes without being their cause.  Meanwhile the other requests move, or wait and go on."""

    async def main() -> None:
        async with service(supervision=HASTY, command=faulty("slow"), num_workers=num_workers) as running:
            backend = await running.models.load(str(versions[0]))
            params = SamplingParams(max_tokens=60, temperature=0, ignore_eos=True)
            expected = await tokens_of(backend, [9, 5], params)
            alone, sent = [], WorkerConnection.begin

            def begin(connection, request):
                alone.append((connection.is_reserved, connection.num_open))
                sent(connection, request)

            with patch.object(WorkerConnection, "begin", begin):
                others = [asyncio.ensure_future(tokens_of(backend, [9, 5], params)) for _ in range(6)]
                await until(lambda: sum(one.answer.has_begun for one in open_requests(backend)) == 6)
                with patch.object(Failover, "_fingerprint", b"suspect"):
                    for worker in ("1", "2"):
                        backend.crashes.note(b"suspect", Loss(worker), has_crashed=True)
                    assert len(await tokens_of(backend, [5], GREEDY)) == 12
                assert not len(backend.crashes), "the answer has cleared it"
                late = await tokens_of(backend, [9, 5], params)
            assert (True, 0) in alone
            assert not any(is_reserved and num_open for is_reserved, num_open in alone)
            assert [late, *await asyncio.gather(*others)] == [expected] * 7

    asyncio.run(main())


def open_requests(backend: RemoteBackend) -> list[OpenRequest]:
    return [request for connection in backend._connections for request in connection._open.values()]


async def num_losses_until_refused(backend: RemoteBackend, prompt: list[int], options=None) -> int:
    """Send a request again after each retriable error, as clients do, until it is refused.  Return how often."""
    for number in range(10):
        await until(lambda: backend.is_ready)
        try:
            await tokens_of(backend, prompt, GREEDY, options)
        except UnavailableError:  # it had begun
            continue
        except InternalError:
            return number
        raise AssertionError("the request was answered")
    raise AssertionError("the request was not refused")


async def until_paused(backend: RemoteBackend, prompt: list[int]) -> UnavailableError:
    """Send a request again after each retriable error until it is paused; return the error."""
    while True:
        with pytest.raises(UnavailableError) as raised:
            await tokens_of_when_ready(backend, prompt)
        if "too many workers were lost" in str(raised.value):
            return raised.value


async def tokens_of_when_ready(backend: RemoteBackend, prompt: list[int]) -> list[int]:
    await until(lambda: backend.is_ready)
    return await tokens_of(backend, prompt, GREEDY)


@pytest.mark.long
def test_a_crash_loop_leaves_only_its_model_not_ready(versions) -> None:
    async def main() -> None:
        async with service(supervision=HASTY, command=faulty("exits")) as running:
            bad = await running.models.load(str(versions[0]), "bad")
            good = await running.models.load(str(versions[1]), "good")
            os.kill(pids(bad)[0], signal.SIGKILL)  # each further one ends while it loads
            await until(lambda: bad.state == "failed" and "status 3" in bad.error)
            assert not bad.is_ready
            assert (bad.deaths()["signal"], bad.deaths()["start"] >= 2) == (1, True)
            with pytest.raises(UnavailableError, match="again and again"):
                await bad.submit([5], GREEDY)
            assert (good.state, len(await tokens_of(good, [5], GREEDY))) == ("ready", 12)
            versions[0].with_suffix(".loaded").unlink()  # whatever it was is gone
            await until(lambda: bad.is_ready)
            assert len(await tokens_of(bad, [5], GREEDY)) == 12
            versions[0].with_suffix(".loaded").unlink()
            versions[1].with_suffix(".loaded").unlink()

    asyncio.run(main())


@pytest.mark.long
def test_new_weights_under_traffic_lose_no_request(versions, expected) -> None:
    """Every answer is complete and from one version; no request fails."""

    async def main() -> None:
        async with service(command=COMMAND, supervision=CALM) as running:
            backend = await running.models.load(str(versions[0]), "model")
            await switch_under(Traffic(backend, expected), running, versions, 20 * CHAOS)

    asyncio.run(main())


def test_a_worker_that_cannot_be_started_is_tried_again(versions, monkeypatch, caplog) -> None:
    """No descriptor or memory for a process: a first load fails, a restart is tried again; each failure is logged."""
    caplog.set_level("INFO", "penstock.serving")
    honest, faults = LocalPlacement.start, [OSError(24, "Too many open files")]

    async def start(*arguments):
        if faults:
            raise faults.pop()
        return await honest(*arguments)

    async def main() -> None:
        async with service(supervision=HASTY) as running:
            monkeypatch.setattr(LocalPlacement, "start", start)
            with pytest.raises(UnavailableError, match="Too many open files"):
                await running.models.load(str(versions[0]))
            backend = await running.models.load(str(versions[0]))
            faults.extend([OSError(11, "Resource temporarily unavailable"), RuntimeError("planted")])
            os.kill(pids(backend)[0], signal.SIGKILL)
            await until(lambda: not faults and backend.is_ready)
            assert len(await tokens_of(backend, [5], GREEDY)) == 12
            assert not running.primary._expected
            text = Metrics(running.models).text().decode()
            for cause, count in (("signal", 1), ("start", 2), ("hang", 0)):
                assert f'penstock:worker_restarts_total{{model_name="v0",cause="{cause}"}} {count}' in text
            with pytest.raises(FileAccessError):
                await running.models.update("v0", "/gone.psm")
            await running.models.update("v0", str(versions[1]))
            await running.models.unload("v0")
        told = [record.facts for record in caplog.records if "event" in getattr(record, "facts", {})]
        ready = [one for one in told if one["event"] == "worker_ready"]
        assert all(0 <= one["populate_s"] < one["load_s"] for one in ready)
        assert [(one["event"], one.get("cause"), one["model"]) for one in told] == [
            ("worker_ready", None, "v0"),
            ("worker_gone", "signal", "v0"),
            ("worker_gone", "start", "v0"),
            ("worker_gone", "start", "v0"),
            ("worker_ready", None, "v0"),
            ("update_failed", None, "v0"),
            ("worker_ready", None, "v0"),
            ("model_updated", None, "v0"),
            ("model_unloaded", None, "v0"),
        ]
        assert "SIGKILL" in told[1]["message"]
        pauses = [one["restart_in_s"] for one in told if one["event"] == "worker_gone"]
        assert pauses == [0.0, HASTY.min_pause_s, 2 * HASTY.min_pause_s], "the first one is replaced at once"

    asyncio.run(main())


@pytest.mark.parametrize(("num_workers", "num_kills"), [(2, 1), (1, 3)])
def test_a_worker_killed_while_it_loads_starts_again(versions, num_workers, num_kills) -> None:
    """It has no error of its own.  If that happens three times in a row, the load fails."""

    async def main() -> None:
        go = versions[0].with_suffix(".go")
        go.unlink(missing_ok=True)
        async with service(num_workers=num_workers, supervision=HASTY, command=faulty("waits")) as running:
            loading = asyncio.ensure_future(running.models.load(str(versions[0])))
            victims: set[int] = set()
            for _ in range(num_kills):
                await until(lambda: {one.pid for one in running.primary._planned} - victims)
                victims.add(victim := ({one.pid for one in running.primary._planned} - victims).pop())
                os.kill(victim, signal.SIGKILL)
            go.touch()
            if num_kills == 3:
                with raises(UnavailableError, match="SIGKILL"):
                    await loading
                return
            backend = await loading
            assert [worker.status for worker in backend.workers()] == ["ready", "ready"]
            assert backend.deaths() == {"signal": 0, "exit": 0, "hang": 0, "start": 1}

    asyncio.run(main())


def test_a_restart_does_not_wait_for_another_models_load(versions, monkeypatch) -> None:
    honest, let_go = LocalPlacement.start, asyncio.Event()

    async def start(placement, config, resources):
        if json.loads(config)["name"] == "slow":
            await let_go.wait()
        return await honest(placement, config, resources)

    async def main() -> None:
        async with service(supervision=HASTY) as running:
            backend = await running.models.load(str(versions[0]))
            monkeypatch.setattr(LocalPlacement, "start", start)
            loading = asyncio.ensure_future(running.models.load(str(versions[1]), "slow"))
            victim = pids(backend)[0]
            os.kill(victim, signal.SIGKILL)
            await until(lambda: victim not in pids(backend) and backend.is_ready)
            assert not loading.done()
            let_go.set()
            assert (await loading).is_ready

    asyncio.run(main())


def test_queued_requests_are_not_suspects(versions, monkeypatch) -> None:
    """A worker that runs two requests crashes with ten: the queued ones are sent again at the same time."""
    options = replace(OPTIONS, limits=replace(OPTIONS.limits, max_requests=2))

    async def main() -> None:
        versions[0].with_suffix(".first").unlink(missing_ok=True)
        async with service(supervision=HASTY, command=faulty("crowd"), options=options) as running:
            backend = await running.models.load(str(versions[0]))
            blamed, note = [], backend.crashes.note

            def noted(fingerprint, loss, **facts):
                blamed.extend([loss] * loss.was_running)
                note(fingerprint, loss, **facts)

            monkeypatch.setattr(backend.crashes, "note", noted)
            asked = [asyncio.ensure_future(tokens_of(backend, [number], GREEDY)) for number in range(CROWD)]
            (link,) = backend._group.connections
            await until(lambda: sum(request.answer.has_begun for request in link._open.values()) == 2)
            assert link.num_open == CROWD
            os.kill(link.pid, signal.SIGKILL)
            assert all(len(ids) == 12 for ids in await asyncio.gather(*asked))
            assert backend.lost_requests() == {"retried": CROWD - 2, "continued": 2, "failed": 0}
            assert len(blamed) == 4  # two that ran, two that may have come after them

    asyncio.run(main())


def test_an_urgent_request_that_crashes_workers_is_found(versions) -> None:
    """It arrives last and runs first: the requests that it overtook were only queued, and it is still refused."""
    options = replace(OPTIONS, limits=replace(OPTIONS.limits, max_requests=2))

    async def main() -> None:
        async with service(supervision=HASTY, command=faulty("scheduled"), options=options) as running:
            backend = await running.models.load(str(versions[0]))
            asked = [asyncio.ensure_future(tokens_of(backend, [number], GREEDY)) for number in range(8)]
            await until(lambda: backend.workers()[0].num_open == 8)
            assert await num_losses_until_refused(backend, [DEADLY], RequestOptions(priority=-100)) < 3
            await until(lambda: backend.deaths()["signal"] == 2)
            for outcome in await asyncio.gather(*asked, return_exceptions=True):
                assert isinstance(outcome, UnavailableError) or len(outcome) == 12

    asyncio.run(main())
