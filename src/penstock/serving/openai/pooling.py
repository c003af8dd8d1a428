"""``POST /pooling`` in vLLM's format: vectors, rows of tokens, classes of texts, or classes of tokens."""

from __future__ import annotations

import base64
import time
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from penstock.api_errors import RefusalError
from penstock.checkpoint.pooling.head import ALL_ROWS, ANSWER_TASK
from penstock.engine.pooling import shorten
from penstock.llm.classify import classifier_head
from penstock.serving.call import Call, Reply, json_reply
from penstock.serving.openai.embeddings import embedded, pooling_head_of
from penstock.serving.translation import options_of, prompts_of

if TYPE_CHECKING:
    from penstock.checkpoint.pooling.head import PoolingHead
    from penstock.llm.backend import Backend
    from penstock.llm.result import Embedding
    from penstock.serving.openai.bodies import PoolingRequest

__all__ = ["pooling"]

_EARLIER: Final = {"score": "classify"}
_MAX_TOKENS: Final = 1 << 13
"""The most tokens of a request whose answer has a row for each, unless the context is longer."""


async def pooling(call: Call) -> Reply:
    """Compute what the task of the body, or of the model, makes of each input."""
    body: PoolingRequest = call.body
    backend = call.model(body.model)
    head = pooling_head_of(backend)
    task = _task_of(body, head)
    if body.dimensions is not None and task != "embed":
        message = f"dimensions: expected none with the task {task}, got {body.dimensions}"
        raise RefusalError(400, message, param="dimensions", code="invalid_value")
    if task == "embed":
        embeddings = await embedded(call, backend, body, is_unit=body.is_activated)
        values = [shorten(embedding.vector, body.dimensions, body.is_activated) for embedding in embeddings]
    else:
        embeddings = await _rows(call, backend, body, task)
        values = [
            embedding.vector if task == "token_embed" else _scores(head, embedding.vector, body)
            for embedding in embeddings
        ]
    num_tokens = sum(len(embedding.token_ids) for embedding in embeddings)
    call.facts["prompt_tokens"] = num_tokens
    data = [{"index": i, "object": "pooling", "data": _written(value, body)} for i, value in enumerate(values)]
    usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    answer = {"id": call.request_id, "object": "list", "created": int(time.time()), "model": backend.name}
    return json_reply({**answer, "data": data, "usage": usage})


def _task_of(body: PoolingRequest, head: PoolingHead) -> str:
    """Return the task of a request.  RefusalError for one that the model's head cannot do."""
    if head.task:
        choices = ["token_classify", "token_embed"]
    else:
        choices = ["classify", "token_embed"] if head.labels else ["embed", "token_embed"]
    own = "token_classify" if head.task else "token_embed"
    task = {**_EARLIER, "encode": own}.get(body.task or choices[0], body.task or choices[0])
    if task not in choices:
        message = f"task: this model expects {' or '.join(choices)}, got {body.task}"
        raise RefusalError(400, message, param="task", code="invalid_value")
    return task


async def _rows(call: Call, backend: Backend, body: PoolingRequest, task: str) -> list[Embedding]:
    """Return the logits of each input, or the rows of its tokens."""
    if task == "classify":
        classifier_head(pooling_head_of(backend))
    prompts = [ids for ids, _ in await prompts_of(backend, body.input, "input", body)]
    num_tokens, limit = sum(map(len, prompts)), max(_MAX_TOKENS, backend.card.max_len)
    if task != "classify" and num_tokens > limit:
        message = f"input: expected at most {limit} tokens with the task {task}, got {num_tokens}; send fewer texts"
        raise RefusalError(400, message, param="input", code="invalid_value")
    is_plain = task == "token_embed"
    kind, is_unit = (ALL_ROWS, body.is_activated) if is_plain else ("auto", False)
    return await backend.embed(prompts, kind, is_unit, options_of(call, body), request_id=call.request_id)


def _scores(head: PoolingHead, logits: NDArray[np.float32], body: PoolingRequest) -> NDArray[Any]:
    """Return the scores of classes; the logits of the ends of answers are no classes and stay as they are."""
    if not body.is_activated or head.task == ANSWER_TASK:
        return logits
    return np.array([head.scores(row) for row in logits]) if logits.ndim > 1 else head.scores(logits)


def _written(value: NDArray[Any], body: PoolingRequest) -> Any:
    if body.encoding_format != "base64":
        return value.tolist()
    return base64.b64encode(np.ascontiguousarray(value, "<f4").tobytes()).decode()
