"""``/openapi.json``, generated from the table of operations and the structs of their bodies."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from penstock.api_errors import CODES, Error, InferenceError
from penstock.serving.operations import NAME, Operation
from penstock.version import __version__

__all__ = ["describe"]

_EVENT_STREAM = "text/event-stream"
_MODELS = ("/v1/models", "/v1/models/{model}")
_BYTES = "application/octet-stream"
_AS_BYTES = {"type": "string", "format": "binary", "description": "JSON, followed by tensors as bytes."}


def describe(operations: Sequence[Operation]) -> dict[str, Any]:
    """Return the OpenAPI 3.1 description of the operations."""
    types: list[Any] = []
    for operation in operations:
        kinds = (operation.answer, operation.body, operation.events, _error_of(operation))
        types += [kind for kind in kinds if kind is not None and not isinstance(kind, tuple)]
    type_schemas, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    schemas = dict(zip(types, type_schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for operation in operations:
        paths.setdefault(operation.path, {})[operation.method.lower()] = _operation(operation, schemas)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Penstock", "version": __version__, "summary": "Inference of language models."},
        "paths": paths,
        "components": {
            "schemas": _plain(components),
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _error_of(operation: Operation) -> type[msgspec.Struct]:
    return InferenceError if operation.is_oip else Error


def _plain(schema: Any) -> Any:
    """Return msgspec's schema without ``default: null`` and empty ``required``, which say nothing.

    Patterns end with the ``$`` of JSON schema instead of Python's ``\\Z``.
    """
    if isinstance(schema, list):
        return [_plain(item) for item in schema]
    if isinstance(schema, str):
        return schema.replace(r"\Z", "$")
    if not isinstance(schema, dict):
        return schema
    nothing: dict[str, Any] = {"default": None, "required": []}
    return {key: _plain(item) for key, item in schema.items() if key not in nothing or item != nothing[key]}


Schemas = dict[Any, dict[str, Any]]
"""The JSON schema of each type: nearly always a reference to a component."""


def _operation(operation: Operation, schemas: Schemas) -> dict[str, Any]:
    description: dict[str, Any] = {
        "operationId": operation.name,
        "summary": operation.summary,
        "tags": [_tag_of(operation)],
        "responses": {
            "200": _answer(operation, schemas),
            **{str(s): _refusal(s, operation, schemas) for s in (*operation.statuses, 405)},
        },
        "security": [{}] if operation.is_open else [{"key": []}, {}],
    }
    names = re.findall(r"\{(\w+)\}", operation.path)
    parameters = [
        {"name": n, "in": "path", "required": True, "schema": {"type": "string", "pattern": f"^{NAME}$"}} for n in names
    ]
    if operation.body is not None:
        content: dict[str, Any] = {"application/json": {"schema": schemas[operation.body]}}
        if operation.binary:
            content[_BYTES] = {"schema": _AS_BYTES}
        description["requestBody"] = {"required": not operation.media.is_optional, "content": content}
        parameters += [{"name": n, "in": "header", "schema": schema} for n, schema in operation.media.headers.items()]
    if parameters:
        description["parameters"] = parameters
    return description


def _tag_of(operation: Operation) -> str:
    """Return the heading under which /docs shows the operation."""
    if operation.is_oip:
        return "Open Inference Protocol"
    return "Service" if operation.method == "GET" and operation.path not in _MODELS else "OpenAI and vLLM"


def _answer(operation: Operation, schemas: Schemas) -> dict[str, Any]:
    if isinstance(operation.answer, tuple):
        content: dict[str, Any] = {kind: {"schema": {"type": "string"}} for kind in operation.answer}
    else:
        content = {"application/json": {"schema": schemas[operation.answer]}}
    if operation.binary:
        content[_BYTES] = {"schema": _AS_BYTES}
    if operation.events is not None:
        # Events are described as in OpenAPI 3.2, because 3.1 cannot describe the items of a stream.
        note = "A JSON value with the schema `x-event`." + ("" if operation.is_oip else " The last event is `[DONE]`.")
        data = {"type": "string", "description": note, "x-event": schemas[operation.events]}
        schema = {"type": "object", "properties": {"data": data}, "required": ["data"]}
        content[_EVENT_STREAM] = {"schema": schema}
    return {"description": "Success.", "headers": _headers(200), "content": content}


def _refusal(status: int, operation: Operation, schemas: Schemas) -> dict[str, Any]:
    content = {"application/json": {"schema": schemas[_error_of(operation)]}}
    return {"description": CODES[status].meaning, "headers": _headers(status), "content": content}


def _headers(status: int) -> dict[str, Any]:
    response_headers: dict[str, Any] = {"X-Request-Id": {"required": True, "schema": {"type": "string"}}}
    if status in CODES and CODES[status].is_retriable:
        response_headers["Retry-After"] = {"required": True, "schema": {"type": "string", "pattern": "^[0-9]+$"}}
    if status == 405:
        response_headers["Allow"] = {"required": True, "schema": {"type": "string"}}
    return response_headers
