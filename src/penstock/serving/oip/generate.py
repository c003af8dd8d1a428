"""Triton's generate extension over REST: a language model's answer to one text, whole or as a stream of events."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from penstock.api_errors import RefusalError
from penstock.config import show
from penstock.json_schema import Either, Items, Members, Shape, Text, Whole
from penstock.serving.call import Call, Events, Reply, json_reply
from penstock.serving.generation import refuse_together
from penstock.serving.oip.dispatch import Inference, found_method
from penstock.serving.oip.language import INFER, OUTPUTS, Asked, seconds_of
from penstock.serving.oip.tensor_codec import MAX_ID_CHARS
from penstock.serving.request_fields import TOKENS

if TYPE_CHECKING:
    from penstock.tensors import InferResponse

__all__ = ["GENERATE", "GENERATE_ANSWER", "GENERATE_EVENT", "generate", "generate_stream"]

GENERATE: Final = Members(
    "GenerateRequest",
    {
        "id": Text(0, MAX_ID_CHARS),
        "text_input": Text(),
        "input_ids": TOKENS,
        "parameters": Members("GenerateParameters", INFER.fields),
        **INFER.fields,
    },
    (),
    {
        "text_input": "Either text_input or input_ids is required.",
        "parameters": "Accepts the same fields as the body. A field may be in only one of both places.",
        "timeout": "Time limit in microseconds, after which the request ends with status 504.",
    },
)
_COUNT: Final = Whole(0, 2**31)
_IDS: Final = Items(Whole(0, 2**31), 0, None)
_HEAD: Final[dict[str, Shape]] = {"id": Text(), "model_name": Text(), "model_version": Text()}
_ONE: Final[dict[str, Shape]] = {
    "text_output": Text(),
    "finish_reason": Text(),
    "output_ids": _IDS,
    "index": _COUNT,
    "num_prompt_tokens": _COUNT,
    "num_output_tokens": _COUNT,
}
_ALWAYS: Final = ("model_name", "model_version", *_ONE)
GENERATE_EVENT: Final = Members("GenerateEvent", {**_HEAD, **_ONE}, _ALWAYS)
GENERATE_ANSWER: Final = Members(
    "GenerateResponse",
    {
        **_HEAD,
        **{name: Either((shape, Items(shape, 0, None)), "a value or a list") for name, shape in _ONE.items()},
    },
    _ALWAYS,
)


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
    body, name, version = call.body, call.path_values["model"], call.path_values.get("version", "")
    if found_method(call, name, version) is not None:
        message = f"{show(name)} is a servable, not a language model. Use infer with tensors."
        raise RefusalError(400, message, param="model", code="not_a_language_model")
    given = {key: value for key, value in body.items() if key in INFER.fields}
    for key, value in body.get("parameters", {}).items():
        refuse_together(key in given, f"{key} must not be both in the body and in parameters", key)
        given[key] = value
    refuse_together(
        given.get("stream", is_stream) is not is_stream,
        f"stream must be {str(is_stream).lower()} here. generate returns one response, generate_stream a stream.",
        "stream",
    )
    refuse_together(
        ("text_input" in body) is ("input_ids" in body), "text_input: set either text_input or input_ids", "text_input"
    )
    prompt_name = "text_input" if "text_input" in body else "input_ids"
    asked = Asked(
        id=body.get("id", ""), model=name, version=version, prompt=body[prompt_name], prompt_name=prompt_name, rank=1,
        body=seconds_of(given), outputs=tuple(OUTPUTS),
    )  # fmt: skip
    return Inference(call, asked)


def _head(inference: Inference, response: InferResponse) -> dict[str, Any]:
    head = {"model_name": inference.name, "model_version": response.version}
    return {"id": inference.id, **head} if inference.id else head


def _columns(response: InferResponse) -> dict[str, list[Any]]:
    """Return the values of all answers by output."""
    found: dict[str, list[Any]] = {}
    for one in response.outputs:
        values = one.array.tolist()
        found[one.name] = [value.decode() for value in values] if one.datatype == "BYTES" else values
    found["output_ids"] = [
        ids[:count] for ids, count in zip(found["output_ids"], found["num_output_tokens"], strict=True)
    ]
    return found
