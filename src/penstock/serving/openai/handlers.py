"""The handlers of OpenAI's routes for text: translate the body, submit the request, render the answers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.llm.backend import isolated_tokenizer
from penstock.serving.call import DONE, Events
from penstock.serving.generation import Generation, usage
from penstock.serving.openai.chat_rendering import ChatRendering
from penstock.serving.openai.completion_rendering import CompletionRendering, echoes_of, scored
from penstock.serving.translation import chat_request, completion_request
from penstock.text.tokenizer_threads import call_isolated

if TYPE_CHECKING:
    from penstock.llm.backend import Answer, TokenDelta
    from penstock.serving.call import Call, Reply
    from penstock.serving.openai.bodies import ChatCompletionRequest, CompletionRequest
    from penstock.serving.openai.rendering import Rendering
    from penstock.serving.translation import EngineRequest

__all__ = ["chat", "complete"]


async def complete(call: Call) -> Reply | None:
    """Complete one or more prompts (``POST /v1/completions``)."""
    body: CompletionRequest = call.body
    request = await completion_request(call)
    echoes = await echoes_of(call, request)
    if body.max_tokens == 0:
        return await scored(call, request, echoes)
    return await _respond(call, request, CompletionRendering(call, request, echoes), body.logprobs is not None)


async def chat(call: Call) -> Reply | None:
    """Generate the next message of a conversation (``POST /v1/chat/completions``)."""
    body: ChatCompletionRequest = call.body
    request = await chat_request(call)
    return await _respond(call, request, ChatRendering(call, request), bool(body.logprobs))


async def _respond(call: Call, request: EngineRequest, rendering: Rendering, with_logprobs: bool) -> Reply | None:
    """Submit a request, and return the whole response, or None after a stream of events.

    ``with_logprobs``: the rendering decodes tokens, for which it may have to wait.
    """
    generation = Generation(call, request)
    isolated = isolated_tokenizer(request.backend) if with_logprobs else None
    events = Events(call) if rendering.is_stream else None

    async def take(prompt: int, answer: Answer, delta: TokenDelta) -> None:
        if events is None:
            await call_isolated(isolated, rendering.keep, prompt, answer, delta)
        else:
            await events.write(await call_isolated(isolated, rendering.event, prompt, answer, delta))

    def take_now(prompt: int, answer: Answer, delta: TokenDelta) -> bool:
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
