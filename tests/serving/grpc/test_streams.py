"""How streams over gRPC end: by their client, by the service, or because nobody takes what is sent."""

from __future__ import annotations

import asyncio
import gc
import logging

import grpc
import pytest

from penstock.serving.grpc.gateway import GoneError, GrpcCall
from penstock.serving.proto import oip_pb2 as pb
from penstock.serving.settings import GatewaySettings
from tests.support.grpc_client import SERVICE, call, channel, refused, request
from tests.support.http_service import SECONDS, until

GRPC = GatewaySettings(grpc_port=0)
STREAM = SERVICE + "ModelStreamInfer"
UNAVAILABLE = grpc.StatusCode.UNAVAILABLE


def test_a_half_closed_stream_ends_with_ok_while_stopping(serve, monkeypatch):
    """Its client has sent its last request and gets all answers: nothing is to be sent again."""
    service, ends, let_go = serve(settings=GRPC), [], asyncio.Event()
    (backend,) = service.models.list()
    real_submit, real_read = backend.submit, GrpcCall.read

    async def submit(*arguments, **named):
        await let_go.wait()
        return await real_submit(*arguments, **named)

    async def read(self):
        data = await real_read(self)
        if data is None:
            ends.append(self)
        return data

    monkeypatch.setattr(backend, "submit", submit)
    monkeypatch.setattr(GrpcCall, "read", read)
    with channel(service) as found:
        stream = found.stream_stream(STREAM)(iter([request().SerializeToString()]), timeout=SECONDS)
        until(lambda: ends and service.num_open == 1)
        service.loop.call_soon_threadsafe(service.grpc.gateway.stopping.set)
        service.loop.call_soon_threadsafe(let_go.set)
        responses = [pb.ModelStreamInferResponse.FromString(one) for one in stream]
        assert responses[-1].infer_response.parameters["triton_final_response"].bool_param
        assert stream.code() is grpc.StatusCode.OK


def test_an_unread_refusal_ends_only_its_stream(serve, monkeypatch, caplog):
    service, tried = serve(settings=GRPC), []

    async def write(self, message):
        tried.append(message)
        self.request.facts["gone"] = "slow reader"
        raise GoneError("planted")

    monkeypatch.setattr(GrpcCall, "write", write)  # as a reader who is too slow makes it
    wrong = request(id="x" * 2000).SerializeToString()
    with channel(service) as found:
        stream = found.stream_stream(STREAM)(iter([wrong]), timeout=SECONDS)
        with pytest.raises(grpc.RpcError):
            list(stream)
    assert tried[0].error_message
    monkeypatch.undo()
    until(lambda: service.num_open == 0)
    caplog.set_level(logging.ERROR)
    service.do(asyncio.sleep(0))
    gc.collect()
    assert caplog.records == []
    call(service, SERVICE + "ModelInfer", request().SerializeToString())


def test_an_internal_cancellation_ends_the_request(serve, monkeypatch):
    """Nobody cancelled the request, but something that it waited for was: its client does not wait for ever."""
    service = serve(settings=GRPC)
    (backend,) = service.models.list()

    async def submit(*_arguments, **_named):
        never = asyncio.get_running_loop().create_future()
        never.cancel()
        await never

    monkeypatch.setattr(backend, "submit", submit)
    assert refused(service, SERVICE + "ModelInfer", request().SerializeToString()).code() is UNAVAILABLE
    with channel(service) as found:
        stream = found.stream_stream(STREAM)(iter([request().SerializeToString()]), timeout=SECONDS)
        (answer,) = map(pb.ModelStreamInferResponse.FromString, stream)
    assert answer.infer_response.parameters["code"].string_param == UNAVAILABLE.name
    assert answer.infer_response.parameters["triton_final_response"].bool_param
    monkeypatch.undo()
    call(service, SERVICE + "ModelInfer", request().SerializeToString())
