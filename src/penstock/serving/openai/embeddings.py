"""``POST /v1/embeddings``: embed texts or token ids."""

from __future__ import annotations

import base64
from typing import Any

from penstock.checkpoint.pooling.head import PoolingHead
from penstock.engine.pooling import shorten
from penstock.errors import UnsupportedError
from penstock.llm.backend import Backend
from penstock.serving.call import Call, Reply, json_reply
from penstock.serving.openai.bodies import EmbeddingRequest
from penstock.serving.translation import options_of, prompts_of, vector_ids

__all__ = ["embeddings", "pooling_head_of"]


async def embeddings(call: Call) -> Reply:
    """Embed one or more inputs."""
    body: EmbeddingRequest = call.body
    backend = call.model(body.model)
    if not backend.card.has_embeddings:
        raise UnsupportedError("This model does not support embeddings.")
    head = pooling_head_of(backend)
    pooling, normalize = body.pooling or "auto", body.normalize is not False
    if head.labels and pooling == "auto":
        raise UnsupportedError('This model is a classifier. Use /classify, or pooling "mean".')
    texts = await _cut(backend, _with_prompt(body.input, head.prompt(body.prompt_name)), head)
    prompts = [ids for ids, _ in await prompts_of(backend, texts, "input", body)]
    options = options_of(call, body)
    results = await backend.embed(prompts, pooling, normalize, options, request_id=call.request_id)
    is_text = body.encoding_format == "base64"
    data: list[dict[str, Any]] = []
    for index, embedding in enumerate(results):
        vector: Any = shorten(embedding.vector, body.dimensions, normalize).astype("<f4")
        value = base64.b64encode(vector.tobytes()).decode() if is_text else vector.tolist()
        data.append({"object": "embedding", "index": index, "embedding": value})
    num_tokens = sum(len(embedding.token_ids) for embedding in results)
    call.facts["prompt_tokens"] = num_tokens
    counts = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    return json_reply({"object": "list", "model": backend.name, "data": data, "usage": counts})


def pooling_head_of(backend: Backend) -> PoolingHead:
    """Return the pooling head of a model; that of plain rows for a model without one or without a tokenizer."""
    head = None if backend.tokenizer is None else backend.tokenizer.pooling_head
    return head or PoolingHead()


async def _cut(backend: Backend, given: Any, head: PoolingHead) -> Any:
    """Return texts as token ids if the model's files change or cut them; token ids stay as they are."""
    if not head.max_text_len and not head.lowercase:
        return given
    if isinstance(given, str):
        return await vector_ids(backend, given, head)
    return [await vector_ids(backend, one, head) if isinstance(one, str) else one for one in given]


def _with_prompt(given: Any, prefix: str) -> Any:
    """Put a prompt before each text of an input; token ids stay as they are."""
    if not prefix:
        return given
    if isinstance(given, str):
        return prefix + given
    return [prefix + one if isinstance(one, str) else one for one in given]
