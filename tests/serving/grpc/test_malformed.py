"""Malformed tensors over gRPC: refused by name, and without memory for them."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import grpc
import pytest

from penstock.serving.proto import oip_pb2 as pb
from penstock.serving.settings import GatewayLimits, GatewaySettings
from tests.support.grpc_client import SERVICE, channel
from tests.support.grpc_frames import answers_to, packed
from tests.support.http_service import SECONDS, Service
from tests.support.memory_use import MIB, check_flat
from tests.support.stub_methods import StubMethods

LIMIT = 256 << 10
INFER, STREAM = SERVICE + "ModelInfer", SERVICE + "ModelStreamInfer"


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    settings = GatewaySettings(grpc_port=0, limits=GatewayLimits(body_bytes=LIMIT))
    found = Service({}, settings, methods=StubMethods())
    yield found
    found.close()


def asked(datatype: str, shape: list[int], raw: bytes | None = None, **contents: list[Any]) -> bytes:
    """A request of one tensor, in raw bytes or typed contents."""
    found = pb.ModelInferRequest(model_name="echo", id="r")
    one = found.inputs.add(name="x", datatype=datatype, shape=shape)
    for field, values in contents.items():
        getattr(one.contents, field).extend(values)
    if raw is not None:
        found.raw_input_contents.append(raw)
    return found.SerializeToString()


GOOD = asked("INT32", [2], int_contents=[1, 2])
MALFORMED = {
    "a size of all there is": asked("INT32", [2**38], bytes(8)),
    "a product of all there is": asked("INT32", [2**31, 2**31], bytes(8)),
    "a product beyond 64 bits": asked("FP64", [2**62, 2**62], bytes(8)),
    "no bytes, of many rows": asked("INT32", [0, 2**62], b"\0"),
    "a size below nothing": asked("INT32", [-1], bytes(8)),
    "seventeen sizes": asked("INT32", [1] * 17, bytes(4)),
    "a million texts in no bytes": asked("BYTES", [2**20], b""),
    "many texts, each too long": asked("BYTES", [2**16], b"\xff" * (LIMIT - 200)),
    "texts of nothing, and one more": asked("BYTES", [2**16], bytes(2**18 - 256)),
    "fewer numbers than are told": asked("INT32", [2**31], int_contents=[1, 2]),
    "more numbers than are told": asked("INT32", [1], int_contents=[1] * 120_000),
    "numbers that are too large": asked("INT8", [120_000], int_contents=[1] * 119_999 + [128]),
    "another type's contents": asked("FP32", [2], int_contents=[1, 2]),
    "bytes twice": asked("INT32", [2], bytes(8), int_contents=[1, 2]),
    "bytes that are no truth": asked("BOOL", [LIMIT - 200], b"\2" * (LIMIT - 200)),
    "a datatype that is none": asked("FP8", [2], bytes(2)),
    "no message": b"\xff" * (LIMIT - 200),
}
REFUSED = f"The decompressed message has more than {LIMIT} bytes.".encode()
TOO_LARGE = asked("UINT8", [LIMIT], bytes(LIMIT))


def code_of(found: grpc.Channel, data: bytes, method: str = INFER) -> str:
    """How a call of one message ends; in a stream what it is told of the message, whose end is not the stream's."""
    rpc = found.stream_stream(method)(iter([data]), timeout=SECONDS)
    code = ""
    with suppress(grpc.RpcError):
        for reply in rpc:
            if method == STREAM:
                message = pb.ModelStreamInferResponse.FromString(reply)
                code = message.infer_response.parameters["code"].string_param if message.error_message else ""
    return code or rpc.code().name


@pytest.mark.parametrize("name", MALFORMED)
def test_tensors_that_are_refused(service: Service, name: str) -> None:
    with channel(service) as found:
        assert code_of(found, MALFORMED[name]) == "INVALID_ARGUMENT"
        assert code_of(found, GOOD) == "OK", "the connection goes on"


PACKED_WRONG = {
    "gzip that ends early": gzip.compress(GOOD)[:-1],
    "zlib that ends early": zlib.compress(GOOD)[:-1],
    "only gzip's first bytes": b"\x1f\x8b",
    "only zlib's first bytes": b"\x78\x9c",
    "gzip and a byte": gzip.compress(GOOD) + b"\0",
    "zlib and a message": zlib.compress(GOOD) + GOOD,
    "gzip twice": gzip.compress(GOOD) * 2,
    "gzip of another sum": gzip.compress(GOOD)[:-8] + bytes(4) + gzip.compress(GOOD)[-4:],
    "zlib of another sum": zlib.compress(GOOD)[:-1] + b"\0",
    "no gzip behind its head": b"\x1f\x8b\x08" + b"\xff" * (LIMIT - 200),
    "packed twice": gzip.compress(gzip.compress(GOOD)),
}


@pytest.mark.parametrize("name", PACKED_WRONG)
def test_packed_messages_that_are_refused(service: Service, name: str) -> None:
    with channel(service) as found:
        for method in (INFER, STREAM):
            assert code_of(found, PACKED_WRONG[name], method) == "INVALID_ARGUMENT"
            for data in (GOOD, gzip.compress(GOOD), zlib.compress(GOOD)):
                assert code_of(found, data, method) == "OK", "the connection goes on"


@pytest.mark.long
def test_memory_is_flat_under_what_is_refused(service: Service) -> None:
    """Sizes of all there is, bombs, messages beyond the limit, whole and in streams."""
    data, check = bytes(48 * MIB), "/grpc.health.v1.Health/Check"
    bombs = [(gzip.compress(data), b"gzip"), (zlib.compress(data), b"deflate")]
    bombs += [(pack(TOO_LARGE), name) for pack, name in ((gzip.compress, b"gzip"), (zlib.compress, b"deflate"))]
    calls = [packed(bomb, method, name) for bomb, name in bombs for method in (INFER, STREAM)]
    small = packed(gzip.compress(bytes(2000)), check)
    del data
    with channel(service) as found:

        def storm() -> None:
            for method in (INFER, STREAM):
                for name, data in MALFORMED.items():
                    assert code_of(found, data, method) == "INVALID_ARGUMENT", name
                for name, data in PACKED_WRONG.items():
                    assert code_of(found, data, method) == "INVALID_ARGUMENT", name
            assert code_of(found, TOO_LARGE) == "RESOURCE_EXHAUSTED"
            for one in calls:
                assert REFUSED in answers_to(service, one, text=REFUSED)
            assert b"more than 1024 bytes." in answers_to(service, small, text=b"decompressed")

        # A round sends three MiB; gRPC's own pools fill slowly.
        check_flat(storm, warm_up=8, rounds=8, largest=LIMIT, grown=4 * MIB)
