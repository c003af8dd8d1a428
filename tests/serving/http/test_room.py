"""A request that every queue is too full for is refused before it is read, with a hint when to come back."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc

from tests.support.both_listeners import both_listeners
from tests.support.grpc_client import SERVICE
from tests.support.worker_processes import DEMO, service


async def trailers(channel: Any, method: str, data: bytes) -> tuple[str, dict[str, str]]:
    try:
        await channel.unary_unary(SERVICE + method)(data)
    except grpc.aio.AioRpcError as error:
        return error.code().name, dict(error.trailing_metadata() or ())
    return "OK", {}


def test_a_full_queue_refuses_what_it_did_not_read() -> None:
    """What is wrong in the message is found once there is room again."""

    async def main() -> None:
        async with both_listeners() as (clients, backend):
            (link,) = backend._connections
            wrong: dict[str, Any] = {"temperature": -1}
            most, link.max_open = link.max_open, -1  # as full as can be
            assert not backend.has_room
            assert await clients.http(**wrong) == b"429"
            code, found = await trailers(clients.channel, "ModelInfer", b"\xff")
            assert (code, found["error-code"], found["retry-after"]) == ("RESOURCE_EXHAUSTED", "queue_full", "1")
            assert await trailers(clients.channel, "ServerLive", b"") == ("OK", {})
            assert await clients.stream() == "RESOURCE_EXHAUSTED"
            link.max_open = most
            assert await clients.http(**wrong) == b"400"
            assert (await trailers(clients.channel, "ModelInfer", b"\xff"))[0] == "INVALID_ARGUMENT"
            assert await clients.http() == b"200"

    asyncio.run(main())


def test_room_at_one_model_is_room() -> None:
    """Which model is asked is known once the request is read."""

    async def main() -> None:
        async with both_listeners() as (clients, backend):
            await clients.models.load(str(DEMO), "other")
            (link,) = backend._connections
            link.max_open = -1
            assert await clients.http(model=backend.name, temperature=-1) == b"400"
            assert await clients.http(model=backend.name) == b"429"
            assert await clients.http(model="other") == b"200"

    asyncio.run(main())


def test_a_draining_service_answers_503_not_429() -> None:
    async def main() -> None:
        async with both_listeners() as (clients, backend):
            (link,) = backend._connections
            link.max_open = -1
            clients.models.is_draining = True
            assert await clients.http() == b"503"
            clients.models.is_draining = False
            assert await clients.http() == b"429"

    asyncio.run(main())


def test_a_model_without_workers_is_not_full() -> None:
    """It is refused as not ready."""

    async def main() -> None:
        async with service() as running:
            backend = await running.models.load(str(DEMO))
            assert backend.has_room
            await backend.stop()
            assert backend.has_room

    asyncio.run(main())
