"""Requests that were damaged on their way: answered with a status of the table or hung up on, never a bug of ours.

``PENSTOCK_CHAOS=n`` sends n times as many (``make chaos``).
"""

from __future__ import annotations

import json
import logging
import os
import random
import socket
from contextlib import suppress

from penstock.api_errors import CODES
from tests.support.http_service import SECONDS, is_idle, num_connections, post, until

NUM = 2000 * int(os.environ.get("PENSTOCK_CHAOS", "1"))
SAMPLING = {"max_tokens": 3, "temperature": 0.5, "seed": 7, "stop": ["a", "b"], "logit_bias": {"5": -1.5}}
MESSAGES = [{"role": "system", "content": "x"}, {"role": "user", "content": [{"type": "text", "text": "ü"}]}]
GOOD = [
    post("/v1/completions", {"prompt": ["the cat", "sat"], "n": 2, "logprobs": 2, "echo": True, **SAMPLING}),
    post("/v1/completions", {"prompt": [[5, 6], [7]], "stream": True, "stream_options": {"include_usage": True}}),
    post("/v1/chat/completions", {"messages": MESSAGES, "logprobs": True, "top_logprobs": 3, **SAMPLING}),
    post("/v1/embeddings", {"input": ["a", "b"], "encoding_format": "base64"}),
    post("/tokenize", {"messages": MESSAGES}),
    post("/detokenize", {"tokens": [5, 6, 7]}),
    b"GET /v1/models/fake HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer x\r\n\r\n",
    b"GET /page/main.js HTTP/1.1\r\nHost: localhost\r\nOrigin: http://localhost\r\n\r\n",
    b"OPTIONS /v1/completions HTTP/1.1\r\nHost: localhost\r\n\r\n",
]
SPLICES = [
    b"\x00", b"\xff\xfe", b"\r\n", b"\r\n\r\n", b"{", b"[", b'"', b"]}", b"\\ud800", b"1e999", b"-1", b"NaN", b"null",
    b"9" * 400, b"[" * 70, b"../../", b"%00", b"%2e%2e", b"Transfer-Encoding: chunked\r\n", b"Content-Length: 3\r\n",
    b"Host: evil\r\n", b"Expect: 100-continue\r\n", b"Upgrade: h2c\r\nConnection: Upgrade\r\n", b" HTTP/9.9",
    b"ffffffff\r\n",
]  # fmt: skip


def damaged(rng: random.Random) -> bytes:
    """A request with one to four of its bytes or pieces changed; half of those with a body tell its right length."""
    data = bytearray(rng.choice(GOOD))
    head, _, body = bytes(data).partition(b"\r\n\r\n")
    keeps_head = bool(body) and rng.random() < 0.5
    if keeps_head:
        data = bytearray(body)
    for _ in range(rng.randrange(1, 5)):
        at = rng.randrange(len(data) + 1)
        end = min(len(data), at + rng.randrange(1, 12))
        match rng.randrange(5):
            case 0:
                data[at:end] = b""
            case 1:
                data[at:at] = rng.choice(SPLICES)
            case 2:
                data[at : at + 1] = bytes([rng.randrange(256)])
            case 3:
                data[at:at] = data[at:end] * rng.randrange(1, 4)
            case _:
                data[at:end] = rng.choice(SPLICES)
    if not keeps_head:
        return bytes(data)
    lines = [line for line in head.split(b"\r\n") if not line.startswith(b"Content-Length")]
    return b"\r\n".join([*lines, b"Content-Length: %d" % len(data)]) + b"\r\n\r\n" + bytes(data)


def answers_to(address: tuple[str, int], data: bytes) -> bytes:
    """All that comes back until the service hangs up."""
    found = b""
    with socket.create_connection(address, 10 * SECONDS) as connection, suppress(ConnectionError):
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        while piece := connection.recv(65536):
            found += piece
    return found


def test_damaged_requests_are_refused_or_hung_up_on(serve, caplog):
    caplog.set_level(logging.ERROR)
    service, rng, statuses = serve("fake"), random.Random(11), set()
    for _ in range(NUM):
        data = damaged(rng)
        answer = answers_to(service.address, data).removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n")
        if not answer:
            continue
        assert answer.startswith(b"HTTP/1.1 "), data
        status = int(answer[9:12])
        assert status in (200, 204) or status in CODES, (data, answer)
        assert status < 500, (data, answer)
        statuses.add(status)
        if status >= 400:
            told, _ = json.JSONDecoder().raw_decode(answer.partition(b"\r\n\r\n")[2].decode())
            assert set(told) == {"error"}, (data, answer)
    assert {200, 204, 400, 404, 415} <= statuses
    assert caplog.records == []
    until(lambda: is_idle(service) and num_connections(service) == 0)
    assert service.ask("GET", "/health/ready")[0] == 200
