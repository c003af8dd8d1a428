"""What a caller without a key can make the gRPC gateway do: little, and nothing to those who have one."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import grpc
import numpy as np
import pytest

from penstock.serving.grpc import gateway, health
from penstock.serving.oip import language, messages, tensor_codec
from penstock.serving.proto import oip_pb2 as pb
from tests.support.grpc_client import SERVICE, call, channel, refused, request
from tests.support.http_service import KEY, SECONDS

BEARER = (("authorization", f"Bearer {KEY}"),)
CHECK = "/grpc.health.v1.Health/Check"


def test_large_messages_of_strangers_are_not_read(locked_grpc):
    large = b"\x1a\x00" * 16_000
    for method in ("ServerLive", "ServerReady"):
        assert call(locked_grpc, SERVICE + method, large) == call(locked_grpc, SERVICE + method, b"")
    error = refused(locked_grpc, CHECK, large)
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "1024 bytes" in error.details()


def test_few_messages_of_strangers_are_read_at_a_time(locked_grpc, monkeypatch):
    monkeypatch.setattr(gateway, "_MAX_KEYLESS", 0)
    assert refused(locked_grpc, CHECK, b"").code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    call(locked_grpc, CHECK, b"", BEARER)
    call(locked_grpc, SERVICE + "ServerLive", b"")
    monkeypatch.setattr(gateway, "_MAX_KEYLESS", 1)
    for _ in range(3):  # each gives its place back
        call(locked_grpc, CHECK, b"")


def test_strangers_that_watch_leave_room_for_others(locked_grpc, monkeypatch):
    monkeypatch.setattr(health, "MAX_WATCHERS", 2)
    with channel(locked_grpc) as found:
        watch = found.unary_stream("/grpc.health.v1.Health/Watch")
        first = watch(b"", timeout=SECONDS)
        next(first)
        with pytest.raises(grpc.RpcError) as error:
            next(watch(b"", timeout=SECONDS))
        assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        known = watch(b"", timeout=SECONDS, metadata=BEARER)
        next(known)
        first.cancel()
        known.cancel()


def test_shapes_of_millions_are_refused_by_their_length(locked_grpc):
    message = request()
    message.inputs[0].shape.extend([1] * 1_000_000)
    error = refused(locked_grpc, SERVICE + "ModelInfer", message.SerializeToString(), BEARER)
    assert (error.code(), "1000001" in error.details()) == (grpc.StatusCode.INVALID_ARGUMENT, True)


def test_packed_numbers_are_counted_before_parsing(locked_grpc):
    """They would be eight times their size, made in one call that lets nobody else run."""
    message = request()
    for index in range(3):
        one = message.inputs.add(name=f"x{index}", datatype="INT8", shape=[400_000])
        one.contents.int_contents.extend([index] * 400_000)
    error = refused(locked_grpc, SERVICE + "ModelInfer", message.SerializeToString(), BEARER)
    assert (error.code(), "packed numbers" in error.details()) == (grpc.StatusCode.INVALID_ARGUMENT, True)


@pytest.mark.parametrize("is_raw", [True, False])
def test_large_tensors_are_decoded_in_pieces(is_raw, monkeypatch):
    """Each call that makes objects makes few of them: between two, other threads run."""
    sizes, real = [], tensor_codec.in_pieces
    for module in (language, messages):
        monkeypatch.setattr(module, "in_pieces", lambda values: (sizes.append(len(one)) or one for one in real(values)))
    ids, message = [*range(100_000)], pb.ModelInferRequest()
    one = message.inputs.add(name="input_ids", datatype="INT32", shape=[100_000])
    if is_raw:
        message.raw_input_contents.append(np.array(ids, "<i4").tobytes())
    else:
        one.contents.int_contents.extend(ids)
    assert language.read_language_request(messages.read_message(message), "", "").prompt == ids
    assert sum(sizes) == (100_000 if is_raw else 200_000)
    assert max(sizes) <= 20_000


def test_an_idle_reflection_stream_ends_with_the_service(locked_grpc):
    never = threading.Event()

    def ask_nothing() -> Iterator[bytes]:
        never.wait(SECONDS)
        yield from ()

    with channel(locked_grpc) as found:
        stream = found.stream_stream("/grpc.reflection.v1.ServerReflection/ServerReflectionInfo")
        answers = stream(ask_nothing(), timeout=SECONDS, metadata=BEARER)
        locked_grpc.loop.call_soon_threadsafe(locked_grpc.grpc.gateway.stopping.set)
        assert list(answers) == []
        never.set()
