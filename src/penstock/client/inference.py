"""Calls of the Open Inference Protocol at a client, each as a request over HTTP and as one over gRPC."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import quote

from penstock.client.http import Parsed, Question, json_of
from penstock.client.tensors import InferResult, array_of, array_of_list, listed, raw_of, tensor_of
from penstock.errors import InvalidArgumentError
from penstock.tensors import Tensor

__all__ = ["Change", "Index", "Inference", "OfModel", "OipCall", "Rpc", "path_of"]

_LENGTH: Final = "inference-header-content-length"
_MAX_TIMEOUT_S: Final = 86_400.0
_OPTIONS: Final = ("method", "version", "outputs", "parameters", "timeout_s")
_MEANT: Final = {
    "binary": "it is given to the client itself",
    "timeout": "timeout_s is its time in seconds",
    "priority": 'parameters={"priority": 1} has it',
}


@dataclass(frozen=True)
class Rpc:
    """One request over gRPC: ``message`` to a method, which answers with a ``reply``, and how that is read."""

    method: str
    message: Any
    reply: Any
    read: Callable[[Any], Any]


class OipCall(ABC):
    """A call that can be made over either door.

    ``timeout_s``: for all of it; None leaves it to the client.  ``is_asked_once``: never tried again.
    """

    timeout_s: float | None = None
    is_asked_once = False

    @abstractmethod
    def question(self) -> Question:
        """As a request over HTTP."""

    @abstractmethod
    def rpc(self) -> Rpc:
        """As a request over gRPC."""


def _model(servable: str, method: str) -> str:
    return f"{servable}.{method}" if method else servable


def version_of(version: str | int) -> str:
    """A version as the protocol has it; InvalidArgumentError for what is neither a text nor a number from 1."""
    if isinstance(version, str):
        return version
    if isinstance(version, bool) or not isinstance(version, int) or version < 1:
        raise InvalidArgumentError(f"version must be a number from 1 or a label, not {version!r:.100}")
    return str(version)


def path_of(model: str, version: str) -> str:
    return f"/v2/models/{quote(model, safe='')}" + (f"/versions/{quote(version, safe='')}" if version else "")


@dataclass(frozen=True)
class Inference(OipCall):
    """Tensors in, tensors out."""

    model: str
    version: str
    inputs: Sequence[Tensor]
    outputs: Sequence[str]
    parameters: Mapping[str, Any]
    is_binary: bool
    timeout_s: float | None = None

    @classmethod
    def asked(
        cls, caller: str, servable: str, inputs: Mapping[str, Any], options: Mapping[str, Any], *, binary: bool = True
    ) -> Inference:
        """Of what a public method, ``caller``, was given; InvalidArgumentError names what cannot be."""
        for name in options:
            if name not in _OPTIONS:
                meant = f" ({_MEANT[name]})" if name in _MEANT else ""
                raise InvalidArgumentError(f"{caller} has the options {', '.join(_OPTIONS)}, not {name}{meant}")
        return cls.of(servable, inputs, binary=binary, **options)

    @classmethod
    def of(
        cls, servable: str, inputs: Mapping[str, Any], *, binary: bool = True, method: str = "",
        version: str | int = "", outputs: Sequence[str] = (), parameters: Mapping[str, Any] | None = None,
        timeout_s: float | None = None,
    ) -> Inference:  # fmt: skip
        """Of what a caller gives; InvalidArgumentError names what cannot be."""
        if not isinstance(inputs, Mapping) or not all(isinstance(name, str) for name in inputs):
            raise InvalidArgumentError(f'inputs must be arrays by name, like {{"x": [[1.0]]}}, not {inputs!r:.100}')
        if parameters is not None and not isinstance(parameters, Mapping):
            raise InvalidArgumentError(f'parameters must be like {{"priority": 1}}, not {parameters!r:.100}')
        given = dict(parameters or {})
        for name, value in given.items():
            if not isinstance(value, bool | int | float | str):
                raise InvalidArgumentError(f"parameter {name} must be a text, a number or a flag, not {value!r:.100}")
        if timeout_s is not None:
            if not 0 < timeout_s <= _MAX_TIMEOUT_S:
                raise InvalidArgumentError(f"timeout_s must be above 0 and up to {_MAX_TIMEOUT_S:g}, not {timeout_s!r}")
            if "timeout" in given:
                raise InvalidArgumentError("give timeout_s or the parameter timeout, not both")
            given["timeout"] = max(int(timeout_s * 1e6), 1000)
        if isinstance(outputs, str):
            raise InvalidArgumentError("outputs must be a sequence of names, not one text")
        tensors = [tensor_of(name, value) for name, value in inputs.items()]
        return cls(_model(servable, method), version_of(version), tensors, tuple(outputs), given, binary, timeout_s)

    def question(self) -> Question:
        """JSON, with the tensors' bytes behind it unless they are to be JSON, too."""
        inputs, raws = [], []
        for one in self.inputs:
            head: dict[str, Any] = {"name": one.name, "datatype": one.datatype, "shape": [*one.array.shape]}
            if self.is_binary:
                raws.append(raw_of(one))
                head["parameters"] = {"binary_data_size": len(raws[-1])}
            else:
                head["data"] = listed(one)
            inputs.append(head)
        body: dict[str, Any] = {"inputs": inputs, "parameters": {**self.parameters}}
        if self.outputs:
            body["outputs"] = [{"name": name} for name in self.outputs]
        headers = [("Content-Type", "application/json")]
        if self.is_binary:
            body["parameters"]["binary_data_output"] = True
            headers = [("Content-Type", "application/octet-stream")]
        data = json_of(body)
        if self.is_binary:
            headers.append(("Inference-Header-Content-Length", str(len(data))))
        path = f"{path_of(self.model, self.version)}/infer"
        return Question("POST", path, b"".join((data, *raws)), tuple(headers), _read_answer)

    def rpc(self) -> Rpc:
        """Raw contents."""
        from penstock.serving.proto import oip_pb2 as pb

        return Rpc("ModelInfer", self.message(), pb.ModelInferResponse, read_response)

    def message(self) -> Any:
        """The request as a message."""
        from penstock.serving.proto import oip_pb2 as pb

        found = pb.ModelInferRequest(model_name=self.model, model_version=self.version)
        for one in self.inputs:
            found.inputs.add(name=one.name, datatype=one.datatype, shape=one.array.shape)
            found.raw_input_contents.append(raw_of(one))
        for name in self.outputs:
            found.outputs.add(name=name)
        for name, value in self.parameters.items():
            kinds = {bool: "bool_param", int: "int64_param", float: "double_param", str: "string_param"}
            try:
                setattr(found.parameters[name], kinds[type(value)], value)
            except (KeyError, ValueError) as error:
                raise InvalidArgumentError(f"parameter {name}: {value!r:.100} cannot be sent: {error}") from None
        return found


def _read_answer(parsed: Parsed) -> InferResult:
    """Of a whole answer; ServiceError for a refusal, ConnectionError for what is no answer."""
    if parsed.status != 200:
        raise parsed.refusal()
    data, given = parsed.take(), parsed.headers.get(_LENGTH)
    try:
        size = len(data) if given is None else int(given)
        head, at = json.loads(data[:size]), size
        outputs = {}
        for one in head["outputs"]:
            num_bytes = one.get("parameters", {}).get("binary_data_size")
            if num_bytes is None:
                outputs[one["name"]] = array_of_list(one["datatype"], one["shape"], one["data"])
            else:
                outputs[one["name"]] = array_of(one["datatype"], one["shape"], data[at : at + num_bytes])
                at += num_bytes
        return InferResult(outputs, head["model_name"], head.get("model_version", ""), head.get("parameters", {}))
    except (ValueError, KeyError, TypeError) as error:
        raise ConnectionError(f"what came is no answer to an inference: {error!r}") from None


def read_response(message: Any) -> InferResult:
    """Of a ModelInferResponse; ConnectionError for what is none of ours."""
    if len(message.raw_output_contents) != len(message.outputs):
        raise ConnectionError("the outputs are not in raw_output_contents")
    outputs = {
        one.name: array_of(one.datatype, tuple(one.shape), raw)
        for one, raw in zip(message.outputs, message.raw_output_contents, strict=True)
    }
    parameters = {name: _parameter(one) for name, one in message.parameters.items()}
    return InferResult(outputs, message.model_name, message.model_version, parameters)


def _parameter(message: Any) -> Any:
    choice = message.WhichOneof("parameter_choice")
    return None if choice is None else getattr(message, choice)


@dataclass(frozen=True)
class OfModel(OipCall):
    """What is known of a model: ``what`` is "metadata", "ready" or "stats", of all models where it has no name."""

    what: str
    servable: str = ""
    method: str = ""
    version: str = ""

    @property
    def is_asked_once(self) -> bool:  # type: ignore[override]
        """That a model is not ready is an answer."""
        return self.what == "ready"

    def question(self) -> Question:
        """A route without a body."""
        model = _model(self.servable, self.method)
        path = path_of(model, self.version) if model else "/v2/models"
        read = {"stats": _read_stats, "ready": _read_ready}.get(self.what, Parsed.value)
        return Question("GET", path if self.what == "metadata" else f"{path}/{self.what}", read=read)

    def rpc(self) -> Rpc:
        """An RPC of its own."""
        from penstock.serving.proto import oip_pb2 as pb

        named = {"name": _model(self.servable, self.method), "version": self.version}
        if self.what == "ready":
            return Rpc("ModelReady", pb.ModelReadyRequest(**named), pb.ModelReadyResponse, lambda found: found.ready)
        if self.what == "stats":
            request = pb.ModelStatisticsRequest(**named)
            return Rpc(
                "ModelStatistics", request, pb.ModelStatisticsResponse, lambda found: plain(found)["model_stats"]
            )
        return Rpc("ModelMetadata", pb.ModelMetadataRequest(**named), pb.ModelMetadataResponse, plain)


def _read_stats(parsed: Parsed) -> Any:
    return parsed.value()["model_stats"]


def _read_ready(parsed: Parsed) -> bool:
    return bool(parsed.value()["ready"])


def plain(message: Any) -> dict[str, Any]:
    """A message as the object that HTTP answers with."""
    found: dict[str, Any] = {}
    for one in message.DESCRIPTOR.fields:
        value = getattr(message, one.name)
        if one.name in ("memory_usage", "response_stats"):  # always empty, and not in the JSON
            continue
        if isinstance(value, bool | int | float | str):
            found[one.name] = value
        elif hasattr(value, "DESCRIPTOR"):
            found[one.name] = plain(value)
        else:
            found[one.name] = [plain(item) if hasattr(item, "DESCRIPTOR") else item for item in value]
    return found


@dataclass(frozen=True)
class Index(OipCall):
    """The versions of all servables."""

    def question(self) -> Question:
        """A route that wants an object."""
        return Question("POST", "/v2/repository/index", b"{}")

    def rpc(self) -> Rpc:
        """An RPC of its own."""
        from penstock.serving.proto import oip_pb2 as pb

        request = pb.RepositoryIndexRequest()
        return Rpc("RepositoryIndex", request, pb.RepositoryIndexResponse, lambda found: plain(found)["models"])


@dataclass(frozen=True)
class Change(OipCall):
    """Load or unload a servable.  ``config``: what a load is told beside (``versions``, ``labels``)."""

    what: str
    servable: str
    config: Mapping[str, Any] = field(default_factory=dict)

    def question(self) -> Question:
        """The configuration is the text of a JSON object."""
        body = {"parameters": {"config": json_of(self.config).decode()}} if self.config else {}
        path = f"/v2/repository/models/{quote(self.servable, safe='')}/{self.what}"
        return Question("POST", path, json_of(body), read=_read_nothing)

    def rpc(self) -> Rpc:
        """An RPC of its own."""
        from penstock.serving.proto import oip_pb2 as pb

        kind = "Load" if self.what == "load" else "Unload"
        request = getattr(pb, f"RepositoryModel{kind}Request")(model_name=self.servable)
        if self.config:
            request.parameters["config"].string_param = json_of(self.config).decode()
        return Rpc(f"RepositoryModel{kind}", request, getattr(pb, f"RepositoryModel{kind}Response"), lambda _: None)


def _read_nothing(parsed: Parsed) -> None:
    if parsed.status != 200:
        raise parsed.refusal()
