"""``POST /v1/chat/completions``: OpenAI's chat completions, whole or as a stream of events."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any, Final

from penstock.json_schema import NOTHING, Choice, Items, Members, Text, Whole, optional
from penstock.serving.call import Call, Events, Reply, json_reply, quoted
from penstock.serving.generation import USAGE, Generation, refuse_together, usage
from penstock.serving.openai.logprobs import CHAT_LOGPROBS, ChatLogprobs
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

__all__ = ["CHAT_ANSWER", "CHAT_EVENT", "chat"]

_REASON: Final = Choice(("stop", "length"))
_ROLE: Final = Choice(("assistant",))
_HEAD: Final[dict[str, Any]] = {
    "id": Text(), "created": Whole(0, 2**53), "model": Text(), "system_fingerprint": Text(),
}  # fmt: skip
_MESSAGE: Final = Members(
    "ChatMessage", {"role": _ROLE, "content": Text(), "refusal": NOTHING}, ("role", "content", "refusal")
)
_CHOICE: Final = Members(
    "ChatChoice",
    {"index": Whole(0, 2**31), "message": _MESSAGE, "logprobs": optional(CHAT_LOGPROBS), "finish_reason": _REASON},
    ("index", "message", "logprobs", "finish_reason"),
)
CHAT_ANSWER: Final = Members(
    "ChatCompletionResponse",
    {**_HEAD, "object": Choice(("chat.completion",)), "choices": Items(_CHOICE, 1, None), "usage": USAGE},
    (*_HEAD, "object", "choices", "usage"),
)
_PIECE: Final = Members(
    "ChatPiece",
    {
        "index": Whole(0, 2**31),
        "delta": Members("ChatDelta", {"role": _ROLE, "content": Text()}),
        "logprobs": optional(CHAT_LOGPROBS),
        "finish_reason": optional(_REASON),
    },
    ("index", "delta", "logprobs", "finish_reason"),
)
CHAT_EVENT: Final = Members(
    "ChatCompletionEvent",
    {
        **_HEAD,
        "object": Choice(("chat.completion.chunk",)),
        "choices": Items(_PIECE, 0, None),
        "usage": optional(USAGE),
    },
    (*_HEAD, "object", "choices"),
)


async def chat(call: Call) -> Reply | None:
    """Generate the next message of a conversation."""
    body, backend = call.body, call.model()
    wanted, is_stream = body.get("logprobs", False), body.get("stream", False)
    _refuse_what_does_not_go_together(body)
    ids = await chat_ids(backend, body["messages"], body.get("add_generation_prompt", True))
    ids = cut(ids, backend.card.max_len, body)
    check_fits(backend, ids, "messages")
    own: dict[str, Any] = {"logprobs": body.get("top_logprobs", 0) if wanted else None}
    if "max_completion_tokens" in body:
        own["max_tokens"] = body["max_completion_tokens"]
    params = sampling_of(body, **own)
    run = Generation(call, backend, params, options_of(body, call.settings.limits.request_s, call.client))
    logprobs = ChatLogprobs(tokenizer_of(backend)) if wanted else None
    slow = isolated_tokenizer(backend) if wanted else None
    if is_stream:
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


def _refuse_what_does_not_go_together(body: dict[str, Any]) -> None:
    most, other = body.get("max_tokens"), body.get("max_completion_tokens")
    refuse_together(
        most is not None and other is not None and most != other,
        "max_completion_tokens must equal max_tokens if both are set", "max_completion_tokens",
    )  # fmt: skip
    refuse_together(
        "top_logprobs" in body and not body.get("logprobs"), "top_logprobs requires logprobs", "top_logprobs"
    )
    refuse_together(
        "stream_options" in body and not body.get("stream", False), "stream_options requires stream", "stream_options"
    )


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
    with_usage = call.body.get("stream_options", {}).get("include_usage", False)
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
