"""What goes wrong with workers and weights, seen over gRPC: every request has exactly one end, a right answer of one
version or a retriable error, and nothing is left.

``PENSTOCK_CHAOS=n`` repeats the storms n times (``make chaos``).
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import psutil
import pytest

from penstock.serving.admission import Admission
from penstock.serving.grpc.listener import GrpcListener
from penstock.serving.proto import oip_pb2 as pb
from penstock.serving.settings import GatewayLimits, GatewaySettings
from tests.support.grpc_client import SERVICE
from tests.support.http_service import SECONDS
from tests.support.worker_processes import (
    CALM,
    HASTY,
    IMPATIENT,
    SEEDED,
    Service,
    pids,
    service,
    still,
    switch_under,
    until,
    wait_for_causes,
)

CHAOS = int(os.environ.get("PENSTOCK_CHAOS", "1"))
PATIENT = GatewayLimits(body_s=SECONDS, write_s=SECONDS)
"""On a machine that stands still for half a minute a message may be late, and is no fault of its client's."""
IN_STREAM = 3
"""Requests of one stream, side by side."""


@asynccontextmanager
async def grpc_service(**named: Any) -> AsyncIterator[tuple[Service, GrpcListener, str]]:
    """A primary with workers, its gRPC gateway, and the address of that."""
    async with service(**named) as running:
        listener = GrpcListener(Admission(running.models, GatewaySettings(grpc_port=0, limits=PATIENT)))
        address = listener.open()
        serving = asyncio.ensure_future(listener.serve())
        try:
            yield running, listener, address
        finally:
            listener.stop(at_once=True)
            await serving
        assert listener.gateway.admission.num_open == 0


@dataclass
class Asked:
    """A request and what came of it."""

    number: int
    ids: list[int] = field(default_factory=list)
    versions: set[int] = field(default_factory=set)
    ends: list[str] = field(default_factory=list)
    """How it ended, each time that it did."""

    def message(self, name: str) -> bytes:
        found = pb.ModelInferRequest(id=name)
        one = found.inputs.add(name="input_ids", datatype="INT32", shape=[3])
        one.contents.int_contents.extend([self.number, 7, 9])
        found.parameters["max_tokens"].int64_param = SEEDED.max_tokens or 0
        found.parameters["temperature"].double_param = SEEDED.temperature
        found.parameters["seed"].int64_param = SEEDED.seed or 0
        found.parameters["ignore_eos"].bool_param = True
        found.parameters["cache_salt"].string_param = f"{random.random()}"  # none is blamed for another's fault
        for name in ("output_ids", "finish_reason"):
            found.outputs.add(name=name)
        return found.SerializeToString()

    def take(self, response: pb.ModelInferResponse) -> None:
        """All of an answer, or a piece."""
        raw_ids, reason = response.raw_output_contents
        self.ids += [int.from_bytes(raw_ids[at : at + 4], "little") for at in range(0, len(raw_ids), 4)]
        self.versions.add(int(response.model_version))
        if reason[4:]:
            self.ends.append(reason[4:].decode())


class Traffic:
    """Clients that ask again and again, every other one in streams, and look at what they get."""

    def __init__(self, address: str, expected: list[dict[int, list[int]]], num_clients: int = 4) -> None:
        self.expected, self.versions, self.num_lost = expected, set[int](), 0
        self.wrong: list[str] = []
        self.asked: dict[int, list[Asked]] = {}
        self.is_over = False
        """UNAVAILABLE ends a client: the service is about to stop."""
        self._channel = grpc.aio.insecure_channel(address)
        self._num_right = [0] * num_clients
        self._tasks = [asyncio.ensure_future(self._client(index)) for index in range(num_clients)]

    async def _client(self, index: int) -> None:
        rng, ask = random.Random(index), self._stream if index % 2 else self._unary
        while not self.wrong:
            asked = [Asked(rng.randrange(32)) for _ in range(IN_STREAM if index % 2 else 1)]
            self.asked[index] = asked
            try:
                code = await ask(asked)
            except grpc.aio.AioRpcError as error:
                # grpc.aio's client says this of a write to an RPC that has been refused already, not how it was.
                late = error.details() == "Internal error from Core"
                code = "UNAVAILABLE" if late else error.code().name
            is_over = self.is_over
            for one in asked:
                self._judge(index, one, code)
            if code != "OK":
                if is_over:
                    return
                await asyncio.sleep(0.01)

    async def _unary(self, asked: list[Asked]) -> str:
        data = await self._channel.unary_unary(SERVICE + "ModelInfer")(asked[0].message(""), timeout=SECONDS)
        asked[0].take(pb.ModelInferResponse.FromString(data))
        return "OK"

    async def _stream(self, asked: list[Asked]) -> str:
        stream = self._channel.stream_stream(SERVICE + "ModelStreamInfer")(timeout=SECONDS)
        for index, one in enumerate(asked):
            await stream.write(one.message(f"{index}"))
        await stream.done_writing()
        async for data in stream:
            found = pb.ModelStreamInferResponse.FromString(data)
            response = found.infer_response
            one = asked[int(response.id)]
            if one.ends:
                self.wrong.append(f"something came behind the end of {one}")
            if found.error_message:
                one.ends.append(response.parameters["code"].string_param)
            else:
                one.take(response)
            if response.parameters["triton_final_response"].bool_param != bool(one.ends):
                self.wrong.append(f"the last response is not marked, or another one is: {one}")
        return (await stream.code()).name

    def _judge(self, index: int, one: Asked, code: str) -> None:
        end = one.ends[0] if one.ends else code
        if len(one.ends) > 1 or end not in ("length", "UNAVAILABLE"):
            self.wrong.append(f"{one} ended with {code}")
        elif end == "UNAVAILABLE":
            self.num_lost += 1
        else:
            (version,) = one.versions
            self.versions.add(version)
            self._num_right[index] += 1
            if one.ids != self.expected[(version - 1) % 2][one.number]:
                self.wrong.append(f"{one} is not what version {version} answers")

    async def more(self) -> None:
        """Until each client got two more right answers, the second of which began after this was called."""
        before = [*self._num_right]
        wanted = [2 * IN_STREAM if index % 2 else 2 for index in range(len(before))]
        pairs = lambda: zip(self._num_right, before, wanted, strict=True)  # noqa: E731
        try:
            await until(lambda: self.wrong or all(now >= then + more for now, then, more in pairs()))
        except AssertionError:
            # One that is "stopped" was stopped from outside.
            workers = [(one.pid, one.status()) for one in psutil.Process().children()]
            told = f"some wait: {self.asked}, lost {self.num_lost}, {[*pairs()]}, workers {workers}"
            raise AssertionError(told) from None
        assert not self.wrong, self.wrong

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        found = await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._channel.close()
        assert not self.wrong, self.wrong
        assert not [one for one in found if isinstance(one, Exception)], found


@pytest.mark.long
def test_killed_workers_are_replaced_under_load_over_grpc(versions, expected, monkeypatch) -> None:
    wait_for_causes(monkeypatch)

    async def main() -> None:
        async with grpc_service(num_workers=2, supervision=HASTY) as (running, _, address):
            backend = await running.models.load(str(versions[0]))
            traffic = Traffic(address, expected[:1] * 2)
            for _ in range(3 * CHAOS):
                await traffic.more()
                victim = random.choice(pids(backend))
                os.kill(victim, signal.SIGKILL)
                await until(lambda victim=victim: victim not in pids(backend))
                await until(lambda: sum(worker.status == "ready" for worker in backend.workers()) == 2)
            await traffic.more()
            await traffic.stop()
            assert backend.deaths() == {"signal": 3 * CHAOS, "exit": 0, "hang": 0, "start": 0}
            await until(lambda: all(worker.num_open == 0 for worker in backend.workers()))

    asyncio.run(main())


@pytest.mark.long
def test_a_stopped_worker_is_replaced_under_load_over_grpc(versions, expected, monkeypatch) -> None:
    wait_for_causes(monkeypatch)

    async def main() -> None:
        async with grpc_service(supervision=IMPATIENT) as (running, _, address):
            backend = await running.models.load(str(versions[0]))
            traffic = Traffic(address, expected[:1] * 2)
            await traffic.more()
            victim = psutil.Process(pids(backend)[0])
            await until(lambda: not still(victim))
            await traffic.more()
            await traffic.stop()
            assert pids(backend) != [victim.pid]

    asyncio.run(main())


def test_new_weights_under_traffic_over_grpc_cost_no_request(versions, expected) -> None:
    """Every answer is from one version, whole; no request fails."""

    async def main() -> None:
        async with grpc_service(supervision=CALM) as (running, _, address):
            await running.models.load(str(versions[0]), "model")
            await switch_under(Traffic(address, expected), running, versions, 20 * CHAOS if CHAOS > 1 else 3)

    asyncio.run(main())


async def read_on(stream: Any, one: Asked) -> None:
    """Take pieces until the stream ends."""
    while (data := await stream.read()) is not grpc.aio.EOF:
        one.take(pb.ModelStreamInferResponse.FromString(data).infer_response)


def test_a_drain_under_traffic_over_grpc_cuts_no_answer(versions, expected) -> None:
    """What was taken ends whole, in streams that are open, too; what comes later is refused to be sent elsewhere."""

    async def main() -> None:
        async with grpc_service(supervision=CALM) as (running, listener, address):
            await running.models.load(str(versions[0]))
            traffic = Traffic(address, expected[:1] * 2)
            await traffic.more()
            idle = grpc.aio.insecure_channel(address)
            stream = idle.stream_stream(SERVICE + "ModelStreamInfer")(timeout=SECONDS)
            await stream.write(Asked(1).message("0"))
            first = pb.ModelStreamInferResponse.FromString(await stream.read())
            traffic.is_over = True
            await running.models.close()
            listener.stop()
            one = Asked(1)
            one.take(first.infer_response)
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await read_on(stream, one)
            assert error.value.code() is grpc.StatusCode.UNAVAILABLE
            assert (one.ids, one.ends) == (expected[0][1], ["length"])
            await until(lambda: all(task.done() for task in traffic._tasks))
            await traffic.stop()
            await idle.close()

    asyncio.run(main())


def test_a_passed_deadline_is_not_logged_as_an_error(caplog):
    """gRPC's core logs a message that it could not send as an error."""
    from penstock.serving.grpc import listener as grpc_listener

    log = logging.getLogger("grpc._cython.cygrpc")
    assert grpc_listener._is_worth_a_line in log.filters
    caplog.set_level(logging.INFO)
    log.error("ExecuteBatchError raised in core by servicer method [/inference.GRPCInferenceService/ModelInfer]")
    log.error("Unexpected [ValueError] raised by servicer method [/inference.GRPCInferenceService/ModelInfer]")
    assert [record.getMessage()[:10] for record in caplog.records] == ["Unexpected"]
