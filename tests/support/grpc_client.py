"""Shorthands over Triton's client, and bare RPCs for what it cannot send."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import numpy as np
import tritonclient.grpc as triton
from tritonclient.utils import triton_to_np_dtype

from penstock.serving.proto import oip_pb2 as pb
from tests.support.http_service import SECONDS, Service

SERVICE = "/inference.GRPCInferenceService/"


def tensor(name: str, values: Any, datatype: str = "") -> triton.InferInput:
    """An input; texts are BYTES, other lists are INT32 unless said otherwise."""
    datatype = datatype or ("BYTES" if name == "text_input" else "INT32")
    array = np.array(values, triton_to_np_dtype(datatype))
    found = triton.InferInput(name, list(array.shape), datatype)
    found.set_data_from_numpy(array)
    return found


def text_of(result: triton.InferResult) -> list[str]:
    return [one.decode() for one in result.as_numpy("text_output").ravel()]


class Stream:
    """A stream of Triton's client; ``next`` gives its responses in order."""

    def __init__(self, client: triton.InferenceServerClient, **options: Any) -> None:
        self._client = client
        self.responses: queue.Queue[tuple[Any, Any]] = queue.Queue()
        client.start_stream(lambda result, error: self.responses.put((result, error)), **options)

    def ask(self, inputs: list[Any], request_id: str = "", model: str = "", **parameters: Any) -> None:
        self._client.async_stream_infer(model, inputs, request_id=request_id, parameters=parameters or None)

    def next(self) -> tuple[Any, Any]:
        return self.responses.get(timeout=SECONDS)

    def answers(self, count: int) -> dict[str, list[Any]]:
        """The responses of so many requests by their ids, until each had its last."""
        found: dict[str, list[Any]] = {}
        while count:
            result, error = self.next()
            assert error is None, error
            response = result.get_response()
            found.setdefault(response.id, []).append(result)
            count -= response.parameters["triton_final_response"].bool_param
        return found


@contextmanager
def streaming(service: Service) -> Iterator[Stream]:
    with triton.InferenceServerClient(service.grpc_address) as client:
        yield Stream(client)
        client.stop_stream()


@contextmanager
def channel(service: Service, *options: tuple[str, Any]) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(service.grpc_address, options=options) as found:
        yield found


def call(service: Service, method: str, data: bytes, metadata: Any = (), timeout: float = SECONDS) -> bytes:
    """Send bytes to a method; RpcError when it refuses."""
    with channel(service) as found:
        rpc = found.unary_unary(method)
        answer: bytes = rpc(data, timeout=timeout, metadata=metadata)
        return answer


def refused(service: Service, method: str, data: bytes, metadata: Any = ()) -> grpc.RpcError:
    try:
        call(service, method, data, metadata)
    except grpc.RpcError as error:
        return error
    raise AssertionError("it was not refused")


def request(**fields: Any) -> pb.ModelInferRequest:
    """A request in typed contents, of one text, that can be made wrong."""
    found = pb.ModelInferRequest(**fields)
    if not found.inputs:
        one = found.inputs.add(name="text_input", datatype="BYTES", shape=[1])
        one.contents.bytes_contents.append(b"the")
    if "max_tokens" not in found.parameters:
        found.parameters["max_tokens"].int64_param = 2
        found.parameters["temperature"].double_param = 0
    return found


def infer(service: Service, message: pb.ModelInferRequest) -> pb.ModelInferResponse:
    return pb.ModelInferResponse.FromString(call(service, SERVICE + "ModelInfer", message.SerializeToString()))


def infer_refused(service: Service, message: pb.ModelInferRequest) -> tuple[str, str, str]:
    """Name of the code, field and message that a request is refused with."""
    error = refused(service, SERVICE + "ModelInfer", message.SerializeToString())
    return error.code().name, trailers(error).get("error-param", ""), error.details()


def trailers(error: grpc.RpcError) -> dict[str, str]:
    return {name: value for name, value in error.trailing_metadata() if isinstance(value, str)}
