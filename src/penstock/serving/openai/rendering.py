"""Render the answers of an engine in OpenAI's formats: as one response, or as a stream of events."""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from penstock.serving.call import Call, Reply, json_reply

if TYPE_CHECKING:
    from penstock.llm.backend import Answer, TokenDelta
    from penstock.serving.openai.bodies import ChatCompletionRequest, CompletionRequest
    from penstock.serving.translation import EngineRequest

__all__ = ["Rendering"]


class Rendering(ABC):
    """Renders the answers to the prompts of one request.  An answer's index counts the answers to all prompts.

    The constant parts of events are encoded once.  ``kind`` is the ``object`` of the response, ``event_kind`` that of
    an event.
    """

    def __init__(self, call: Call, request: EngineRequest, prefix: str, kind: str, event_kind: str) -> None:
        body: CompletionRequest | ChatCompletionRequest = call.body
        options = body.stream_options
        self.is_stream = bool(body.stream)
        self.includes_usage = options is not None and bool(options.include_usage)
        self._num_each = request.params.n
        self._head = {
            "id": f"{prefix}-{call.request_id}",
            "object": event_kind if self.is_stream else kind,
            "created": int(time.time()),
            "model": request.backend.name,
            "system_fingerprint": f"v{request.backend.card.version}",
        }
        self._begin = "data: " + json.dumps(self._head, separators=(",", ":"))[:-1] + ',"choices":['
        self._end = '],"usage":null}\n\n' if self.includes_usage else "]}\n\n"

    @abstractmethod
    def event(self, prompt: int, answer: Answer, delta: TokenDelta) -> bytes:
        """Return the events of a delta; empty if there is nothing to send yet."""

    @abstractmethod
    def keep(self, prompt: int, answer: Answer, delta: TokenDelta) -> None:
        """Store a delta for an answer that is sent whole."""

    @abstractmethod
    def choices(self) -> list[dict[str, Any]]:
        """Return the answers that were stored."""

    def whole(self, choices: list[dict[str, Any]], counts: dict[str, Any]) -> Reply:
        """Return the response with all answers."""
        return json_reply({**self._head, "choices": choices, "usage": counts})

    def usage_event(self, counts: dict[str, Any]) -> bytes:
        """Return the event with the token counts."""
        return f'{self._begin}],"usage":{json.dumps(counts)}}}\n\n'.encode()
