"""The gateway: who is let in, and what a request may be."""

from __future__ import annotations

import asyncio
import json
import logging

import pytest

from penstock.engine.options import RequestOptions
from penstock.errors import FileAccessError, InvalidArgumentError, InvalidFileError
from penstock.logs import JsonLines
from penstock.serving.generation import MAX_AT_ONCE
from penstock.serving.http.app import operations
from penstock.serving.keys import KeySet
from penstock.serving.operations import Routes
from penstock.serving.settings import GatewayLimits, GatewaySettings
from tests.support.errors import raises
from tests.support.http_service import raw, until

KEY = "a-key-of-twenty-chars"
AUTHORIZED = {"Authorization": f"Bearer {KEY}"}
HEAD = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n"
OPEN = {"/", "/docs", "/page/{file}", "/health", "/health/live", "/health/ready", "/v2/health/live", "/v2/health/ready"}


@pytest.fixture
def keys_file(tmp_path):
    path = tmp_path / "keys"
    path.write_text(f"# of the tests\n\n{KEY}\nanother-key-of-theirs\n")
    path.chmod(0o600)
    return path


@pytest.fixture
def locked(serve, keys_file):
    return serve(settings=GatewaySettings(keys_file=keys_file))


def code_of(data: bytes) -> str:
    told = json.loads(data)
    return (told["error"] if isinstance(told["error"], dict) else told)["code"]


def test_every_route_wants_the_key(locked):
    for operation in operations():
        names = {"model": "fake", "file": "main.js", "version": "1", "task": "summarization"}
        path = operation.path.format(**names)
        body = {} if operation.body is not None else None
        status, headers, data = locked.ask(operation.method, path, body)
        assert operation.is_open == (operation.path in OPEN)
        if operation.is_open:
            assert status == 200
        else:
            assert (status, headers["www-authenticate"], code_of(data)) == (401, "Bearer", "invalid_api_key"), path
        status, _, _ = locked.ask(operation.method, path, body, AUTHORIZED)
        assert status in ((403,) if operation.is_admin else (200, 400)), path


def test_unknown_routes_need_the_key(locked):
    for path in ("/nowhere", "/v1/", "/v1/models/", "/metrics/", "/V1/models", "//metrics", "/%2e%2e/metrics"):
        for method in ("GET", "POST", "DELETE", "OPTIONS", "PATCH"):
            assert locked.ask(method, path)[0] == 401
            assert locked.ask(method, path, headers=AUTHORIZED)[0] == 404


def test_the_methods_of_a_route_need_no_key(locked):
    assert locked.ask("OPTIONS", "/v1/models")[0] == 204


def test_wrong_keys_are_refused(locked):
    wrong = ["", "Bearer", "Bearer ", f"Basic {KEY}", KEY, f"Bearer {KEY}x", f"Bearer {KEY[:-1]}", f"Bearer {KEY} x"]
    for value in [*wrong, "Bearer \xff\xfe"]:
        assert locked.ask("GET", "/v1/models", headers={"Authorization": value})[0] == 401


def test_all_keys_of_the_file_are_known_and_none_is_kept(keys_file):
    keys = KeySet.read(keys_file)
    assert keys.has_key(f"Bearer {KEY}".encode())
    assert keys.has_key(b"bearer another-key-of-theirs")
    assert not keys.has_key(b"Bearer # of the tests")
    assert not keys.has_key(None)
    assert KEY not in repr(vars(keys))


def test_each_known_key_is_compared_in_constant_time(keys_file, monkeypatch):
    seen = []
    monkeypatch.setattr("penstock.serving.keys.hmac.compare_digest", lambda a, b: seen.append((a, b)) or a == b)
    KeySet.read(keys_file).has_key(f"Bearer {KEY}".encode())
    assert [len(a) == len(b) == 32 for a, b in seen] == [True, True]  # the second, too, though the first fits


@pytest.mark.parametrize(
    "text", ["", "# none\n", "short\n", "with a space in it\n", "x" * 600 + "\n", "ключ-достаточной-длины\n"]
)
def test_weak_keys_are_refused(tmp_path, text):
    path = tmp_path / "keys"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(InvalidFileError):
        KeySet.read(path)


def test_a_file_that_others_read_is_refused(keys_file, tmp_path):
    keys_file.chmod(0o644)
    with raises(InvalidFileError, param="path", match="chmod 600"):
        KeySet.read(keys_file)
    with pytest.raises(FileAccessError):
        KeySet.read(tmp_path / "nothing")


def test_the_world_is_not_served_without_a_key(keys_file):
    for host in ("0.0.0.0", "::", "192.168.1.1", "example.com", "127.example.com"):  # noqa: S104
        with raises(InvalidArgumentError, param="host", match="--api-key-file"):
            GatewaySettings(host=host)
        GatewaySettings(host=host, keys_file=keys_file)
        GatewaySettings(host=host, insecure=True)
    assert GatewaySettings().host == "127.0.0.1"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "localhost"}, 200),
        ({"Host": "LOCALHOST:8000"}, 200),
        ({"Host": "127.0.0.1:1"}, 200),
        ({"Host": "[::1]:8000"}, 200),
        ({"Host": "evil.example"}, 403),
        ({"Host": "localhost.evil.example"}, 403),
        ({"Host": "[bad"}, 400),
        ({"Host": "x@localhost"}, 400),
        ({"Host": "localhost/evil"}, 400),
        ({"Host": "localhost?evil"}, 400),
        ({"Host": "localhost#evil"}, 400),
        ({"Host": "localhost:80:80"}, 400),
        ({"Host": "localhost:port"}, 400),
        ({"Host": "localhost\\evil"}, 400),
        ({"Host": "[::1"}, 400),
        ({"Host": "::1"}, 400),
        ({"Host": "[::1%25lo]"}, 400),
        ({"Host": "localhost evil"}, 400),
        ({"Host": "localhost, evil"}, 400),
        ({"Host": "localhost:"}, 200),
        ({"Host": "localhost", "Origin": "http://localhost"}, 200),
        ({"Host": "localhost:8000", "Origin": "http://localhost:8000"}, 200),
        ({"Host": "localhost", "Origin": "http://evil.example"}, 403),
        ({"Host": "localhost", "Origin": "http://localhost:9"}, 403),
        ({"Host": "localhost", "Origin": "null"}, 403),
    ],
)
def test_host_and_origin(demo, headers, status):
    assert demo.ask("GET", "/v1/models", headers=headers)[0] == status


def test_odd_hosts_are_refused_where_any_host_is_allowed(serve):
    service = serve(settings=GatewaySettings(hosts=("*",)))
    assert service.ask("GET", "/v1/models", headers={"Host": "any.example:80"})[0] == 200
    for host in ("x@any.example", "any.example/evil", "[bad"):
        status, _, data = service.ask("GET", "/v1/models", headers={"Host": host})
        assert (status, code_of(data)) == (400, "invalid_header")


def test_further_hosts_and_origins(serve):
    settings = GatewaySettings(hosts=("my.example",), origins=("https://page.example",))
    service = serve(settings=settings)
    assert service.ask("GET", "/v1/models", headers={"Host": "my.example:8000"})[0] == 200
    assert service.ask("GET", "/v1/models", headers={"Host": "your.example"})[0] == 403
    origin = {"Origin": "https://page.example"}
    status, headers, _ = service.ask("GET", "/v1/models", headers=origin)
    assert (status, headers["access-control-allow-origin"], headers["vary"]) == (200, "https://page.example", "Origin")
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    status, headers, _ = service.ask("OPTIONS", "/v1/completions", headers=origin | asked)
    assert (status, headers["access-control-allow-methods"]) == (204, "POST")
    assert "authorization" in headers["access-control-allow-headers"]
    assert not {"content-length", "content-type"} & set(headers)  # RFC 9110 section 8.6
    status, headers, _ = service.ask("OPTIONS", "/v1/completions", headers=asked)
    assert (status, headers["allow"], "access-control-allow-methods" in headers) == (204, "POST", False)
    for name in ("a", "b"):  # in metrics, all names are one route
        assert service.ask("OPTIONS", f"/v1/models/{name}", headers=origin | asked)[0] == 204
    assert {"/v1/models/{model}"} == {
        route
        for method, route, _ in service.gateway.admission.metrics._http
        if method == "OPTIONS" and "models" in route
    }
    assert "access-control-allow-origin" not in service.ask("GET", "/v1/models")[1]


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"", "invalid_json"),
        (b"{", "invalid_json"),
        (b"\xff\xfe", "invalid_json"),
        (b'{"prompt": NaN}', "invalid_json"),
        (b'{"prompt": "x", "temperature": 1e999}', "invalid_json"),
        (b'{"prompt": "x", "prompt": "y"}', "invalid_json"),
        (b'{"prompt": ' + b"[" * 100_000, "invalid_json"),
        (b'{"prompt": ' + b"[" * 70 + b"]" * 70 + b"}", "invalid_json"),
        (b'{"prompt": "\\ud800"}', "invalid_json"),
        (b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}", "invalid_json"),
        (b"[]", "invalid_value"),
        (b"{}", "missing_required_parameter"),
        (b'{"prompt": []}', "invalid_value"),
        (b'{"prompt": [-1]}', "invalid_value"),
        (b'{"prompt": [1000000]}', "invalid_value"),
        (b'{"prompt": [true]}', "invalid_value"),
        (b'{"prompt": [1, "x"]}', "invalid_value"),
        (b'{"prompt": ""}', "invalid_value"),
        (b'{"prompt": "x", "n": 1000000}', "invalid_value"),
        (b'{"prompt": ["x"%s], "n": 128}' % (b', "y"' * 16), "invalid_value"),
        (b'{"prompt": "x", "n": true}', "invalid_value"),
        (b'{"prompt": "x", "logits_processors": ["os.system"]}', "unsupported_parameter"),
        (b'{"prompt": "x", "suffix": "y"}', "unsupported_parameter"),
        (b'{"prompt": "x", "model": "../../etc/passwd"}', "model_not_found"),
    ],
)
def test_bodies_that_are_refused(demo, body, code):
    status, _, data = demo.ask("POST", "/v1/completions", body)
    assert (status, code_of(data)) == (404 if code == "model_not_found" else 400, code)


def test_bounds_on_bodies(serve):
    service = serve(settings=GatewaySettings(limits=GatewayLimits(body_bytes=1000)))
    fits = json.dumps({"prompt": "x" * 900, "max_tokens": 1}).encode()
    assert service.ask("POST", "/tokenize", json.dumps({"prompt": "x" * 900}).encode())[0] == 200
    status, headers, data = service.ask("POST", "/v1/completions", fits + b" " * (1001 - len(fits)))
    assert (status, code_of(data), headers["connection"]) == (413, "body_too_large", "close")
    # The length is not believed: chunks are counted as they come.
    chunk = b"100\r\n" + b" " * 256 + b"\r\n"
    head = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
    assert raw(service, head + chunk * 5).startswith(b"HTTP/1.1 413 ")


def test_a_body_in_pieces_of_one_byte(serve):
    """More pieces than bytes that matter: time and memory go with the bytes."""
    head = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
    body = b'{"prompt": "' + b"x" * 20_000 + b'"}'
    pieces = b"".join(b"1\r\n%c\r\n" % byte for byte in body)
    assert b'"count":20000' in raw(serve(context_len=30_000, num_pages=1000), head + pieces + b"0\r\n\r\n")


@pytest.mark.parametrize(
    "headers",
    [
        {"Content-Type": "text/plain"},
        {"Content-Type": "application/x-www-form-urlencoded"},
        {"Content-Type": "multipart/form-data; boundary=x"},
        {"Content-Type": "application/json; charset=latin-1"},
        {"Content-Type": "application/python-pickle"},
        {"Content-Encoding": "gzip"},
        {"Content-Encoding": "zstd, identity"},
    ],
)
def test_other_bodies_than_plain_json_are_refused(demo, headers):
    status, _, data = demo.ask("POST", "/tokenize", b'{"prompt": "x"}', headers)
    assert (status, code_of(data)) == (415, "unsupported_media_type")


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"GET /" + b"x" * 40_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n", 431),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 40_000 + b"\r\n\r\n", 431),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 40_000, 431),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"X: y\r\n" * 200 + b"\r\n", 431),
        (b"nonsense\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nConnection: close\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nConnection: close\r\nHost: localhost\r\nHost: evil.example\r\n\r\n", 400),
        (b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n", 400),
        (b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: 3\r\nContent-Length: 5\r\n\r\n", 400),
        (b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nX: a\x00b\r\n\r\n", 400),
    ],
)  # fmt: skip
def test_malformed_requests_are_refused(demo, data, status):
    service = demo
    assert raw(service, data).startswith(b"HTTP/1.1 %d " % status)
    assert service.ask("GET", "/health/live")[0] == 200


def test_methods(demo):
    service = demo
    status, headers, _ = service.ask("DELETE", "/v1/models")
    assert (status, headers["allow"]) == (405, "GET, HEAD")
    assert service.ask("GET", "/v1/completions")[1]["allow"] == "POST"
    status, headers, data = service.ask("HEAD", "/v1/models")
    assert (status, data) == (200, b"")


@pytest.mark.parametrize(
    ("path", "near"),
    [
        ("/completions", "/v1/completions"),
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1/complete", "/v1/completions"),
        ("/models/", "/v1/models"),
        ("/ready", "/health/ready"),
        ("/zzzz", ""),
        ("/v1/completions" + "x" * 100, ""),
    ],
)
def test_a_route_that_is_not_there_names_the_nearest(demo, path, near):
    status, _, data = demo.ask("PUT", path)
    assert (status, code_of(data)) == (404, "unknown_route")
    message = json.loads(data)["error"]["message"]
    assert (f"Did you mean {near}?" in message) if near else ("Did you mean" not in message)


@pytest.mark.parametrize(
    ("path", "instead"),
    [
        ("/v1/responses", "/v1/chat/completions"),
        ("/v1/responses/resp_1", "/v1/chat/completions"),
        ("/v1/messages", "/v1/chat/completions"),
        ("/v1/files", "penstock batch"),
        ("/api/chat", "/v1/chat/completions"),
        ("/api/tags", "/v1/models"),
        ("/v1/audio/speech", "audio API is not available"),
    ],
)
def test_apis_of_other_services_say_what_to_use(demo, path, instead):
    status, _, data = demo.ask("POST", path)
    assert (status, code_of(data)) == (404, "unknown_route")
    assert instead in json.loads(data)["error"]["message"]


@pytest.mark.parametrize(
    "name", ["..%2f..%2fkeys", "..", "%2e%2e", "a%00b", "x" * 200, "main.js%2f..", "index.html", "page.py"]
)
def test_names_in_paths_reach_no_file(demo, name):
    assert demo.ask("GET", f"/page/{name}")[0] == 404
    assert demo.ask("GET", f"/v1/models/{name}")[0] == 404


def test_the_page_and_its_policy(demo):
    service = demo
    status, headers, data = service.ask("GET", "/")
    assert (status, headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert headers["content-security-policy"].startswith("default-src 'none'; script-src 'self';")
    assert headers["x-content-type-options"] == "nosniff"
    for name in ("main.js", "page.css", "icon.svg"):
        assert f"page/{name}".encode() in data
        assert service.ask("GET", f"/page/{name}")[0] == 200


@pytest.mark.parametrize("given", ["abc-1.2_3", "x" * 129, "a b", "é", "", None])
def test_request_ids(demo, given):
    service = demo
    headers = {} if given is None else {"X-Request-Id": given}
    _, found, data = service.ask("POST", "/v1/completions", {"prompt": "the", "max_tokens": 1}, headers)
    mine = found["x-request-id"]
    assert (mine == given) == (given == "abc-1.2_3")
    assert json.loads(data)["id"] == f"cmpl-{mine}"
    assert service.ask("GET", "/nowhere", headers=headers)[1]["x-request-id"] != ""


def test_the_log_has_a_line_of_json_for_each_request(serve, caplog):
    service = serve()
    with caplog.at_level(logging.INFO, "penstock.serving"):
        service.ask("POST", "/v1/completions", {"prompt": "the", "max_tokens": 2, "user": "me\nforged: 1"})
        service.ask("GET", '/x"%0Aforged', headers=AUTHORIZED)
        until(lambda: len(caplog.records) >= 2)
    lines = [JsonLines().format(record) for record in caplog.records]
    first, second = map(json.loads, lines)
    assert list(first)[:3] == ["time", "level", "request_id"]
    assert (first["status"], first["model"], first["completion_tokens"], first["user"]) == (
        200,
        "fake",
        2,
        "me\nforged: 1",
    )
    assert (second["status"], second["path"]) == (404, '/x"\nforged')
    assert not any("\n" in line or KEY in line for line in lines)


def test_internal_errors_are_only_in_the_log(serve, caplog):
    service = serve()
    service.models.list()[0].figures = lambda: 1 / 0
    status, headers, data = service.ask("GET", "/status")
    assert status == 500
    assert b"ZeroDivisionError" not in data
    assert headers["x-request-id"].encode() in data
    until(lambda: any(record.exc_info for record in caplog.records))
    told = next(json.loads(JsonLines().format(record)) for record in caplog.records if record.exc_info)
    assert told["level"] == "error"
    assert "ZeroDivisionError" in told["trace"]


def test_readiness_is_the_engines(serve, monkeypatch):
    service = serve()
    assert service.ask("GET", "/health/ready")[0] == 200
    monkeypatch.setattr("penstock.llm.local_backend.STALE_S", -1.0)  # as if its loop had not turned for that long
    status, headers, data = service.ask("GET", "/health/ready")
    assert (status, headers["retry-after"], code_of(data)) == (503, "1", "not_ready")
    assert service.ask("GET", "/health/live")[0] == 200
    assert json.loads(service.ask("GET", "/v1/models")[2])["data"][0]["is_ready"] is False


def test_an_address_that_is_taken(serve):
    from penstock.serving.http.app import make_app
    from penstock.serving.http.listener import Listener

    service = serve()
    settings = GatewaySettings(port=service.address[1])
    with raises(FileAccessError, match=str(service.address[1])):
        Listener(make_app(service.models, settings), settings).open()


def test_names_are_found_by_their_whole_path():
    routes = Routes(operations())
    assert list(routes.find("/v1/models/demo")[0]) == ["GET"]
    for path in ("/v1/models/", "/v1/models/a/b", "/v1/models/.hidden", "/v1/models/{model}", "/v1/models/a\n"):
        assert routes.find(path) == ({}, {})


@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "stream"])
def test_an_internal_cancellation_ends_the_request(serve, monkeypatch, is_stream):
    """As over gRPC: the client is not left without a response."""
    service = serve()
    (backend,) = service.models.list()

    async def submit(*_arguments, **_named):
        never = asyncio.get_running_loop().create_future()
        never.cancel()
        await never

    monkeypatch.setattr(backend, "submit", submit)
    status, error = service.refused("/v1/completions", prompt="the cat", stream=is_stream)
    assert (status, error["code"]) == (503, "unavailable")
    monkeypatch.undo()
    service.post("/v1/completions", prompt="the cat", max_tokens=1)


def test_scored_tokens_are_in_the_log(serve, caplog):
    caplog.set_level(logging.INFO, "penstock")
    service = serve()
    body = service.post("/v1/completions", prompt=[5, 6, 7], max_tokens=0, echo=True, logprobs=1)
    until(lambda: caplog.records)
    (line,) = (one.facts for one in caplog.records if getattr(one, "facts", {}).get("path") == "/v1/completions")
    assert line["prompt_tokens"] == body["usage"]["prompt_tokens"] == 3


def slow(monkeypatch, backend, name: str) -> list[float]:
    """The deadlines that a method of a backend gets, which takes 0.2 s each time."""
    real, given = getattr(backend, name), []

    async def call(ids, *arguments, **named):
        given.append(next(one.deadline_s for one in arguments if isinstance(one, RequestOptions)))
        await asyncio.sleep(0.2)
        return await real(ids, *arguments, **named)

    monkeypatch.setattr(backend, name, call)
    return given


def test_all_prompts_of_a_request_share_its_deadline(serve, monkeypatch):
    service = serve(context_len=64)
    (backend,) = service.models.list()
    given = slow(monkeypatch, backend, "submit")
    service.post("/v1/completions", prompt=[[7]] * (MAX_AT_ONCE + 2), max_tokens=1, timeout=500)
    assert given[0] <= 500
    assert all(one <= 499.9 for one in given[MAX_AT_ONCE:])
    given = slow(monkeypatch, backend, "score")
    service.post("/v1/completions", prompt=[[7, 8]] * 3, max_tokens=0, echo=True, logprobs=0, timeout=500)
    assert given[1] <= 499.9 > given[2] + 0.1
    status, error = service.refused("/v1/completions", prompt=[[7, 8]] * 3, max_tokens=0, echo=True, logprobs=0,
                                    timeout=0.1)  # fmt: skip
    assert (status, error["param"], error["code"]) == (504, "timeout", "deadline_exceeded")
