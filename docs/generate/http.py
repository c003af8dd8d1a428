"""The reference of HTTP, from the OpenAPI description that the service makes, and of gRPC, from the .proto files."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from generate.markdown import code, definitions, page, table
from penstock.api_errors import CODES
from penstock.llm.local_backend import LocalModels
from penstock.serving.http.admin import admin_operations
from penstock.serving.http.app import operations
from penstock.serving.http.openapi import describe
from penstock.serving.model_changes import Changes
from penstock.serving.operations import Operation

PROTO = Path(__file__).parents[2] / "src/penstock/serving/proto"
GROUPS = (
    ("OpenAI's API", ("/v1/", "/tokenize", "/detokenize", "/rerank", "/score", "/classify", "/pooling", "/predict")),
    ("Open Inference Protocol", ("/v2",)),
    ("Admin socket", ("/admin",)),
    ("Health, status and page", ("/",)),
)


def type_of(schema: dict[str, Any]) -> str:
    """Return the type of a schema in words; references are links to the schema's own section."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(type_of(one) for one in schema["anyOf"]))
    if "enum" in schema:
        return " or ".join(code(json.dumps(one)) for one in schema["enum"])
    if "const" in schema:
        return code(json.dumps(schema["const"]))
    kind = schema.get("type", "any")
    if kind == "array":
        return f"list of {type_of(schema['items'])}" if schema.get("items") else "list"
    return str(kind)


def limits_of(schema: dict[str, Any]) -> str:
    """Return the bounds of a schema in words."""
    names = {
        "minimum": "{} or more",
        "maximum": "{} or less",
        "exclusiveMinimum": "above {}",
        "exclusiveMaximum": "below {}",
        "minLength": "at least {} characters",
        "maxLength": "at most {} characters",
        "minItems": "at least {} items",
        "maxItems": "at most {} items",
        "pattern": "pattern `{}`",
    }
    found = []
    for one in (schema, *schema.get("anyOf", ())):
        if "minimum" in one and "maximum" in one:
            one = dict(one)
            found.append(f"from {one.pop('minimum')} to {one.pop('maximum')}")
        found += [text.format(one[name]) for name, text in names.items() if name in one]
    return ", ".join(dict.fromkeys(found))


def members(schema: dict[str, Any]) -> str:
    """Return the fields of an object as a list."""
    required = set(schema.get("required", ()))
    items = []
    for name, field in schema.get("properties", {}).items():
        shown = [type_of(field)]
        if name in required:
            shown.append("required")
        elif "default" in field:
            shown.append(f"default {code(json.dumps(field['default']))}")
        parts = [field.get("description", "").rstrip("."), limits_of(field)]
        text = ". ".join(part[0].upper() + part[1:] for part in parts if part)
        items.append((f"`{name}`: {', '.join(shown)}", f"{text}." if text else type_of(field)))
    return definitions(items)


def operation(one: Operation, found: dict[str, Any]) -> str:
    """Return the section of a route."""
    key = "None" if one.is_open else "Admin key" if one.is_admin else "API key, if the service has keys"
    if one.path.startswith("/admin"):
        key = "None: only the user who started the service can connect to the socket"
        if one.name == "profile_model":
            key += ". Also at the service's port, with an admin key"
    rows = [("Key", key)]
    body = found.get("requestBody")
    if body is not None:
        rows.append(("Body", type_of(body["content"]["application/json"]["schema"])))
    answers = found["responses"]["200"]["content"]
    for kind, content in answers.items():
        schema = content["schema"]
        event = schema.get("properties", {}).get("data", {}).get("x-event")
        shown = f"events, each {type_of(event)}" if event else type_of(schema)
        rows.append((f"`{kind}`", "bytes" if schema.get("format") == "binary" else shown))
    statuses = [code(status) for status in sorted(found["responses"]) if status != "200"]
    rows.append(("Errors", ", ".join(statuses)))
    facts = "\n".join(f"- {name}: {text}" for name, text in rows)
    return f"### {one.method} {one.path}\n\n{found['summary']}\n\n{facts}"


def rest() -> tuple[str, str]:
    """Return the page about HTTP, and the OpenAPI description as JSON."""
    admin = [one for one in admin_operations(Changes(LocalModels([]))) if one.path.startswith("/admin")]
    table_of = [*(one for one in operations() if not one.path.startswith("/admin")), *admin]
    found = describe(table_of)
    parts = [
        "The service describes its routes itself at `/openapi.json`; this page is made from that description, and so "
        "is [openapi.json](openapi.json), which tools can read. [Serving](../guides/serving.md) explains the routes, "
        "and [Errors](errors.md) lists statuses and codes.",
    ]
    left = list(table_of)
    for title, prefixes in GROUPS:
        chosen = [one for one in left if one.path.startswith(prefixes)]
        left = [one for one in left if one not in chosen]
        parts.append(f"## {title}")
        parts += [operation(one, found["paths"][one.path][one.method.lower()]) for one in chosen]
    parts.append("## Schemas")
    for name, schema in found["components"]["schemas"].items():
        text = " ".join(schema.get("description", "").replace("``", "`").split())
        inner = members(schema) if "properties" in schema else type_of(schema)
        parts.append("\n\n".join(part for part in (f"### {name}", text, inner) if part))
    return page("HTTP", *parts), json.dumps(found, indent=1)


def grpc() -> str:
    """Return the page about gRPC: services and messages as the .proto files declare them."""
    text = (PROTO / "oip.proto").read_text()
    blocks = re.findall(r"^(service|message|enum) (\w+) \{(\}$|.*?^\}$)", text, re.MULTILINE | re.DOTALL)
    parts = [
        "`penstock serve --grpc-port N` serves the Open Inference Protocol, health and reflection. This page is made "
        "from `src/penstock/serving/proto/oip.proto`. [Serving](../guides/serving.md#grpc) lists inputs, outputs and "
        "parameters of language models; [Errors](errors.md) maps statuses to gRPC's codes.",
    ]
    for kind, name, body in blocks:
        if kind == "service":
            calls = re.findall(r"rpc (\w+)\((stream )?(\w+)\) returns \((stream )?(\w+)\)", body)
            rows = [
                (
                    code(call),
                    f"{'stream of ' if many else ''}{_message(asked)}",
                    f"{'stream of ' if each else ''}{_message(answer)}",
                )
                for call, many, asked, each, answer in calls
            ]
            parts += [f"## {name}", table(("method", "request", "response"), rows), "## Messages"]
        else:
            parts.append(f"### {name}\n\n```protobuf\n{kind} {name} {{{body}\n```")
    parts.append(
        "## Health and reflection\n\n`grpc.health.v1.Health` has `Check` and `Watch`. `grpc.reflection.v1` and "
        "`v1alpha` have `ServerReflectionInfo`. Both are gRPC's own protocols."
    )
    return page("gRPC", *parts)


def _message(name: str) -> str:
    return f"[{name}](#{name.lower()})"


def statuses() -> str:
    """Return the table of statuses."""
    rows = [
        (status, code(one.type), code(one.grpc), one.meaning, "yes" if one.is_retriable else "no")
        for status, one in CODES.items()
    ]
    return table(("status", "type", "over gRPC", "meaning", "retry"), rows)
