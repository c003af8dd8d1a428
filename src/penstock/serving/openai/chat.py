"""``POST /v1/chat/completions``: OpenAI's chat completions, whole or as a stream of events."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

from penstock.serving.call import Call, Events, Reply, json_reply, quoted
from penstock.serving.generation import Generation, check_stream_options, includes_usage, refuse_together, usage
from penstock.serving.openai.bodies import ChatCompletionRequest
from penstock.serving.openai.logprobs import ChatLogprobs
from penstock.serving.request_parsing import (
    chat_ids,
    check_fits,
    cut,
    isolated_tokenizer,
    options_of,
    sampling_of,
    tokenizer_of,
)
from penstock.text.tokenizer_threads import call_isolated

if TYPE_CHECKING:
    from penstock.llm.backend import Answer, Backend, Delta
    from penstock.text.tokenizer import Tokenizer

__all__ = ["chat"]


async def chat(call: Call) -> Reply | None:
    """Generate the next message of a conversation."""
    body: ChatCompletionRequest = call.body
    backend = call.model(body.model)
    wanted = body.logprobs
    _refuse_what_does_not_go_together(body)
    ids = await chat_ids(backend, body.messages, body.add_generation_prompt is not False)
    ids = cut(ids, backend.card.max_len, body)
    check_fits(backend, ids, "messages")
    num_top = (body.top_logprobs or 0) if wanted else None
    params = sampling_of(body, logprobs=num_top, max_tokens=body.max_completion_tokens or body.max_tokens)
    run = Generation(call, backend, params, options_of(body, call.settings.limits.request_s, call.client))
    logprobs = ChatLogprobs(tokenizer_of(backend)) if wanted else None
    slow = isolated_tokenizer(backend) if wanted else None
    if body.stream:
        await _stream(call, run, ids, params.n, logprobs, _head(call, backend, "chat.completion.chunk"), slow)
        return None
    texts: list[list[str]] = [[] for _ in range(params.n)]
    entries: list[list[Any]] = [[] for _ in range(params.n)]
    reasons = [""] * params.n

    def keep(_: int, answer: Answer, delta: Delta) -> bool:
        texts[delta.index].append(delta.text)
        reasons[delta.index] = delta.finish_reason or ""
        if logprobs is not None:
            entries[delta.index] += logprobs.of(delta.logprobs or [])["content"]
        return True

    async def take(i: int, answer: Answer, delta: Delta) -> None:
        await call_isolated(slow, keep, i, answer, delta)

    await run.run([ids], take, keep if slow is None else None)
    choices = [
        {
            "index": index,
            "message": {"role": "assistant", "content": "".join(texts[index]), "refusal": None},
            "logprobs": None if logprobs is None else {"content": entries[index]},
            "finish_reason": reasons[index],
        }
        for index in range(params.n)
    ]
    counts = usage(run.num_prompt_tokens, run.num_output_tokens, run.num_cached_tokens)
    return json_reply({**_head(call, backend, "chat.completion"), "choices": choices, "usage": counts})


def _refuse_what_does_not_go_together(body: ChatCompletionRequest) -> None:
    most, other = body.max_tokens, body.max_completion_tokens
    refuse_together(
        most is not None and other is not None and most != other,
        "max_completion_tokens must equal max_tokens if both are set", "max_completion_tokens",
    )  # fmt: skip
    refuse_together(
        body.top_logprobs is not None and not body.logprobs, "top_logprobs requires logprobs", "top_logprobs"
    )
    check_stream_options(body)


def _head(call: Call, backend: Backend, kind: str) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{call.request_id}",
        "object": kind,
        "created": int(time.time()),
        "model": backend.name,
        "system_fingerprint": f"v{backend.card.version}",
    }


async def _stream(
    call: Call,
    run: Generation,
    ids: list[int],
    n: int,
    logprobs: ChatLogprobs | None,
    head: dict[str, Any],
    slow: Tokenizer | None,
) -> None:
    """Send an event per step and choice, after an event with the role of each choice.

    ``slow``: a tokenizer in another process, which decodes tokens for the log-probabilities; None if there is none.
    """
    events = Events(call)
    with_usage = includes_usage(call.body)
    begin = "data: " + json.dumps(head, separators=(",", ":"))[:-1] + ',"choices":['
    end = '],"usage":null}\n\n' if with_usage else "]}\n\n"
    begun = [False] * n

    def event(delta: Delta) -> bytes:
        index, out = delta.index, ""
        if not begun[index]:
            begun[index] = True
            role = (
                f'{{"index":{index},"delta":{{"role":"assistant","content":""}},"logprobs":null,"finish_reason":null}}'
            )
            out = begin + role + end
        found = None if logprobs is None else logprobs.of(delta.logprobs or [])
        if delta.text or delta.finish_reason is not None or (found is not None and found["content"]):
            piece = f'"content":{quoted(delta.text)}' if delta.text or found is not None else ""
            listed = "null" if found is None else json.dumps(found, separators=(",", ":"))
            reason = "null" if delta.finish_reason is None else f'"{delta.finish_reason}"'
            choice = f'{{"index":{index},"delta":{{{piece}}},"logprobs":{listed},"finish_reason":{reason}}}'
            out += begin + choice + end
        return out.encode()

    async def take(_: int, answer: Answer, delta: Delta) -> None:
        await events.write(await call_isolated(slow, event, delta))

    def take_now(_: int, answer: Answer, delta: Delta) -> bool:
        return events.write_now(lambda: event(delta))

    await run.run([ids], take, take_now if slow is None else None)
    last = b"data: [DONE]\n\n"
    if with_usage:
        counts = json.dumps(usage(run.num_prompt_tokens, run.num_output_tokens, run.num_cached_tokens))
        last = f'{begin}],"usage":{counts}}}\n\n'.encode() + last
    await events.end(last)
