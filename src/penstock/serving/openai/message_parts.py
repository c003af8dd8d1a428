"""The parts of a message with thoughts and tool calls, in OpenAI's format."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from penstock.text.answer.parser import AnswerPart, MoreArguments, Piece

if TYPE_CHECKING:
    from penstock.llm.backend import TokenDelta
    from penstock.serving.openai.answer_spec import AnswerSpec

__all__ = ["MessageParts"]


class MessageParts:
    """The parts of one message as its text grows.  ``finish_reason`` is set at its end."""

    def __init__(self, spec: AnswerSpec) -> None:
        self._parser = spec.parser()
        self._shows_thoughts = spec.shows_thoughts
        self._id_len = 0 if spec.form.tools is None else spec.form.tools.id_len
        self._content: list[str] = []
        self._thoughts: list[str] = []
        self._calls: list[dict[str, Any]] = []
        self.finish_reason: str | None = None

    def push(self, delta: TokenDelta) -> list[dict[str, Any]]:
        """Add the text of a delta, and return the ``delta`` of each event of a stream."""
        parts = self._parser.push(delta.text)
        if delta.finish_reason is not None:
            parts += self._parser.finish()
        pieces = [piece for part in parts for piece in self._pieces(part)]
        if delta.finish_reason is not None:
            is_call = bool(self._calls) and delta.finish_reason == "stop"
            self.finish_reason = "tool_calls" if is_call else delta.finish_reason
        return pieces

    def _pieces(self, part: AnswerPart) -> list[dict[str, Any]]:
        if isinstance(part, Piece):
            if part.is_reasoning and not self._shows_thoughts:
                return []
            (self._thoughts if part.is_reasoning else self._content).append(part.text)
            return [{"reasoning_content" if part.is_reasoning else "content": part.text}]
        if isinstance(part, MoreArguments):
            self._calls[-1]["function"]["arguments"] += part.text
            return [{"tool_calls": [{"index": len(self._calls) - 1, "function": {"arguments": part.text}}]}]
        index, function = len(self._calls), {"name": part.name, "arguments": part.arguments}
        number = os.urandom(12).hex()
        call = {
            "id": number[: self._id_len] if self._id_len else f"call_{number}",
            "type": "function",
            "function": function,
        }
        self._calls.append(call)
        first = {"index": index, **call, "function": {"name": part.name, "arguments": ""}}
        rest = {"index": index, "function": {"arguments": part.arguments}}
        return [{"tool_calls": [piece]} for piece in ((first, rest) if part.arguments else (first,))]

    def whole(self) -> dict[str, Any]:
        """Return the fields of the whole message."""
        content = "".join(self._content)
        message: dict[str, Any] = {"content": content if content or not (self._calls or self._thoughts) else None}
        if self._thoughts:
            message["reasoning_content"] = "".join(self._thoughts)
        if self._calls:
            message["tool_calls"] = self._calls
        return message
