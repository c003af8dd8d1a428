"""Dispatch requests of the Open Inference Protocol to a language model or to a method of a servable."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated, Final

import msgspec

from penstock.api_errors import FieldError, RefusalError
from penstock.config import show
from penstock.engine.options import MAX_PRIORITY
from penstock.errors import NotFoundError
from penstock.serving.admission import deadline_s, within
from penstock.serving.generation import Generation, Take, TakeNow
from penstock.serving.oip.bodies import Microseconds
from penstock.serving.oip.classifiers import classifier_response, is_classifier
from penstock.serving.oip.language import LanguageAnswer, LanguageRequest, read_language_request, response_of
from penstock.serving.request_decoding import converted
from penstock.serving.request_fields import MAX_NAME_CHARS
from penstock.serving.translation import text_request
from penstock.tensors import InferRequest, InferResponse, ServedMethod

if TYPE_CHECKING:
    from penstock.llm.backend import Answer, Backend, TokenDelta
    from penstock.serving.call import Call

__all__ = ["Inference", "answer", "check_version", "found_method", "language_model", "model_called", "single_response"]

_LARGE: Final = 1 << 14
_Priority = Annotated[int, msgspec.Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY)]
_HINT: Final = "triton_enable_empty_final_response"  # ignored: the last response is never empty


def found_method(call: Call, name: str, version: str) -> ServedMethod | None:
    """Return the servable's method of that name, or None if the name can only be a language model.

    Raises NotFoundError, UnavailableError.
    """
    if call.methods is None or not name:
        return None
    method = call.methods.find(name, version)
    if method is not None:
        call.facts["model"], call.facts["version"] = method.name, method.version
    return method


def model_called(call: Call, name: str) -> Backend:
    """Return the language model of a name.  Raises NotFoundError, or a 400 error for an empty name."""
    if not name:
        raise RefusalError(400, "name is missing", param="name", code="missing_required_parameter")
    call.facts["model"] = name[:128]
    return _find_model(call, name)


def _find_model(call: Call, name: str) -> Backend:
    """Return the language model of a name.  Raises NotFoundError with the names of models and servables."""
    try:
        return call.models.get(name)
    except NotFoundError:
        if call.methods is None:
            raise
        ready = [model.name for model in call.methods.index() if model.state == "READY"]
        names = dict.fromkeys([*(model.name for model in call.models.list()), *ready])
        raise NotFoundError(f"Model {name!r:.140} not found. Available: {', '.join(names) or 'none'}.") from None


def check_version(backend: Backend, version: str, version_number: int = 0) -> None:
    """Raise a 404 error if ``version`` is set and differs from ``version_number`` (0: the model's current one)."""
    number = str(version_number or backend.card.version)
    if version not in ("", number):
        raise RefusalError(
            404, f"{backend.name} has no version {version[:32]!r}. Available: {number}.", param="model_version",
            code="version_not_found",
        )  # fmt: skip


async def answer(call: Call, request: InferRequest, model: str, version: str) -> tuple[str, InferResponse]:
    """Return the name of the model or method, and its whole response."""
    whole = await single_response(call, request, model, version)
    if whole is not None:
        return whole
    inference = await language_model(call, request, model, version)
    if call.body.stream:
        message = "stream must be false here. ModelStreamInfer and generate_stream support streaming."
        raise RefusalError(400, message, param="stream", code="invalid_value")
    response = await inference.whole()
    return inference.name, response


async def single_response(
    call: Call, request: InferRequest, model: str, version: str
) -> tuple[str, InferResponse] | None:
    """Return the name and the response of a servable's method or of a classifier; None for a language model."""
    method = found_method(call, model, version)
    if method is not None:
        return method.name, await run_method(call, method, request)
    backend = _find_model(call, model) if model else None
    if backend is None or not is_classifier(backend):
        return None
    backend = call.model(model)
    check_version(backend, version)
    return backend.name, await classifier_response(call, backend, request)


async def language_model(call: Call, request: InferRequest, model: str, version: str) -> Inference:
    """Return a checked request to a language model; a large request is checked in a thread.

    Raises NotFoundError before any other error.
    """
    if model:
        _find_model(call, model)
    is_large = any(tensor.array.size > _LARGE for tensor in request.inputs.values())
    if is_large:
        return Inference(call, await asyncio.to_thread(read_language_request, request, model, version))
    return Inference(call, read_language_request(request, model, version))


async def run_method(call: Call, method: ServedMethod, request: InferRequest) -> InferResponse:
    """Run a method of a servable and return its response; the log has the call's id, not the id in the body."""
    if call.models.is_draining:
        raise RefusalError(503, "The service is stopping.", code="draining")
    timeout_s, priority, is_each = None, 0, False
    for name, value in request.parameters.items():
        if name == "timeout":
            timeout_s = converted(value, Microseconds, name) / 1e6
        elif name == "priority":
            priority = converted(value, _Priority, name)
        elif name == "per_instance_errors":
            is_each = converted(value, bool, name)
        elif name == _HINT:
            converted(value, bool, name)
        else:
            raise FieldError(
                name[:MAX_NAME_CHARS],
                f"Unknown parameter: {show(name)}. Servables accept timeout, priority and per_instance_errors.",
                "unknown",
            )  # fmt: skip
    seconds = deadline_s(call, timeout_s)
    checked = InferRequest(call.request_id, request.inputs, request.outputs, {}, seconds, priority, is_each)
    if call.sink is not None:  # the gateway of HTTP limits the time of each handler
        return await method.infer(checked)
    return await within(seconds, method.infer(checked))


class Inference:
    """One request to a language model and its answers."""

    def __init__(self, call: Call, request: LanguageRequest) -> None:
        call.body = request.body
        self._call, self._request = call, request
        self._version = 0
        self._num_finished = 0

    @property
    def name(self) -> str:
        """The model's name, once the request runs."""
        return self._backend.name

    @property
    def id(self) -> str:
        """The client's id of the request."""
        return self._request.id

    async def whole(self) -> InferResponse:
        """Return all answers in one response."""
        choices: dict[int, LanguageAnswer] = {}

        def keep(index: int, answer: Answer, delta: TokenDelta) -> bool:
            self._add(choices.setdefault(index, LanguageAnswer(index)), answer, delta)
            return True

        async def take(index: int, answer: Answer, delta: TokenDelta) -> None:
            keep(index, answer, delta)

        await self._run(take, keep)
        return self._response([choices[index] for index in sorted(choices)])

    async def pieces(self, send: Callable[[InferResponse, bool], Awaitable[None]]) -> None:
        """Send a response for each delta, with True for the last one."""
        choices: dict[int, LanguageAnswer] = {}

        async def take(index: int, answer: Answer, delta: TokenDelta) -> None:
            choice = choices.setdefault(index, LanguageAnswer(index))
            self._add(choice, answer, delta)
            if not delta.text and delta.finish_reason is None:
                return  # an incomplete character
            del choices[index]
            self._num_finished += delta.finish_reason is not None
            await send(self._response([choice]), self._num_finished == self._num_answers)

        await self._run(take)

    def _add(self, choice: LanguageAnswer, answer: Answer, delta: TokenDelta) -> None:
        if not self._version:
            check_version(self._backend, self._request.version, answer.version)
            self._version = answer.version
        choice.texts.append(delta.text)
        choice.token_ids += delta.token_ids
        choice.finish_reason = delta.finish_reason or ""
        choice.num_prompt_tokens = answer.num_prompt_tokens

    def _response(self, choices: list[LanguageAnswer]) -> InferResponse:
        return response_of(self._request, self._version, choices)

    async def _run(self, take: Take, take_now: TakeNow | None = None) -> None:
        """Run the request; pass each delta to ``take`` with the index of its answer."""
        request, call = self._request, self._call
        body, backend = request.body, call.model(request.model or None)
        self._backend = backend
        check_version(backend, request.version)
        engine_request = await text_request(call, backend, request.prompt, request.prompt_name, body)
        n = engine_request.params.n
        self._num_answers = len(engine_request.prompts) * n

        async def taken(prompt: int, answer: Answer, delta: TokenDelta) -> None:
            await take(prompt * n + delta.index, answer, delta)

        def taken_now(prompt: int, answer: Answer, delta: TokenDelta) -> bool:
            return take_now is not None and take_now(prompt * n + delta.index, answer, delta)

        generation = Generation(call, engine_request)
        await within(
            deadline_s(call, body.timeout_s), generation.run(taken, taken_now if take_now is not None else None)
        )
