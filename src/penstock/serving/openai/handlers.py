"""The handlers of OpenAI's routes for text: translate the body, submit the request, render the answers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.serving.openai.chat_rendering import ChatRendering
from penstock.serving.openai.completion_rendering import CompletionRendering, echoes_of, scored
from penstock.serving.openai.rendering import respond
from penstock.serving.translation import chat_request, completion_request

if TYPE_CHECKING:
    from penstock.serving.call import Call, Reply
    from penstock.serving.openai.bodies import ChatCompletionRequest, CompletionRequest

__all__ = ["chat", "complete"]


async def complete(call: Call) -> Reply | None:
    """Complete one or more prompts (``POST /v1/completions``)."""
    body: CompletionRequest = call.body
    request = await completion_request(call)
    echoes = await echoes_of(call, request)
    if body.max_tokens == 0:
        return await scored(call, request, echoes)
    return await respond(call, request, CompletionRendering(call, request, echoes), body.logprobs is not None)


async def chat(call: Call) -> Reply | None:
    """Generate the next message of a conversation (``POST /v1/chat/completions``)."""
    body: ChatCompletionRequest = call.body
    request = await chat_request(call)
    return await respond(call, request, ChatRendering(call, request), bool(body.logprobs))
