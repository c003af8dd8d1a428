"""``inference.GRPCInferenceService``: the Open Inference Protocol over gRPC, with Triton's streaming method."""

from __future__ import annotations

import asyncio
from typing import Any, Final

from penstock.api_errors import CODES, MAX_MESSAGE_CHARS, RefusalError
from penstock.errors import UnavailableError
from penstock.serving.admission import deadline_s, within
from penstock.serving.grpc.gateway import GoneError, GrpcCall, GrpcMethod, Outcome, trailers_of
from penstock.serving.json_bounds import decode
from penstock.serving.oip.dispatch import answer, language_model, single_response
from penstock.serving.oip.messages import message_of, read_message, set_parameter
from penstock.serving.oip.model_config import config
from penstock.serving.oip.repository import load, unload
from penstock.serving.oip.state import EXTENSIONS, index, is_model_ready, metadata, server_metadata, statistics
from penstock.serving.oip.tensor_codec import MAX_ID_CHARS
from penstock.serving.proto import oip_pb2 as pb
from penstock.serving.request_fields import MAX_NAME_CHARS
from penstock.tensors import InferRequest, InferResponse

__all__ = ["SERVICE", "oip_methods"]

SERVICE: Final = "inference.GRPCInferenceService"
FINAL: Final = "triton_final_response"
MAX_OF_STREAM: Final = 128
"""The most open requests of one stream; further ones are not read until one has ended."""
_LARGE_REQUEST: Final = 1 << 16


def oip_methods() -> list[GrpcMethod]:
    """Return the methods of the service."""
    return [
        # Anyone may call these two, so their messages, which are empty, are not read.
        GrpcMethod(f"/{SERVICE}/ServerLive", pb.ServerLiveRequest, _live, is_stream=True, is_open=True),
        GrpcMethod(f"/{SERVICE}/ServerReady", pb.ServerReadyRequest, _ready, is_stream=True, is_open=True),
        GrpcMethod(f"/{SERVICE}/ServerMetadata", pb.ServerMetadataRequest, _metadata),
        GrpcMethod(f"/{SERVICE}/ModelReady", pb.ModelReadyRequest, _model_ready),
        GrpcMethod(f"/{SERVICE}/ModelMetadata", pb.ModelMetadataRequest, _model_metadata),
        GrpcMethod(f"/{SERVICE}/ModelConfig", pb.ModelConfigRequest, _model_config),
        GrpcMethod(f"/{SERVICE}/ModelInfer", pb.ModelInferRequest, _infer, is_work=True),
        GrpcMethod(f"/{SERVICE}/ModelStreamInfer", pb.ModelInferRequest, _stream_infer, is_stream=True),
        GrpcMethod(f"/{SERVICE}/ModelStatistics", pb.ModelStatisticsRequest, _statistics),
        GrpcMethod(f"/{SERVICE}/RepositoryIndex", pb.RepositoryIndexRequest, _index),
        GrpcMethod(f"/{SERVICE}/RepositoryModelLoad", pb.RepositoryModelLoadRequest, _load, is_admin=True),
        GrpcMethod(f"/{SERVICE}/RepositoryModelUnload", pb.RepositoryModelUnloadRequest, _unload, is_admin=True),
    ]


async def _live(call: GrpcCall) -> pb.ServerLiveResponse:
    return pb.ServerLiveResponse(live=True)


async def _ready(call: GrpcCall) -> pb.ServerReadyResponse:
    """Report the same as ``/health/ready``."""
    return pb.ServerReadyResponse(ready=call.request.is_ready())


async def _metadata(call: GrpcCall) -> pb.ServerMetadataResponse:
    return pb.ServerMetadataResponse(**server_metadata(EXTENSIONS))


async def _model_ready(call: GrpcCall) -> pb.ModelReadyResponse:
    name, version = call.message.name, call.message.version
    try:
        return pb.ModelReadyResponse(ready=is_model_ready(call.request, name, version))
    except UnavailableError:
        return pb.ModelReadyResponse(ready=False)


async def _model_metadata(call: GrpcCall) -> pb.ModelMetadataResponse:
    return pb.ModelMetadataResponse(**metadata(call.request, call.message.name, call.message.version))


async def _model_config(call: GrpcCall) -> pb.ModelConfigResponse:
    model_config = config(call.request, call.message.name, call.message.version)
    return pb.ModelConfigResponse(config=pb.ModelConfig(**model_config))


async def _statistics(call: GrpcCall) -> pb.ModelStatisticsResponse:
    return pb.ModelStatisticsResponse(**statistics(call.request, call.message.name, call.message.version))


async def _index(call: GrpcCall) -> pb.RepositoryIndexResponse:
    _check_repository(call)
    return pb.RepositoryIndexResponse(models=index(call.request, call.message.ready))


async def _load(call: GrpcCall) -> pb.RepositoryModelLoadResponse:
    _check_repository(call)
    loading = load(call.request, call.message.model_name, _parameters(call.message.parameters))
    await within(deadline_s(call.request), loading)
    return pb.RepositoryModelLoadResponse()


async def _unload(call: GrpcCall) -> pb.RepositoryModelUnloadResponse:
    _check_repository(call)
    unloading = unload(call.request, call.message.model_name, _parameters(call.message.parameters))
    await within(deadline_s(call.request), unloading)
    return pb.RepositoryModelUnloadResponse()


def _check_repository(call: GrpcCall) -> None:
    if call.message.repository_name:
        message = "repository_name must be empty: the only repository has no name"
        raise RefusalError(400, message, param="repository_name", code="unsupported_parameter")


def _parameters(parameters: Any) -> dict[str, Any]:
    return {
        name: getattr(parameter, parameter.WhichOneof("parameter_choice") or "string_param")
        for name, parameter in parameters.items()
    }


async def _read(message: pb.ModelInferRequest) -> InferRequest:
    return await decode(message.ByteSize(), lambda: read_message(message))


async def _written(response: InferResponse, model: str, request_id: str) -> pb.ModelInferResponse:
    if sum(output.array.nbytes for output in response.outputs) < _LARGE_REQUEST:
        return message_of(response, model, request_id)
    return await asyncio.to_thread(message_of, response, model, request_id)


async def _infer(call: GrpcCall) -> pb.ModelInferResponse:
    """Handle ModelInfer: one request, one response."""
    message = call.message
    request = await _read(message)
    name, response = await answer(call.request, request, message.model_name, message.model_version)
    return await _written(response, name, message.id)


class _RpcStream:
    """Handles the requests of one stream concurrently; responses are written one at a time."""

    def __init__(self, call: GrpcCall) -> None:
        self._call = call
        self._writing = asyncio.Lock()
        self._places = asyncio.Semaphore(MAX_OF_STREAM)
        self._tasks: set[asyncio.Task[None]] = set()
        self._num_read = 0
        self._is_stopped = False
        """True if the service ended the stream, and not the client."""

    async def run(self) -> None:
        """Handle requests until the client has sent its last one and all are answered, or until the service stops."""
        self._owner = asyncio.current_task()
        stopping = asyncio.ensure_future(self._call.gateway.stopping.wait())
        try:
            while (data := await self._next(stopping)) is not None:
                self._num_read += 1
                task = asyncio.ensure_future(self._answer(data, f"{self._call.request.request_id}.{self._num_read}"))
                self._tasks.add(task)
                task.add_done_callback(self._ended)
            while self._tasks:
                await asyncio.wait(self._tasks)
        finally:
            stopping.cancel()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._is_stopped:
            raise RefusalError(503, "The service is stopping.", code="draining")

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._places.release()

    async def _next(self, stopping: asyncio.Future[Any]) -> bytes | None:
        """Wait for room and read the next request; None after the last."""
        await self._places.acquire()
        reading = asyncio.ensure_future(self._call.read())
        try:
            await asyncio.wait((reading, stopping), return_when=asyncio.FIRST_COMPLETED)
            self._is_stopped = not reading.done()
            return None if self._is_stopped else reading.result()
        finally:
            reading.cancel()

    async def _answer(self, data: bytes, request_id: str) -> None:
        """Handle one request; an error is sent as its response, and does not affect other requests."""
        rpc = self._call
        call = rpc.gateway.begin(_ONE_OF_STREAM, rpc.context, rpc.request.headers, request_id)
        outcome, message = Outcome(), pb.ModelInferRequest()
        with rpc.gateway.counted(outcome, call):
            rpc.gateway.admission.count(call.request)
            message = await call.parsed(data)
            await self._respond(call, message)
        if outcome.refusal is not None:
            await self._send(_failed(message, outcome.refusal, request_id))

    async def _respond(self, call: GrpcCall, message: pb.ModelInferRequest) -> None:
        request, request_call = await _read(message), call.request
        model, version = message.model_name, message.model_version
        single = await single_response(request_call, request, model, version)
        if single is not None:
            name, response = single
            await self._write(response, name, message.id, True)
            return
        inference = await language_model(request_call, request, model, version)

        async def send(response: InferResponse, is_last: bool) -> None:
            await self._write(response, inference.name, message.id, is_last)

        if request_call.body.stream is not False:
            await inference.pieces(send)
        else:
            await send(await inference.whole(), True)

    async def _write(self, response: InferResponse, model: str, request_id: str, is_last: bool) -> None:
        response_message = await _written(response, model, request_id)
        set_parameter(response_message, FINAL, is_last)
        await self._send(pb.ModelStreamInferResponse(infer_response=response_message))

    async def _send(self, response: pb.ModelStreamInferResponse) -> None:
        async with self._writing:
            try:
                await self._call.write(response)
            except GoneError:
                if self._owner is not None:
                    self._owner.cancel()
                raise


def _failed(message: pb.ModelInferRequest, refusal: RefusalError, request_id: str) -> pb.ModelStreamInferResponse:
    """Return the error response to a request of a stream; its parameters replace a status and trailing metadata."""
    failed = pb.ModelStreamInferResponse(error_message=str(refusal)[:MAX_MESSAGE_CHARS])
    response = failed.infer_response
    response.id, response.model_name = message.id[:MAX_ID_CHARS], message.model_name[:MAX_NAME_CHARS]
    response.parameters["code"].string_param = CODES[refusal.status].grpc
    for name, text in trailers_of(request_id, refusal):
        response.parameters[name].string_param = text
    response.parameters[FINAL].bool_param = True
    return failed


async def _stream_infer(call: GrpcCall) -> None:
    """Handle ModelStreamInfer."""
    await _RpcStream(call).run()


_ONE_OF_STREAM: Final = GrpcMethod(f"/{SERVICE}/ModelStreamInfer", pb.ModelInferRequest, _infer, is_work=True)
