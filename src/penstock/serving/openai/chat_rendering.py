"""The format of ``/v1/chat/completions``."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from penstock.llm.backend import tokenizer_of
from penstock.serving.call import Call, encoded, quoted
from penstock.serving.openai.logprobs import ChatLogprobsBuilder
from penstock.serving.openai.message_parts import MessageParts
from penstock.serving.openai.rendering import Rendering

if TYPE_CHECKING:
    from penstock.llm.backend import Answer, TokenDelta
    from penstock.serving.openai.bodies import ChatCompletionRequest
    from penstock.serving.translation import EngineRequest

__all__ = ["ChatRendering"]


class ChatRendering(Rendering):
    """Renders the next messages of a conversation.  The first event of each has its role."""

    def __init__(self, call: Call, request: EngineRequest) -> None:
        super().__init__(call, request, "chatcmpl", "chat.completion", "chat.completion.chunk")
        body: ChatCompletionRequest = call.body
        uses_ids = bool(body.return_tokens_as_token_ids)
        self._logprobs = ChatLogprobsBuilder(tokenizer_of(request.backend), uses_ids) if body.logprobs else None
        self._has_begun = [False] * self._num_each
        self._texts: list[list[str]] = [[] for _ in range(self._num_each)]
        self._entries: list[list[Any]] = [[] for _ in range(self._num_each)]
        self._reasons = [""] * self._num_each
        spec = request.spec
        self._messages = None if spec is None else [MessageParts(spec) for _ in range(self._num_each)]

    def event(self, prompt: int, answer: Answer, delta: TokenDelta) -> bytes:
        """Return the events of a delta; empty for an incomplete character."""
        index, out = delta.index, ""
        if not self._has_begun[index]:
            self._has_begun[index] = True
            content = '""' if self._messages is None else "null"
            first = f'{{"role":"assistant","content":{content}}}'
            out = self._begin + f'{{"index":{index},"delta":{first},"logprobs":null,"finish_reason":null}}' + self._end
        logprobs = None if self._logprobs is None else self._logprobs.of(delta.logprobs or [])
        if self._messages is not None:
            return (out + self._part_events(self._messages[index], delta, logprobs)).encode()
        if delta.text or delta.finish_reason is not None or (logprobs is not None and logprobs["content"]):
            piece = f'"content":{quoted(delta.text)}' if delta.text or logprobs is not None else ""
            listed = "null" if logprobs is None else json.dumps(logprobs, separators=(",", ":"))
            reason = "null" if delta.finish_reason is None else f'"{delta.finish_reason}"'
            choice = f'{{"index":{index},"delta":{{{piece}}},"logprobs":{listed},"finish_reason":{reason}}}'
            out += self._begin + choice + self._end
        return out.encode()

    def _part_events(self, message: MessageParts, delta: TokenDelta, logprobs: dict[str, Any] | None) -> str:
        """Return an event for each part of a message that a delta completes, and one for the end of the message."""
        pieces = message.push(delta)
        has_logprobs = logprobs is not None and bool(logprobs["content"])
        if delta.finish_reason is not None or (has_logprobs and not pieces):
            pieces.append({})
        out = ""
        for number, piece in enumerate(pieces, 1):
            choice = {
                "index": delta.index,
                "delta": piece,
                "logprobs": logprobs if number == 1 else None,
                "finish_reason": message.finish_reason if number == len(pieces) else None,
            }
            out += self._begin + encoded(choice) + self._end
        return out

    def keep(self, prompt: int, answer: Answer, delta: TokenDelta) -> None:
        """Store a delta for a message that is sent whole."""
        if self._messages is None:
            self._texts[delta.index].append(delta.text)
        else:
            self._messages[delta.index].push(delta)
        self._reasons[delta.index] = delta.finish_reason or ""
        if self._logprobs is not None:
            self._entries[delta.index] += self._logprobs.of(delta.logprobs or [])["content"]

    def choices(self) -> list[dict[str, Any]]:
        """Return the messages that were stored."""
        return [
            {
                "index": index,
                "message": self._message(index),
                "logprobs": None if self._logprobs is None else {"content": self._entries[index]},
                "finish_reason": self._messages[index].finish_reason if self._messages else self._reasons[index],
            }
            for index in range(self._num_each)
        ]

    def _message(self, index: int) -> dict[str, Any]:
        if self._messages is not None:
            return {"role": "assistant", "refusal": None, **self._messages[index].whole()}
        return {"role": "assistant", "content": "".join(self._texts[index]), "refusal": None}
