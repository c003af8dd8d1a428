"""``inference.GRPCInferenceService``: the Open Inference Protocol over gRPC, and Triton's stream of requests."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

from penstock import __version__
from penstock.errors import DeadlineError
from penstock.serving import oip_pb2 as pb
from penstock.serving.asked import check_count, options_of, prompts_of, sampling_of
from penstock.serving.fields import MAX_NAME_CHARS
from penstock.serving.generation import Generation
from penstock.serving.grpc_door import GoneError, GrpcCall, Method, Outcome, trailers_of
from penstock.serving.oip import MAX_ID_CHARS, OUTPUTS, Asked, Choice, inputs_of, read_request, response_of
from penstock.serving.refusals import CODES, MAX_MESSAGE_CHARS, RefusalError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from penstock.serving.backend import Answer, Backend, Delta

__all__ = ["SERVICE", "oip_methods"]

SERVICE: Final = "inference.GRPCInferenceService"
FINAL: Final = "triton_final_response"
MOST_OF_STREAM: Final = 128
"""Requests of one stream that are open at a time; no more are read meanwhile."""
_LARGE_REQUEST: Final = 1 << 16
_GRACE_S: Final = 5.0


def oip_methods() -> list[Method]:
    """The methods of the service."""
    return [
        # Their messages are empty, and are not read: anybody may send some.
        Method(f"{SERVICE}/ServerLive", pb.ServerLiveRequest, _live, is_stream=True, is_open=True),
        Method(f"{SERVICE}/ServerReady", pb.ServerReadyRequest, _ready, is_stream=True, is_open=True),
        Method(f"{SERVICE}/ServerMetadata", pb.ServerMetadataRequest, _metadata),
        Method(f"{SERVICE}/ModelReady", pb.ModelReadyRequest, _model_ready),
        Method(f"{SERVICE}/ModelMetadata", pb.ModelMetadataRequest, _model_metadata),
        Method(f"{SERVICE}/ModelInfer", pb.ModelInferRequest, _infer, is_work=True),
        Method(f"{SERVICE}/ModelStreamInfer", pb.ModelInferRequest, _stream_infer, is_stream=True),
    ]


async def _live(call: GrpcCall) -> pb.ServerLiveResponse:
    return pb.ServerLiveResponse(live=True)


async def _ready(call: GrpcCall) -> pb.ServerReadyResponse:
    """As ``/health/ready``."""
    models = call.door.http.models
    is_ready = not models.is_draining and any(one.is_ready for one in models.list())
    return pb.ServerReadyResponse(ready=is_ready)


async def _metadata(call: GrpcCall) -> pb.ServerMetadataResponse:
    return pb.ServerMetadataResponse(name="penstock", version=__version__, extensions=["parameters"])


async def _model_ready(call: GrpcCall) -> pb.ModelReadyResponse:
    backend = _model(call, call.message)
    is_ready = backend.is_ready and not call.door.http.models.is_draining
    if is_ready:
        _check_version(backend, call.message.version)
    return pb.ModelReadyResponse(ready=is_ready)


async def _model_metadata(call: GrpcCall) -> pb.ModelMetadataResponse:
    backend = _model(call, call.message)
    _check_version(backend, call.message.version)
    found = pb.ModelMetadataResponse(name=backend.name, versions=[str(backend.card.version)], platform="penstock")
    name, datatype = inputs_of(backend.card)
    found.inputs.add(name=name, datatype=datatype, shape=[-1])
    for name, datatype in OUTPUTS.items():
        found.outputs.add(name=name, datatype=datatype, shape=[-1, -1] if name == "output_ids" else [-1])
    return found


def _model(call: GrpcCall, message: Any) -> Backend:
    if not message.name:
        raise RefusalError(400, "name is missing", param="name", code="missing_required_parameter")
    call.facts["model"] = message.name[:128]
    return call.door.http.models.get(message.name)


def _check_version(backend: Backend, version: str, found: int = 0) -> None:
    """404 for a version that does not answer (``found``, else the one that would)."""
    there = str(found or backend.card.version)
    if version not in ("", there):
        raise RefusalError(
            404, f"{backend.name} has version {there}, not {version[:32]!r}", param="model_version",
            code="version_not_found",
        )  # fmt: skip


async def _read(message: pb.ModelInferRequest) -> Asked:
    if message.ByteSize() < _LARGE_REQUEST:
        return read_request(message)
    return await asyncio.to_thread(read_request, message)


async def _infer(call: GrpcCall) -> pb.ModelInferResponse:
    """One answer, whole."""
    asked = await _read(call.message)
    if asked.body.get("stream"):
        message = "stream is true, but ModelInfer answers once: ModelStreamInfer streams"
        raise RefusalError(400, message, param="stream", code="invalid_value")
    return await _Inference(call, asked).whole()


class _Inference:
    """One request to a model, from its checked message to what is sent."""

    def __init__(self, rpc: GrpcCall, asked: Asked) -> None:
        body = {**asked.body, "model": asked.model} if asked.model else asked.body
        self._rpc, self._asked, self._call = rpc, asked, rpc.request(body)
        self._version = 0
        self._num_finished = 0

    async def whole(self) -> pb.ModelInferResponse:
        """All answers in one response."""
        choices: dict[int, Choice] = {}

        async def take(index: int, answer: Answer, delta: Delta) -> None:
            self._add(choices.setdefault(index, Choice(index)), answer, delta)

        await self._run(take)
        return self._response([choices[index] for index in sorted(choices)])

    async def pieces(self, send: Callable[[pb.ModelInferResponse], Awaitable[None]]) -> None:
        """A response for each piece of text; the last has the parameter FINAL."""
        choices: dict[int, Choice] = {}

        async def take(index: int, answer: Answer, delta: Delta) -> None:
            choice = choices.setdefault(index, Choice(index))
            self._add(choice, answer, delta)
            if not delta.text and delta.finish_reason is None:
                return  # half a character
            del choices[index]
            self._num_finished += delta.finish_reason is not None
            response = self._response([choice])
            response.parameters[FINAL].bool_param = self._num_finished == self._num_answers
            await send(response)

        await self._run(take)

    def _add(self, choice: Choice, answer: Answer, delta: Delta) -> None:
        if not self._version:
            _check_version(self._backend, self._asked.version, answer.version)
            self._version = answer.version
        choice.texts.append(delta.text)
        choice.token_ids += delta.token_ids
        choice.finish_reason = delta.finish_reason or ""
        choice.num_prompt_tokens = answer.num_prompt_tokens

    def _response(self, choices: list[Choice]) -> pb.ModelInferResponse:
        return response_of(self._asked, self._backend.name, self._version, choices)

    async def _run(self, take: Callable[[int, Answer, Delta], Awaitable[None]]) -> None:
        """The answers' pieces, by the number of the answer."""
        asked, call = self._asked, self._call
        body, backend = call.body, call.model()
        self._backend = backend
        _check_version(backend, asked.version)
        given = await prompts_of(backend, asked.prompt, asked.prompt_name, body)
        check_count(len(given), body)
        own = {"best_of": body["best_of"]} if "best_of" in body else {}
        params = sampling_of(body, **own)
        self._num_answers = len(given) * params.n

        async def taken(prompt: int, answer: Answer, delta: Delta) -> None:
            await take(prompt * params.n + delta.index, answer, delta)

        limit_s = min(call.settings.limits.request_s, self._rpc.remaining_s)
        seconds = min(body.get("timeout", limit_s), limit_s)
        if seconds <= 0:
            raise DeadlineError("the deadline was over when the request came")
        run = Generation(call, backend, params, options_of(body, limit_s))
        try:
            async with asyncio.timeout(seconds + _GRACE_S):
                await run.run([ids for ids, _ in given], taken)
        except DeadlineError:  # the engine's own, which is a TimeoutError, too
            raise
        except TimeoutError:
            raise DeadlineError(f"no answer within {seconds:g} s") from None


class _Stream:
    """The requests of one stream, side by side; their responses are written one at a time."""

    def __init__(self, call: GrpcCall) -> None:
        self._call = call
        self._writing = asyncio.Lock()
        self._places = asyncio.Semaphore(MOST_OF_STREAM)
        self._tasks: set[asyncio.Task[None]] = set()
        self._num_read = 0
        self._is_stopped = False
        """Ended by the service, and not by the client's last request."""

    async def run(self) -> None:
        """Until the client has sent its last request and all are answered, or the service stops."""
        self._owner = asyncio.current_task()
        stopping = asyncio.ensure_future(self._call.door.stopping.wait())
        try:
            while (data := await self._next(stopping)) is not None:
                self._num_read += 1
                task = asyncio.ensure_future(self._answer(data, f"{self._call.request_id}.{self._num_read}"))
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
            raise RefusalError(503, "the service is stopping", code="draining")

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._places.release()

    async def _next(self, stopping: asyncio.Future[Any]) -> bytes | None:
        """The next request, once there is a place for it; None after the last."""
        await self._places.acquire()
        reading = asyncio.ensure_future(self._call.read())
        try:
            await asyncio.wait((reading, stopping), return_when=asyncio.FIRST_COMPLETED)
            self._is_stopped = not reading.done()
            return None if self._is_stopped else reading.result()
        finally:
            reading.cancel()

    async def _answer(self, data: bytes, request_id: str) -> None:
        """One request: what goes wrong with it is a response of its own, and the others go on."""
        rpc = self._call
        one = GrpcCall(rpc.door, _ONE_OF_STREAM, rpc.context, request_id, rpc.headers, rpc.is_known)
        outcome, message = Outcome(), pb.ModelInferRequest()
        with rpc.door.counted(outcome, one), rpc.door.opened():
            message = await one.parsed(data)
            asked = await _read(message)
            inference = _Inference(one, asked)
            if asked.body.get("stream", True):
                await inference.pieces(self._write)
            else:
                response = await inference.whole()
                response.parameters[FINAL].bool_param = True
                await self._write(response)
        if outcome.refusal is not None:
            await self._send(_failed(message, outcome.refusal, request_id))

    async def _write(self, response: pb.ModelInferResponse) -> None:
        await self._send(pb.ModelStreamInferResponse(infer_response=response))

    async def _send(self, response: pb.ModelStreamInferResponse) -> None:
        async with self._writing:
            try:
                await self._call.write(response)
            except GoneError:
                if self._owner is not None:
                    self._owner.cancel()
                raise


def _failed(message: pb.ModelInferRequest, refusal: RefusalError, request_id: str) -> pb.ModelStreamInferResponse:
    """What a request of a stream is refused with; the parameters say what a status and trailing metadata would."""
    found = pb.ModelStreamInferResponse(error_message=str(refusal)[:MAX_MESSAGE_CHARS])
    response = found.infer_response
    response.id, response.model_name = message.id[:MAX_ID_CHARS], message.model_name[:MAX_NAME_CHARS]
    response.parameters["code"].string_param = CODES[refusal.status].grpc
    for name, text in trailers_of(request_id, refusal):
        response.parameters[name].string_param = text
    response.parameters[FINAL].bool_param = True
    return found


async def _stream_infer(call: GrpcCall) -> None:
    """Requests as they come, answered side by side."""
    await _Stream(call).run()


_ONE_OF_STREAM: Final = Method(f"{SERVICE}/ModelStreamInfer", pb.ModelInferRequest, _infer, is_work=True)
