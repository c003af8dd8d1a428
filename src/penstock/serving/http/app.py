"""The HTTP application: the table of its operations, behind the door."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from penstock.json_schema import Anything
from penstock.serving import request_fields
from penstock.serving.call import Call, Reply
from penstock.serving.gateway import Gateway
from penstock.serving.http import health, page_files, status
from penstock.serving.http.openapi import describe
from penstock.serving.keys import Admission
from penstock.serving.oip.rest import oip_operations
from penstock.serving.openai import chat, completions, embeddings, tokenize
from penstock.serving.operations import Operation, Routes
from penstock.serving.settings import GatewaySettings

if TYPE_CHECKING:
    from penstock.llm.backend import Models
    from penstock.serving.arrivals import Arrivals
    from penstock.serving.traces import Traces
    from penstock.tensors import Methods

__all__ = ["description_of", "make_app", "operations"]

_MODEL = (404, 429, 503)
_WORK = (*_MODEL, 504)


def operations() -> list[Operation]:
    """Every route of the service."""
    table = [
        Operation("GET", "/v1/models", "list_models", "The models.", health.models, health.MODELS),
        Operation(
            "GET", "/v1/models/{model}", "get_model", "One model.", health.model, health.MODEL, refusals=(404,)
        ),
        Operation(
            "POST", "/v1/completions", "complete", "Continue prompts.", completions.complete,
            completions.COMPLETION_ANSWER, request_fields.COMPLETION, completions.COMPLETION_EVENT, _WORK,
        ),
        Operation(
            "POST", "/v1/chat/completions", "chat", "Answer a conversation.", chat.chat, chat.CHAT_ANSWER,
            request_fields.CHAT, chat.CHAT_EVENT, _WORK,
        ),
        Operation(
            "POST", "/v1/embeddings", "embed", "Texts as vectors.", embeddings.embeddings,
            embeddings.EMBEDDING_ANSWER, request_fields.EMBEDDING, refusals=_WORK,
        ),
        Operation(
            "POST", "/tokenize", "tokenize", "A text's or a conversation's token ids.", tokenize.tokenize,
            tokenize.TOKENIZE_ANSWER, request_fields.TOKENIZE, refusals=_MODEL,
        ),
        Operation(
            "POST", "/detokenize", "detokenize", "The text of token ids.", tokenize.detokenize,
            tokenize.DETOKENIZE_ANSWER, request_fields.DETOKENIZE, refusals=_MODEL,
        ),
        Operation(
            "GET", "/health/live", "live", "The service runs.", health.health_live, health.HEALTH, is_open=True
        ),
        Operation(
            "GET", "/health/ready", "ready", "A model takes requests.", health.health_ready, health.HEALTH,
            refusals=(503,), is_open=True,
        ),
        Operation(
            "GET", "/health", "health", "As /health/ready, by the name that vLLM has.", health.health_ready,
            health.HEALTH, refusals=(503,), is_open=True,
        ),
        Operation("GET", "/version", "version", "The version of Penstock.", health.version, health.VERSION),
        Operation("GET", "/status", "status", "What the live view shows.", status.status, status.STATUS),
        Operation("GET", "/", "page", "The web page.", page_files.page, ("text/html",), is_open=True),
        Operation(
            "GET", "/page/{file}", "page_file", "What the page loads.", page_files.page_file, page_files.PAGE_TYPES,
            refusals=(404,), is_open=True,
        ),
        Operation("GET", "/metrics", "metrics", "Prometheus' text.", health.metrics, ("text/plain",)),
    ]  # fmt: skip
    table += oip_operations()
    table.append(description_of(table))
    return table


def description_of(table: list[Operation]) -> Operation:
    """The description of the others, and of itself."""
    texts: list[bytes] = []

    async def openapi(call: Call) -> Reply:
        if not texts:
            texts.append(json.dumps(describe(table)).encode())
        return Reply(200, texts[0])

    return Operation("GET", "/openapi.json", "openapi", "This description.", openapi, Anything())


def make_app(
    models: Models,
    settings: GatewaySettings | None = None,
    traces: Traces | None = None,
    arrivals: Arrivals | None = None,
    methods: Methods | None = None,
) -> Gateway:
    """The application over some models and servables.  Reads the keys' files; InvalidFileError when they are wrong."""
    settings = settings or GatewaySettings()
    admission = Admission.read(settings.keys_file, settings.admin_keys_file)
    return Gateway(Routes(operations()), models, settings, admission, traces=traces, arrivals=arrivals, methods=methods)
