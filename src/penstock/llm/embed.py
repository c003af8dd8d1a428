"""Embed prompts: one vector for each."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from penstock.checkpoint.pooling.head import PoolingHead
from penstock.engine.engine import Engine
from penstock.engine.options import RequestOptions, check_options
from penstock.engine.pooling import Pooling, check_embedding, shorten
from penstock.engine.request import Request, RequestStatus
from penstock.errors import InvalidArgumentError, PenstockError, UnsupportedError
from penstock.llm.open_requests import OpenRequests
from penstock.llm.prompts import Prompt, check_each, of_prompt, split_prompts
from penstock.llm.result import Embedding
from penstock.text.cut import encode_text

__all__ = ["EmbedSettings", "embed", "embed_prompts"]


@dataclass(frozen=True)
class EmbedSettings:
    """The settings with which prompts become vectors; the arguments of ``LLM.embed``."""

    pooling: str = "auto"
    normalize: bool | None = None
    prompt_name: str | None = None
    dimensions: int | None = None


def embed_prompts(
    engine: Engine,
    encode: Callable[[Prompt], Sequence[int]],
    prompts: Prompt | Iterable[Prompt],
    settings: EmbedSettings,
    options: RequestOptions | None,
    opened: OpenRequests | None = None,
) -> Embedding | list[Embedding]:
    """Embed one prompt or several, as ``LLM.embed`` documents it.

    ``encode`` turns a prompt into token ids.  ``opened`` holds the requests, so that another thread can abort them.
    """
    pooling, normalize = settings.pooling, settings.normalize
    check_embedding(pooling, normalize)
    options, head = check_options(options), engine.pooling_head or PoolingHead()
    if head.labels and pooling == "auto":
        raise UnsupportedError("embed: the model is a classifier; use classify, or pooling='mean'", param="embed")
    prefix = head.prompt(settings.prompt_name)

    def ids_of(prompt: Prompt) -> Sequence[int]:
        ids = encode_text(encode, prefix + prompt, head) if isinstance(prompt, str) else encode(prompt)
        return engine.fit_prompt(ids, 0, options)

    several, is_one = split_prompts(prompts)
    checked = check_each(several, is_one, ids_of)
    embeddings = embed(engine, checked, pooling, normalize, is_one=is_one, options=options, opened=opened)
    if settings.dimensions is not None:
        is_unit = normalize if normalize is not None else pooling == "auto" and head.normalize
        embeddings = [
            replace(embedding, vector=shorten(embedding.vector, settings.dimensions, is_unit))
            for embedding in embeddings
        ]
    return embeddings[0] if is_one else embeddings


def embed(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    pooling: str,
    normalize: bool | None,
    *,
    is_one: bool = False,
    options: RequestOptions | None = None,
    opened: OpenRequests | None = None,
) -> list[Embedding]:
    """Return the embeddings of token ids, in the order of the prompts.

    At most a few steps' worth of requests is open at a time, and a full queue is waited for, so the number of prompts
    is not limited.  Raises the error of the first request that failed, with the index of its prompt.
    """
    opened = opened or OpenRequests(engine)
    todo = deque(enumerate(prompts))
    unfinished: dict[int, Request] = {}
    done: dict[int, Embedding] = {}
    try:
        while todo or unfinished:
            while todo and len(unfinished) < 4 * engine.scheduler.max_requests:
                index, ids = todo.popleft()
                unfinished[index] = opened.submit(ids, pooling=Pooling(pooling, engine.pooling_head), options=options)
            engine.wait(next(iter(unfinished.values())), 0)
            for index in [i for i, request in unfinished.items() if request.status is RequestStatus.FINISHED]:
                try:
                    done[index] = _embedding(unfinished.pop(index), normalize)
                except PenstockError as error:
                    raise of_prompt(index, is_one, error) from None
    finally:
        for request in unfinished.values():
            engine.abort(request)
    return [done[index] for index in range(len(done))]


def _embedding(request: Request, normalize: bool | None) -> Embedding:
    if request.error is not None:
        raise request.error
    if request.finish_reason != "stop" or request.pooling is None:
        raise InvalidArgumentError("embed: the request was aborted", code="aborted")
    return Embedding(request.prompt_ids, request.pooling.vector(normalize), request.num_cached)
