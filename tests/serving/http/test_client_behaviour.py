"""What clients do to a service: they go away at every stage, send slowly, read slowly, and never come to an end."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import struct
import time
from contextlib import suppress

import pytest

from penstock.serving.settings import GatewayLimits, GatewaySettings
from tests.support.http_service import ENDLESS, ROOMY, is_idle, num_connections, post, until


def read_until(connection: socket.socket, text: bytes, found: bytes = b"") -> bytes:
    """What was found and what comes, until the text is in it."""
    while text not in found:
        piece = connection.recv(65536)
        assert piece, f"the connection ended after {found!r}"
        found += piece
    return found


@pytest.mark.parametrize("reset", [False, True], ids=["close", "reset"])
@pytest.mark.parametrize(
    "stage", ["connected", "line", "headers", "body", "whole answer", "stream begun", "stream of several", "chat"]
)
def test_a_disconnected_client_leaves_no_request(serve, stage, reset):
    service = serve(**ROOMY)
    request = post(
        "/v1/completions", ENDLESS | {"stream": stage.startswith("stream"), "n": 3 if "several" in stage else 1}
    )
    if stage == "chat":
        chat = {k: v for k, v in ENDLESS.items() if k != "prompt"} | {"messages": [{"role": "user", "content": "x"}]}
        request = post("/v1/chat/completions", chat)
    sent = {"connected": 0, "line": 10, "headers": 60, "body": len(request) - 5}.get(stage, len(request))
    connection = service.connect()
    connection.sendall(request[:sent])
    until(lambda: num_connections(service) == 1)
    if sent == len(request):
        until(lambda: service.num_open == 1)
        until(lambda: service.models.list()[0].llm.engine.figures().num_output_tokens > 2)
        if stage.startswith("stream"):
            read_until(connection, b"data: ")
    elif stage == "body":
        until(lambda: service.num_open == 1)
    if reset:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()
    until(lambda: is_idle(service), "the end of its request")
    until(lambda: num_connections(service) == 0)
    assert service.post("/v1/completions", prompt="the", max_tokens=3)["usage"]["completion_tokens"] == 3


def test_a_disconnected_client_leaves_the_queue(serve):
    service = serve(max_requests=1, **ROOMY)
    first, second = service.connect(), service.connect()
    engine = service.models.list()[0].llm.engine
    first.sendall(post("/v1/completions", ENDLESS))
    until(lambda: engine.figures().num_running == 1)
    second.sendall(post("/v1/completions", ENDLESS))
    until(lambda: engine.figures().num_waiting == 1)
    second.close()
    until(lambda: engine.figures().num_waiting == 0 and service.num_open == 1)
    first.close()
    until(lambda: is_idle(service))


def test_tokens_are_sent_while_the_answer_goes_on(serve):
    service = serve(**ROOMY)
    with service.connect() as connection:
        connection.sendall(post("/v1/completions", ENDLESS | {"stream": True}))
        read_until(connection, b"data: ")
        assert service.num_open == 1
    until(lambda: is_idle(service))


@pytest.mark.long
@pytest.mark.parametrize("is_stream", [True, False], ids=["stream", "whole"])
def test_a_client_that_does_not_read_is_disconnected(serve, caplog, is_stream):
    limits = GatewayLimits(write_s=0.3, keep_alive_s=1)
    service = serve(settings=GatewaySettings(limits=limits), **ROOMY)
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(service.address)
    # Many bytes a token: buffers fill soon, and what is whole does not fit into them.
    body = ENDLESS | {"stream": is_stream, "logprobs": 20} | ({} if is_stream else {"max_tokens": 1500})
    connection.sendall(post("/v1/completions", body))
    until(lambda: service.models.list()[0].llm.engine.figures().num_output_tokens > 0)
    until(lambda: is_idle(service), "the end of what nobody reads")
    until(lambda: num_connections(service) == 0, "the end of the connection")
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == []
    connection.close()


@pytest.mark.long
def test_a_service_stops_despite_a_client_that_does_not_read(serve):
    service = serve(settings=GatewaySettings(limits=GatewayLimits(write_s=0.3)), **ROOMY)
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(service.address)
        connection.sendall(post("/v1/completions", ENDLESS | {"logprobs": 20, "max_tokens": 1500}))
        until(lambda: service.num_open == 1)
        until(lambda: is_idle(service), "the end of the request")
        (one,) = service.listener.connections
        assert one.transport._inner.get_write_buffer_size()  # the kernel did not take all
        service.loop.call_soon_threadsafe(service.listener.stop)
        until(lambda: not service.is_alive, "the end of the service")


@pytest.mark.parametrize(("path", "size", "status"), [("/nowhere", 900_000, 404), ("/tokenize", 10_000_000, 413)])
@pytest.mark.parametrize("close", [False, True], ids=["kept", "closed"])
def test_refused_sender_can_read_the_reason(serve, path, size, status, close):
    limits = GatewayLimits(body_bytes=1_000_000, keep_alive_s=1 if status == 413 else 60)
    service = serve(settings=GatewaySettings(limits=limits))
    with service.connect() as connection:
        extra = ["Connection: close"] if close else []
        for _ in range(3 if status == 404 and not close else 1):
            connection.sendall(post(path, {"prompt": "x" * size}, *extra))
            assert read_until(connection, b"}}").startswith(b"HTTP/1.1 %d " % status)
        if close or status == 413:
            assert connection.recv(100) == b""
    until(lambda: num_connections(service) == 0)


def test_refused_sender_is_disconnected_after_body_s(serve):
    service = serve(settings=GatewaySettings(limits=GatewayLimits(body_s=0.3)))
    with service.connect() as connection, suppress(ConnectionError):
        head = b"POST /nowhere HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
        connection.sendall(head)
        read_until(connection, b"}}")
        for _ in range(10_000):
            connection.sendall(b"1\r\nx\r\n")
            time.sleep(0.005)
        raise AssertionError("the connection did not end")
    until(lambda: num_connections(service) == 0)


@pytest.mark.parametrize("sent", [b"", b"POST /v1/comp", b"GET / HTTP/1.1\r\nHost: localhost\r\nX-A"])
def test_headers_that_do_not_come_end_the_connection(serve, sent):
    service = serve(settings=GatewaySettings(limits=GatewayLimits(header_s=0.2)))
    with service.connect() as connection, suppress(ConnectionResetError):  # who is late finds it gone
        connection.sendall(sent)
        assert connection.recv(100) == b""
    until(lambda: num_connections(service) == 0)


def test_a_body_that_does_not_come_is_refused(serve):
    service = serve(settings=GatewaySettings(limits=GatewayLimits(body_s=0.2, keep_alive_s=1)))
    with service.connect() as connection:
        connection.sendall(post("/v1/completions", {"prompt": "the cat"})[:-3])
        answer = read_until(connection, b"}}")
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b"body_too_slow" in answer
        assert connection.recv(100) == b""
    until(lambda: is_idle(service))


def test_a_kept_connection_serves_many_and_ends_when_it_rests(serve):
    for seconds, num_requests in ((600, 3), (1, 1)):
        service = serve(settings=GatewaySettings(limits=GatewayLimits(keep_alive_s=seconds)))
        with service.connect() as connection:
            for _ in range(num_requests):
                connection.sendall(post("/v1/completions", {"prompt": "the cat", "max_tokens": 2}))
                assert read_until(connection, b"}}}").startswith(b"HTTP/1.1 200 ")
            assert num_connections(service) == 1 or seconds == 1
            if seconds == 1:
                assert connection.recv(100) == b""
        until(lambda service=service: num_connections(service) == 0)


def test_small_pieces_are_sent_at_once(serve):
    service = serve()
    with service.connect():
        until(lambda: num_connections(service) == 1)
        (one,) = service.listener.connections
        own = one.transport.get_extra_info("socket")
        assert own.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_requests_sent_ahead_are_answered_in_order(serve):
    service = serve()
    bodies = [post("/tokenize", {"prompt": text}) for text in ("a", "ab", "abc")]
    with service.connect() as connection:
        connection.sendall(b"".join(bodies))
        found = b""
        while found.count(b'"count":') < 3:
            found += connection.recv(65536)
    assert [found.index(b'"count":%d' % n) for n in (1, 2, 3)] == sorted(
        found.index(b'"count":%d' % n) for n in (1, 2, 3)
    )


def test_a_client_may_leave_with_several_requests_open(serve, caplog):
    """Each of them ends without a line of uvicorn's about a response that is missing."""
    service = serve(**ROOMY)
    for body in (ENDLESS, ENDLESS | {"stream": True}):
        with service.connect() as connection:
            connection.sendall(2 * post("/v1/completions", body))
            until(lambda: service.num_open == 1)
        until(lambda: is_idle(service) and num_connections(service) == 0)
        service.do(asyncio.sleep(0))
    assert [one for one in caplog.records if one.levelno >= logging.ERROR] == []


def test_excess_connections_are_refused(serve):
    service = serve(settings=GatewaySettings(limits=GatewayLimits(num_connections=2)))
    kept = [service.connect() for _ in range(2)]
    until(lambda: num_connections(service) == 2)
    with service.connect() as connection:
        assert connection.recv(100).startswith(b"HTTP/1.1 503 ")
    for connection in kept:
        connection.close()
    until(lambda: num_connections(service) == 0)
    assert service.ask("GET", "/health/live")[0] == 200


def test_excess_requests_are_refused_and_the_others_served(serve):
    service = serve(settings=GatewaySettings(limits=GatewayLimits(num_open=1)), **ROOMY)
    with service.connect() as connection:
        connection.sendall(post("/v1/completions", ENDLESS | {"stream": True}))
        read_until(connection, b"data: ")
        status, headers, data = service.ask("POST", "/v1/completions", {"prompt": "the"})
        assert (status, headers["retry-after"]) == (429, "1")
        assert json.loads(data)["error"]["code"] == "too_many_requests"
        assert service.ask("GET", "/health/ready")[0] == 200
    until(lambda: is_idle(service))


def test_a_full_queue_is_refused_at_once(serve):
    from penstock.engine.options import EngineOptions

    service = serve(max_requests=1, options=EngineOptions(max_waiting=1), **ROOMY)
    engine = service.models.list()[0].llm.engine
    held = [service.connect() for _ in range(2)]
    for number, connection in enumerate(held):
        connection.sendall(post("/v1/completions", ENDLESS))
        until(lambda number=number: service.num_open == number + 1 and engine.figures().num_running == 1)
    until(lambda: engine.figures().num_waiting == 1)
    status, headers, data = service.ask("POST", "/v1/completions", {"prompt": "the"})
    assert (status, headers["retry-after"]) == (429, "1")
    assert json.loads(data)["error"]["code"] == "queue_full"
    for connection in held:
        connection.close()
    until(lambda: is_idle(service))


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_ends_at_its_deadline(serve, stream, later):
    service = serve(**ROOMY)
    with service.connect() as connection:
        connection.sendall(post("/v1/completions", ENDLESS | {"timeout": 600, "stream": stream}))
        if stream:
            found = read_until(connection, b"data: ")
        else:
            until(lambda: service.models.list()[0].llm.engine.figures().num_output_tokens > 2)
            found = b""
        later.ahead = 601.0
        found = read_until(connection, b'"deadline_exceeded"', found)
    assert found.startswith(b"HTTP/1.1 200 " if stream else b"HTTP/1.1 504 ")
    assert b'"message": "timeout ' in found  # by the field's name, not the engine's
    until(lambda: is_idle(service))


def test_a_service_that_stops_lets_answers_end(serve):
    service = serve(**ROOMY)
    with service.connect() as connection:
        connection.sendall(post("/v1/completions", ENDLESS | {"stream": True, "max_tokens": 500}))
        found = read_until(connection, b"data: ")
        service.models.is_draining = True
        assert service.ask("GET", "/health/ready")[0] == 503
        status, headers, _ = service.ask("POST", "/v1/completions", {"prompt": "the"})
        assert (status, headers["retry-after"]) == (503, "1")
        service.loop.call_soon_threadsafe(service.listener.stop)
        found = read_until(connection, b"[DONE]", found)
        assert b'"finish_reason":"length"' in found
    service.close()


def test_a_model_that_is_closed_ends_its_streams_with_an_error(serve):
    service = serve(**ROOMY)
    with service.connect() as connection:
        connection.sendall(post("/v1/completions", ENDLESS | {"stream": True}))
        read_until(connection, b"data: ")
        service.do(service.models.unload("fake"))
        assert b'"code": "unavailable"' in read_until(connection, b"}}\n\n")
    assert service.ask("POST", "/v1/completions", {"prompt": "the", "model": "fake"})[0] == 404
