"""The HTTP application: the gateway with the table of all operations."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from penstock.serving.admission import Admission
from penstock.serving.call import Call, Headers, Reply
from penstock.serving.gateway import Gateway
from penstock.serving.http import health, status, web_files
from penstock.serving.http.compression import accepted, deflated
from penstock.serving.http.openapi import describe
from penstock.serving.http.profile import profile_operation
from penstock.serving.keys import ApiKeys
from penstock.serving.oip.rest import oip_operations
from penstock.serving.openai import bodies, embeddings, handlers, pooling, predict, ranking, responses, tokenize
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
    """Return all routes of the service."""
    table = [
        Operation("GET", "/v1/models", "list_models", "List the models.", health.models, health.ModelList),
        Operation(
            "GET", "/v1/models/{model}", "get_model", "Describe a model.", health.model, health.ModelObject,
            refusals=(404,),
        ),
        Operation(
            "POST", "/v1/completions", "complete", "Complete prompts.", handlers.complete,
            responses.CompletionResponse, bodies.CompletionRequest, responses.CompletionEvent, _WORK,
        ),
        Operation(
            "POST", "/v1/chat/completions", "chat", "Answer a conversation.", handlers.chat,
            responses.ChatCompletionResponse, bodies.ChatCompletionRequest, responses.ChatCompletionEvent, _WORK,
        ),
        Operation(
            "POST", "/v1/embeddings", "embed", "Embed texts or token ids.", embeddings.embeddings,
            responses.EmbeddingResponse, bodies.EmbeddingRequest, refusals=_WORK,
        ),
        *ranking_operations(),
        Operation(
            "POST", "/tokenize", "tokenize", "Tokenize a text or a conversation.", tokenize.tokenize,
            responses.TokenizeResponse, bodies.TokenizeRequest, refusals=_MODEL,
        ),
        Operation(
            "POST", "/detokenize", "detokenize", "Decode token ids into text.", tokenize.detokenize,
            responses.DetokenizeResponse, bodies.DetokenizeRequest, refusals=_MODEL,
        ),
        Operation(
            "GET", "/health/live", "live", "Report that the service is running.", health.health_live, health.Health,
            is_open=True,
        ),
        Operation(
            "GET", "/health/ready", "ready", "Report whether a model accepts requests.", health.health_ready,
            health.Health, refusals=(503,), is_open=True,
        ),
        Operation(
            "GET", "/health", "health", "Same as /health/ready, under vLLM's name.", health.health_ready,
            health.Health, refusals=(503,), is_open=True,
        ),
        Operation("GET", "/version", "version", "The version of Penstock.", health.version, health.Version),
        Operation("GET", "/status", "status", "Status of models, workers and servables.", status.status, status.Status),
        Operation(
            "GET", "/status/history", "history", "Token rates, queues and pages of each model since the start.",
            status.history, status.StatusHistory,
        ),
        Operation("GET", "/", "page", "The web page.", web_files.page, ("text/html",), is_open=True),
        Operation(
            "GET", "/docs", "docs", "Read and try this API.", web_files.docs_page, ("text/html",), is_open=True,
        ),
        Operation(
            "GET", "/page/{file}", "page_file", "A file of the web page.", web_files.page_file, web_files.PAGE_TYPES,
            refusals=(404,), is_open=True,
        ),
        Operation("GET", "/metrics", "metrics", "Metrics in Prometheus' text format.", health.metrics, ("text/plain",)),
        profile_operation(is_admin=True), *oip_operations(),
    ]  # fmt: skip
    table.append(description_of(table))  # which describes itself too
    return table


def ranking_operations() -> list[Operation]:
    """Return the operations of encoders and cross-encoders, each under the paths that clients know."""
    return [
        *(
            Operation(
                "POST", path, name, "Order documents by their relevance to a query.", ranking.rerank,
                responses.RerankResponse, bodies.RerankRequest, refusals=_WORK,
            )
            for path, name in (("/rerank", "rerank"), ("/v1/rerank", "rerank_v1"))
        ),
        *(
            Operation(
                "POST", path, name, "Score pairs of texts.", ranking.score,
                responses.ScoreResponse, bodies.ScoreRequest, refusals=_WORK,
            )
            for path, name in (("/score", "score"), ("/v1/score", "score_v1"))
        ),
        Operation(
            "POST", "/classify", "classify", "Classify texts or token ids.", ranking.classify,
            responses.ClassifyResponse, bodies.ClassifyRequest, refusals=_WORK,
        ),
        Operation(
            "POST", "/pooling", "pooling", "Compute vectors or classes of texts or of their tokens.", pooling.pooling,
            responses.PoolingResponse, bodies.PoolingRequest, refusals=_WORK,
        ),
        Operation(
            "POST", "/predict", "predict", "Classify texts, find entities, answer questions, fill masks, or translate.",
            predict.predict, responses.PredictResponse, bodies.PredictRequest, refusals=_WORK,
        ),
        Operation(
            "POST", "/predict/{task}", "predict_task", "Translate or summarize texts, whichever the path names.",
            predict.predict, responses.PredictResponse, bodies.PredictRequest, refusals=_WORK,
        ),
    ]  # fmt: skip


def description_of(table: list[Operation]) -> Operation:
    """Return the operation that describes all operations of ``table``, itself included."""
    replies: dict[str, Reply] = {}

    async def openapi(call: Call) -> Reply:
        encoding = accepted(call.headers.get(b"accept-encoding", b""))
        if encoding not in replies:
            text = json.dumps(describe(table)).encode()
            headers: Headers = [(b"vary", b"Accept-Encoding")]
            if encoding:
                text = deflated(text, encoding)
                headers.append((b"content-encoding", encoding.encode()))
            replies[encoding] = Reply(200, text, headers=headers)
        return replies[encoding]

    return Operation("GET", "/openapi.json", "openapi", "This OpenAPI description.", openapi, Any)


def make_app(
    models: Models,
    settings: GatewaySettings | None = None,
    traces: Traces | None = None,
    arrivals: Arrivals | None = None,
    methods: Methods | None = None,
) -> Gateway:
    """Return the application for models and servables.  It reads the key files and raises InvalidFileError for them."""
    settings = settings or GatewaySettings()
    keys = ApiKeys.read(settings.keys_file, settings.admin_keys_file)
    admission = Admission(models, settings, keys, traces=traces, methods=methods)
    return Gateway(Routes(operations()), admission, arrivals)
