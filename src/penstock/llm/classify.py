"""Classify texts and order documents by their relevance, with the head of a classifier."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from penstock.checkpoint.pooling.head import PoolingHead
from penstock.config import check_integer
from penstock.engine.engine import Engine
from penstock.engine.options import RequestOptions, check_options
from penstock.errors import InvalidArgumentError, UnsupportedError
from penstock.llm.embed import embed
from penstock.llm.open_requests import OpenRequests
from penstock.llm.prompts import Prompt, check_each
from penstock.llm.result import Embedding
from penstock.text.reranking import encode_pair
from penstock.text.tokenizer import Tokenizer
from penstock.validation import wrong_type

__all__ = [
    "Classification", "Pair", "Ranked", "classification", "classifier_head", "classify_prompts", "ids_of", "order",
    "ranking_head", "rerank_documents",
]  # fmt: skip

Pair: TypeAlias = tuple[str, str]


@dataclass(frozen=True)
class Classification:
    """The classes of a text: ``scores`` [num_labels] by ``labels``, and the ``logits`` they are made from.

    ``label`` is that of the highest score, the first of equal ones; ``score`` is its score.
    """

    token_ids: list[int]
    labels: tuple[str, ...]
    scores: NDArray[np.float64]
    logits: NDArray[np.float32]

    @property
    def label(self) -> str:
        """The name of the likeliest class."""
        return self.labels[int(self.scores.argmax())]

    @property
    def score(self) -> float:
        """The score of the likeliest class."""
        return float(self.scores.max())


@dataclass(frozen=True)
class Ranked:
    """A document with its ``score``; ``index`` is its place among the documents given, ``num_tokens`` those read."""

    index: int
    score: float
    document: str
    num_tokens: int = 0


def classify_prompts(
    engine: Engine,
    encode: Callable[[Prompt | Pair], Sequence[int]],
    prompts: Any,
    options: RequestOptions | None,
    opened: OpenRequests | None = None,
) -> Classification | list[Classification]:
    """Classify one text or several, as ``LLM.classify`` documents it.  ``encode`` turns a text or pair into ids."""
    head, options = classifier_head(engine.pooling_head), check_options(options)
    several, is_one = _split(prompts)
    checked = check_each(several, is_one, lambda prompt: engine.fit_prompt(encode(prompt), 0, options))
    embeddings = embed(engine, checked, "auto", False, is_one=is_one, options=options, opened=opened)
    results = [classification(head, embedding) for embedding in embeddings]
    return results[0] if is_one else results


def classification(head: PoolingHead, embedding: Embedding) -> Classification:
    """Return the classes of a text whose vector is the logits of a classifier."""
    return Classification(embedding.token_ids, head.labels, head.scores(embedding.vector), embedding.vector)


def classifier_head(head: PoolingHead | None) -> PoolingHead:
    """Return a classifier's head.  UnsupportedError for a model that is none."""
    if head is None or not head.labels or head.task:
        kind = " of texts, found one for " + head.task if head is not None and head.task else ", found none"
        raise UnsupportedError(f"model: expected a classifier with a head of classes{kind}.", param="model")
    return head


def rerank_documents(
    engine: Engine,
    tokenizer: Tokenizer,
    query: str,
    documents: Iterable[str],
    top_n: int | None,
    options: RequestOptions | None,
    instruction: str | None,
    opened: OpenRequests | None = None,
) -> list[Ranked]:
    """Order documents by their relevance to a query, as ``LLM.rerank`` documents it."""
    head, options = ranking_head(engine.pooling_head), check_options(options)
    if not isinstance(query, str):
        raise wrong_type("query", "a string", query)
    texts = [] if isinstance(documents, str) else list(documents)
    if isinstance(documents, str) or not all(isinstance(text, str) for text in texts):
        raise wrong_type("documents", "a list of strings", documents)
    max_len = engine.max_len if options.truncate_prompt else None

    def encode(text: str) -> Sequence[int]:
        return engine.fit_prompt(encode_pair(tokenizer, query, text, max_len, instruction), 0, options)

    ids = check_each(texts, False, encode)
    embeddings = embed(engine, ids, "auto", False, options=options, opened=opened)
    scores = [float(head.scores(embedding.vector)[0]) for embedding in embeddings]
    return order(scores, texts, [len(embedding.token_ids) for embedding in embeddings], top_n)


def ranking_head(head: PoolingHead | None) -> PoolingHead:
    """Return the head of a classifier with one class, whose score is a relevance.  Otherwise UnsupportedError."""
    if head is None or not head.labels or head.task:
        raise UnsupportedError(
            "rerank: expected a cross-encoder or a causal reranker; the files of this model have no head of classes",
            param="model",
        )
    if len(head.labels) != 1:
        raise UnsupportedError(
            f"rerank: expected a classifier with one class, got one with {len(head.labels)}", param="model"
        )
    return head


def order(scores: Sequence[float], texts: Sequence[str], num_tokens: Sequence[int], top_n: int | None) -> list[Ranked]:
    """Return the documents by descending score, the earlier first of equal ones; only the first ``top_n`` if given."""
    if top_n is not None:
        check_integer("top_n", top_n, 1, 2**31 - 1)
    ranked = [Ranked(i, score, texts[i], num_tokens[i]) for i, score in enumerate(scores)]
    return sorted(ranked, key=lambda one: (-one.score, one.index))[:top_n]


def _split(prompts: Any) -> tuple[list[Any], bool]:
    """Return prompts as a list, and whether it was a single text, pair of texts or list of token ids."""
    if isinstance(prompts, str) or _is_pair(prompts):
        return [prompts], True
    if hasattr(prompts, "tolist"):
        prompts = prompts.tolist()
    if isinstance(prompts, (bytes, dict)) or not isinstance(prompts, Iterable):
        raise wrong_type("prompts", "a text, a pair of texts, a list of token ids, or a list of them", prompts)
    several = list(prompts)
    if several and all(isinstance(item, int) and not isinstance(item, bool) for item in several):
        return [several], True
    return several, False


def _is_pair(prompt: object) -> bool:
    return isinstance(prompt, tuple) and len(prompt) == 2 and all(isinstance(text, str) for text in prompt)


def ids_of(tokenizer: Callable[[], Tokenizer], prompt: Any, max_len: int | None) -> Sequence[int]:
    """Return the token ids of a text, of a pair of texts (a tuple), or those given."""
    if isinstance(prompt, str):
        return tokenizer().encode(prompt)
    if isinstance(prompt, tuple) and any(isinstance(item, str) for item in prompt):
        if not _is_pair(prompt):
            raise InvalidArgumentError("prompt: expected a tuple of two texts", param="prompt")
        return encode_pair(tokenizer(), prompt[0], prompt[1], max_len)
    ids: Sequence[int] = prompt  # which the engine checks
    return ids
