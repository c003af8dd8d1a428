"""``POST /rerank``, ``/score`` and ``/classify``: scores of a classifier's classes, in the formats of vLLM and Jina."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.checkpoint.pooling.head import PoolingHead
from penstock.llm.backend import Backend
from penstock.llm.classify import classification, classifier_head, order, ranking_head
from penstock.llm.result import Embedding
from penstock.serving.call import Call, Reply, json_reply
from penstock.serving.openai.bodies import ClassifyRequest, RerankRequest, ScoreRequest
from penstock.serving.openai.embeddings import pooling_head_of
from penstock.serving.request_fields import ServingFields
from penstock.serving.translation import options_of, pair_ids, prompts_of

__all__ = ["classify", "rerank", "score"]


async def rerank(call: Call) -> Reply:
    """Order documents by their relevance to a query."""
    body: RerankRequest = call.body
    backend = call.model(body.model)
    head, texts = ranking_head(pooling_head_of(backend)), body.texts
    pairs = [await pair_ids(backend, body.query, text, body, f"documents[{i}]") for i, text in enumerate(texts)]
    logits = await _logits(call, backend, pairs, body)
    scores = _relevances(head, logits, body.is_activated)
    results: list[dict[str, Any]] = []
    for result in order(scores, texts, [len(ids) for ids in pairs], body.top_n or None):
        text = {} if body.return_documents is False else {"document": {"text": result.document}}
        results.append({"index": result.index, "relevance_score": result.score, **text})
    return json_reply({"id": call.request_id, "model": backend.name, "usage": _usage(call, logits), "results": results})


async def score(call: Call) -> Reply:
    """Score pairs of texts."""
    body: ScoreRequest = call.body
    backend = call.model(body.model)
    head = ranking_head(pooling_head_of(backend))
    pairs = [await pair_ids(backend, *pair, body, "text_2") for pair in body.pairs]
    logits = await _logits(call, backend, pairs, body)
    data = [
        {"object": "score", "index": i, "score": value}
        for i, value in enumerate(_relevances(head, logits, body.is_activated))
    ]
    return _listed(call, backend, data, logits)


async def classify(call: Call) -> Reply:
    """Classify texts or token ids."""
    body: ClassifyRequest = call.body
    backend = call.model(body.model)
    head = classifier_head(pooling_head_of(backend))
    prompts = [ids for ids, _ in await prompts_of(backend, body.input, "input", body)]
    logits = await _logits(call, backend, prompts, body)
    data = []
    for index, row in enumerate(logits):
        classes = classification(head, row)
        probs = (classes.scores if body.is_activated else classes.logits).tolist()
        data.append({"index": index, "label": classes.label, "probs": probs, "num_classes": len(probs)})
    return _listed(call, backend, data, logits)


async def _logits(
    call: Call, backend: Backend, prompts: Sequence[Sequence[int]], body: ServingFields
) -> list[Embedding]:
    """Return the logits of classes as vectors, one for each prompt."""
    return await backend.embed(prompts, "auto", False, options_of(call, body), request_id=call.request_id)


def _relevances(head: PoolingHead, logits: Sequence[Embedding], is_activated: bool) -> list[float]:
    return [float((head.scores(row.vector) if is_activated else row.vector)[0]) for row in logits]


def _listed(call: Call, backend: Backend, data: list[dict[str, Any]], logits: Sequence[Embedding]) -> Reply:
    answer = {"id": call.request_id, "object": "list", "model": backend.name, "data": data}
    return json_reply({**answer, "usage": _usage(call, logits)})


def _usage(call: Call, logits: Sequence[Embedding]) -> dict[str, int]:
    num_tokens = sum(len(row.token_ids) for row in logits)
    call.facts["prompt_tokens"] = num_tokens
    return {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
