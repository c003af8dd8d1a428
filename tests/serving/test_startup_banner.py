"""The text of a service that is ready: the request to try is one that the model answers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from penstock.checkpoint.pooling.head import HeadLayer, PoolingHead
from penstock.serving.startup_banner import _described, startup_banner


def head(num_labels: int) -> PoolingHead:
    labels = tuple(f"label {index}" for index in range(num_labels))
    return PoolingHead(layers=(HeadLayer(np.ones((num_labels or 3, 4))),), labels=labels)


REQUESTS: dict[str, tuple[PoolingHead | None, str, str]] = {
    "language model": (None, "/v1/completions", "prompt"),
    "chat model": (None, "/v1/chat/completions", "messages"),
    "embedding model": (head(0), "/v1/embeddings", "input"),
    "classifier": (head(3), "/classify", "input"),
    "classifier of tokens": (PoolingHead("all", labels=("a", "b"), task="token_classification"), "/pooling", "input"),
    "cross-encoder": (head(1), "/rerank", "documents"),
    "causal reranker": (PoolingHead(labels=("no", "yes"), pair_format="qwen3"), "/rerank", "documents"),
}


@pytest.mark.parametrize("kind", REQUESTS)
def test_the_request_to_try_suits_the_model(kind: str) -> None:
    own, route, key = REQUESTS[kind]
    card = SimpleNamespace(source="folder", network="bert", scheme="f32", max_len=64)
    card.has_chat_template = kind == "chat model"
    tokenizer = SimpleNamespace(pooling_head=own)
    backend = SimpleNamespace(name="demo", card=card, tokenizer=tokenizer, plans=list)
    gateway = SimpleNamespace(keys_file=None, limits=SimpleNamespace(num_connections=9))
    options = SimpleNamespace(limits=SimpleNamespace(context_len=0))
    settings: Any = SimpleNamespace(gateway=gateway, options=options)
    models: Any = SimpleNamespace(list=lambda: [backend])
    text = startup_banner({"http": "http://localhost:1"}, models, None, settings, 0, 99)
    (line,) = (line for line in text.splitlines() if "try:" in line)
    assert f"curl http://localhost:1{route} " in line
    assert f'"{key}"' in line


def test_roles_of_workers_are_counted() -> None:
    card = SimpleNamespace(source="folder", network="llama", scheme="f32", max_len=64)
    plans = [SimpleNamespace(num_threads=1, num_ranks=1, max_requests=4)] * 3
    workers = [SimpleNamespace(role=role) for role in ("prefill", "decode", "decode")]
    backend: Any = SimpleNamespace(card=card, plans=lambda: plans, workers=lambda: workers)
    assert "3 workers (1 for prefill, 2 for decode), 1 thread each" in _described(backend, 0)
