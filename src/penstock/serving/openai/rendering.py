"""Render the answers of an engine in OpenAI's formats: as one response, or as a stream of events."""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from penstock.llm.backend import isolated_tokenizer
from penstock.serving.call import DONE, Call, Events, Reply, json_reply
from penstock.serving.generation import Generation, usage
from penstock.text.tokenizer_threads import call_isolated

if TYPE_CHECKING:
    from penstock.llm.backend import Answer, Delta
    from penstock.serving.openai.bodies import ChatCompletionRequest, CompletionRequest
    from penstock.serving.translation import EngineRequest

__all__ = ["Rendering", "respond"]


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
    def event(self, prompt: int, answer: Answer, delta: Delta) -> bytes:
        """Return the events of a delta; empty if there is nothing to send yet."""

    @abstractmethod
    def keep(self, prompt: int, answer: Answer, delta: Delta) -> None:
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


async def respond(call: Call, request: EngineRequest, rendering: Rendering, with_logprobs: bool) -> Reply | None:
    """Submit a request, and return the whole response, or None after a stream of events.

    ``with_logprobs``: the rendering decodes tokens, for which it may have to wait.
    """
    generation = Generation(call, request)
    isolated = isolated_tokenizer(request.backend) if with_logprobs else None
    events = Events(call) if rendering.is_stream else None

    async def take(prompt: int, answer: Answer, delta: Delta) -> None:
        if events is None:
            await call_isolated(isolated, rendering.keep, prompt, answer, delta)
        else:
            await events.write(await call_isolated(isolated, rendering.event, prompt, answer, delta))

    def take_now(prompt: int, answer: Answer, delta: Delta) -> bool:
        if events is not None:
            return events.write_now(lambda: rendering.event(prompt, answer, delta))
        rendering.keep(prompt, answer, delta)
        return True

    await generation.run(take, take_now if isolated is None else None)
    counts = usage(generation.num_prompt_tokens, generation.num_output_tokens, generation.num_cached_tokens)
    if events is None:
        return rendering.whole(rendering.choices(), counts)
    await events.end((rendering.usage_event(counts) if rendering.includes_usage else b"") + DONE)
    return None
