"""Whole answers over gRPC that nobody takes: what they hold is bounded, and others are answered beside them."""

import asyncio
import logging
import socket
from contextlib import suppress

import grpc
import pytest

from penstock.serving.grpc.send_budget import SendBudget
from penstock.serving.proto import oip_pb2 as pb
from penstock.serving.settings import GatewayLimits, GatewaySettings
from tests.support.grpc_client import SERVICE, call, request
from tests.support.http_service import SECONDS, until


def test_responses_wait_for_the_send_budget_in_order():
    async def work():
        send_budget, given, leave = SendBudget(max_answers=2, max_bytes=100), [], {}

        async def answer(name, size):
            leave[name] = asyncio.Event()
            await send_budget.add(size, SECONDS)
            given.append(name)
            await leave[name].wait()

        async def begin(name, size):
            tasks.append(asyncio.create_task(answer(name, size)))
            for _ in range(5):
                await asyncio.sleep(0)

        tasks = []
        await begin("larger than all", 1000)
        assert (given, send_budget.has_room) == (["larger than all"], False)
        await begin("second", 60)
        await begin("third", 40)
        await begin("small", 1)
        assert given == ["larger than all"]
        leave["larger than all"].set()
        for _ in range(10):
            await asyncio.sleep(0)
        assert given == ["larger than all", "second", "third"]
        assert (send_budget.num_answers, send_budget.num_bytes, send_budget.has_room) == (2, 100, False)
        tasks[1].cancel()
        for _ in range(10):
            await asyncio.sleep(0)
        assert given[-1] == "small"
        with pytest.raises(TimeoutError):
            await send_budget.add(100, 0.01)
        for one in leave.values():
            one.set()
        with suppress(asyncio.CancelledError):
            await asyncio.gather(*tasks)
        await asyncio.sleep(0)
        assert (send_budget.num_answers, send_budget.num_bytes, send_budget.has_room) == (0, 0, True)

    asyncio.run(work())


def frame(kind, flags, stream, payload):
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload


def field(name, value):
    return b"\0" + bytes((len(name),)) + name + bytes((len(value),)) + value


def asks(stream, authority):
    """Frames of a request that has an answer, on a stream."""
    headers = {b":method": b"POST", b":scheme": b"http", b":path": f"{SERVICE}ServerMetadata".encode()}
    headers |= {b":authority": authority.encode(), b"content-type": b"application/grpc", b"te": b"trailers"}
    block = b"".join(field(name, value) for name, value in headers.items())
    return frame(1, 4, stream, block) + frame(0, 1, stream, bytes(5))


def test_slow_readers_hold_a_limited_number_of_responses(serve, caplog):
    """Beyond those each has the clock that every stream has; who takes what he asked for notices nothing."""
    caplog.set_level(logging.INFO, "penstock.serving")
    service = serve(settings=GatewaySettings(grpc_port=0, limits=GatewayLimits(write_s=0.3)))
    send_budget = service.grpc.gateway.send_budget
    send_budget._max_answers = 2
    host, _, port = service.grpc_address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=SECONDS) as own:
        own.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0, b"\0\x04" + bytes(4)))  # a window of 0 bytes
        own.sendall(asks(1, service.grpc_address) + asks(3, service.grpc_address))
        until(lambda: send_budget.num_answers == 2)
        assert not send_budget.has_room
        own.sendall(asks(5, service.grpc_address))
        until(lambda: [one for one in caplog.records if one.facts.get("gone") == "slow reader"])
        for _ in range(3):
            found = pb.ServerMetadataResponse.FromString(call(service, SERVICE + "ServerMetadata", b""))
            assert found.name == "penstock"
        assert send_budget.num_answers == 2
        own.sendall(frame(4, 0, 0, b"\0\x04" + (1 << 16).to_bytes(4, "big")))  # he reads on, and gets what he asked for
        until(lambda: send_budget.num_answers == 0)
        assert b"penstock" in own.recv(1 << 16)
        own.sendall(frame(4, 0, 0, b"\0\x04" + bytes(4)) + asks(7, service.grpc_address))
        until(lambda: send_budget.num_answers == 1)
    until(lambda: send_budget.num_answers == 0, "the end of what is left of a client who has gone")
    call(service, SERVICE + "ServerMetadata", b"")


def test_a_response_that_never_fits_the_budget_is_dropped(serve, monkeypatch):
    service = serve(settings=GatewaySettings(grpc_port=0, limits=GatewayLimits(write_s=0.2)))

    async def add(self, size, seconds):
        raise TimeoutError

    monkeypatch.setattr(SendBudget, "add", add)
    with pytest.raises(grpc.RpcError) as error:
        call(service, SERVICE + "ModelInfer", request().SerializeToString())
    assert error.value.code() is grpc.StatusCode.ABORTED
    until(lambda: service.num_open == 0)
    monkeypatch.undo()
    call(service, SERVICE + "ModelInfer", request().SerializeToString())
