"""``POST /v1/embeddings``: embed texts or token ids."""

from __future__ import annotations

import base64
from typing import Any

from penstock.checkpoint.pooling.head import PoolingHead
from penstock.engine.pooling import shorten
from penstock.errors import UnsupportedError
from penstock.llm.backend import Backend
from penstock.llm.result import Embedding
from penstock.serving.call import Call, Reply, json_reply
from penstock.serving.openai.bodies import EmbeddingRequest, PoolingRequest
from penstock.serving.translation import options_of, prompts_of, vector_ids

__all__ = ["embedded", "embeddings", "pooling_head_of"]


async def embeddings(call: Call) -> Reply:
    """Embed one or more inputs."""
    body: EmbeddingRequest = call.body
    backend = call.model(body.model)
    normalize = body.normalize is not False
    results = await embedded(call, backend, body, body.pooling or "auto", body.prompt_name, is_unit=normalize)
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


async def embedded(
    call: Call,
    backend: Backend,
    body: EmbeddingRequest | PoolingRequest,
    pooling: str = "auto",
    prompt_name: str | None = None,
    *,
    is_unit: bool,
) -> list[Embedding]:
    """Return the vectors of the inputs of a body; with ``is_unit`` they have length 1."""
    if not backend.card.has_embeddings:
        raise UnsupportedError("This model does not support embeddings.")
    head = pooling_head_of(backend)
    if head.labels and pooling == "auto":
        route = "/pooling" if head.task else "/classify"
        raise UnsupportedError(f'This model is a classifier. Use {route}, or pooling "mean".')
    texts = await _cut(backend, _with_prompt(body.input, head.prompt(prompt_name)), head)
    prompts = [ids for ids, _ in await prompts_of(backend, texts, "input", body)]
    return await backend.embed(prompts, pooling, is_unit, options_of(call, body), request_id=call.request_id)


def pooling_head_of(backend: Backend) -> PoolingHead:
    """Return the pooling head of a model; that of plain rows for a model without one or without a tokenizer."""
    head = None if backend.tokenizer is None else backend.tokenizer.pooling_head
    return head or PoolingHead()


async def _cut(backend: Backend, prompts: Any, head: PoolingHead) -> Any:
    """Return texts as token ids if the model's files change or cut them; token ids stay as they are."""
    if not head.max_text_len and not head.lowercase:
        return prompts
    if isinstance(prompts, str):
        return await vector_ids(backend, prompts, head)
    return [await vector_ids(backend, prompt, head) if isinstance(prompt, str) else prompt for prompt in prompts]


def _with_prompt(prompts: Any, prefix: str) -> Any:
    """Put a prompt before each text of an input; token ids stay as they are."""
    if not prefix:
        return prompts
    if isinstance(prompts, str):
        return prefix + prompts
    return [prefix + prompt if isinstance(prompt, str) else prompt for prompt in prompts]
