"""The Open Inference Protocol over REST: ``/v2``, with the extensions for binary tensors, statistics and repository."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

import msgspec

from penstock.api_errors import RefusalError
from penstock.serving.call import Call, Reply, json_reply
from penstock.serving.http.compression import ENCODINGS, accepted, deflated
from penstock.serving.json_bounds import decode
from penstock.serving.oip import bodies
from penstock.serving.oip.dispatch import answer
from penstock.serving.oip.generate import generate, generate_stream
from penstock.serving.oip.json_body import InferBody, body_of, read_body
from penstock.serving.oip.model_config import config
from penstock.serving.oip.repository import load, unload
from penstock.serving.oip.state import (
    REST_EXTENSIONS,
    index,
    is_model_ready,
    metadata,
    server_metadata,
    statistics,
)
from penstock.serving.operations import Media, Operation

if TYPE_CHECKING:
    from penstock.tensors import InferResponse

__all__ = ["oip_operations"]

_LARGE: Final = 1 << 16
_WORTH_PACKING: Final = 1 << 10
_LENGTH_HEADER: Final = b"inference-header-content-length"

# Clients of the protocol send no Content-Type, or the same one for all requests.
_TYPES: Final = ("application/json", "application/octet-stream", "")
_INFER: Final = Media(
    types=_TYPES, encodings=tuple(ENCODINGS), is_raw=True,
    headers={"Inference-Header-Content-Length": {"type": "integer", "minimum": 0}},
)  # fmt: skip
_PLAIN: Final = Media(types=_TYPES, is_optional=True)


async def live(call: Call) -> Reply:
    """Report that the event loop runs."""
    return json_reply({"live": True})


async def ready(call: Call) -> Reply:
    """Report the same as ``/health/ready``."""
    if not call.is_ready():
        raise RefusalError(503, "No model or servable is ready, or the service is stopping.", code="not_ready")
    return json_reply({"ready": True})


async def server(call: Call) -> Reply:
    """Return the server's name, version and extensions."""
    return json_reply(server_metadata(REST_EXTENSIONS))


async def model(call: Call) -> Reply:
    """Return a model's inputs and outputs."""
    return json_reply(metadata(call, *_model_and_version(call)))


async def model_config(call: Call) -> Reply:
    """Return a model's configuration."""
    return json_reply(config(call, *_model_and_version(call)))


async def model_ready(call: Call) -> Reply:
    """Report whether a model accepts requests; 503 if not."""
    name, version = _model_and_version(call)
    if not is_model_ready(call, name, version):
        raise RefusalError(503, f"{name} is not ready", param="model", code="not_ready")
    return json_reply({"name": name, "ready": True})


async def model_statistics(call: Call) -> Reply:
    """Return the statistics of a model, or of all models."""
    return json_reply(statistics(call, *_model_and_version(call)))


async def repository_index(call: Call) -> Reply:
    """Return the index of models and servables, ready or not."""
    return json_reply(index(call, bool(call.body.ready)))


async def repository_load(call: Call) -> Reply:
    """Load a servable."""
    body: bodies.RepositoryLoadRequest = call.body
    await load(call, call.path_values["model"], _parameters(body.parameters))
    return json_reply({})


async def repository_unload(call: Call) -> Reply:
    """Unload a servable."""
    body: bodies.RepositoryUnloadRequest = call.body
    await unload(call, call.path_values["model"], _parameters(body.parameters))
    return json_reply({})


def _parameters(struct: msgspec.Struct | None) -> dict[str, Any]:
    """Return the fields that are set, by name."""
    fields = {} if struct is None else msgspec.structs.asdict(struct)
    return {name: value for name, value in fields.items() if value is not None}


def _model_and_version(call: Call) -> tuple[str, str]:
    values = call.path_values
    return values.get("model", ""), values.get("version", "")


async def infer(call: Call) -> Reply:
    """Run inference on tensors and return the whole response."""
    json_bytes = _json_bytes(call)
    body = await decode(len(call.data), lambda: read_body(call.data, json_bytes))
    name, version = _model_and_version(call)
    body.check_path(name, version)
    called, response = await answer(call, body.request, name, version)
    encoding = accepted(call.headers.get(b"accept-encoding", b""))
    if sum(output.array.nbytes for output in response.outputs) < _LARGE:
        return _reply(body, called, response, encoding)
    return await asyncio.to_thread(_reply, body, called, response, encoding)


def _json_bytes(call: Call) -> int:
    """Return the length of the JSON part of the body in bytes."""
    header = call.headers.get(_LENGTH_HEADER)
    if header is None:
        return len(call.data)
    if not header.isdigit() or len(header) > 19:
        message = "Inference-Header-Content-Length must be a number of bytes"
        raise RefusalError(400, message, param="Inference-Header-Content-Length", code="invalid_header")
    return int(header)


def _reply(body: InferBody, model: str, response: InferResponse, encoding: str) -> Reply:
    data, json_bytes = body_of(body, model, response)
    kind, headers = b"application/json", []
    if json_bytes is not None:
        kind, headers = b"application/octet-stream", [(_LENGTH_HEADER, b"%d" % json_bytes)]
    if encoding and len(data) >= _WORTH_PACKING:
        data = deflated(data, encoding)
        headers.append((b"content-encoding", encoding.encode()))
    return Reply(200, data, kind, headers)


def oip_operations() -> list[Operation]:
    """Return all routes of the protocol."""
    table = [
        Operation(
            "GET", "/v2", "server_metadata", "Name, version and extensions of the server.", server,
            bodies.ServerMetadata,
        ),
        # The protocol's OpenAPI file has this path, its text does not.
        Operation("GET", "/v2/", "server_metadata_of_folder", "Same as /v2.", server, bodies.ServerMetadata),
        Operation(
            "GET", "/v2/health/live", "server_live", "Report that the service is running.", live, bodies.ServerLive,
            is_open=True,
        ),
        Operation(
            "GET", "/v2/health/ready", "server_ready", "Report whether a model accepts requests.", ready,
            bodies.ServerReady,
            refusals=(503,), is_open=True,
        ),
        Operation(
            "GET", "/v2/models/stats", "all_statistics", "Statistics of all models.", model_statistics,
            bodies.StatisticsResponse,
        ),
        Operation(
            "POST", "/v2/repository/index", "repository_index", "List models and servables, ready or not.",
            repository_index, list[bodies.ModelIndex], bodies.RepositoryIndexRequest, media=_PLAIN,
        ),
        Operation(
            "POST", "/v2/repository/models/{model}/load", "repository_load", "Load a servable. Needs an admin key.",
            repository_load, bodies.Done, bodies.RepositoryLoadRequest, refusals=_CHANGE, is_admin=True, media=_PLAIN,
        ),
        Operation(
            "POST", "/v2/repository/models/{model}/unload", "repository_unload",
            "Unload a servable. Needs an admin key.", repository_unload, bodies.Done,
            bodies.RepositoryUnloadRequest, refusals=_CHANGE, is_admin=True, media=_PLAIN,
        ),
    ]  # fmt: skip
    for path, suffix in (("/v2/models/{model}", ""), ("/v2/models/{model}/versions/{version}", "_version")):
        table += _of_model(path, suffix)
    return table


_MAYBE: Final = (404, 503)
_CHANGE: Final = (404, 429, 503, 504)
_WORK: Final = (404, 429, 503, 504)


def _of_model(path: str, suffix: str) -> list[Operation]:
    """Return the routes of a model, or of a version of a model."""
    return [
        Operation(
            "POST", f"{path}/infer", f"infer{suffix}", "Run inference on tensors.", infer,
            bodies.InferenceResponse, bodies.InferenceRequest, refusals=_WORK, media=_INFER, binary=True,
        ),
        Operation(
            "POST", f"{path}/generate", f"generate{suffix}", "Generate text with a language model.", generate,
            bodies.GenerateResponse, bodies.GenerateRequest, refusals=_WORK, media=Media(_TYPES),
        ),
        Operation(
            "POST", f"{path}/generate_stream", f"generate_stream{suffix}", "Generate text as a stream of events.",
            generate_stream, (), bodies.GenerateRequest, bodies.GenerateEvent, _WORK, media=Media(_TYPES),
        ),
        Operation(
            "GET", path, f"model_metadata{suffix}", "The model's inputs and outputs.", model, bodies.ModelMetadata,
            refusals=_MAYBE,
        ),
        Operation(
            "GET", f"{path}/config", f"model_config{suffix}", "Configuration of the model.", model_config,
            bodies.TritonModelConfig,
            refusals=_MAYBE,
        ),
        Operation(
            "GET", f"{path}/ready", f"model_ready{suffix}", "Report whether the model accepts requests.", model_ready,
            bodies.ModelReady, refusals=_MAYBE,
        ),
        Operation(
            "GET", f"{path}/stats", f"model_statistics{suffix}", "Statistics of the model.", model_statistics,
            bodies.StatisticsResponse, refusals=_MAYBE,
        ),
    ]  # fmt: skip
