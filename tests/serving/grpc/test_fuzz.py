"""Damaged messages, frames and streams, and clients that go at any moment: answered, refused or hung up on, never a bug
of ours, and nothing is left of them.

``PENSTOCK_CHAOS=n`` sends n times as many (``make chaos``).
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import random
import struct
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress

import grpc
import pytest

from penstock.engine import deadlines
from penstock.serving import metrics
from penstock.serving.grpc import gateway
from penstock.serving.proto import oip_pb2 as pb
from penstock.serving.settings import GatewaySettings
from tests.support.grpc_client import SERVICE, call, channel, infer, request
from tests.support.grpc_damage import GOOD, asked, cut_bytes, damaged
from tests.support.grpc_frames import answers_to, frame, headers
from tests.support.http_service import SECONDS, Service, is_idle, until

CHAOS = int(os.environ.get("PENSTOCK_CHAOS", "1"))
INFER, STREAM = SERVICE + "ModelInfer", SERVICE + "ModelStreamInfer"
EXPECTED = {"OK", "INVALID_ARGUMENT", "NOT_FOUND", "DEADLINE_EXCEEDED"}
"""A damaged message may ask for little time."""
OPEN = {SERVICE + "ServerLive", SERVICE + "ServerReady", "/grpc.health.v1.Health/Check"}
"""Asked without a key, and so with little."""
FINAL = "triton_final_response"


@pytest.fixture
def fake(serve) -> Service:
    return serve("fake", settings=GatewaySettings(grpc_port=0), context_len=128)


def num_tasks(service: Service) -> int:
    """Tasks of the service's event loop."""

    async def count() -> int:
        return len(asyncio.all_tasks())

    found: int = service.do(count())
    return found


def test_good_requests_are_good(fake):
    """What is damaged elsewhere."""
    for one in GOOD:
        assert infer(fake, one).outputs


@pytest.mark.long
def test_damaged_messages_are_answered_or_refused(fake, caplog):
    caplog.set_level(logging.ERROR)
    rng, codes = random.Random(21), Counter[str]()
    methods = [path for path in fake.grpc.gateway._methods if not path.endswith("Watch")]
    with channel(fake) as found:
        for _ in range(1200 * CHAOS):
            method, data = (INFER if rng.random() < 0.9 else rng.choice(methods)), damaged(rng)
            answers = found.stream_stream(method)(iter([data]), timeout=SECONDS)
            with suppress(grpc.RpcError):
                list(answers)
            code = answers.code().name
            is_admins = fake.grpc.gateway._methods[method].is_admin
            too_large = {"RESOURCE_EXHAUSTED"} if method in OPEN else set()
            assert code in ({"PERMISSION_DENIED"} if is_admins else EXPECTED | too_large), (method, data)
            codes[code] += 1
    assert {"OK", "INVALID_ARGUMENT", "NOT_FOUND"} <= set(codes)
    assert min(codes["OK"], codes["INVALID_ARGUMENT"]) > 50 * CHAOS, codes
    assert caplog.records == []
    until(lambda: is_idle(fake))
    assert infer(fake, request()).outputs


def test_a_stream_of_good_and_damaged_requests(fake, caplog):
    """Each has one end, and the good ones their answers, whatever stands between them."""
    caplog.set_level(logging.ERROR)
    rng = random.Random(22)
    texts = {asked(number).id: infer(fake, asked(number)).raw_output_contents[0] for number in range(8)}
    texts = {name: raw[4:].decode() for name, raw in texts.items()}
    with channel(fake) as found:
        for _ in range(30 * CHAOS):
            sent = [(asked(n).SerializeToString() if n < 8 else damaged(rng)) for n in rng.sample(range(40), 24)]
            good = [one for one in texts if any(one.encode() in data for data in sent if data in _GOOD_BYTES)]
            got, ends = dict.fromkeys(good, ""), 0
            stream = found.stream_stream(STREAM)(iter(sent), timeout=SECONDS)
            for data in stream:
                message = pb.ModelStreamInferResponse.FromString(data)
                response = message.infer_response
                ends += response.parameters[FINAL].bool_param
                if message.error_message:
                    assert response.parameters["code"].string_param in EXPECTED, message
                elif response.id in got:
                    got[response.id] += response.raw_output_contents[0][4:].decode()
            assert stream.code() is grpc.StatusCode.OK
            assert ends == len(sent)
            assert got == {one: texts[one] for one in good}
    assert caplog.records == []
    until(lambda: is_idle(fake))


_GOOD_BYTES = {asked(number).SerializeToString() for number in range(8)}


def conversation() -> tuple[bytes, ...]:
    """What a client sends of two calls, frame by frame; the first is the preface."""
    message = GOOD[1].SerializeToString()
    data = b"\x00" + struct.pack(">I", len(message)) + message
    return (
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", frame(4, 0, 0, b""), headers(INFER.encode(), 1), frame(0, 1, 1, data),
        headers(STREAM.encode(), 3), frame(0, 0, 3, data), frame(0, 0, 3, data[:9]), frame(0, 1, 3, data[9:]),
    )  # fmt: skip


def odd_frames(rng: random.Random) -> tuple[bytes, ...]:
    """Right in HTTP/2 and wrong in gRPC: lengths, flags and order of messages, resets, settings."""
    large, none = b"\x00\x7f\xff\xff\xff", b"\x00\x00\x00\x00\x00"
    odd = [
        frame(0, 0, 3, large), frame(0, 1, 3, b"\x01" + none[1:]), frame(0, 0, 1, none * 3), frame(3, 0, 3, bytes(4)),
        frame(0, 1, 3, b"\x00\x00"), frame(4, 0, 0, b"\x00\x04\x00\x00\x00\x00"), frame(8, 0, 0, bytes(4)),
        headers(b"/", 5),        frame(6, 0, 0, bytes(8)), frame(7, 0, 0, bytes(8)), frame(9, 0, 3, b""),
        headers(INFER.encode(), 2), frame(0, 0, 9, none),
    ]  # fmt: skip
    found = [*conversation()]
    for _ in range(rng.randrange(1, 4)):
        found.insert(rng.randrange(1, len(found) + 1), rng.choice(odd))
    return tuple(found)


def test_damaged_frames_end_their_connection_at_most(fake, caplog):
    caplog.set_level(logging.ERROR)
    assert b"finish_reason" in answers_to(fake, b"".join(conversation()), text=FINAL.encode())
    rng = random.Random(23)
    for number in range(300 * CHAOS):
        if number % 2:
            data = b"".join(odd_frames(rng))
        else:
            preface, *frames = conversation()
            data = preface + cut_bytes(rng, b"".join(frames))
        answers_to(fake, data, rng.choice((0.0, 0.001, 0.004)))
    until(lambda: is_idle(fake))
    assert infer(fake, request()).outputs
    told = [one.getMessage() for one in caplog.records if one.name.startswith("penstock")]  # gRPC has words of its own
    assert not [one for one in told if "opened again" not in one]


def is_alive(service: Service) -> bool:
    with suppress(grpc.RpcError):
        return call(service, SERVICE + "ServerLive", b"") != b""
    return False


def test_a_method_name_that_is_not_utf8_ends_no_service(fake):
    """gRPC 1.84 and 1.85 end their server over it, which is then opened again."""
    preface, settings, *_ = conversation()
    answers_to(fake, preface + settings + headers(b"/inference.\xa8/X", 1) + frame(0, 1, 1, bytes(5)), pause_s=0.1)
    until(lambda: is_alive(fake))
    assert infer(fake, request()).outputs


def test_a_server_that_ends_by_itself_is_opened_again(fake):
    fake.do(fake.grpc._server.stop(0))
    until(lambda: is_alive(fake))
    assert infer(fake, request()).outputs


class Leaving:
    """A client that goes at a stage of a call."""

    STAGES = ("nothing sent", "sent", "at work", "answered in part", "closed", "reader gone")

    def __init__(self, service: Service, stage: str, is_stream: bool) -> None:
        self.service, self.stage, self.is_stream = service, stage, is_stream
        self.never = threading.Event()
        self.long = request()
        self.long.parameters["max_tokens"].int64_param = 20_000
        self.long.parameters["ignore_eos"].bool_param = True

    def _sends(self) -> Iterator[bytes]:
        if self.stage != "nothing sent":
            yield self.long.SerializeToString()
            if self.is_stream:
                yield b"\xff"
        if self.stage != "closed":
            self.never.wait(SECONDS)

    def go(self) -> None:
        before = self.service.models.list()[0].llm.engine.figures().num_output_tokens
        with channel(self.service) as found:
            rpc = found.stream_stream(STREAM if self.is_stream else INFER)(self._sends(), timeout=SECONDS)
            engine = self.service.models.list()[0].llm.engine
            if self.stage in ("at work", "closed", "reader gone"):
                until(lambda: engine.figures().num_output_tokens > before)
            elif self.stage == "answered in part" and self.is_stream:
                while not pb.ModelStreamInferResponse.FromString(next(rpc)).infer_response.outputs:
                    pass
            if self.stage != "reader gone":
                rpc.cancel()
            self.never.set()


@pytest.mark.parametrize("is_stream", [False, True], ids=["unary", "stream"])
@pytest.mark.parametrize("stage", Leaving.STAGES)
def test_a_disconnected_grpc_client_leaves_no_request(serve, stage, is_stream, caplog, monkeypatch):
    caplog.set_level(logging.ERROR)
    service = serve("fake", settings=GatewaySettings(grpc_port=0), context_len=30_000, num_pages=1000)
    infer(service, request())
    until(lambda: is_idle(service))
    before = num_tasks(service)
    for _ in range(2 * CHAOS):
        Leaving(service, stage, is_stream).go()
        until(lambda: is_idle(service))
    until(lambda: num_tasks(service) <= before, "the end of its tasks")
    monkeypatch.setattr(gateway, "_MAX_KEYLESS", 1)
    call(service, "/grpc.health.v1.Health/Check", b"")  # a caller without a key finds the only place free
    assert caplog.records == []
    assert infer(service, request()).outputs


@pytest.mark.long
def test_damaged_requests_leave_no_objects(fake, monkeypatch):
    """Of objects that Python's collector knows, in client and service together, less than one for every fourth; a
    planted one for each is seen.
    """
    monkeypatch.setattr(metrics, "WINDOW", 16)
    monkeypatch.setattr(deadlines, "_MIN_ENTRIES", 0)
    kept, rng = [], random.Random(24)
    streams = [[damaged(rng) for _ in range(3)] for _ in range(80)]
    num = sum(map(len, streams))

    def held() -> int:
        until(lambda: is_idle(fake))
        fake.do(asyncio.sleep(0.1))
        gc.collect()
        return len(gc.get_objects())

    with channel(fake) as found:

        def round_(is_leaky: bool = False) -> int:
            """How many more objects there are after a round."""
            before = held()
            for sent in streams:
                list(found.stream_stream(STREAM)(iter(sent), timeout=SECONDS))
                if is_leaky:
                    kept.extend([] for _ in sent)
            return held() - before

        grown = [round_(), round_()]
        while min(grown) >= num // 4 and len(grown) < 6:
            grown.append(round_())
        assert min(grown) < num // 4, grown
        assert round_(is_leaky=True) > num // 2
