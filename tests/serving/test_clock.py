"""A clock that is set by an hour, back and forth: deadlines, heartbeats and queues go by the one that only goes on."""

from __future__ import annotations

import asyncio
import itertools
import time
from pathlib import Path

import pytest

import penstock
from penstock.engine.options import RequestOptions
from penstock.errors import DeadlineError
from penstock.processes.supervision import SupervisionPolicy
from penstock.serving.http.app import make_app
from penstock.serving.http.listener import Listener
from penstock.serving.settings import GatewayLimits, GatewaySettings
from tests.support.both_listeners import Clients
from tests.support.worker_processes import DEMO, ENDLESS, SEEDED, faulty, service, tokens_of

SHOWN = {
    "checkpoint/folder.py",
    "cluster/placement/certificate.py",
    "llm/local_backend.py",
    "logs.py",
    "quant/folder.py",
    "runtime/cache.py",
    "runtime/temporary_folder.py",
    "runtime/verify.py",
    "servables/lifecycle/loaded_version.py",
    "serving/metrics.py",
    "serving/openai/pooling.py",
    "serving/openai/rendering.py",
    "serving/traces.py",
    "text/template_sandbox.py",
}
"""Files that ask for the time of day: to show it, to compare it with that of files, to date a certificate."""


def test_wall_clock_time_is_only_displayed() -> None:
    root = Path(penstock.__file__).parent
    asking = {
        str(path.relative_to(root))
        for path in root.rglob("*.py")
        for text in [path.read_text()]
        if any(name in text for name in ("time.time(", "time.time_ns(", "import datetime", "UTC, datetime"))
    }
    assert asking <= SHOWN, "a deadline, a wait or an age goes by time.monotonic"


def test_an_hour_forth_and_back_ends_no_request(monkeypatch) -> None:
    """In the primary and in its worker, at every look at the clock."""

    async def main() -> None:
        async with service(command=faulty("clock"), supervision=SupervisionPolicy(hang_s=600.0)) as running:
            backend = await running.models.load(str(DEMO))
            own = RequestOptions(deadline_s=1800.0)
            expected = await tokens_of(backend, [5, 7, 9], SEEDED, own)
            assert len(expected) == SEEDED.max_tokens
            steps = itertools.cycle((3600.0, -3600.0))
            honest = time.time
            monkeypatch.setattr(time, "time", lambda: honest() + next(steps))
            monkeypatch.setattr(time, "time_ns", lambda: int(time.time() * 1e9))
            assert await tokens_of(backend, [5, 7, 9], SEEDED, own) == expected
            with pytest.raises(DeadlineError):
                await tokens_of(backend, [5, 7, 9], ENDLESS, RequestOptions(deadline_s=0.05))
            limits = GatewayLimits(request_s=1800.0, body_s=1800.0, write_s=1800.0)
            gateway = make_app(running.models, GatewaySettings(port=0, limits=limits))
            listener = Listener(gateway, gateway.settings)
            clients = Clients(running.models, listener, listener.open(), "127.0.0.1:1")
            serving = asyncio.ensure_future(listener.serve())
            assert await clients.http(timeout=1700) == b"200"
            assert await clients.http(max_tokens=4000, timeout=0.05) == b"504"
            assert backend.is_ready
            assert sum(backend.deaths().values()) == 0
            await clients.channel.close()
            listener.stop(at_once=True)
            await serving

    asyncio.run(main())
