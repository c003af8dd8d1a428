"""``POST /v1/embeddings``: embed texts or token ids."""

from __future__ import annotations

import base64
from typing import Any

from penstock.errors import UnsupportedError
from penstock.serving.call import Call, Reply, json_reply
from penstock.serving.openai.bodies import EmbeddingRequest
from penstock.serving.translation import options_of, prompts_of

__all__ = ["embeddings"]


async def embeddings(call: Call) -> Reply:
    """Embed one or more inputs."""
    body: EmbeddingRequest = call.body
    backend = call.model(body.model)
    if not backend.card.has_embeddings:
        raise UnsupportedError("This model does not support embeddings.")
    prompts = [ids for ids, _ in await prompts_of(backend, body.input, "input", body)]
    options = options_of(call, body)
    pooling, normalize = body.pooling or "mean", body.normalize is not False
    results = await backend.embed(prompts, pooling, normalize, options, request_id=call.request_id)
    is_text = body.encoding_format == "base64"
    data: list[dict[str, Any]] = []
    for index, embedding in enumerate(results):
        vector: Any = embedding.vector.astype("<f4")
        value = base64.b64encode(vector.tobytes()).decode() if is_text else vector.tolist()
        data.append({"object": "embedding", "index": index, "embedding": value})
    num_tokens = sum(len(embedding.token_ids) for embedding in results)
    call.facts["prompt_tokens"] = num_tokens
    counts = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    return json_reply({"object": "list", "model": backend.name, "data": data, "usage": counts})
