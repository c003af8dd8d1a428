"""The placement on a cluster, without one: silent nodes are avoided, and the loss of the head is reported in time."""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from penstock.cluster.placement import ray_placement
from penstock.cluster.placement.placement import Resources
from penstock.cluster.placement.ray_placement import RayPlacement
from penstock.errors import UnavailableError
from tests.support.waiting import eventually


class FakeCluster(RayPlacement):
    """A placement whose driver is the test: ``sent`` has the commands."""

    def __init__(self) -> None:
        super().__init__("127.0.0.1:1", Path("token"))
        self.sent: list[dict[str, Any]] = []

    async def _join(self) -> None:
        pass

    def send(self, command: dict[str, Any]) -> None:
        self.sent.append(command)

    async def place(self, **answer: object) -> tuple[object, list[str]]:
        """Start a group that gets this answer; return it, and the nodes that it had to avoid."""
        starting = asyncio.ensure_future(self.start("{}", Resources()))
        await asyncio.sleep(0)
        command = self.sent[-1]
        self._on_message({"name": command["name"], **answer})
        return await starting, command["options"]["without"]


def test_a_node_that_does_not_answer_is_avoided(monkeypatch) -> None:
    monkeypatch.setattr(ray_placement, "_KILL_S", 0.01)

    async def main() -> None:
        cluster = FakeCluster()
        there = {"pid": 1, "node": "10.0.0.2"}
        group, without = await cluster.place(**there, node_id="n1")
        assert without == []
        group.kill()
        assert await group.wait() is None
        group, without = await cluster.place(**there, node_id="n2")
        assert without == ["n1"]
        with pytest.raises(UnavailableError, match="no process there"):
            await cluster.place(error="node 10.0.0.3: Ray started no process there within 30 s", node_id="n3")
        with pytest.raises(UnavailableError, match="no node has"):
            await cluster.place(error="no node has 1 x 1 cores", node_id="")
        group, without = await cluster.place(**there, node_id="n2")
        assert without == ["n1", "n3"]
        monkeypatch.setattr(ray_placement, "_AVOID_S", -1.0)
        cluster._on_message({"name": group.name, "exit": None})
        cluster.avoid("n1")
        cluster.avoid("n3")
        assert (await cluster.place(**there, node_id="n1"))[1] == [], "only for a while"

    asyncio.run(main())


def test_a_silent_head_is_reported(monkeypatch) -> None:
    """Its queue of connections is full, so that the kernel drops further ones, as if it had lost its network."""
    told: list[str] = []
    monkeypatch.setattr(ray_placement, "tell", lambda event, *rest, **facts: told.append(event))

    async def main() -> None:
        loop = asyncio.get_running_loop()
        with socket.create_server(("127.0.0.1", 0), backlog=0) as head:
            head.setblocking(False)
            placement = RayPlacement(f"127.0.0.1:{head.getsockname()[1]}", Path("token"))
            watching = asyncio.ensure_future(placement._watch_head())
            probe, _ = await loop.sock_accept(head)  # the head answers, and is lost right after that
            probe.close()
            waiting = [socket.socket() for _ in range(4)]
            for each in waiting:
                each.setblocking(False)
                with suppress(BlockingIOError):
                    each.connect(head.getsockname())
            await eventually(lambda: told)
            assert told[0] == "cluster_lost"
            watching.cancel()
            for each in waiting:
                each.close()

    asyncio.run(main())
