"""Prompts that end within the last message of a conversation, so that the model continues its text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from penstock.errors import InvalidArgumentError, UnsupportedError
from penstock.text.chat_template import check_messages, render_chat

if TYPE_CHECKING:
    from penstock.text.tokenizer import Tokenizer

__all__ = ["encode_continued", "render_continued"]

_MARK: Final = "<|continue-here|>"
_FIELD: Final = "continue_final_message"


def render_continued(template: str, messages: Sequence[Mapping[str, Any]], special_tokens: Mapping[str, str]) -> str:
    """Return the prompt that a template makes of messages, cut after the text of the last one.

    The prompts are those of transformers' ``continue_final_message``: a mark is put after the text, and the prompt ends
    before it.  A template that removes white space around a text also removes it before the mark.  Raises
    InvalidArgumentError if the last message has no text or the template does not show it, and the errors of
    ``render_chat``.
    """
    checked = check_messages(messages)
    mark = _MARK
    while mark in str(checked):
        mark += ">"
    *before, last = checked
    text, marked = _marked(last, f"{mark} ")
    rendered = render_chat(template, [*before, marked], special_tokens, add_generation_prompt=False)
    end = rendered.rfind(mark)
    if end < 0 or text.strip() not in rendered[:end]:
        raise InvalidArgumentError(
            f"{_FIELD}: expected a chat template that shows the text of the last message; this one changes or omits it",
            param=_FIELD,
        )
    is_trimmed = not rendered.startswith(f"{mark} ", end)
    return rendered[:end].rstrip() if is_trimmed else rendered[:end]


def _marked(message: Mapping[str, Any], mark: str) -> tuple[str, dict[str, Any]]:
    """Return the text of a message, and the message with a mark after it; of several parts, the last one with a text
    is continued.
    """
    content = message.get("content")
    if isinstance(content, str):
        return content, {**message, "content": content + mark}
    parts = list(content or ())
    for index in range(len(parts) - 1, -1, -1):
        part = parts[index]
        if isinstance(part, Mapping) and isinstance(text := part.get("text"), str):
            parts[index] = {**part, "text": text + mark}
            return text, {**message, "content": parts}
    raise InvalidArgumentError(f"{_FIELD}: expected a text in the last message, got none", param=_FIELD)


def encode_continued(tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return the token ids of messages whose last one is continued.

    Raises UnsupportedError if the model has no template, and the errors of ``render_continued``.
    """
    if tokenizer.chat_template is None:
        raise UnsupportedError("This model has no chat template. Pass a plain prompt instead of messages.")
    text = render_continued(tokenizer.chat_template, messages, tokenizer.special_tokens)
    return tokenizer.encode(text, add_special_tokens=False)
