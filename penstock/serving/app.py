"""The HTTP application: the table of its operations, behind the door."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from penstock.serving import chat, completions, embeddings, fields, listing, page_files, status, tokens
from penstock.serving.call import Call, Reply
from penstock.serving.door import Door
from penstock.serving.keys import Admission
from penstock.serving.oip_rest import oip_operations
from penstock.serving.openapi import describe
from penstock.serving.operations import Operation, Routes
from penstock.serving.settings import DoorSettings
from penstock.serving.shapes import Anything

if TYPE_CHECKING:
    from penstock.serving.arrivals import Arrivals
    from penstock.serving.backend import Models
    from penstock.serving.infer import Methods
    from penstock.serving.traces import Traces

__all__ = ["description_of", "make_app", "operations"]

_MODEL = (404, 429, 503)
_WORK = (*_MODEL, 504)


def operations() -> list[Operation]:
    """Every route of the service."""
    table = [
        Operation("GET", "/v1/models", "list_models", "The models.", listing.models, listing.MODELS),
        Operation(
            "GET", "/v1/models/{model}", "get_model", "One model.", listing.model, listing.MODEL, refusals=(404,)
        ),
        Operation(
            "POST", "/v1/completions", "complete", "Continue prompts.", completions.complete,
            completions.COMPLETION_ANSWER, fields.COMPLETION, completions.COMPLETION_EVENT, _WORK,
        ),
        Operation(
            "POST", "/v1/chat/completions", "chat", "Answer a conversation.", chat.chat, chat.CHAT_ANSWER,
            fields.CHAT, chat.CHAT_EVENT, _WORK,
        ),
        Operation(
            "POST", "/v1/embeddings", "embed", "Texts as vectors.", embeddings.embeddings,
            embeddings.EMBEDDING_ANSWER, fields.EMBEDDING, refusals=_WORK,
        ),
        Operation(
            "POST", "/tokenize", "tokenize", "A text's or a conversation's token ids.", tokens.tokenize,
            tokens.TOKENIZE_ANSWER, fields.TOKENIZE, refusals=_MODEL,
        ),
        Operation(
            "POST", "/detokenize", "detokenize", "The text of token ids.", tokens.detokenize,
            tokens.DETOKENIZE_ANSWER, fields.DETOKENIZE, refusals=_MODEL,
        ),
        Operation(
            "GET", "/health/live", "live", "The service runs.", listing.health_live, listing.HEALTH, is_open=True
        ),
        Operation(
            "GET", "/health/ready", "ready", "A model takes requests.", listing.health_ready, listing.HEALTH,
            refusals=(503,), is_open=True,
        ),
        Operation(
            "GET", "/health", "health", "As /health/ready, by the name that vLLM has.", listing.health_ready,
            listing.HEALTH, refusals=(503,), is_open=True,
        ),
        Operation("GET", "/version", "version", "The version of Penstock.", listing.version, listing.VERSION),
        Operation("GET", "/status", "status", "What the live view shows.", status.status, status.STATUS),
        Operation("GET", "/", "page", "The web page.", page_files.page, ("text/html",), is_open=True),
        Operation(
            "GET", "/page/{file}", "page_file", "What the page loads.", page_files.page_file, page_files.PAGE_TYPES,
            refusals=(404,), is_open=True,
        ),
        Operation("GET", "/metrics", "metrics", "Prometheus' text.", listing.metrics, ("text/plain",)),
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
    settings: DoorSettings | None = None,
    traces: Traces | None = None,
    arrivals: Arrivals | None = None,
    methods: Methods | None = None,
) -> Door:
    """The application over some models and servables.  Reads the keys' files; InvalidFileError when they are wrong."""
    settings = settings or DoorSettings()
    admission = Admission.read(settings.keys_file, settings.admin_keys_file)
    return Door(Routes(operations()), models, settings, admission, traces=traces, arrivals=arrivals, methods=methods)
