"""The profile of a running service: recorded steps, the times of requests, and refusals by name."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path
from threading import Event, Thread

import pytest

from penstock.bench.charts.roofline import draw_roofline
from penstock.bench.charts.timeline import draw_timeline
from penstock.bench.charts.trace import chrome_trace
from penstock.bench.live_profile import report_from
from penstock.cli.main import main as penstock
from penstock.engine.params import SamplingParams
from tests.support.admin_socket import admin
from tests.support.serve_command import ask, serving
from tests.support.worker_processes import DEMO, ENDLESS, pids, service

PROFILE = "/admin/models/demo/profile"
GREEDY = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)


async def ids_of(backend) -> list[int]:
    async with await backend.submit(list(range(5, 45)), GREEDY) as answer:
        return [token async for delta in answer for token in delta.token_ids]


def test_steps_and_requests_are_recorded(tmp_path: Path) -> None:
    async def main() -> None:
        async with service() as running, admin(running.models, tmp_path / "admin.sock") as (asked, _):
            backend = await running.models.load(str(DEMO))
            before = await ids_of(backend)
            endless = await backend.submit([5, 6], ENDLESS)
            profiling = asyncio.ensure_future(asked("POST", PROFILE, {"steps": 6, "seconds": 600, "limits": True}))
            while not profiling.done():  # several steps of each kind run meanwhile
                assert await ids_of(backend) == before, "recording changes no token"
            await endless.aclose()
            status, found = await profiling
            assert status == 200, found
            report = report_from(found)
            assert sum(phase.passes for phase in report.phases) == 6
            assert {phase.phase for phase in report.phases} <= {"prefill", "mixed", "decode"}
            for phase in report.phases:
                total = sum(row.seconds for row in phase.kinds) + sum(phase.between.values())
                assert total == pytest.approx(phase.wall_s, rel=1e-6)
                assert phase.seen >= phase.passes
                assert all(row.limit for row in phase.kinds if row.num_bytes)
            assert "svg" in draw_roofline(report, "demo")
            assert "svg" in draw_timeline(report, "demo")
            assert any(event["name"] == "step 0" for event in chrome_trace(report)["traceEvents"])
            await asked("POST", "/admin/models/demo/unload")

    asyncio.run(main())


def test_a_profile_is_refused_or_ended_by_name(tmp_path: Path) -> None:
    async def main() -> None:
        async with service() as running, admin(running.models, tmp_path / "admin.sock") as (asked, _):
            backend = await running.models.load(str(DEMO))

            async def refused(**body: object) -> tuple[int, str, str | None]:
                status, answer = await asked("POST", PROFILE, body)
                return status, answer["error"]["code"], answer["error"]["param"]

            assert await refused(steps=0) == (400, "invalid_value", "steps")
            assert await refused(seconds=0) == (400, "invalid_value", "seconds")
            assert await refused(worker="none") == (404, "worker_not_found", "worker")
            status, found = await asked("POST", PROFILE, {"seconds": 0.01})
            assert (status, found["phases"], found["requests"]) == (200, [], [])
            assert found["worker"] == backend.workers()[0].name
            waiting = asyncio.ensure_future(running.models.profile("demo", _settings(), ""))
            await asyncio.sleep(0)
            assert (await refused())[0] == 503
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            waiting = asyncio.ensure_future(running.models.profile("demo", _settings(), ""))
            await asyncio.sleep(0)
            (pid,) = pids(backend)
            os.kill(pid, signal.SIGKILL)
            (error,) = await asyncio.gather(waiting, return_exceptions=True)
            assert error.code == "unavailable"

    asyncio.run(main())


def test_a_url_is_profiled_with_an_admin_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys, others = tmp_path / "admin-keys", tmp_path / "other-keys"
    for file in (keys, others):
        file.touch(0o600)
        file.write_text(f"# of {file.name}\n{file.name}-of-16-characters\n")
    is_over = Event()
    options = ("--admin-key-file", keys, "--threads", "1", "--max-seconds", "300")
    with serving(DEMO, *options, cwd=tmp_path) as (_, url, _):

        def client() -> None:
            while not is_over.is_set():
                ask(url, "/v1/completions", {"prompt": "import", "max_tokens": 8, "temperature": 0})

        traffic = Thread(target=client)
        traffic.start()
        try:
            command = ["profile", "demo", "--service", url, "--steps", "4", "--timeline", str(tmp_path / "steps.svg")]
            assert penstock([*command, "--admin-key-file", str(keys), "--seconds", "296"]) == 2
            assert "--max-seconds" in capsys.readouterr().err, "its response would end before its report"
            assert penstock([*command, "--admin-key-file", str(others)]) == 1
            assert "--admin-key-file" in capsys.readouterr().err
            status = penstock([*command, "--admin-key-file", str(keys), "--seconds", "295"])
            text, errors = capsys.readouterr()
            assert status == 0, errors
            assert " in worker demo-1\n" in text
            assert "of its limit" not in text, "no column without values"
            assert penstock([*command, "--admin-key-file", str(keys), "--limits", "--json"]) == 0
            found = json.loads(capsys.readouterr().out)
        finally:
            is_over.set()
            traffic.join()
    assert found["worker"] == "demo-1"
    assert sum(phase["passes"] for phase in found["phases"]) == 4
    assert all(row["limit"] for phase in found["phases"] for row in phase["kinds"] if row["num_bytes"])
    assert "svg" in (tmp_path / "steps.svg").read_text()


def _settings():
    from penstock.llm.backend import ProfileSettings

    return ProfileSettings(100, 600.0)


@pytest.mark.parametrize(
    ("options", "param"),
    [(("--service", "http://localhost:8000"), "admin-key-file"), (("--service", "ftp://localhost"), "service"),
     (("--service", "a", "--admin-key-file", "b"), "admin-key-file"), (("--service", "a", "--batch", "2"), "batch"),
     (("--seconds", "3"), "seconds")],
)  # fmt: skip
def test_options_that_do_not_go_together_are_refused(options: tuple[str, ...], param: str, capsys) -> None:
    assert penstock(["profile", "demo", *options]) == 2
    assert f"--{param}" in capsys.readouterr().err
