"""A language model's answer in pieces over HTTP: the Open Inference Protocol's ``generate_stream`` at a client."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from penstock.client.http import Question, json_of
from penstock.client.inference import Inference, path_of
from penstock.client.tensors import InferResult
from penstock.errors import InvalidArgumentError, UnsupportedError
from penstock.tensors import DTYPES, Tensor

__all__ = ["Generated"]

_OUTPUTS: Final = {
    "text_output": "BYTES", "finish_reason": "BYTES", "output_ids": "INT32", "index": "INT32",
    "num_prompt_tokens": "INT32", "num_output_tokens": "INT32",
}  # fmt: skip
_PROMPTS: Final = ("text_input", "input_ids")


class Generated:
    """An inference whose answer comes as events, each of which is read as gRPC's pieces are."""

    def __init__(self, call: Inference) -> None:
        self.timeout_s = call.timeout_s
        self._call = call
        for name in call.outputs:
            if name not in _OUTPUTS:
                raise InvalidArgumentError(f"output {name!r:.100}: a language model's are {', '.join(_OUTPUTS)}")

    def question(self) -> Question:
        """Its request; UnsupportedError and InvalidArgumentError for what no event stream takes."""
        call = self._call
        if not any(one.name in _PROMPTS for one in call.inputs):
            raise UnsupportedError(
                f"{call.model}: stream_infer over http:// is for language models, which take text_input or input_ids; "
                "a servable answers in one piece: infer gives it, and infer_many those to many requests"
            )
        body: dict[str, Any] = {**call.parameters}
        for one in call.inputs:
            if one.name in body:
                raise InvalidArgumentError(f"{one.name} is given as an input and as a parameter")
            body[one.name] = _plain(one)
        path = f"{path_of(call.model, call.version)}/generate_stream"
        return Question("POST", path, json_of(body))

    def piece(self, event: dict[str, Any]) -> InferResult:
        """Of an event; ConnectionError for what is none."""
        try:
            outputs = {
                name: _array(datatype, event[name])
                for name, datatype in _OUTPUTS.items()
                if not self._call.outputs or name in self._call.outputs
            }
            return InferResult(outputs, event["model_name"], event["model_version"], {})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConnectionError(f"what came is no piece of an answer: {error!r}") from None


def _plain(tensor: Tensor) -> Any:
    """A tensor as a field of the request: one element as itself, several as a list."""
    values = [one.decode() if isinstance(one, bytes) else one for one in tensor.array.reshape(-1).tolist()]
    if tensor.name == "input_ids":
        if tensor.array.ndim > 1 and len(tensor.array) != 1:
            raise InvalidArgumentError("input_ids: one prompt at a time over http://; several go over grpc://")
        return values
    if tensor.name == "text_input" and len(values) != 1:
        raise InvalidArgumentError("text_input: one prompt at a time over http://; several go over grpc://")
    return values[0] if len(values) == 1 else values


def _array(datatype: str, value: Any) -> Any:
    """A row for the one answer that an event is of."""
    if datatype == "BYTES":
        found = np.empty(1, object)
        found[0] = value.encode()
        return found
    return np.array([value], DTYPES[datatype])
