"""Where a request ends: ``Upgrade`` headers, trailers and transfer codings must not move it."""

from __future__ import annotations

import json
import socket
import subprocess
import time
from contextlib import suppress

import pytest

from penstock.serving.settings import GatewaySettings
from tests.support.http_service import KEY, Service, raw
from tests.system_packages import skip_reason

BODY = b'{"prompt": "the cat"}'
HEAD = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
SIZED = b"Content-Length: %d\r\n" % len(BODY)
CHUNKED = b"Transfer-Encoding: chunked\r\n"
CHUNKS = b"5\r\n%b\r\n%x\r\n%b\r\n0\r\n\r\n" % (BODY[:5], len(BODY) - 5, BODY[5:])
UPGRADES = [
    b"Connection: Upgrade\r\nUpgrade: h2c\r\n",
    b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAoAAAAAIAAAAA\r\n",
    b"Connection: upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n",
    b"Upgrade: TLS/1.0\r\nConnection: keep-alive, Upgrade\r\n",
    b"Upgrade: h2c\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n",
]
LAST = b"GET /health/live HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"


def answers(connection: socket.socket) -> list[int]:
    """The statuses of all answers until the server closes the connection."""
    connection.settimeout(60)
    found = b""
    with suppress(ConnectionResetError):
        while piece := connection.recv(65536):
            found += piece
    statuses = []
    while found:
        head, separator, rest = found.partition(b"\r\n\r\n")
        assert separator == b"\r\n\r\n", found
        assert head.startswith(b"HTTP/1.1 "), found
        lines = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:])
        statuses.append(int(head[9:12]))
        found = rest[int(lines.get(b"content-length", b"0")) :] if statuses[-1] != 100 else rest
    return statuses


def ask(service: Service, *pieces: bytes) -> list[int]:
    """The statuses that the pieces, each in a packet of its own, are answered with."""
    with service.connect() as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for index, piece in enumerate(pieces):
            if index:
                time.sleep(0.05)
            connection.sendall(piece)
        return answers(connection)


@pytest.mark.parametrize("upgrade", UPGRADES)
@pytest.mark.parametrize(("sized", "body"), [(SIZED, BODY), (CHUNKED, CHUNKS)], ids=["sized", "chunked"])
def test_a_body_behind_an_upgrade_header_is_read(demo, upgrade, sized, body):
    head = HEAD + upgrade + sized + b"\r\n"
    assert ask(demo, head + body + LAST) == [200, 200]
    assert ask(demo, head, body + LAST) == [200, 200]
    assert ask(demo, head, body[:7], body[7:], LAST) == [200, 200]
    assert ask(demo, 20 * (head + body) + LAST) == 21 * [200]


@pytest.mark.parametrize(("sized", "body"), [(SIZED, BODY), (CHUNKED, CHUNKS)], ids=["sized", "chunked"])
def test_an_upgrade_can_be_split_anywhere(demo, sized, body):
    data = HEAD + UPGRADES[0] + sized + b"\r\n" + body + LAST
    connections = [demo.connect() for _ in data[1:]]
    for at, connection in enumerate(connections, 1):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(data[:at])
    time.sleep(0.3)
    for at, connection in enumerate(connections, 1):
        connection.sendall(data[at:])
    for at, connection in enumerate(connections, 1):
        with connection:
            assert answers(connection) == [200, 200], at


def test_an_upgrade_without_a_body(demo):
    request = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n" + UPGRADES[0] + b"\r\n"
    assert ask(demo, request + request + LAST) == [200, 200, 200]
    assert ask(demo, request, LAST) == [200, 200]


def test_a_body_that_looks_like_a_request_stays_a_body(demo):
    """What a proxy takes for a body must not be answered as a request."""
    inner = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n"
    head = HEAD + UPGRADES[0] + b"Content-Length: %d\r\n\r\n" % len(inner)
    assert ask(demo, head, inner, LAST) == [400, 200]
    assert ask(demo, head + inner + LAST) == [400, 200]


def test_an_upgrade_with_expect_gets_100_continue(demo):
    head = HEAD + UPGRADES[0] + SIZED + b"Expect: 100-continue\r\n\r\n"
    assert ask(demo, head, BODY + LAST) == [100, 200, 200]


def test_limits_hold_behind_an_upgrade(demo):
    assert ask(demo, HEAD + UPGRADES[0] + b"X: y\r\n" * 100 + b"\r\n") == [431]
    assert ask(demo, HEAD + UPGRADES[0] + b"X: " + b"y" * 40_000 + b"\r\n\r\n") == [431]
    assert ask(demo, HEAD + UPGRADES[0] + SIZED + CHUNKED + b"\r\n" + CHUNKS) == [400]


@pytest.mark.parametrize("target", [b"localhost:80", b"/tokenize"])
def test_connect_is_refused(demo, target):
    head = b"CONNECT " + target + b" HTTP/1.1\r\nHost: localhost\r\n" + SIZED + b"\r\n"
    assert ask(demo, head + BODY + LAST) == [501]
    assert ask(demo, head + LAST) == [501]


def slow_request() -> bytes:
    body = json.dumps({"prompt": "the cat", "max_tokens": 200, "ignore_eos": True}).encode()
    head = HEAD.replace(b"/tokenize", b"/v1/completions") + b"Content-Length: %d\r\n\r\n" % len(body)
    return head + body


REFUSED = {
    "connect": (b"CONNECT a:80 HTTP/1.1\r\nHost: localhost\r\n\r\n", 501),
    "coding": (HEAD + b"Transfer-Encoding: gzip, chunked\r\n\r\n" + CHUNKS, 501),
    "large": (HEAD + b"X: y\r\n" * 100 + b"\r\n", 431),
    "endless": (HEAD + b"X: " + b"y" * 200_000, 431),
    "malformed": (b"BREW / HTCPCP/1.0\r\n\r\n", 400),
    "bad chunk": (HEAD + CHUNKED + b"\r\nzz\r\n", 400),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_comes_behind_earlier_responses(demo, name):
    slow, (refused, status) = slow_request(), REFUSED[name]
    assert ask(demo, slow + refused) == [200, status]
    assert ask(demo, slow, refused + LAST) == [200, status]
    assert ask(demo, slow + slow + refused) == [200, 200, status]
    assert ask(demo, refused)[:1] == [status]


@pytest.mark.skipif(bool(skip_reason("curl")), reason=skip_reason("curl"))
def test_curl_with_http2_is_answered(demo):
    body = json.dumps({"prompt": "the cat", "max_tokens": 3})
    for more in ([], ["-H", "Transfer-Encoding: chunked"]):
        command = ["curl", "-sS", "--fail", "--http2", "--max-time", "60", *more, "-d", body]
        command += ["-H", "Content-Type: application/json", demo.url + "/v1/completions"]
        found = subprocess.run(command, capture_output=True, check=True)
        assert json.loads(found.stdout)["usage"]["completion_tokens"] == 3


def test_trailers_are_not_headers(serve, tmp_path):
    file = tmp_path / "keys"
    file.write_text(KEY + "\n")
    file.chmod(0o600)
    service = serve(settings=GatewaySettings(keys_file=file))
    head, trailer = HEAD + CHUNKED + b"\r\n", b"Authorization: Bearer %b\r\n" % KEY.encode()
    body = CHUNKS.removesuffix(b"\r\n") + trailer + b"\r\n"
    assert ask(service, head + body + LAST) == [401, 200]
    assert ask(service, head, body, LAST) == [401, 200]
    allowed = HEAD + trailer + CHUNKED + b"\r\n"
    host = CHUNKS.removesuffix(b"\r\n") + b"Host: evil.example\r\n\r\n"
    assert ask(service, allowed + host + LAST) == [200, 200]
    large = CHUNKS.removesuffix(b"\r\n") + b"X: y\r\n" * 10_000 + b"\r\n"
    assert ask(service, allowed + large)[0] in (200, 431)
    assert service.ask("GET", "/health/live")[0] == 200


@pytest.mark.parametrize(
    "trailer", [b"Connection: close", b"Connection: upgrade\r\nUpgrade: h2c", b"Expect: 100-continue"]
)
def test_a_trailer_does_not_change_the_connection(demo, trailer):
    head, body = HEAD + CHUNKED + b"\r\n", CHUNKS.removesuffix(b"\r\n") + trailer + b"\r\n\r\n"
    assert ask(demo, head + body + LAST) == [200, 200]
    assert ask(demo, head + body, LAST) == [200, 200]
    assert ask(demo, 3 * (head + body) + LAST) == 4 * [200]
    closes = HEAD + b"Connection: close\r\n" + CHUNKED + b"\r\n"
    assert ask(demo, head + body + closes + body + LAST) == [200, 200]
    assert ask(demo, head + body + closes + CHUNKS + b"no request") == [200, 200]


@pytest.mark.parametrize("coding", [b"gzip, chunked", b"gzip\r\nTransfer-Encoding: chunked", b"x-other,chunked"])
def test_other_transfer_codings_are_not_implemented(demo, coding):
    assert ask(demo, HEAD + b"Transfer-Encoding: " + coding + b"\r\n\r\n" + CHUNKS + LAST) == [501]


@pytest.mark.parametrize("coding", [b"Chunked", b"CHUNKED"])
def test_chunked_in_any_case(demo, coding):
    assert ask(demo, HEAD + b"Transfer-Encoding: " + coding + b"\r\n\r\n" + CHUNKS + LAST) == [200, 200]


OLD = b"POST /v1/completions HTTP/1.0\r\nHost: localhost\r\nContent-Type: application/json\r\n"


def test_chunks_need_http_11(demo):
    """RFC 9112 section 6.1: a message of HTTP/1.0 with a transfer coding has faulty framing."""
    assert ask(demo, OLD + CHUNKED + b"\r\n" + CHUNKS) == [400]


@pytest.mark.parametrize("connection", [b"", b"Connection: keep-alive\r\n"], ids=["close", "keep-alive"])
def test_a_stream_to_http_10_has_no_chunks(demo, connection):
    body = b'{"prompt": "the cat", "max_tokens": 3, "ignore_eos": true, "stream": true}'
    head = OLD + connection + b"Content-Length: %d\r\n\r\n" % len(body)
    head, _, events = raw(demo, head + body).partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head.lower()
    assert b"connection: close" in head.lower()
    assert all(line.startswith(b"data: ") for line in events.rstrip(b"\n").split(b"\n\n"))
    assert events.endswith(b"data: [DONE]\n\n")
