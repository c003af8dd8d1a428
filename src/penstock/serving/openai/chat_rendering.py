"""The format of ``/v1/chat/completions``."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from penstock.llm.backend import tokenizer_of
from penstock.serving.call import Call, quoted
from penstock.serving.openai.logprobs import ChatLogprobs
from penstock.serving.openai.rendering import Rendering

if TYPE_CHECKING:
    from penstock.llm.backend import Answer, Delta
    from penstock.serving.openai.bodies import ChatCompletionRequest
    from penstock.serving.translation import EngineRequest

__all__ = ["ChatRendering"]


class ChatRendering(Rendering):
    """Renders the next messages of a conversation.  The first event of each has its role."""

    def __init__(self, call: Call, request: EngineRequest) -> None:
        super().__init__(call, request, "chatcmpl", "chat.completion", "chat.completion.chunk")
        body: ChatCompletionRequest = call.body
        uses_ids = bool(body.return_tokens_as_token_ids)
        self._logprobs = ChatLogprobs(tokenizer_of(request.backend), uses_ids) if body.logprobs else None
        self._has_begun = [False] * self._num_each
        self._texts: list[list[str]] = [[] for _ in range(self._num_each)]
        self._entries: list[list[Any]] = [[] for _ in range(self._num_each)]
        self._reasons = [""] * self._num_each

    def event(self, prompt: int, answer: Answer, delta: Delta) -> bytes:
        """Return the events of a delta; empty for an incomplete character."""
        index, out = delta.index, ""
        if not self._has_begun[index]:
            self._has_begun[index] = True
            role = (
                f'{{"index":{index},"delta":{{"role":"assistant","content":""}},"logprobs":null,"finish_reason":null}}'
            )
            out = self._begin + role + self._end
        logprobs = None if self._logprobs is None else self._logprobs.of(delta.logprobs or [])
        if delta.text or delta.finish_reason is not None or (logprobs is not None and logprobs["content"]):
            piece = f'"content":{quoted(delta.text)}' if delta.text or logprobs is not None else ""
            listed = "null" if logprobs is None else json.dumps(logprobs, separators=(",", ":"))
            reason = "null" if delta.finish_reason is None else f'"{delta.finish_reason}"'
            choice = f'{{"index":{index},"delta":{{{piece}}},"logprobs":{listed},"finish_reason":{reason}}}'
            out += self._begin + choice + self._end
        return out.encode()

    def keep(self, prompt: int, answer: Answer, delta: Delta) -> None:
        """Store a delta for a message that is sent whole."""
        self._texts[delta.index].append(delta.text)
        self._reasons[delta.index] = delta.finish_reason or ""
        if self._logprobs is not None:
            self._entries[delta.index] += self._logprobs.of(delta.logprobs or [])["content"]

    def choices(self) -> list[dict[str, Any]]:
        """Return the messages that were stored."""
        return [
            {
                "index": index,
                "message": {"role": "assistant", "content": "".join(self._texts[index]), "refusal": None},
                "logprobs": None if self._logprobs is None else {"content": self._entries[index]},
                "finish_reason": self._reasons[index],
            }
            for index in range(self._num_each)
        ]
