"""What a caller without a key can make the gRPC door do: little, and nothing to those who have one."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import grpc
import pytest

from penstock.serving import grpc_door
from penstock.serving import grpc_health as health
from penstock.serving.settings import DoorSettings
from tests.serving.grpc_client import SERVICE, call, channel, refused, request
from tests.serving.service import SECONDS

KEY = "a-key-of-twenty-chars"
BEARER = (("authorization", f"Bearer {KEY}"),)
CHECK = "/grpc.health.v1.Health/Check"


@pytest.fixture
def locked(serve, tmp_path):
    """A service that wants a key."""
    file = tmp_path / "keys"
    file.write_text(KEY + "\n")
    file.chmod(0o600)
    return serve(settings=DoorSettings(grpc_port=0, keys_file=file))


def test_large_messages_of_strangers_are_not_read(locked):
    large = b"\x1a\x00" * 16_000
    for method in ("ServerLive", "ServerReady"):
        assert call(locked, SERVICE + method, large) == call(locked, SERVICE + method, b"")
    error = refused(locked, CHECK, large)
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "1024 bytes" in error.details()


def test_few_messages_of_strangers_are_read_at_a_time(locked, monkeypatch):
    monkeypatch.setattr(grpc_door, "_MAX_KEYLESS", 0)
    assert refused(locked, CHECK, b"").code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    call(locked, CHECK, b"", BEARER)
    call(locked, SERVICE + "ServerLive", b"")
    monkeypatch.undo()
    call(locked, CHECK, b"")
    assert locked.grpc.door._num_keyless == 0


def test_strangers_that_watch_leave_room_for_others(locked, monkeypatch):
    monkeypatch.setattr(health, "MAX_WATCHERS", 2)
    with channel(locked) as found:
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


def test_shapes_of_millions_are_refused_by_their_length(locked):
    message = request()
    message.inputs[0].shape.extend([1] * 1_000_000)
    error = refused(locked, SERVICE + "ModelInfer", message.SerializeToString(), BEARER)
    assert (error.code(), "1000001" in error.details()) == (grpc.StatusCode.INVALID_ARGUMENT, True)


def test_a_reflection_stream_that_asks_nothing_ends_with_the_service(locked):
    never = threading.Event()

    def ask_nothing() -> Iterator[bytes]:
        never.wait(SECONDS)
        yield from ()

    with channel(locked) as found:
        stream = found.stream_stream("/grpc.reflection.v1.ServerReflection/ServerReflectionInfo")
        answers = stream(ask_nothing(), timeout=SECONDS, metadata=BEARER)
        locked.loop.call_soon_threadsafe(locked.grpc.door.stopping.set)
        assert list(answers) == []
        never.set()
