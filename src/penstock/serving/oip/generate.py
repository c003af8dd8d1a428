"""Triton's generate extension over REST: a language model's answer to one text, whole or as a stream of events."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import msgspec

from penstock.api_errors import RefusalError, refuse_if
from penstock.config import show
from penstock.serving.call import Call, Events, Reply, json_reply
from penstock.serving.oip.bodies import GenerateRequest
from penstock.serving.oip.dispatch import Inference, found_method
from penstock.serving.oip.language import OUTPUTS, LanguageRequest

if TYPE_CHECKING:
    from penstock.tensors import InferResponse

__all__ = ["generate", "generate_stream"]


async def generate(call: Call) -> Reply:
    """Return the whole answer; with several answers each field is a list."""
    inference = _inference(call, is_stream=False)
    response = await inference.whole()
    columns = _columns(response)
    several = len(columns["index"]) > 1
    return json_reply(
        {**_head(inference, response), **{k: v if several else v[0] for k, v in columns.items()}}
    )  # fmt: skip


async def generate_stream(call: Call) -> None:
    """Send an event for each delta of an answer; the last one has a ``finish_reason``."""
    inference, events = _inference(call, is_stream=True), Events(call)

    async def send(response: InferResponse, is_last: bool) -> None:
        columns = {name: values[0] for name, values in _columns(response).items()}
        event = json.dumps({**_head(inference, response), **columns}, separators=(",", ":"))
        await events.write(f"data: {event}\n\n".encode())

    await inference.pieces(send)
    await events.end(b"")


def _inference(call: Call, is_stream: bool) -> Inference:
    body: GenerateRequest = call.body
    name, version = call.path_values["model"], call.path_values.get("version", "")
    if found_method(call, name, version) is not None:
        message = f"{show(name)} is a servable, not a language model. Use infer with tensors."
        raise RefusalError(400, message, param="model", code="not_a_language_model")
    request_body = body
    if body.parameters is not None:
        values = {key: value for key, value in msgspec.structs.asdict(body.parameters).items() if value is not None}
        for key in values:
            is_twice = getattr(body, key) is not None
            refuse_if(is_twice, f"{key} must not be both in the body and in parameters", key)
        request_body = msgspec.structs.replace(body, **values)
    refuse_if(
        request_body.stream is (not is_stream),
        f"stream must be {str(is_stream).lower()} here. generate returns one response, generate_stream a stream.",
        "stream",
    )
    text, ids = body.text_input, body.input_ids
    refuse_if((text is None) is (ids is None), "text_input: set either text_input or input_ids", "text_input")
    request = LanguageRequest(
        id=body.id or "", model=name, version=version, prompt=ids if text is None else text,
        prompt_name="input_ids" if text is None else "text_input", rank=1, body=request_body, outputs=tuple(OUTPUTS),
    )  # fmt: skip
    return Inference(call, request)


def _head(inference: Inference, response: InferResponse) -> dict[str, Any]:
    head = {"model_name": inference.name, "model_version": response.version}
    return {"id": inference.id, **head} if inference.id else head


def _columns(response: InferResponse) -> dict[str, list[Any]]:
    """Return the values of all answers by output."""
    columns: dict[str, list[Any]] = {}
    for output in response.outputs:
        values = output.array.tolist()
        columns[output.name] = [value.decode() for value in values] if output.datatype == "BYTES" else values
    columns["output_ids"] = [
        ids[:count] for ids, count in zip(columns["output_ids"], columns["num_output_tokens"], strict=True)
    ]
    return columns
