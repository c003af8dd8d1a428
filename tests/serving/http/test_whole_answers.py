"""Whole answers that are written past ASGI: the same bytes as uvicorn has, in one piece, no header that ends early."""

from __future__ import annotations

import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from penstock.serving.http.http1 import _DirectBody
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


def test_whole_answers_are_those_of_asgi(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kept and closed connections, HTTP/1.0, HEAD, several requests at once."""
    conversations = [
        f"GET {LIVE}Connection: close\r\n\r\n",
        f"HEAD {LIVE}Connection: close\r\n\r\n",
        f"GET {LIVE}\r\nGET {LIVE}\r\nGET {LIVE}Connection: close\r\n\r\n",
        "GET /health/live HTTP/1.0\r\nHost: localhost\r\n\r\n",
        "GET /nowhere HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
    ]
    found = [said(service, one) for one in conversations]
    monkeypatch.setattr(_DirectBody, "whole", lambda *_: False)
    assert found == [said(service, one) for one in conversations]
    assert [one.count("HTTP/1.1 200") for one in found] == [1, 1, 3, 1, 0]
    assert "connection: close" in found[0]


class Written(list[bytes]):
    def write(self, data: bytes) -> None:
        self.append(data)


def cycle(**given: Any) -> Any:
    found = SimpleNamespace(
        response_started=False, disconnected=False, flow=SimpleNamespace(write_paused=False), keep_alive=True,
        default_headers=[(b"date", b"today")], transport=Written(), scope={"method": "GET"},
        message_event=SimpleNamespace(set=lambda: None), on_response=lambda: None,
    )  # fmt: skip
    vars(found).update(given)
    return found


@pytest.mark.parametrize("header", [(b"a", b"b\r\nc: d"), (b"a\n", b"b"), (b"a", b"\r")])
def test_a_header_that_holds_the_end_of_a_line_is_not_written(header: tuple[bytes, bytes]) -> None:
    one = cycle()
    with pytest.raises(ValueError, match="line break"):
        _DirectBody(one).whole(200, [header], b"x")
    assert not one.transport
    assert not one.response_started


@pytest.mark.parametrize(
    "state", [{"response_started": True}, {"disconnected": True}, {"flow": SimpleNamespace(write_paused=True)}]
)
def test_responses_that_must_wait_are_left_to_asgi(state: dict[str, Any]) -> None:
    one = cycle(**state)
    assert not _DirectBody(one).whole(200, [], b"x")
    assert not one.transport


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
