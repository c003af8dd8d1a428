"""The log of servables: the request of a failed stage, invalid versions, and slow loads."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from penstock.errors import InvalidArgumentError, InvalidFileError, UnavailableError
from penstock.servables.api.specs import parse_spec
from penstock.servables.lifecycle import servable_load
from penstock.servables.lifecycle.repository import ServableRepository
from penstock.servables.process import worker_main
from penstock.servables.process.failures import format_trace
from penstock.serving.proto import oip_pb2 as pb
from penstock.serving.settings import GatewaySettings
from tests.support.grpc_client import SERVICE, refused, trailers
from tests.support.http_service import Service
from tests.support.servable_folders import PATIENCE, run, serving, until, write

STAGES = """
    servable.settings(timeout_s=2)

    @servable.stage(outputs={"y": "FP32[]"})
    def go(x):
        if x == 1: raise ValueError("the operator's own")
        if x == 2: os._exit(3)
        if x == 3: time.sleep(1000)
        return x

    @servable.method(inputs={"x": "FP32[]"}, outputs={"y": "FP32[]"})
    def it(x):
        return go(x)
"""
SERVED = """
    number = servable.version()

    @servable.stage(outputs={"y": "FP32[]"})
    def go(x):
        return x

    @servable.method(inputs={"x": "FP32[]"}, outputs={"y": "FP32[]"})
    def it(x):
        return go(x)
"""
FAILED = {1: (500, "stage_failed", "INTERNAL"), 2: (500, "stage_died", "INTERNAL")}
FAILED[3] = (504, "stage_hung", "DEADLINE_EXCEEDED")


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    root = tmp_path_factory.mktemp("servables")
    write(root, "bad", STAGES)
    servables = ServableRepository(PATIENCE)
    found = Service({}, GatewaySettings(grpc_port=0), methods=servables)
    found.do(servables.open(root))
    yield found
    found.do(servables.stop())
    found.close()


def events(caplog: pytest.LogCaptureFixture, *names: str) -> list[dict[str, Any]]:
    told = [getattr(one, "facts", {}) for one in caplog.records]
    return [one for one in told if one.get("event") in names]


def check_told(caplog: pytest.LogCaptureFixture, kind: int, request_id: str) -> None:
    """One line of what the stage did, by the request's id, and no trace of code that is not the operator's."""
    (told,) = events(caplog, "stage_failed", "stage_lost")
    assert (told["event"], told["request_id"]) == ("stage_failed" if kind == 1 else "stage_lost", request_id)
    if kind == 1:
        assert 'raise ValueError("the operator\'s own")' in told["trace"]
    assert [one for one in caplog.records if one.exc_info] == []


@pytest.mark.parametrize("kind", FAILED)
@pytest.mark.parametrize("own", [{}, {"id": "of-the-body"}])
def test_failed_stage_is_logged_with_the_request_id(service: Service, caplog, kind: int, own: Any) -> None:
    caplog.set_level(logging.INFO, "penstock.serving")
    body = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1], "data": [kind]}], **own}
    status, headers, data = service.ask("POST", "/v2/models/bad/infer", body, {"X-Request-Id": f"mine-{kind}"})
    assert (status, json.loads(data)["code"]) == FAILED[kind][:2]
    check_told(caplog, kind, headers["x-request-id"])
    assert headers["x-request-id"] == f"mine-{kind}"


@pytest.mark.parametrize("kind", FAILED)
def test_failed_stage_is_logged_with_the_request_id_over_grpc(service: Service, caplog, kind: int) -> None:
    caplog.set_level(logging.INFO, "penstock.serving")
    message = pb.ModelInferRequest(model_name="bad", id="of-the-message")
    message.inputs.add(name="x", datatype="FP32", shape=[1]).contents.fp32_contents.append(kind)
    error = refused(service, SERVICE + "ModelInfer", message.SerializeToString(), [("x-request-id", "mine")])
    assert (error.code().name, trailers(error)["error-code"]) == (FAILED[kind][2], FAILED[kind][1])
    check_told(caplog, kind, trailers(error)["x-request-id"])


def test_internal_errors_are_logged_with_traceback(service: Service, caplog, monkeypatch) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("planted")

    method = service.methods.find("bad")
    monkeypatch.setattr(type(method), "_check_inputs", broken)
    body = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1], "data": [0]}]}
    status, _, data = service.ask("POST", "/v2/models/bad/infer", body)
    assert (status, json.loads(data)["code"]) == (500, "internal")
    assert [str(one.exc_info[1]) for one in caplog.records if one.exc_info] == ["planted"]


def test_invalid_versions_are_logged(tmp_path: Path, caplog) -> None:
    """A line for each at each load that looks at the folder."""
    root = tmp_path / "root"
    folder = write(root, "one", SERVED)
    for name in ("0", "007", "-1", "1.5", "3.tmp", "_4", "notes"):
        (folder / name).mkdir()
    (folder / "3").touch()
    (tmp_path / "elsewhere").mkdir()
    (folder / "2").symlink_to(tmp_path / "elsewhere")
    names = ["-1", "0", "007", "1.5", "2", "3"]

    def told() -> dict[str, str]:
        found = {one["version"]: one["message"] for one in events(caplog, "version_refused")}
        assert len(found) == len(events(caplog, "version_refused"))
        caplog.clear()
        return found

    async def work() -> None:
        async with serving(root) as servables:
            first = told()
            assert sorted(first) == names
            assert f"{folder / '007'} is not a version" in first["007"]
            assert "leads out" in first["2"]
            await servables.load("one")
            assert told() == first
            (folder / "007").rmdir()
            await servables.load("one")
            assert sorted(told()) == [name for name in names if name != "007"]

    run(work)


ENDS = {
    "sys.exit('no')": "servable.py:5: it ended its process while loading, by SystemExit('no')",
    "sys.exit()": "servable.py:5: it ended its process while loading, by SystemExit()",
    "os._exit(2)": "servable.py: the script ended its process with status 2 while loading",
    "os._exit(0)": "servable.py: the script ended its process with status 0 while loading",
    "raise KeyboardInterrupt": "servable.py:5: KeyboardInterrupt: ",
}


@pytest.mark.parametrize("text", ENDS)
def test_script_that_exits_cannot_be_loaded(tmp_path: Path, text: str) -> None:
    """It fails like a script that raises: loading it again would not help."""
    write(tmp_path, "one", f"\n{text}")

    async def work() -> None:
        with pytest.raises(InvalidFileError) as error:
            async with serving(tmp_path):
                pass
        assert str(error.value) == str(tmp_path / "one" / ENDS[text])

    run(work)


def test_process_killed_while_loading_is_retriable(tmp_path: Path) -> None:
    """For example by the kernel when memory is short."""
    write(tmp_path, "one", f"os.kill(os.getpid(), {int(signal.SIGKILL)})")

    async def work() -> None:
        with pytest.raises(UnavailableError, match=r"one/1: .* loading: .*SIGKILL"):
            async with serving(tmp_path):
                pass

    run(work)


def test_slow_load_is_logged(tmp_path: Path, caplog, monkeypatch) -> None:
    """More and more seldom, with what is waited for, and not once it is done."""
    caplog.set_level(logging.INFO, "penstock.serving")
    monkeypatch.setattr(servable_load, "SLOW_S", 0.01)
    gate = tmp_path / "gate"
    write(tmp_path / "root", "one", f"while not os.path.exists({str(gate)!r}): time.sleep(0.005)\n" + dedent(SERVED))

    def told() -> list[dict[str, Any]]:
        return [one for one in events(caplog, "servable_loading") if "importing" in one["message"]]

    async def work() -> None:
        servables = ServableRepository(PATIENCE)
        opening = asyncio.ensure_future(servables.open(tmp_path / "root"))
        await until(lambda: opening.done() or len(told()) >= 4)
        gate.touch()
        await opening
        found = told()
        assert [one["seconds"] for one in found] == [0.01 * 2**n for n in range(len(found))]
        assert found[0]["message"] == "still loading one 1 after 0.01 s: importing servable.py"
        assert (found[0]["servable"], found[0]["version"]) == ("one", 1)
        await asyncio.sleep(2 * found[-1]["seconds"])  # the next one would have come
        assert told() == found
        await servables.stop()

    run(work)


RAISES = {
    "def f(:": "6: invalid syntax",
    "\0": "null bytes",
    "x = 1 / 0": "6: ZeroDivisionError: division by zero",
    "import helper": "6: KeyError: 'planted'",
    "sys.exit('no')": "6: it ended its process",
    "@servable.method(inputs={'x': 'FP32[]'}, outputs={'y': 'FP32[]'})\ndef f(x): return [].pop()": "7: IndexError",
}


@pytest.mark.parametrize("text", RAISES)
def test_reason_of_a_failed_load_is_logged(tmp_path: Path, caplog, capfd, text: str) -> None:
    """With the trace of the operator's code alone, and nothing beside the log."""
    caplog.set_level(logging.INFO, "penstock.serving")
    folder = write(tmp_path, "one", f"\n\n{text}\n")
    (folder / "helper.py").write_text("{}['planted']\n")

    async def work() -> None:
        with pytest.raises(InvalidFileError) as error:
            async with serving(tmp_path):
                pass
        (told,) = events(caplog, "script_failed")
        assert told["message"] == str(error.value)
        assert RAISES[text] in told["message"]
        assert (told["servable"], told["version"]) == ("one", "1")
        assert worker_main.__file__ not in told["trace"]
        if text != "\0":  # which no line is told of
            assert f'File "{folder / "servable.py"}", line' in told["trace"]
        if "helper" in text:
            assert str(folder / "helper.py") in told["trace"]

    run(work)
    assert "Traceback" not in capfd.readouterr().err


def test_errors_outside_the_file_keep_their_traceback() -> None:
    """A bug in Penstock shows only frames of Penstock."""
    with pytest.raises(InvalidArgumentError) as error:
        parse_spec("FP9[]", "y")
    assert __file__ in format_trace(error.value, "servable.py", "worker_main.py")
