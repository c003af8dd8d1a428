"""One admission policy: the same situation gets the same code, field, id, count and log line over HTTP and gRPC."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import grpc
import pytest

from penstock.api_errors import CODES
from penstock.errors import UnavailableError
from penstock.serving.settings import GatewayLimits, GatewaySettings
from tests.support.grpc_client import SERVICE, channel, request
from tests.support.http_service import KEY, Service, until

ADMIN_KEY = "an-admin-key-of-theirs"
BEARER = ("authorization", f"Bearer {KEY}")
TRANSPORTS = ("http", "grpc")
pytestmark = pytest.mark.parametrize("transport", TRANSPORTS)


@dataclass
class Answer:
    """A response in gRPC's terms: its code, the ``code`` and the ``param`` of an error, and the headers."""

    grpc_code: str
    code: str | None
    param: str | None
    headers: Mapping[str, str]


def over_http(service: Service, name: str, headers: list[tuple[str, str]], model: str, **parameters: Any) -> Answer:
    paths = {"infer": f"models/{model}/infer", "load": f"repository/models/{model}/load", "live": "health/live"}
    text = {"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["the"]}
    body: dict[str, Any] = {"inputs": [text], "parameters": {"max_tokens": 2, **parameters}} if name == "infer" else {}
    data = b"" if name == "live" else json.dumps(body).encode()
    method = "GET" if name == "live" else "POST"
    lines = [f"{method} /v2/{paths[name]} HTTP/1.1", "host: localhost", "connection: close"]
    lines += ["content-type: application/json", f"content-length: {len(data)}", *(f"{k}: {v}" for k, v in headers)]
    with service.connect() as connection:
        connection.sendall("\r\n".join(lines).encode() + b"\r\n\r\n" + data)
        with connection.makefile("rb") as file:
            head, _, found = file.read().partition(b"\r\n\r\n")
    first, *rest = head.decode().split("\r\n")
    status, names = int(first.split(" ")[1]), dict(line.lower().split(": ", 1) for line in rest)
    if status == 200:
        return Answer("OK", None, None, names)
    error = json.loads(found)
    return Answer(CODES[status].grpc, error["code"], error["param"], names)


def over_grpc(service: Service, name: str, headers: list[tuple[str, str]], model: str, **parameters: Any) -> Answer:
    method = {"infer": "ModelInfer", "load": "RepositoryModelLoad", "live": "ServerLive"}[name]
    message = request(model_name=model)
    for field, value in parameters.items():
        setattr(message.parameters[field], "int64_param" if isinstance(value, int) else "double_param", value)
    data = message.SerializeToString() if name == "infer" else b""
    with channel(service) as found:
        call = found.unary_unary(SERVICE + method).with_call
        try:
            _, ended = call(data, timeout=60, metadata=headers)
        except grpc.RpcError as error:
            trailers = dict(error.trailing_metadata())
            return Answer(error.code().name, trailers.get("error-code"), trailers.get("error-param"), trailers)
    return Answer("OK", None, None, dict(ended.trailing_metadata()))


def ask(
    transport: str, service: Service, name: str = "infer", *headers: tuple[str, str], model: str = "fake", **fields: Any
) -> Answer:
    return (over_http if transport == "http" else over_grpc)(service, name, [*headers], model, **fields)


def told(answer: Answer) -> tuple[str, str | None, str | None]:
    return answer.grpc_code, answer.code, answer.param


@pytest.fixture
def keyed(serve, tmp_path):
    """A service that wants keys, with one place for an open request."""
    files = []
    for name, key in (("keys", KEY), ("admin_keys", ADMIN_KEY)):
        files.append(tmp_path / name)
        files[-1].write_text(key + "\n")
        files[-1].chmod(0o600)
    limits = GatewayLimits(num_open=1)
    settings = GatewaySettings(grpc_port=0, keys_file=files[0], admin_keys_file=files[1], limits=limits)
    return serve(settings=settings)


@pytest.fixture
def plain(serve):
    return serve(settings=GatewaySettings(grpc_port=0, origins=("https://friend.example",)))


KEYS = {
    "no key": ([], ("UNAUTHENTICATED", "invalid_api_key", None)),
    "a wrong key": ([("authorization", "Bearer wrong-wrong-wrong")], ("UNAUTHENTICATED", "invalid_api_key", None)),
    "a key without its scheme": ([("authorization", KEY)], ("UNAUTHENTICATED", "invalid_api_key", None)),
    "a key twice": ([BEARER, BEARER], ("INVALID_ARGUMENT", "invalid_header", None)),
    "a foreign origin before a missing key": (
        [("origin", "https://evil.example")], ("PERMISSION_DENIED", "origin_not_allowed", None)
    ),
    "an origin that is no URL": ([("origin", "null"), BEARER], ("PERMISSION_DENIED", "origin_not_allowed", None)),
    "a key": ([BEARER], ("OK", None, None)),
    "an admin key": ([("authorization", f"Bearer {ADMIN_KEY}")], ("OK", None, None)),
}  # fmt: skip


@pytest.mark.parametrize("situation", KEYS)
def test_keys_and_origins(transport, situation, keyed):
    headers, expected = KEYS[situation]
    assert told(ask(transport, keyed, "infer", *headers)) == expected
    assert keyed.num_open == 0


def test_open_endpoints_need_no_key(transport, keyed):
    assert ask(transport, keyed, "live").grpc_code == "OK"


def test_allowed_origins_are_served(transport, plain):
    assert ask(transport, plain, "infer", ("origin", "https://friend.example")).grpc_code == "OK"


def test_admin_endpoints_need_an_admin_key(transport, keyed):
    refused = ("PERMISSION_DENIED", "admin_only", None)
    assert told(ask(transport, keyed, "load")) == ("UNAUTHENTICATED", "invalid_api_key", None)
    assert told(ask(transport, keyed, "load", BEARER)) == refused
    assert told(ask(transport, keyed, "load", ("authorization", f"Bearer {ADMIN_KEY}"))) != refused
    assert keyed.num_open == 0


def test_a_full_service_says_what_is_full(transport, keyed, monkeypatch):
    """The number of open requests comes first, then the room in the queues; open endpoints answer."""
    (backend,) = keyed.models.list()
    monkeypatch.setattr(backend, "has_room_for", lambda client: False)
    full = ask(transport, keyed, "infer", BEARER)
    assert (told(full), full.headers["retry-after"]) == (("RESOURCE_EXHAUSTED", "queue_full", None), "1")
    keyed.gateway.admission.num_open = 1
    full = ask(transport, keyed, "infer", BEARER)
    assert (told(full), full.headers["retry-after"]) == (("RESOURCE_EXHAUSTED", "too_many_requests", None), "1")
    assert ask(transport, keyed, "live").grpc_code == "OK"
    keyed.gateway.admission.num_open = 0
    monkeypatch.undo()
    assert ask(transport, keyed, "infer", BEARER).grpc_code == "OK"


def test_requests_are_counted_while_they_run(transport, keyed, monkeypatch):
    (backend,) = keyed.models.list()
    seen = []

    async def submit(*_arguments: Any, **_named: Any) -> None:
        seen.append(keyed.num_open)
        raise UnavailableError("away", 7.0)

    monkeypatch.setattr(backend, "submit", submit)
    away = ask(transport, keyed, "infer", BEARER)
    assert (away.grpc_code, away.headers["retry-after"], seen) == ("UNAVAILABLE", "7", [1])
    until(lambda: keyed.num_open == 0)


ERRORS = {
    "a timeout": (TimeoutError(), ("DEADLINE_EXCEEDED", "deadline_exceeded", "timeout")),
    "a fault": (ZeroDivisionError("secret"), ("INTERNAL", "internal", None)),
}


@pytest.mark.parametrize("situation", ERRORS)
def test_failures_of_the_engine(transport, situation, plain, monkeypatch, caplog):
    error, expected = ERRORS[situation]
    (backend,) = plain.models.list()

    async def submit(*_arguments: Any, **_named: Any) -> None:
        raise error

    monkeypatch.setattr(backend, "submit", submit)
    assert told(ask(transport, plain)) == expected
    assert ("failed" in caplog.text) == (expected[0] == "INTERNAL")


def test_fields_and_models_that_are_wrong(transport, plain):
    assert told(ask(transport, plain, temperature=-1)) == ("INVALID_ARGUMENT", "invalid_value", "temperature")
    assert told(ask(transport, plain, model="other")) == ("NOT_FOUND", "model_not_found", "model")
    assert told(ask(transport, plain, timeout=1)) == ("INVALID_ARGUMENT", "invalid_value", "timeout")
    plain.models.is_draining = True
    assert told(ask(transport, plain)) == ("UNAVAILABLE", "draining", None)


@pytest.mark.parametrize(("given", "is_kept"), [("mine-1", True), ("a b", False), ("x" * 129, False), ("", False)])
def test_request_ids_are_taken_or_made(transport, given, is_kept, plain):
    answer = ask(transport, plain, "infer", *([("x-request-id", given)] if given else []))
    found = answer.headers["x-request-id"]
    assert (found == given) == is_kept
    assert is_kept or re.fullmatch("[0-9a-f]{24}", found)


def test_log_lines_have_the_same_fields(transport, plain, caplog):
    """gRPC's has the code beside the status; a probe that succeeds is logged as DEBUG."""
    caplog.set_level(logging.DEBUG, "penstock.serving")
    ask(transport, plain, "infer", ("x-request-id", "good"))
    ask(transport, plain, "infer", ("x-request-id", "bad"), temperature=-1)
    ask(transport, plain, "live", ("x-request-id", "probe"))

    def records() -> dict[str, logging.LogRecord]:
        found = [one for one in caplog.records if "request_id" in getattr(one, "facts", {})]
        return {one.facts["request_id"]: one for one in found}

    until(lambda: len(records()) == 3)
    always = {"request_id", "method", "path", "status", "seconds", "client"}
    always |= {"code"} if transport == "grpc" else set()
    good, bad, probe = (records()[name] for name in ("good", "bad", "probe"))
    assert set(good.facts) == always | {"model", "prompt_tokens", "completion_tokens"}
    assert set(bad.facts) == always | {"error"}
    assert set(probe.facts) == always
    assert [one.facts["status"] for one in (good, bad, probe)] == [200, 400, 200]
    assert [one.levelname for one in (good, bad, probe)] == ["INFO", "INFO", "DEBUG"]
    assert {one.facts["client"] for one in (good, bad, probe)} == {"127.0.0.1"}
    assert good.facts["method"] == ("gRPC" if transport == "grpc" else "POST")


def test_metrics_count_each_request_once(transport, plain):
    ask(transport, plain)
    ask(transport, plain, temperature=-1)
    name = "grpc_server_handling_seconds_count" if transport == "grpc" else "http_request_duration_seconds_count"
    label = "ModelInfer" if transport == "grpc" else "/v2/models/{model}/infer"

    def count() -> int:
        text = plain.ask("GET", "/metrics")[2].decode()
        return sum(int(line.split(" ")[-1]) for line in text.splitlines() if line.startswith(name) and label in line)

    until(lambda: count() == 2)
