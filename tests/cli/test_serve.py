"""``penstock serve`` as a command: ready, answers, drains, and leaves nothing."""

from __future__ import annotations

import gc
import http.client
import json
import logging
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
import warnings
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import psutil
import pytest
import tritonclient.grpc as triton

from penstock.cli.main import main, make_parser
from penstock.cli.service.serve import settings_of
from penstock.cluster.autoscale import ScalePolicy
from penstock.env import writes_json_log
from penstock.errors import InvalidArgumentError, UnavailableError
from penstock.serving.settings import GatewayLimits
from tests.support.command import DEMO
from tests.support.errors import raises
from tests.support.grpc_client import Stream, tensor
from tests.support.serve_command import ask, connection, serving
from tests.support.terminal import Terminal
from tests.support.waiting import until


def is_ready(url: str) -> bool:
    with closing(connection(url)) as link:
        link.request("GET", "/health/ready")
        return link.getresponse().status == 200


@contextmanager
def stream(url: str, body: dict[str, object]) -> Iterator[http.client.HTTPResponse]:
    with closing(connection(url)) as link:
        link.request(
            "POST", "/v1/completions", json.dumps({**body, "stream": True}), {"Content-Type": "application/json"}
        )
        with link.getresponse() as answer:
            assert answer.status == 200
            yield answer


def test_it_answers_and_drains(tmp_path: Path) -> None:
    args = [f"code={DEMO}", DEMO, "--log", "warning", "--max-requests", "4", "--drain-seconds", "600"]
    with serving(*args, cwd=tmp_path) as (process, url, said):
        assert "code: demo.psm, llama" in said
        assert "demo: demo.psm, llama" in said
        assert "pages of 32 tokens" in said
        assert f"curl {url}/v1/completions" in said
        assert [one["id"] for one in ask(url, "/v1/models")["data"]] == ["code", "demo"]
        answer = ask(url, "/v1/completions", {"model": "code", "prompt": "import", "max_tokens": 4, "temperature": 0})
        assert answer["usage"]["completion_tokens"] > 0
        # a worker of which nothing was heard for seconds is not counted on
        until(lambda: is_ready(url), process=process, pause_s=0.02)
        found = psutil.Process(process.pid).children()
        assert len(found) == 2, "one worker per model, and nothing else"
        body = {"model": "demo", "prompt": "a", "max_tokens": 400, "temperature": 1, "ignore_eos": True, "n": 8}
        with stream(url, body) as events:
            first = events.readline()
            process.send_signal(signal.SIGTERM)
            text = (first + events.read()).decode()
        assert text.count('"finish_reason":"length"') == 8, "an open request ends whole"
        assert text.endswith("data: [DONE]\n\n")
        assert process.wait(600) == 0
        assert not [child for child in found if child.is_running()]
        log = (tmp_path / "log").read_text()
        unwanted = (
            "torch",
            "transformers",
            "opentelemetry",
            "penstock.serving.grpc.gateway",
            "penstock.serving.proto.oip_pb2",
        )
        assert not [line for line in log.splitlines() if line.rsplit("|", 1)[-1].strip() in unwanted]
        assert {path.name for path in tmp_path.iterdir()} == {"log"}, "no socket, no folder is left"


def test_the_grpc_listener_drains(tmp_path: Path) -> None:
    with serving(DEMO, "--grpc-port", "0", "--max-requests", "4", cwd=tmp_path) as (process, _, said):
        address = re.search(r"gRPC \(Open Inference Protocol v2\) at (\S+)\n", said)[1]
        with triton.InferenceServerClient(address) as client:
            stream = Stream(client)
            stream.ask([tensor("text_input", ["a"])], max_tokens=900, ignore_eos=True)
            first, _ = stream.next()
            process.send_signal(signal.SIGTERM)
            (rest,) = stream.answers(1).values()
            assert sum(one.as_numpy("num_output_tokens")[0] for one in (first, *rest)) == 900, "it ends whole"
            error = stream.next()[1]  # then the stream, which nobody closed, does
            assert error.status() == "StatusCode.UNAVAILABLE"
            client.stop_stream(cancel_requests=True)
        assert process.wait(300) == 0


def test_a_second_signal_ends_it_at_once(tmp_path: Path) -> None:
    with serving(DEMO, "--max-requests", "2", "--drain-seconds", "600", cwd=tmp_path) as (process, url, _):
        body = {"model": "demo", "prompt": "a", "max_tokens": 900, "temperature": 1, "ignore_eos": True, "n": 128}
        with stream(url, body) as events, closing(connection(url)) as unfinished:
            unfinished.putrequest("POST", "/v1/completions")
            unfinished.putheader("Content-Type", "application/json")
            unfinished.putheader("Content-Length", "100")
            unfinished.endheaders(b"{")
            events.readline()
            process.send_signal(signal.SIGINT)
            while "waiting for open requests" not in (tmp_path / "log").read_text():
                assert process.poll() is None
            process.send_signal(signal.SIGINT)
            assert process.wait(600) == 130
        assert {path.name for path in tmp_path.iterdir()} == {"log"}
        assert "Traceback" not in (tmp_path / "log").read_text()


REFUSED = {
    "no such file": "gone.psm",
    "the port is taken": " is in use. Choose another port.",
    "open to the world": "--api-key-file",
    "a weak key": "key 1 must be",
    "no certificate": "tls_certificate",
    "a page that cannot be": "can never match",
    "traces over gRPC": "OTLP/HTTP URL",
    "no port": "penstock: --port: expected an integer from 0 to 65535, got 99999",
    "no port for gRPC": "penstock: --grpc-port: expected an integer from 0 to 65535, got 70000",
    "two of one name": "penstock: the name 'demo' is taken",
    "an ONNX file": "expected a language model, got an ONNX file",
    "half of TLS": "penstock: --tls-key must be given together with --tls-certificate",
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_failing_start_prints_one_line_and_leaves_no_files(case: str, tmp_path: Path, penstock_command) -> None:
    (tmp_path / "key").write_text("x\n")
    (tmp_path / "key").chmod(0o600)
    (tmp_path / "temporary").mkdir()
    (tmp_path / "net.onnx").write_bytes(b"\x08\x08")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        args = {
            "no such file": ("gone.psm", "--port", 0),
            "the port is taken": (DEMO, "--port", taken.getsockname()[1]),
            "open to the world": (DEMO, "--host", "0.0.0.0", "--port", 0),  # noqa: S104 - to be refused
            "a weak key": (DEMO, "--port", 0, "--api-key-file", tmp_path / "key"),
            "no certificate": (DEMO, "--port", 0, "--tls-certificate", tmp_path / "key", "--tls-key", tmp_path / "key"),
            "a page that cannot be": (DEMO, "--port", 0, "--allowed-origin", "https://page.example/"),
            "traces over gRPC": (DEMO, "--port", 0, "--otlp-traces-endpoint", "grpc://localhost:4317"),
            "no port": (DEMO, "--port", 99999),
            "no port for gRPC": (DEMO, "--port", 0, "--grpc-port=70000"),
            "two of one name": (DEMO, DEMO, "--port", 0),
            "an ONNX file": (tmp_path / "net.onnx", "--port", 0),
            "half of TLS": (DEMO, "--port", 0, "--tls-key", tmp_path / "key"),
        }[case]
        done = penstock_command("serve", "--log-format=text", *args, TMPDIR=str(tmp_path / "temporary"))
    # A file that is missing or no certificate, and a port that is taken, are no wrong options.
    is_option = case not in ("no such file", "the port is taken", "a weak key", "no certificate")
    assert done.returncode == (2 if is_option else 1)
    assert len(done.stderr.strip().splitlines()) == 1
    assert REFUSED[case] in done.stderr
    assert list((tmp_path / "temporary").iterdir()) == []


@pytest.mark.parametrize(
    ("options", "num_workers", "scale"),
    [
        ("", 1, None),
        ("--workers 3", 3, None),
        ("--replicas 2..4", 2, ScalePolicy(2, 4)),
        ("--replicas 0..4 --workers 3", 3, ScalePolicy(0, 4)),
        ("--replicas 0..1 --scale-queue-seconds 5 --scale-down-seconds 9", 1, ScalePolicy(0, 1, 5, down_after_s=9)),
    ],
)
def test_the_number_of_workers(options: str, num_workers: int, scale: ScalePolicy | None) -> None:
    settings = settings_of(make_parser(["serve"]).parse_args(["serve", "m.psm", *options.split()]))
    assert (settings.num_workers, settings.scale) == (num_workers, scale)
    assert (settings.options.weights == "auto") == ((scale.max_replicas if scale else num_workers) == 1)


@pytest.mark.parametrize(
    "options",
    [
        "--replicas 3..2", "--replicas x", "--replicas 1..257", "--replicas 2..4 --workers 1",
        "--replicas 2..4 --workers 5", "--scale-queue-seconds 1", "--scale-down-seconds 1",
        "--replicas 1..2 --scale-queue-seconds 0", "--replicas 1..2 --scale-down-seconds nan",
    ],
)  # fmt: skip
def test_a_wrong_number_of_workers_is_refused(options: str) -> None:
    with pytest.raises(InvalidArgumentError, match=r"replicas|workers|queue_s|down_after_s"):
        settings_of(make_parser(["serve"]).parse_args(["serve", "m.psm", *options.split()]))


def test_options_become_settings() -> None:
    parser = make_parser(["serve"])
    line = ["serve", "a=x/m.psm", "/y/n.psm", "--workers", "2", "--max-waiting", "7", "--no-prefix-cache"]
    line += ["--max-body-bytes", "1000", "--max-open", "7", "--max-seconds", "1.5"]
    settings = settings_of(parser.parse_args([*line, "--hang-seconds", "2", "--kv-cache", "int8", "--port", "9"]))
    limits = settings.gateway.limits
    assert (limits.body_bytes, limits.num_open, limits.request_s) == (1000, 7, 1.5)
    assert settings_of(parser.parse_args(["serve", "m.psm"])).gateway.limits == GatewayLimits()
    assert settings.models == (("a", str(Path("x/m.psm").absolute())), ("", "/y/n.psm"))
    assert (settings.num_workers, settings.supervision.hang_s, settings.gateway.port) == (2, 2.0, 9)
    assert (settings.options.engine.max_waiting, settings.options.engine.prefix_cache) == (7, False)
    assert (settings.options.limits.kv_layout, settings.options.weights) == ("int8", "mmap")
    assert settings.options.threads >= 1
    for wrong in ("--workers", "--hang-seconds", "--drain-seconds", "--max-open", "--max-body-bytes", "--max-seconds"):
        with raises(InvalidArgumentError, param=wrong[2:].replace("-", "_")):
            settings_of(parser.parse_args(["serve", "m.psm", wrong, "0"]))
    for alone, value in (
        ("--threads", "1025"),
        ("--worker-host", "127.0.0.1"),
        ("--worker-token-file", "token"),
        ("--worker-port", "0"),
    ):
        with pytest.raises(InvalidArgumentError, match=alone[2:].replace("-", "[-_]")):
            settings_of(parser.parse_args(["serve", "m.psm", alone, value]))
    for host in ("http://host", "host:8000", "[::1]", "", "a b"):
        with raises(InvalidArgumentError, param="hosts", match=re.escape(repr(host))):
            settings_of(parser.parse_args(["serve", "m.psm", "--allowed-host", host]))
    for host in ("*", "a.example", "under_score", "10.0.0.1", "::1"):
        assert settings_of(parser.parse_args(["serve", "m.psm", "--allowed-host", host])).gateway.hosts == (host,)


def test_only_the_service_imports_grpc() -> None:
    script = (
        "import sys, penstock, penstock.cli.main as m\n"
        "m.make_parser()\n"
        "import penstock.llm.llm, penstock.llm.async_llm\n"
        "print([n for n in ('grpc', 'google.protobuf', 'uvicorn', 'httptools') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_service_without_a_grpc_port_does_not_import_grpc() -> None:
    script = "import sys, penstock.serving.service, penstock.serving.workers.worker; print('grpc' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_a_terminal_gets_lines_for_people_first():
    with Terminal("serve", DEMO, "--port", 0) as terminal:
        assert "opens " in terminal.until("Ctrl-C stops it.")
        banner = terminal.until("  try: curl ")
        assert "{" not in banner  # no JSON line of the log
        url = re.search(r"serves at (http://[0-9.:]+)", banner)[1]
        assert f"OpenAI's clients: base_url {url}/v1" in banner
        terminal.until("\n")
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"{url}/v1/nope")  # noqa: S310
        line = terminal.until("\n")
        assert re.match(r"\d\d:\d\d:\d\d GET /v1/nope 404 in \d+ ms, client 127.0.0.1: Unknown route", line)
        terminal.type("\x03")
        assert "Stopping" in terminal.rest()


def test_a_log_of_json_has_nothing_else(tmp_path: Path) -> None:
    """Notes of workers and of the end are lines of the log too, so that a reader can parse the whole stream."""
    arguments = (DEMO, "--tp", 3, "--threads", 1, "--log-format", "json")
    with serving(*arguments, cwd=tmp_path, program=("-m", "penstock", "serve")) as (process, _, _):
        process.send_signal(signal.SIGTERM)
        process.wait()
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    notes = [(line["program"], line["message"]) for line in lines if line.get("event") == "note"]
    assert {program for program, _ in notes} == {"penstock", "penstock worker"}
    assert all({"time", "level"} <= set(line) for line in lines)


@pytest.mark.long
def test_warnings_of_workers_are_lines_of_a_json_log(tmp_path: Path) -> None:
    """A worker opens a folder whose generation_config.json has a value that is not used."""
    folder = shutil.copytree(DEMO.parent / "model", tmp_path / "model")
    config = folder / "generation_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"top_k": "many"}))
    with serving(folder, "--log-format", "json", cwd=tmp_path, program=("-m", "penstock", "serve")):
        pass
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert any(line["level"] == "warning" and "top_k" in line["message"] for line in lines)
    assert all({"time", "level"} <= set(line) for line in lines)


def state_of_process() -> list[object]:
    """What a command may change for the commands that follow in its process."""
    root, uvicorn = logging.getLogger(), logging.getLogger("uvicorn")
    handlers = [signal.getsignal(number) for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)]
    log = [*root.handlers, root.level, uvicorn.level, warnings.showwarning, warnings.filters[:]]
    return [handlers, log, dict(os.environ), resource.getrlimit(resource.RLIMIT_NOFILE), bool(gc.get_freeze_count())]


@pytest.mark.parametrize("fails", [False, True])
def test_serve_leaves_no_state_of_the_process_behind(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Signal handlers, logging, warnings, environment, limits and frozen objects are as before."""
    during = []

    async def serve(*_: object) -> None:
        during.append(state_of_process())
        os.kill(os.getpid(), signal.SIGINT)
        if fails:
            raise UnavailableError("no model")

    monkeypatch.setattr("penstock.serving.service._load", serve)
    monkeypatch.setattr("penstock.serving.service.startup_banner", lambda *_: "")
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 1024), hard))
    try:
        before = state_of_process()
        assert main(["serve", str(DEMO), "--port", "0"]) == (1 if fails else 130)
        assert state_of_process() == before
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert during[0][:3] != before[:3], "it was changed meanwhile"


def test_json_logs_can_be_asked_for():
    with Terminal("serve", DEMO, "--port", 0, "--log-format", "json") as terminal:
        assert '{"time": ' in terminal.until("  try: curl ")


def test_notes_about_ranks_are_said_once(tmp_path: Path) -> None:
    """Two workers have the same ranks.  The demo has two key-value heads."""
    with serving(DEMO, "--tp", 3, "--threads", 1, "--workers", 2, cwd=tmp_path):
        log = (tmp_path / "log").read_text()
    assert log.count("worker_ready") == 2
    assert log.count("Key-value heads are repeated on ranks, which costs ") == 1


@pytest.mark.parametrize("fails", [False, True])
def test_serve_leaves_no_log_format_behind(
    fails: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The next command of the same process writes its errors as text."""
    formats = []

    async def run_service(settings: object) -> int:
        formats.append(writes_json_log())
        if fails:
            raise UnavailableError("no address")
        return 0

    monkeypatch.delenv("PENSTOCK_LOG", raising=False)
    monkeypatch.setattr("penstock.serving.service.run_service", run_service)
    assert main(["serve", str(DEMO), "--port", "0", "--log-format", "json"]) == int(fails)
    told = capsys.readouterr().err.splitlines()
    assert formats == [True]
    assert [json.loads(line)["event"] for line in told] == ["note"] * fails
    assert not writes_json_log()
    assert main(["serve", "nothing"]) == 2
    assert capsys.readouterr().err.startswith("penstock: ")
