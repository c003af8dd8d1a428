"""A query and a document as the prompt of a causal reranker."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Any, Final

from penstock.errors import InvalidArgumentError

__all__ = ["encode_prompt", "messages_of", "yes_no_prompt"]

_SYSTEM: Final = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".'
)
_INSTRUCTION: Final = "Given a web search query, retrieve relevant passages that answer the query"
_FILLERS: Final = ("0", "x y")
"""Two documents that share no token: what the ids of their prompts have in common belongs to the format."""


def yes_no_prompt(query: str, document: str, instruction: str) -> str:
    """Return the prompt of Qwen3-Reranker's model card; "" is the card's own instruction."""
    return (
        f"<|im_start|>system\n{_SYSTEM}<|im_end|>\n<|im_start|>user\n<Instruct>: {instruction or _INSTRUCTION}\n"
        f"<Query>: {query}\n<Document>: {document}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )


def messages_of(query: str, document: str, instruction: str, *, is_structured: bool) -> list[dict[str, Any]]:
    """Return the messages that sentence-transformers 6 makes of a pair: roles system (if any), query and document."""
    texts = ({"system": instruction} if instruction else {}) | {"query": query, "document": document}
    return [
        {"role": role, "content": [{"type": "text", "text": text}] if is_structured else text}
        for role, text in texts.items()
    ]


def encode_prompt(
    encode: Callable[[str], list[int]], render: Callable[[str], str], document: str, max_len: int | None
) -> list[int]:
    """Return the ids of the prompt that ``render`` makes of a document.

    ``max_len`` cuts the end of the document; what follows it in the prompt stays.  InvalidArgumentError when the rest
    of the prompt leaves no room for it.
    """
    ids = encode(render(document))
    if max_len is None or len(ids) <= max_len:
        return ids
    others = [encode(render(filler)) for filler in _FILLERS]
    num_before = _num_common([ids, *others])
    num_behind = _num_common([each[::-1] for each in (ids, *others)])
    if num_before + num_behind >= max_len:
        raise InvalidArgumentError(
            f"query: the prompt has {num_before + num_behind} tokens without the document, which leaves no room for it "
            f"in {max_len} tokens",
            param="query",
        )
    return ids[: max_len - num_behind] + ids[len(ids) - num_behind :]


def _num_common(lists: Sequence[Sequence[int]]) -> int:
    """Return the length of the beginning that lists share."""
    return sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, zip(*lists, strict=False)))
