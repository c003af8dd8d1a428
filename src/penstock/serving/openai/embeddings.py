"""``POST /v1/embeddings``: embed texts or token ids."""

from __future__ import annotations

import base64
from typing import Any, Final

from penstock.errors import UnsupportedError
from penstock.json_schema import Choice, Either, Items, Members, Number, Text, Whole
from penstock.serving.call import Call, Reply, json_reply
from penstock.serving.request_parsing import options_of, prompts_of

__all__ = ["EMBEDDING_ANSWER", "embeddings"]

_COUNT: Final = Whole(0, 2**53)
_VECTOR: Final = Members(
    "Embedding",
    {
        "object": Choice(("embedding",)),
        "index": _COUNT,
        "embedding": Either((Items(Number(-1e38, 1e38), 1, None), Text()), "numbers, or base64 of float32"),
    },
    ("object", "index", "embedding"),
)
EMBEDDING_ANSWER: Final = Members(
    "EmbeddingResponse",
    {
        "object": Choice(("list",)),
        "model": Text(),
        "data": Items(_VECTOR, 1, None),
        "usage": Members(
            "EmbeddingUsage",
            {"prompt_tokens": _COUNT, "total_tokens": _COUNT},
            ("prompt_tokens", "total_tokens"),
        ),
    },
    ("object", "model", "data", "usage"),
)


async def embeddings(call: Call) -> Reply:
    """Embed one or more inputs."""
    body, backend = call.body, call.model()
    if not backend.card.has_embeddings:
        raise UnsupportedError("This model does not support embeddings.")
    prompts = [ids for ids, _ in await prompts_of(backend, body["input"], "input", body)]
    options = options_of(body, call.settings.limits.request_s, call.client)
    pooling, normalize = body.get("pooling", "mean"), body.get("normalize", True)
    found = await backend.embed(prompts, pooling, normalize, options, request_id=call.request_id)
    is_text = body.get("encoding_format", "float") == "base64"
    data: list[dict[str, Any]] = []
    for index, one in enumerate(found):
        vector: Any = one.vector.astype("<f4")
        value = base64.b64encode(vector.tobytes()).decode() if is_text else vector.tolist()
        data.append({"object": "embedding", "index": index, "embedding": value})
    num_tokens = sum(len(one.token_ids) for one in found)
    call.facts["prompt_tokens"] = num_tokens
    counts = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    return json_reply({"object": "list", "model": backend.name, "data": data, "usage": counts})
