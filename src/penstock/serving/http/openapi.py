"""``/openapi.json``, generated from the table of operations and the shapes that check their bodies."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from penstock.api_errors import CODES, ERROR, OIP_ERROR
from penstock.serving.operations import NAME, Operation
from penstock.version import __version__

__all__ = ["describe"]

_EVENT_STREAM = "text/event-stream"
_BYTES = "application/octet-stream"
_AS_BYTES = {"type": "string", "format": "binary", "description": "JSON, followed by tensors as bytes."}


def describe(operations: Sequence[Operation]) -> dict[str, Any]:
    """Return the OpenAPI 3.1 description of the operations."""
    paths: dict[str, dict[str, Any]] = {}
    schemas: dict[str, Any] = {}
    for one in operations:
        paths.setdefault(one.path, {})[one.method.lower()] = _operation(one, schemas)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Penstock", "version": __version__, "summary": "Inference of language models."},
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(one: Operation, schemas: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {
        "operationId": one.name,
        "summary": one.summary,
        "responses": {
            "200": _answer(one, schemas),
            **{str(s): _refusal(s, one, schemas) for s in (*one.statuses, 405)},
        },
        "security": [{}] if one.is_open else [{"key": []}, {}],
    }
    names = re.findall(r"\{(\w+)\}", one.path)
    parameters = [
        {"name": n, "in": "path", "required": True, "schema": {"type": "string", "pattern": f"^{NAME}$"}} for n in names
    ]
    if one.body is not None:
        content: dict[str, Any] = {"application/json": {"schema": _hoisted(one.body.schema(), schemas)}}
        if one.binary:
            content[_BYTES] = {"schema": _AS_BYTES}
        found["requestBody"] = {"required": not one.media.is_optional, "content": content}
        parameters += [{"name": n, "in": "header", "schema": schema} for n, schema in one.media.headers.items()]
    if parameters:
        found["parameters"] = parameters
    return found


def _answer(one: Operation, schemas: dict[str, Any]) -> dict[str, Any]:
    if isinstance(one.answer, tuple):
        content: dict[str, Any] = {kind: {"schema": {"type": "string"}} for kind in one.answer}
    else:
        content = {"application/json": {"schema": _hoisted(one.answer.schema(), schemas)}}
    if one.binary:
        content[_BYTES] = {"schema": _AS_BYTES}
    if one.events is not None:
        # Events are described as in OpenAPI 3.2, because 3.1 cannot describe the items of a stream.
        note = "A JSON value with the schema `x-event`." + ("" if one.is_oip else " The last event is `[DONE]`.")
        data = {"type": "string", "description": note, "x-event": _hoisted(one.events.schema(), schemas)}
        schema = {"type": "object", "properties": {"data": data}, "required": ["data"]}
        content[_EVENT_STREAM] = {"schema": schema}
    return {"description": "Success.", "headers": _headers(200), "content": content}


def _refusal(status: int, one: Operation, schemas: dict[str, Any]) -> dict[str, Any]:
    content = {"application/json": {"schema": _hoisted((OIP_ERROR if one.is_oip else ERROR).schema(), schemas)}}
    return {"description": CODES[status].meaning, "headers": _headers(status), "content": content}


def _headers(status: int) -> dict[str, Any]:
    found: dict[str, Any] = {"X-Request-Id": {"required": True, "schema": {"type": "string"}}}
    if status in CODES and CODES[status].is_retriable:
        found["Retry-After"] = {"required": True, "schema": {"type": "string", "pattern": "^[0-9]+$"}}
    if status == 405:
        found["Allow"] = {"required": True, "schema": {"type": "string"}}
    return found


def _hoisted(schema: dict[str, Any], schemas: dict[str, Any]) -> dict[str, Any]:
    """Return the schema with each titled part moved to the components and replaced by a reference."""
    moved: dict[str, Any] = {}
    for key, value in schema.items():
        if isinstance(value, dict):
            moved[key] = _hoisted(value, schemas)
        elif isinstance(value, list):
            moved[key] = [_hoisted(item, schemas) if isinstance(item, dict) else item for item in value]
        else:
            moved[key] = value
    title = moved.get("title")
    if not isinstance(title, str) or "type" not in moved:
        return moved
    known = schemas.setdefault(title, moved)
    if known != moved:
        raise ValueError(f"two schemas have the title {title}")
    return {"$ref": f"#/components/schemas/{title}"}
