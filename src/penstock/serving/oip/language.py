"""Language models in the Open Inference Protocol: request parameters from tensors, and answers as tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from penstock.api_errors import FieldError
from penstock.config import parse_json, show
from penstock.errors import InvalidFileError
from penstock.sampling_fields import SAMPLING_FIELDS
from penstock.serving.oip.bodies import InferParameters
from penstock.serving.oip.tensor_codec import MAX_ELEMENTS, byte_array, frozen, in_pieces
from penstock.serving.request_decoding import converted
from penstock.serving.request_fields import MAX_PROMPTS, checked_prompts
from penstock.tensors import InferRequest, InferResponse, Tensor
from penstock.tensors.codec import bfloat16_to_float32

if TYPE_CHECKING:
    from penstock.llm.backend import ModelCard

__all__ = [
    "OUTPUTS", "LanguageAnswer", "LanguageRequest", "ids_of", "inputs_of", "read_language_request", "response_of",
    "texts_of",
]  # fmt: skip

_PROMPTS: Final = ("text_input", "input_ids")
_LISTS: Final = tuple(row.name for row in SAMPLING_FIELDS if row.kind in ("strings", "token_ids", "choices"))
_OBJECTS: Final = tuple(row.name for row in SAMPLING_FIELDS if row.kind in ("biases", "id_lists"))
_HINTS: Final = ("triton_enable_empty_final_response",)  # ignored: the last response is never empty
MAX_JSON_BYTES: Final = 1 << 16

OUTPUTS: Final[dict[str, str]] = {
    "text_output": "BYTES",
    "finish_reason": "BYTES",
    "output_ids": "INT32",
    "index": "INT32",
    "num_prompt_tokens": "INT32",
    "num_output_tokens": "INT32",
}
"""The outputs and their datatypes; a request that names none gets all."""


@dataclass(frozen=True)
class LanguageRequest:
    """A checked request.

    ``prompt``: as in ``/v1/completions``; ``prompt_name``: its input; ``rank``: the rank of that input's tensor, which
    the outputs share.
    """

    id: str
    model: str
    version: str
    prompt: Any
    prompt_name: str
    rank: int
    body: InferParameters
    outputs: tuple[str, ...]


@dataclass
class LanguageAnswer:
    """One answer, or the part of it that is sent next."""

    index: int
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str = ""
    num_prompt_tokens: int = 0


def read_language_request(request: InferRequest, model: str, version: str) -> LanguageRequest:
    """Check a request and return it.  Raises FieldError with the name of the input, output or parameter at fault."""
    inputs, parameters = dict(request.inputs), dict(request.parameters)
    for name in _HINTS:
        converted(parameters.pop(name, False), bool, name)
    values = {name: _object(value, name) if name in _OBJECTS else value for name, value in parameters.items()}
    prompts = [inputs.pop(name) for name in _PROMPTS if name in inputs]
    for name, tensor in inputs.items():
        if name in values:
            raise FieldError(name, f"{show(name)[1:-1]} is both an input and a parameter")
        if name == "timeout" or name not in InferParameters.__struct_fields__:
            message = f"Unknown input: {show(name)}. Pass the prompt as {' or '.join(_PROMPTS)}."
            raise FieldError(name[:200], message, "unknown")
        values[name] = _value(tensor)
    if len(prompts) != 1:
        raise FieldError(
            "inputs", "inputs must contain either text_input or input_ids", "value" if prompts else "missing"
        )
    body: InferParameters = converted(values, InferParameters)
    (tensor,) = prompts
    prompt = _single(texts_of(tensor)) if tensor.name == "text_input" else ids_of(tensor)
    return LanguageRequest(
        id=request.request_id, model=model, version=version, prompt=prompt, prompt_name=tensor.name,
        rank=tensor.array.ndim, body=body, outputs=_outputs(request.outputs),
    )  # fmt: skip


def _outputs(names: Sequence[str]) -> tuple[str, ...]:
    for name in names:
        if name not in OUTPUTS:
            message = f"Unknown output: {show(name)}. Available: {', '.join(OUTPUTS)}."
            raise FieldError(name[:200] or "outputs", message, "unknown")
    return tuple(names or OUTPUTS)


def _decoded(tensor: Tensor) -> list[Any]:
    size = tensor.array.size
    if size > MAX_ELEMENTS:
        raise FieldError(tensor.name, f"the input {tensor.name} has {size} elements; the maximum is {MAX_ELEMENTS}")
    array = bfloat16_to_float32(tensor.array) if tensor.datatype == "BF16" else tensor.array
    values = [value for piece in in_pieces(array.ravel()) for value in piece.tolist()]
    if tensor.datatype != "BYTES":
        return values
    try:
        return [value.decode() for value in values]
    except UnicodeDecodeError:
        raise FieldError(tensor.name, f"the input {tensor.name} must be UTF-8 text") from None


def _value(tensor: Tensor) -> Any:
    """Return the value of an input that is a field of InferParameters, whose type is checked later."""
    values = _decoded(tensor)
    if tensor.name in _LISTS:
        return values
    if len(values) != 1:
        raise FieldError(tensor.name, f"the input {tensor.name} must have one element, not {len(values)}")
    return _object(values[0], tensor.name) if tensor.name in _OBJECTS else values[0]


def _object(value: Any, name: str) -> Any:
    """Return a field that is an object, passed as a string of JSON."""
    if not isinstance(value, str):
        raise FieldError(name, f"{name} must be a string with a JSON object, not {show(value)}")
    try:
        return parse_json(value.encode(), name, max_bytes=MAX_JSON_BYTES)
    except InvalidFileError as error:
        raise FieldError(name, str(error)) from None


def _single(texts: list[str]) -> str | list[str]:
    return texts[0] if len(texts) == 1 else texts


def texts_of(tensor: Tensor) -> list[str]:
    """Return the strings of an input of shape [n] or [n, 1].  Raises FieldError."""
    shape = tensor.array.shape
    if tensor.datatype != "BYTES" or not (len(shape) == 1 or (len(shape) == 2 and shape[1] == 1)):
        raise FieldError(
            tensor.name,
            f"{tensor.name}: expected BYTES of shape [n] or [n, 1], got {tensor.datatype} of {show([*shape])}",
        )
    if not 1 <= shape[0] <= MAX_PROMPTS:
        raise FieldError(tensor.name, f"{tensor.name}: expected 1 to {MAX_PROMPTS} strings, got {shape[0]}")
    texts: list[str] = _decoded(tensor)
    return texts


def ids_of(tensor: Tensor) -> list[int] | list[list[int]]:
    """Return the token ids of an input of shape [tokens] or [n, tokens].  Raises FieldError."""
    shape = tensor.array.shape
    if tensor.datatype not in ("INT32", "INT64") or len(shape) not in (1, 2) or 0 in shape:
        raise FieldError(
            tensor.name,
            f"input_ids must be INT32 or INT64 of shape [tokens] or [n, tokens] without a size of 0, "
            f"not {tensor.datatype} of {show([*shape])}",
        )
    num_prompts = 1 if len(shape) == 1 else shape[0]
    if num_prompts > MAX_PROMPTS:
        raise FieldError(tensor.name, f"input_ids must have at most {MAX_PROMPTS} rows, not {num_prompts}")
    ids: list[int] = checked_prompts(_decoded(tensor), "input_ids")
    if num_prompts == 1:
        return ids
    return [ids[at : at + shape[1]] for at in range(0, len(ids), shape[1])]


def response_of(request: LanguageRequest, version: int, choices: Sequence[LanguageAnswer]) -> InferResponse:
    """Return answers, or parts of them, as the requested outputs, with one row per answer."""
    shape = (len(choices), 1) if request.rank == 2 else (len(choices),)
    outputs = []
    for name in request.outputs:
        if name == "output_ids":
            longest = max(len(choice.token_ids) for choice in choices)
            rows = [choice.token_ids + [-1] * (longest - len(choice.token_ids)) for choice in choices]
            array = frozen(np.array(rows, np.int32).reshape(len(choices), longest))
        elif OUTPUTS[name] == "BYTES":
            array = byte_array([_COLUMNS[name](choice).encode() for choice in choices], shape)
        else:
            array = frozen(np.array([_COLUMNS[name](choice) for choice in choices], np.int32).reshape(shape))
        outputs.append(Tensor(name, OUTPUTS[name], array))
    return InferResponse(str(version), outputs)


_COLUMNS: Final[dict[str, Callable[[LanguageAnswer], Any]]] = {
    "text_output": lambda choice: "".join(choice.texts),
    "finish_reason": lambda choice: choice.finish_reason,
    "index": lambda choice: choice.index,
    "num_prompt_tokens": lambda choice: choice.num_prompt_tokens,
    "num_output_tokens": lambda choice: len(choice.token_ids),
}


def inputs_of(card: ModelCard) -> tuple[str, str]:
    """Return the name and the datatype of a model's required input."""
    return ("text_input", "BYTES") if card.has_tokenizer else ("input_ids", "INT32")
