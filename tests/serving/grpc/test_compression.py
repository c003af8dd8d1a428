"""Compressed messages over gRPC: which are, that clients' are answered, and up to which size."""

from __future__ import annotations

import asyncio
import gzip
import zlib
from collections.abc import Iterator

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton

from penstock.api_errors import RefusalError
from penstock.serving.grpc import compression
from penstock.serving.grpc.compression import ZLIB_FIELDS, encoding_of, unpacked
from penstock.serving.http.compression import inflated
from penstock.serving.proto import oip_pb2 as pb
from penstock.serving.settings import GatewayLimits, GatewaySettings
from tests.support.grpc_client import SERVICE, Stream, call, tensor
from tests.support.grpc_frames import answers_to, packed
from tests.support.http_service import SECONDS, Service
from tests.support.stub_methods import StubMethods

LIMIT = 64 << 10
ALGORITHMS = {"gzip": grpc.Compression.Gzip, "deflate": grpc.Compression.Deflate}
PACK = {"gzip": gzip.compress, "deflate": zlib.compress}
INFER, STREAM = SERVICE + "ModelInfer", SERVICE + "ModelStreamInfer"


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    found = Service({}, GatewaySettings(grpc_port=0, limits=GatewayLimits(body_bytes=LIMIT)), methods=StubMethods())
    yield found
    found.close()


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """How the messages were packed that were unpacked."""
    found: list[str] = []

    def noting(data: bytes, encoding: str, most: int, noun: str) -> bytes:
        found.append(encoding)
        return inflated(data, encoding, most, noun)

    monkeypatch.setattr(compression, "inflated", noting)
    return found


def asked(size: int, request_id: str = "r") -> bytes:
    """A request of so many bytes."""
    found = pb.ModelInferRequest(model_name="echo", id=request_id)
    found.inputs.add(name="x", datatype="UINT8", shape=[size])
    found.raw_input_contents.append(bytes(size))
    data = found.SerializeToString()
    return data if len(data) == size else asked_less(found, size, len(data) - size)


def asked_less(found: pb.ModelInferRequest, size: int, more: int) -> bytes:
    found.inputs[0].shape[0] = size - more
    found.raw_input_contents[0] = bytes(size - more)
    return found.SerializeToString()


def test_no_request_begins_as_a_packed_message_does(service: Service) -> None:
    """In any order of its fields: what is a number there has another number."""
    requests = {one.request.DESCRIPTOR for one in service.grpc.gateway._methods.values()}
    assert len(requests) > 10
    for kind in requests:
        numbers = {one.number for one in kind.fields if one.type in {3, 4, 5, 8, 13, 14, 17, 18}}
        assert not numbers & ZLIB_FIELDS, kind.full_name
        for one in kind.fields:
            for wire_type in range(6):
                tag = one.number << 3 | wire_type
                is_zlib = any(encoding_of(bytes([tag & 255, n])) == "deflate" for n in range(256))
                assert is_zlib == (wire_type == 0 and one.number in ZLIB_FIELDS)


@pytest.mark.parametrize("algorithm", PACK)
def test_every_packed_message_is_known(algorithm: str) -> None:
    data = asked(1000)
    bits = 16 if algorithm == "gzip" else 0
    for level in range(10):
        for window in range(9, 16):
            packer = zlib.compressobj(level, zlib.DEFLATED, window + bits)
            found = packer.compress(data) + packer.flush()
            assert encoding_of(found) == algorithm
            assert unpacked(found, len(data)) == data
            with pytest.raises(RefusalError) as error:
                unpacked(found, len(data) - 1)
            assert error.value.status == 413
    assert unpacked(data, 1) is data
    assert unpacked(b"", 1) == b""


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_clients_of_triton(service: Service, seen: list[str], algorithm: str) -> None:
    x = tensor("x", [7] * 1000)
    with triton.InferenceServerClient(service.grpc_address) as client:
        found = client.infer("echo", [x], compression_algorithm=algorithm)
        assert np.array_equal(found.as_numpy("x"), [7] * 1000)
        stream = Stream(client, compression_algorithm=algorithm)
        for n in range(3):
            stream.ask([tensor("x", [n] * 1000)], str(n), "echo")
        answers = stream.answers(3)
        client.stop_stream()
    assert {name: one.as_numpy("x").tolist() for name, (one,) in answers.items()} == {
        str(n): [n] * 1000 for n in range(3)
    }
    assert seen == [algorithm] * 4


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_clients_of_grpc(service: Service, seen: list[str], algorithm: str) -> None:
    """Up to the limit once unpacked, and not a byte more; in a stream the others go on."""
    most, more = asked(LIMIT), asked(LIMIT + 1)
    assert (len(most), len(more)) == (LIMIT, LIMIT + 1)

    async def main() -> None:
        async with grpc.aio.insecure_channel(service.grpc_address, compression=ALGORITHMS[algorithm]) as found:
            assert pb.ModelInferResponse.FromString(await found.unary_unary(INFER)(most, timeout=SECONDS)).id == "r"
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await found.unary_unary(INFER)(more, timeout=SECONDS)
            assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            codes = []
            async for data in found.stream_stream(STREAM)(iter([most, more, most]), timeout=SECONDS):
                message = pb.ModelStreamInferResponse.FromString(data)
                codes.append(message.infer_response.parameters["code"].string_param)
            assert sorted(codes) == ["", "", "RESOURCE_EXHAUSTED"]

    asyncio.run(main())
    assert seen == [algorithm] * 5


def test_other_methods_take_packed_messages(service: Service) -> None:
    data = pb.ModelMetadataRequest(name="echo").SerializeToString()
    for pack in PACK.values():
        found = call(service, SERVICE + "ModelMetadata", pack(data))
        assert pb.ModelMetadataResponse.FromString(found).name == "echo"
        assert call(service, "/grpc.health.v1.Health/Check", pack(b"")) == call(
            service, "/grpc.health.v1.Health/Check", b""
        )


def test_accepted_encodings_are_announced(service: Service) -> None:
    """With every answer; an encoding that is not known is refused by gRPC itself."""
    told = b"identity, deflate, gzip"
    assert told in answers_to(service, packed(gzip.compress(asked(100))), text=told)
    assert b"grpc-encoding" in answers_to(service, packed(asked(100), encoding=b"snappy"), text=b"grpc-encoding")
    assert call(service, INFER, asked(100))
