"""The calls of the Open Inference Protocol: each as a request over HTTP and as one over gRPC."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from penstock.client.calls import Answer, ClientCall, Rpc
from penstock.client.http_messages import HttpRequest, HttpResponse, json_body, path_segment
from penstock.client.tensors import InferResult, array_of, array_of_list, listed, raw_of, tensor_of
from penstock.errors import InvalidArgumentError
from penstock.tensors import Tensor

__all__ = ["InferCall", "MetadataCall", "ReadyCall", "RepositoryChange", "RepositoryIndex", "StatisticsCall"]

_LENGTH_HEADER: Final = "inference-header-content-length"
_MAX_TIMEOUT_S: Final = 86_400.0
_OPTIONS: Final = ("method", "version", "outputs", "parameters", "timeout_s")
_HINTS: Final = {
    "binary": "pass it to the client's constructor",
    "timeout": "pass timeout_s, in seconds",
    "priority": 'pass parameters={"priority": 1}',
}


def model_name(servable: str, method: str) -> str:
    """Return the protocol's model name of a servable's method; without one, of the default method."""
    return f"{servable}.{method}" if method else servable


def version_of(version: str | int) -> str:
    """Return a version as the protocol writes it.  Raises InvalidArgumentError unless it is a string or an int >= 1."""
    if isinstance(version, str):
        return version
    if isinstance(version, bool) or not isinstance(version, int) or version < 1:
        raise InvalidArgumentError(
            f"version: expected an integer from 1 or a label, got {version!r:.100}", param="version"
        )
    return str(version)


def model_path(model: str, version: str) -> str:
    """Return the path of a model's routes."""
    path = f"/v2/models/{path_segment(model)}"
    return f"{path}/versions/{path_segment(version)}" if version else path


@dataclass(frozen=True)
class InferCall(ClientCall[InferResult]):
    """Tensors to a model, and the tensors that it returns."""

    model: str
    version: str
    inputs: Sequence[Tensor]
    outputs: Sequence[str]
    parameters: Mapping[str, Any]
    is_binary: bool
    timeout_s: float | None = None

    @classmethod
    def from_arguments(
        cls, caller: str, servable: str, inputs: Mapping[str, Any], options: Mapping[str, Any], *, binary: bool = True
    ) -> InferCall:
        """Build the call from the arguments of a public method, ``caller``.  Raises InvalidArgumentError."""
        for name in options:
            if name not in _OPTIONS:
                hint = f" ({_HINTS[name]})" if name in _HINTS else ""
                raise InvalidArgumentError(
                    f"{caller}: unknown option {name}{hint}. Options: {', '.join(_OPTIONS)}.", param=name
                )
        return cls._from_options(servable, inputs, binary=binary, **options)

    @classmethod
    def _from_options(
        cls, servable: str, inputs: Mapping[str, Any], *, binary: bool, method: str = "",
        version: str | int = "", outputs: Sequence[str] = (), parameters: Mapping[str, Any] | None = None,
        timeout_s: float | None = None,
    ) -> InferCall:  # fmt: skip
        if not isinstance(inputs, Mapping) or not all(isinstance(name, str) for name in inputs):
            raise InvalidArgumentError(
                f'inputs: expected arrays by name, like {{"x": [[1.0]]}}, got {inputs!r:.100}', param="inputs"
            )
        if parameters is not None and not isinstance(parameters, Mapping):
            raise InvalidArgumentError(
                f'parameters: expected values by name, like {{"priority": 1}}, got {parameters!r:.100}',
                param="parameters",
            )
        sent = dict(parameters or {})
        for name, value in sent.items():
            if not isinstance(value, bool | int | float | str):
                raise InvalidArgumentError(
                    f"parameters: {name}: expected a string, a number or a bool, got {value!r:.100}", param="parameters"
                )
        if timeout_s is not None:
            if not 0 < timeout_s <= _MAX_TIMEOUT_S:
                raise InvalidArgumentError(
                    f"timeout_s: expected seconds above 0 and at most {_MAX_TIMEOUT_S:g}, got {timeout_s!r}",
                    param="timeout_s",
                )
            if "timeout" in sent:
                raise InvalidArgumentError(
                    "timeout_s: expected timeout_s or the parameter timeout, got both", param="timeout_s"
                )
            sent["timeout"] = max(int(timeout_s * 1e6), 1000)
        if isinstance(outputs, str):
            raise InvalidArgumentError("outputs: expected a sequence of names, got one string", param="outputs")
        tensors = [tensor_of(name, value) for name, value in inputs.items()]
        model = model_name(servable, method)
        return cls(model, version_of(version), tensors, tuple(outputs), sent, binary, timeout_s)

    def http_request(self) -> HttpRequest[InferResult]:
        """Return JSON followed by the tensors' bytes, or JSON only if the client is not binary."""
        inputs, raws = [], []
        for tensor in self.inputs:
            head: dict[str, Any] = {"name": tensor.name, "datatype": tensor.datatype, "shape": [*tensor.array.shape]}
            if self.is_binary:
                raws.append(raw_of(tensor))
                head["parameters"] = {"binary_data_size": len(raws[-1])}
            else:
                head["data"] = listed(tensor)
            inputs.append(head)
        fields: dict[str, Any] = {"inputs": inputs, "parameters": {**self.parameters}}
        if self.outputs:
            fields["outputs"] = [{"name": name} for name in self.outputs]
        headers = [("Content-Type", "application/json")]
        if self.is_binary:
            fields["parameters"]["binary_data_output"] = True
            headers = [("Content-Type", "application/octet-stream")]
        head_bytes = json_body(fields)
        if self.is_binary:
            headers.append(("Inference-Header-Content-Length", str(len(head_bytes))))
        path = f"{model_path(self.model, self.version)}/infer"
        return HttpRequest("POST", path, _read_http_result, b"".join((head_bytes, *raws)), tuple(headers))

    def rpc(self) -> Rpc[InferResult]:
        """Return ModelInfer, with the tensors as raw contents."""
        from penstock.serving.proto import oip_pb2 as pb

        return Rpc("ModelInfer", self.message(), pb.ModelInferResponse, read_response)

    def message(self) -> Any:
        """Return the request as a ModelInferRequest."""
        from penstock.serving.proto import oip_pb2 as pb

        message = pb.ModelInferRequest(model_name=self.model, model_version=self.version)
        for tensor in self.inputs:
            message.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.array.shape)
            message.raw_input_contents.append(raw_of(tensor))
        for name in self.outputs:
            message.outputs.add(name=name)
        kinds = {bool: "bool_param", int: "int64_param", float: "double_param", str: "string_param"}
        for name, value in self.parameters.items():
            try:
                setattr(message.parameters[name], kinds[type(value)], value)
            except (KeyError, ValueError) as error:
                raise InvalidArgumentError(
                    f"parameters: {name}: gRPC cannot carry the value {value!r:.100}: {error}", param="parameters"
                ) from None
        return message


def _read_http_result(response: HttpResponse) -> InferResult:
    """Return the result in a response.  Raises ServiceError for a refusal, ConnectionError for a malformed result."""
    if response.status != 200:
        raise response.refusal()
    body, length = response.take(), response.headers.get(_LENGTH_HEADER)
    try:
        start = len(body) if length is None else int(length)
        head = json.loads(body[:start])
        outputs = {}
        for output in head["outputs"]:
            num_bytes = output.get("parameters", {}).get("binary_data_size")
            if num_bytes is None:
                array = array_of_list(output["datatype"], output["shape"], output["data"])
            else:
                array = array_of(output["datatype"], output["shape"], body[start : start + num_bytes])
                start += num_bytes
            outputs[output["name"]] = array
        return InferResult(outputs, head["model_name"], head.get("model_version", ""), head.get("parameters", {}))
    except (ValueError, KeyError, TypeError) as error:
        raise ConnectionError(f"malformed inference response: {error!r}") from None


def read_response(message: Any) -> InferResult:
    """Return the result in a ModelInferResponse.  Raises ConnectionError unless all outputs are raw contents."""
    if len(message.raw_output_contents) != len(message.outputs):
        raise ConnectionError("malformed inference response: outputs are missing from raw_output_contents")
    outputs = {
        output.name: array_of(output.datatype, tuple(output.shape), raw)
        for output, raw in zip(message.outputs, message.raw_output_contents, strict=True)
    }
    parameters = {name: _parameter(value) for name, value in message.parameters.items()}
    return InferResult(outputs, message.model_name, message.model_version, parameters)


def _parameter(message: Any) -> Any:
    choice = message.WhichOneof("parameter_choice")
    return None if choice is None else getattr(message, choice)


@dataclass(frozen=True)
class MetadataCall(ClientCall[Answer]):
    """The inputs, outputs and versions of a model."""

    model: str
    version: str

    def http_request(self) -> HttpRequest[Answer]:
        """``GET /v2/models/{model}``."""
        return HttpRequest("GET", model_path(self.model, self.version), HttpResponse.json)

    def rpc(self) -> Rpc[Answer]:
        """ModelMetadata."""
        from penstock.serving.proto import oip_pb2 as pb

        request = pb.ModelMetadataRequest(name=self.model, version=self.version)
        return Rpc("ModelMetadata", request, pb.ModelMetadataResponse, plain)


@dataclass(frozen=True)
class ReadyCall(ClientCall[bool]):
    """Return the call that asks if a model accepts requests.  It is sent once, because 503 is an answer here."""

    model: str
    version: str
    is_sent_once = True

    def http_request(self) -> HttpRequest[bool]:
        """``GET /v2/models/{model}/ready``."""
        path = f"{model_path(self.model, self.version)}/ready"
        return HttpRequest("GET", path, lambda response: bool(response.json()["ready"]))

    def rpc(self) -> Rpc[bool]:
        """ModelReady."""
        from penstock.serving.proto import oip_pb2 as pb

        request = pb.ModelReadyRequest(name=self.model, version=self.version)
        return Rpc("ModelReady", request, pb.ModelReadyResponse, lambda reply: bool(reply.ready))


@dataclass(frozen=True)
class StatisticsCall(ClientCall[list[Answer]]):
    """The counts and times of a model; of all models if ``model`` is empty."""

    model: str
    version: str

    def http_request(self) -> HttpRequest[list[Answer]]:
        """``GET /v2/models/{model}/stats``."""
        path = model_path(self.model, self.version) if self.model else "/v2/models"
        return HttpRequest("GET", f"{path}/stats", lambda response: response.json()["model_stats"])

    def rpc(self) -> Rpc[list[Answer]]:
        """ModelStatistics."""
        from penstock.serving.proto import oip_pb2 as pb

        request = pb.ModelStatisticsRequest(name=self.model, version=self.version)
        return Rpc("ModelStatistics", request, pb.ModelStatisticsResponse, lambda reply: plain(reply)["model_stats"])


@dataclass(frozen=True)
class RepositoryIndex(ClientCall[list[Answer]]):
    """The versions of all servables."""

    def http_request(self) -> HttpRequest[list[Answer]]:
        """``POST /v2/repository/index``, which requires an object as its body."""
        return HttpRequest("POST", "/v2/repository/index", HttpResponse.json, b"{}")

    def rpc(self) -> Rpc[list[Answer]]:
        """RepositoryIndex."""
        from penstock.serving.proto import oip_pb2 as pb

        request = pb.RepositoryIndexRequest()
        return Rpc("RepositoryIndex", request, pb.RepositoryIndexResponse, lambda reply: plain(reply)["models"])


@dataclass(frozen=True)
class RepositoryChange(ClientCall[None]):
    """Load or unload a servable.  ``config`` holds the settings of a load: ``versions`` and ``labels``."""

    action: str
    servable: str
    config: Mapping[str, Any] = field(default_factory=dict)

    def http_request(self) -> HttpRequest[None]:
        """``POST /v2/repository/models/{servable}/load``, with the configuration as a string of JSON."""
        fields = {"parameters": {"config": json_body(self.config).decode()}} if self.config else {}
        path = f"/v2/repository/models/{path_segment(self.servable)}/{self.action}"
        return HttpRequest("POST", path, _check_status, json_body(fields))

    def rpc(self) -> Rpc[None]:
        """RepositoryModelLoad or RepositoryModelUnload."""
        from penstock.serving.proto import oip_pb2 as pb

        kind = "Load" if self.action == "load" else "Unload"
        request = getattr(pb, f"RepositoryModel{kind}Request")(model_name=self.servable)
        if self.config:
            request.parameters["config"].string_param = json_body(self.config).decode()
        return Rpc(f"RepositoryModel{kind}", request, getattr(pb, f"RepositoryModel{kind}Response"), lambda _: None)


def _check_status(response: HttpResponse) -> None:
    if response.status != 200:
        raise response.refusal()


def plain(message: Any) -> dict[str, Any]:
    """Return a message as the JSON object that the HTTP route returns."""
    fields: dict[str, Any] = {}
    for descriptor in message.DESCRIPTOR.fields:
        value = getattr(message, descriptor.name)
        if descriptor.name in ("memory_usage", "response_stats"):  # always empty, and absent from the JSON
            continue
        if isinstance(value, bool | int | float | str):
            fields[descriptor.name] = value
        elif hasattr(value, "DESCRIPTOR"):
            fields[descriptor.name] = plain(value)
        else:
            fields[descriptor.name] = [plain(item) if hasattr(item, "DESCRIPTOR") else item for item in value]
    return fields
