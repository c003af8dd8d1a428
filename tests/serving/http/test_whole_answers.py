"""Responses as bytes: kept and closed connections, no header that ends early, no client that is gone."""

from __future__ import annotations

import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from penstock.serving.http.http1 import _Sink
from penstock.serving.oip.json_body import read_body
from tests.support.http_service import Service
from tests.support.stub_methods import StubMethods

LIVE = "/health/live HTTP/1.1\r\nHost: localhost\r\n"


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    found = Service({}, methods=StubMethods())
    yield found
    found.close()


def said(service: Service, data: str) -> str:
    """All that a connection answers with until its end."""
    with service.connect() as link:
        link.sendall(data.encode())
        parts = []
        while part := link.recv(65536):
            parts.append(part)
    return re.sub("(x-request-id|date): [^\r]*", r"\1: -", b"".join(parts).decode())


FIXED = "cache-control: no-store\r\nx-content-type-options: nosniff\r\nreferrer-policy: no-referrer\r\n"
BODY = '{"status":"ok"}'


def whole(status: str, body: str, *more: str, is_head: bool = False) -> str:
    lines = [f"HTTP/1.1 {status}", "date: -", "content-type: application/json", f"content-length: {len(body)}"]
    text = "\r\n".join([*lines, "x-request-id: -"]) + "\r\n" + FIXED + "".join(f"{one}\r\n" for one in more)
    return text + "\r\n" + ("" if is_head else body)


CLOSE = "connection: close"
CONVERSATIONS = {
    "closed": (f"GET {LIVE}Connection: close\r\n\r\n", whole("200 OK", BODY, CLOSE)),
    "HEAD": (f"HEAD {LIVE}Connection: close\r\n\r\n", whole("200 OK", BODY, CLOSE, is_head=True)),
    "pipelined": (
        f"GET {LIVE}\r\nGET {LIVE}\r\nGET {LIVE}Connection: close\r\n\r\n",
        2 * whole("200 OK", BODY) + whole("200 OK", BODY, CLOSE),
    ),
    "HTTP/1.0": ("GET /health/live HTTP/1.0\r\nHost: localhost\r\n\r\n", whole("200 OK", BODY, CLOSE)),
}


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_whole_responses(service: Service, name: str) -> None:
    sent, expected = CONVERSATIONS[name]
    assert said(service, sent) == expected


class Written(list[bytes]):
    is_closed = False

    def write(self, data: bytes) -> None:
        self.append(data)

    def close(self) -> None:
        self.is_closed = True


def cycle(**given: Any) -> Any:
    found = SimpleNamespace(
        response_started=False, response_complete=False, disconnected=False, flow=SimpleNamespace(write_paused=False),
        keep_alive=True, default_headers=[(b"date", b"today")], transport=Written(),
        scope={"method": "GET", "http_version": "1.1"},
        message_event=SimpleNamespace(set=lambda: None), on_response=lambda: None,
    )  # fmt: skip
    vars(found).update(given)
    return found


@pytest.mark.parametrize("header", [(b"a", b"b\r\nc: d"), (b"a\n", b"b"), (b"a", b"\r")])
def test_a_header_that_holds_the_end_of_a_line_is_not_written(header: tuple[bytes, bytes]) -> None:
    one = cycle()
    with pytest.raises(ValueError, match="line break"):
        _Sink(one).whole(200, [header], b"x")
    with pytest.raises(ValueError, match="line break"):
        _Sink(one).begin(200, [header], b"x")
    assert not one.transport
    assert not one.response_started


def test_a_response_that_says_close_closes() -> None:
    one = cycle()
    _Sink(one).whole(413, [(b"connection", b"close")], b"x")
    assert one.transport.is_closed
    assert b"".join(one.transport).count(b"connection: close") == 1


def test_a_stream_is_chunked_and_ends_in_one_write() -> None:
    one = cycle()
    sink = _Sink(one)
    sink.begin(200, [], b"first")
    sink.write(b"second")
    sink.end(b"last")
    head, *rest = one.transport
    assert head.endswith(b"transfer-encoding: chunked\r\n\r\n5\r\nfirst\r\n")
    assert rest == [b"6\r\nsecond\r\n", b"4\r\nlast\r\n0\r\n\r\n"]
    assert one.response_complete


def test_nothing_is_written_to_a_client_that_is_gone() -> None:
    one = cycle(disconnected=True)
    sink = _Sink(one)
    assert (sink.is_gone, sink.is_free) == (True, False)
    for write in (lambda: sink.whole(200, [], b"x"), lambda: sink.begin(200, [], b"x"), sink.end):
        write()
    assert not one.transport
    assert not one.response_complete


def test_a_sink_is_free_unless_the_client_is_slow_to_read() -> None:
    assert _Sink(cycle()).is_free
    assert not _Sink(cycle(flow=SimpleNamespace(write_paused=True))).is_free


@pytest.mark.parametrize("datatype", ["FP16", "FP32", "FP64"])
def test_a_few_numbers_are_what_many_are(datatype: str) -> None:
    """Small inputs are read by another way: rounding at each datatype's own edges, and of integers, is the same."""
    kind = {"FP16": "<f2", "FP32": "<f4", "FP64": "<f8"}[datatype]
    largest = float(np.finfo(kind).max)
    values = [0.1, -0.0, 1 / 3, largest, -largest, 2**53 + 1, 5e-324, 1e-45, 2049.0, 16777217, 65503.9]
    values = [one for one in values if abs(one) <= largest]
    few, many = (
        read_body(text.encode(), len(text)).request.inputs["x"].array[: len(values)]
        for text in (
            f'{{"inputs": [{{"name": "x", "datatype": "{datatype}", "shape": [{len(ones)}], "data": {ones}}}]}}'
            for ones in (values, values + [0.0] * 2000)
        )
    )
    assert few.tobytes() == many.tobytes()
