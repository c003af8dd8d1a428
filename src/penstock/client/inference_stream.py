"""A streamed inference: ModelStreamInfer over gRPC, a language model's ``generate_stream`` over HTTP."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from penstock.client.calls import ClientCall, Rpc
from penstock.client.http_messages import HttpRequest, json_body
from penstock.client.oip_calls import InferCall, model_path, read_response
from penstock.client.tensors import InferResult
from penstock.errors import InvalidArgumentError, UnsupportedError
from penstock.tensors import DTYPES, Tensor

__all__ = ["InferenceStream"]

_OUTPUTS: Final = {
    "text_output": "BYTES", "finish_reason": "BYTES", "output_ids": "INT32", "index": "INT32",
    "num_prompt_tokens": "INT32", "num_output_tokens": "INT32",
}  # fmt: skip
_PROMPTS: Final = ("text_input", "input_ids")


class InferenceStream(ClientCall[InferResult]):
    """An inference whose result arrives in parts.  The parts have the same form over HTTP and over gRPC."""

    def __init__(self, inference: InferCall) -> None:
        self.timeout_s = inference.timeout_s
        self._inference = inference

    def rpc(self) -> Rpc[InferResult]:
        """Return ModelStreamInfer."""
        from penstock.serving.proto import oip_pb2 as pb

        return Rpc("ModelStreamInfer", self._inference.message(), pb.ModelStreamInferResponse, read_response)

    def http_request(self) -> HttpRequest[InferResult]:
        """Return the request of ``generate_stream``.

        Raises UnsupportedError for an inference without a prompt, InvalidArgumentError for one that does not fit.
        """
        inference = self._inference
        for name in inference.outputs:
            if name not in _OUTPUTS:
                raise InvalidArgumentError(
                    f"outputs: expected outputs of a language model ({', '.join(_OUTPUTS)}), got {name!r:.100}",
                    param="outputs",
                )
        if not any(tensor.name in _PROMPTS for tensor in inference.inputs):
            raise UnsupportedError(
                f"{inference.model}: over http://, stream_infer serves only language models, which take text_input or "
                "input_ids. For a servable use infer or infer_many, which return each result as a whole."
            )
        fields: dict[str, Any] = {**inference.parameters}
        for tensor in inference.inputs:
            if tensor.name in fields:
                raise InvalidArgumentError(
                    f"{tensor.name}: expected an input or a parameter, got both", param=tensor.name
                )
            fields[tensor.name] = _field(tensor)
        path = f"{model_path(inference.model, inference.version)}/generate_stream"
        return HttpRequest("POST", path, self._read_event, json_body(fields))

    def _read_event(self, event: dict[str, Any]) -> InferResult:
        """Return the part of the result in an event.  Raises ConnectionError for a malformed event."""
        output_names = self._inference.outputs
        try:
            outputs = {
                name: _array(datatype, event[name])
                for name, datatype in _OUTPUTS.items()
                if not output_names or name in output_names
            }  # fmt: skip
            return InferResult(outputs, event["model_name"], event["model_version"], {})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConnectionError(f"malformed event of generate_stream: {error!r}") from None


def _field(tensor: Tensor) -> Any:
    """Return a tensor as a field of the request: a single element as itself, several as a list."""
    values = [value.decode() if isinstance(value, bytes) else value for value in tensor.array.reshape(-1).tolist()]
    if tensor.name == "input_ids":
        if tensor.array.ndim > 1 and len(tensor.array) != 1:
            raise InvalidArgumentError(
                "input_ids: expected one prompt over http://; grpc:// takes several", param="input_ids"
            )
        return values
    if tensor.name == "text_input" and len(values) != 1:
        raise InvalidArgumentError(
            "text_input: expected one prompt over http://; grpc:// takes several", param="text_input"
        )
    return values[0] if len(values) == 1 else values


def _array(datatype: str, value: Any) -> Any:
    """Return a value as an array of one row, because an event belongs to one prompt."""
    if datatype == "BYTES":
        array = np.empty(1, object)
        array[0] = value.encode()
        return array
    return np.array([value], DTYPES[datatype])
