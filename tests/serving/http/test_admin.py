"""The admin listener: models come, change and go through a socket of its owner's, while the public listener answers."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import signal
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from penstock.api_errors import RefusalError
from penstock.errors import FileAccessError, InvalidArgumentError
from penstock.serving.call import Call
from penstock.serving.http.unix_socket import UnixSocket
from penstock.serving.metrics import Metrics
from penstock.serving.settings import GatewaySettings
from tests.support.admin_socket import admin, call
from tests.support.errors import raises
from tests.support.serve_command import ask, serving
from tests.support.worker_processes import DEMO, ENDLESS, OPTIONS, faulty, pids, service, until


def children() -> set[psutil.Process]:
    """This process's."""
    return {*psutil.Process().children()}


def test_models_change_while_the_public_port_answers(tmp_path: Path) -> None:
    path = tmp_path / "admin.sock"
    with serving(DEMO, "--admin-socket", path, "--max-requests", "4", "--threads", "1", cwd=tmp_path) as running:
        process, url, said = running
        assert f"unloading models: unix:{path}" in said
        assert path.stat().st_mode & 0o777 == 0o600
        status, loaded = call(path, "POST", "/admin/models/load", {"path": str(DEMO), "name": "second"})
        assert (status, loaded["id"], loaded["state"], loaded["version"]) == (200, "second", "ready", 1)
        answers = [
            ask(url, "/v1/completions", {"model": name, "prompt": "import", "max_tokens": 8, "temperature": 0})
            for name in ("demo", "second")
        ]
        assert answers[0]["choices"] == answers[1]["choices"]
        status, updated = call(path, "POST", "/admin/models/second/update", {"path": str(DEMO)})
        assert (status, updated["version"], updated["state"]) == (200, 2, "ready")
        status, found = call(path, "GET", "/admin/models")
        assert [(one["id"], one["version"]) for one in found["models"]] == [("demo", 1), ("second", 2)]
        assert found["models"][0]["latency"]["e2e_s"] is not None, "those of the public listener"
        assert call(path, "POST", "/admin/models/second/unload") == (200, {"id": "second", "state": "unloaded"})
        assert [one["id"] for one in ask(url, "/v1/models")["data"]] == ["demo"]
        assert len(psutil.Process(process.pid).children()) == 1
        status, told = call(path, "GET", "/openapi.json")
        assert set(told["paths"]) == {
            "/admin/models", "/admin/models/load", "/admin/models/{model}/update", "/admin/models/{model}/unload",
            "/admin/models/{model}/drain", "/admin/models/{model}/profile", "/openapi.json",
        }  # fmt: skip
        for method, route in (("GET", "/admin/models"), ("POST", "/admin/models/demo/unload")):
            connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=600)
            connection.request(method, route)
            assert connection.getresponse().status == 404, "not at the public listener"
            connection.close()
        process.send_signal(signal.SIGTERM)
        assert process.wait(600) == 0
        assert {one.name for one in tmp_path.iterdir()} == {"log"}


def test_refusals_by_name(tmp_path: Path) -> None:
    (tmp_path / "bad.psm").write_bytes(DEMO.read_bytes()[:5000])
    (tmp_path / "notes.txt").write_text("no model")

    async def main() -> None:
        async with service() as running, admin(running.models, tmp_path / "admin.sock") as (asked, _):

            async def refused(route: str, **body: object) -> tuple[int, str, str | None]:
                status, answer = await asked("POST", f"/admin/models/{route}", body or None)
                return status, answer["error"]["code"], answer["error"]["param"]

            wrong = {"path": str(tmp_path / "bad.psm")}
            assert await refused("load", **wrong) == (400, "invalid_model", "path")
            assert await refused("load", path=str(tmp_path / "none.psm")) == (400, "invalid_model", "path")
            assert await refused("load", path=str(tmp_path / "notes.txt")) == (400, "invalid_model", "path")
            assert await refused("load", path="demo.psm") == (400, "invalid_value", "path")
            assert await refused("load", path=str(DEMO), name="a/b") == (400, "invalid_value", "name")
            assert await refused("load", name="a") == (400, "missing_required_parameter", "path")
            assert await refused("demo/update", path=str(DEMO)) == (404, "model_not_found", "model")
            assert await refused("demo/unload") == (404, "model_not_found", "model")
            assert running.models.list() == []
            await running.models.load(str(DEMO))
            status, answer = await asked("POST", "/admin/models/load", {"path": str(DEMO)})
            assert status == 400
            assert "'demo' is taken" in answer["error"]["message"]
            assert await refused("demo/update", **wrong) == (400, "invalid_model", "path")
            status, found = await asked("GET", "/admin/models")
            assert [(one["state"], one["version"]) for one in found["models"]] == [("ready", 1)]
            assert "bad.psm" in found["models"][0]["error"]

    asyncio.run(main())


def test_a_plan_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    options = replace(OPTIONS, limits=replace(OPTIONS.limits, num_pages=2**26))

    async def main() -> None:
        async with service(options=options) as running, admin(running.models, tmp_path / "admin.sock") as (asked, _):
            status, answer = await asked("POST", "/admin/models/load", {"path": str(DEMO)})
            assert (status, answer["error"]["code"]) == (503, "out_of_memory")
            assert "but only" in answer["error"]["message"]
            assert running.models.list() == []

    asyncio.run(main())


def test_a_loading_model_does_not_change_the_default(tmp_path: Path) -> None:
    """Who names no model means the one that is there, not the one that may come."""
    model, other, go = tmp_path / "demo.psm", tmp_path / "other.psm", tmp_path / "demo.go"
    for path in (model, other):
        path.symlink_to(DEMO)
    go.touch()

    async def main() -> None:
        async with service(command=faulty("waits")) as running:
            models = running.models
            asked = Call("id", {}, {}, models, GatewaySettings(), Metrics(models))
            await models.load(str(model))
            loading = asyncio.ensure_future(models.load(str(other)))
            await until(lambda: len(models.list()) == 2)
            assert asked.model(None).name == "demo"
            (tmp_path / "other.go").touch()
            await loading
            with raises(RefusalError, param="model"):
                asked.model(None)

    asyncio.run(main())


def test_a_client_that_leaves_leaves_no_half_of_a_model(tmp_path: Path) -> None:
    model, go = tmp_path / "demo.psm", tmp_path / "demo.go"
    model.symlink_to(DEMO)

    async def main() -> None:
        path = tmp_path / "admin.sock"
        async with service(command=faulty("waits")) as running, admin(running.models, path) as (asked, changes):
            models, at_first = running.models, children()

            async def leave_while_it_loads(route: str, body: dict[str, str]) -> None:
                before = children()
                _, writer = await asyncio.open_unix_connection(str(path))
                data = json.dumps(body)
                writer.write(
                    f"POST /admin/models/{route} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                    f"Content-Length: {len(data)}\r\n\r\n{data}".encode()
                )
                await until(lambda: children() - before)  # it waits: it cannot be quicker than we are
                writer.close()
                await writer.wait_closed()
                await until(lambda: not changes._tasks)

            await leave_while_it_loads("load", {"path": str(model)})
            assert models.list() == []
            assert children() == at_first
            go.touch()
            backend = await models.load(str(model))
            before = pids(backend)
            go.unlink()
            await leave_while_it_loads("demo/update", {"path": str(model)})
            assert (pids(backend), backend.state, backend.card.version) == (before, "ready", 1)
            go.touch()
            assert (await asked("POST", "/admin/models/demo/update", {"path": str(model)}))[1]["version"] == 2
            assert len(children() - at_first) == 1

    asyncio.run(main())


def test_one_change_of_a_model_at_a_time_and_none_at_the_end(tmp_path: Path) -> None:
    model = tmp_path / "demo.psm"
    model.symlink_to(DEMO)

    async def main() -> None:
        path = tmp_path / "admin.sock"
        async with service(command=faulty("waits+slow")) as running, admin(running.models, path) as (asked, changes):
            loading = asyncio.ensure_future(running.models.load(str(model)))
            before = children()
            await until(lambda: children() - before)
            status, answer = await asked("POST", "/admin/models/demo/unload")
            assert (status, answer["error"]["code"]) == (503, "unavailable")
            assert "loading" in answer["error"]["message"]
            model.with_suffix(".go").touch()
            backend = await loading
            answering = await backend.submit([5, 6], ENDLESS)
            unloading = asyncio.ensure_future(asked("POST", "/admin/models/demo/unload"))
            await until(lambda: backend.state == "draining")
            status, answer = await asked("POST", "/admin/models/demo/update", {"path": str(model)})
            assert (status, answer["error"]["code"]) == (503, "unavailable")
            await changes.close()
            assert (await unloading)[0] == 503
            status, answer = await asked("POST", "/admin/models/load", {"path": str(DEMO), "name": "more"})
            assert (status, answer["error"]["code"]) == (503, "unavailable")
            await answering.aclose()

    asyncio.run(main())


def test_a_worker_is_drained_and_replaced(tmp_path: Path) -> None:
    """Its open answer goes on in the worker that takes its place, whose tokens follow those of the first."""

    async def main() -> None:
        path = tmp_path / "admin.sock"
        async with service(command=faulty("slow")) as running, admin(running.models, path) as (asked, _):
            backend = await running.models.load(str(DEMO))
            (first,) = [worker.name for worker in backend.workers()]

            async def drain(worker: str, status: int = 200, **body: object) -> dict:
                found, answer = await asked("POST", "/admin/models/demo/drain", {"worker": worker, **body})
                assert found == status, answer
                return answer

            refused = (await drain("demo-none", 404))["error"]
            assert (refused["param"], refused["code"]) == ("worker", "worker_not_found")
            assert first in refused["message"]
            refused = (await drain(first, 400))["error"]
            assert refused["param"] == "worker"
            assert "only ready worker" in refused["message"]

            answer = await backend.submit([5, 6], ENDLESS)
            events = aiter(answer)
            await anext(events)
            (second,) = [worker["name"] for worker in (await drain(first, replace=True))["workers"]]
            assert second != first
            assert [(worker.name, worker.num_open) for worker in backend.workers()] == [(second, 1)]
            await anext(events)
            await answer.aclose()
            backend._group.resize(2)
            await until(lambda: len(pids(backend)) == 2)
            assert [worker["name"] for worker in (await drain(second))["workers"]] != [second]
            assert len(pids(backend)) == 1
            assert sum(backend.deaths().values()) == 0

    asyncio.run(main())


def test_a_socket_replaces_no_other_file(tmp_path: Path) -> None:
    path = tmp_path / "a.sock"
    path.write_text("mine")
    with raises(InvalidArgumentError, param="path", match="not a socket"):
        UnixSocket(path)
    assert path.read_text() == "mine"
    path.unlink()
    first = UnixSocket(path)
    with raises(InvalidArgumentError, param="path", match="in use"):
        UnixSocket(path)
    first.socket.close()  # as one that was killed leaves it
    second = UnixSocket(path)
    assert path.stat().st_mode & 0o777 == 0o600
    path.unlink()
    path.write_text("another's")
    second.close()
    assert path.read_text() == "another's"


def test_a_socket_lies_in_a_folder_of_its_owners(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    os.chmod(tmp_path / "open", 0o777)  # noqa: S103 - to be refused
    with raises(InvalidArgumentError, param="path", match="other users"):
        UnixSocket(tmp_path / "open" / "a.sock")
    (tmp_path / "file").touch()
    with raises(InvalidArgumentError, param="path", match="expected a folder"):
        UnixSocket(tmp_path / "file" / "a.sock")
    for wrong in (tmp_path / "none" / "a.sock", tmp_path / ("a" * 120)):
        with pytest.raises(FileAccessError):
            UnixSocket(wrong)
    assert {one.name for one in tmp_path.iterdir()} == {"open", "file"}
