"""A query and a document as the model reads them: the pair of a cross-encoder, or the prompt of a causal reranker."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from penstock.checkpoint.pooling.head import PoolingHead
from penstock.checkpoint.pooling.yes_no import YES_NO_INSTRUCTION, YES_NO_PROMPT
from penstock.errors import InvalidArgumentError, UnsupportedError
from penstock.text.cut import FILLERS, num_shared
from penstock.text.tokenizer import Tokenizer
from penstock.validation import wrong_type

__all__ = ["encode_pair"]


def encode_pair(
    tokenizer: Tokenizer, query: str, document: str, max_len: int | None = None, instruction: str | None = None
) -> list[int]:
    """Return the token ids of two texts in the form that the model reads.

    A causal reranker reads them as a prompt, in which ``instruction`` says what is relevant; None is the default prompt
    of the model's files.  Another model has no instruction and refuses one with UnsupportedError; its pair is that of
    ``Tokenizer.encode_pair``.  ``max_len`` cuts the document so that the result has at most so many tokens.
    InvalidArgumentError when the rest leaves no room for it.
    """
    head = tokenizer.pooling_head or PoolingHead()
    if not head.pair_format:
        if instruction is not None:
            raise UnsupportedError("instruction: expected none, because the model reads none", param="instruction")
        return tokenizer.encode_pair(query, document, max_len)
    for name, value in (
        ("query", query),
        ("document", document),
        ("instruction", "" if instruction is None else instruction),
    ):
        if not isinstance(value, str):
            raise wrong_type(name, "a string", value)
    chosen = head.prompt(None) if instruction is None else instruction

    def render(text: str) -> str:
        if head.pair_format == "qwen3":
            return YES_NO_PROMPT.format(instruction=chosen or YES_NO_INSTRUCTION, query=query, document=text)
        if tokenizer.chat_template is None:
            raise UnsupportedError(
                "The reranker has no chat template that can be used, which says how it reads a query and a document. "
                f"{tokenizer.chat_template_error}",
                param="model",
            )
        from penstock.text.chat_template import render_chat

        messages = _messages_of(query, text, chosen, is_structured=head.pair_format == "structured_messages")
        return render_chat(
            tokenizer.chat_template,
            messages,
            tokenizer.special_tokens,
            add_generation_prompt=head.add_generation_prompt,
        )

    return _encode_prompt(partial(tokenizer.encode, add_special_tokens=False), render, document, max_len)


def _messages_of(query: str, document: str, instruction: str, *, is_structured: bool) -> list[dict[str, Any]]:
    """Return the messages that sentence-transformers 6 makes of a pair: roles system (if any), query and document."""
    texts = ({"system": instruction} if instruction else {}) | {"query": query, "document": document}
    return [
        {"role": role, "content": [{"type": "text", "text": text}] if is_structured else text}
        for role, text in texts.items()
    ]


def _encode_prompt(
    encode: Callable[[str], list[int]], render: Callable[[str], str], document: str, max_len: int | None
) -> list[int]:
    """Return the ids of the prompt that ``render`` makes of a document.

    ``max_len`` cuts the end of the document; what follows it in the prompt stays.  InvalidArgumentError when the rest
    of the prompt leaves no room for it.
    """
    ids = encode(render(document))
    if max_len is None or len(ids) <= max_len:
        return ids
    num_before, num_behind = num_shared(ids, [encode(render(filler)) for filler in FILLERS])
    if num_before + num_behind >= max_len:
        raise InvalidArgumentError(
            f"query: the prompt has {num_before + num_behind} tokens without the document, which leaves no room for it "
            f"in {max_len} tokens",
            param="query",
        )
    return ids[: max_len - num_behind] + ids[len(ids) - num_behind :]
