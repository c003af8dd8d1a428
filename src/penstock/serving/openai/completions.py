"""``POST /v1/completions``: OpenAI's text completions, whole or as a stream of events."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

from penstock.serving.call import Call, Events, Reply, json_reply, quoted
from penstock.serving.generation import Generation, check_stream_options, includes_usage, refuse_together, usage
from penstock.serving.openai.bodies import CompletionRequest
from penstock.serving.openai.logprobs import TextLogprobs, joined
from penstock.serving.request_parsing import (
    check_count,
    isolated_tokenizer,
    options_of,
    prompts_of,
    sampling_of,
    tokenizer_of,
)
from penstock.text.tokenizer_threads import call_isolated, call_tokenizer

if TYPE_CHECKING:
    from penstock.engine.logprobs import TokenLogprobs
    from penstock.llm.backend import Answer, Backend, Delta
    from penstock.text.tokenizer import Tokenizer

__all__ = ["complete"]


class _Text:
    """Collects the text and log-probabilities of one choice."""

    def __init__(self, backend: Backend, ids: list[int], echo: str | None, with_logprobs: bool) -> None:
        self._ids, self._echo = ids, echo
        self._logprobs = TextLogprobs(tokenizer_of(backend), len(echo or "")) if with_logprobs else None
        self.texts: list[str] = []
        self.logprobs: list[dict[str, Any]] = []
        self.finish_reason = ""

    def take(self, delta: Delta, before: list[TokenLogprobs | None] | None) -> tuple[str, dict[str, Any] | None]:
        """Return the new text and its log-probabilities; the first call includes the echoed prompt."""
        text, found = delta.text, None
        if self._logprobs is not None:
            if self._echo is not None and before is not None:
                found = self._logprobs.prompt(self._ids, before)
            own = self._logprobs.of(delta.token_ids, delta.logprobs or [])
            found = own if found is None else joined([found, own])
        if self._echo is not None:
            text, self._echo = self._echo + text, None
        return text, found

    def keep(self, text: str, found: dict[str, Any] | None, finish_reason: str | None) -> None:
        """Store a delta for an answer that is sent whole."""
        self.texts.append(text)
        if found is not None:
            self.logprobs.append(found)
        self.finish_reason = finish_reason or self.finish_reason

    def choice(self, index: int) -> dict[str, Any]:
        """Return the whole choice."""
        logprobs = joined(self.logprobs) if self._logprobs is not None else None
        return {
            "index": index, "text": "".join(self.texts), "logprobs": logprobs, "finish_reason": self.finish_reason
        }  # fmt: skip


async def complete(call: Call) -> Reply | None:
    """Complete one or more prompts."""
    body: CompletionRequest = call.body
    backend = call.model(body.model)
    _refuse_what_does_not_go_together(body)
    num_top, is_echo = body.logprobs, body.echo
    given = await prompts_of(backend, body.prompt, "prompt", body)
    check_count(len(given), body)
    prompts = [ids for ids, _ in given]
    echoes: list[str | None] = [None] * len(prompts)
    if is_echo:
        for i, (_, text) in enumerate(given):
            echoes[i] = text if text is not None else await _text_of(backend, prompts[i])
    head = _head(call, backend)
    if body.max_tokens == 0:
        return await _echo_alone(call, backend, prompts, echoes, head)
    prompt_logprobs = num_top if is_echo else None
    params = sampling_of(body, logprobs=num_top, prompt_logprobs=prompt_logprobs, best_of=body.best_of)
    run = Generation(call, backend, params, options_of(body, call.settings.limits.request_s, call.client))
    n = params.n
    texts = {
        i * n + j: _Text(backend, prompts[i], echoes[i], num_top is not None)
        for i in range(len(prompts))
        for j in range(n)
    }
    slow = isolated_tokenizer(backend) if num_top is not None else None
    if body.stream:
        await _stream(call, run, prompts, texts, head, slow)
        return None

    def keep(i: int, answer: Answer, delta: Delta) -> bool:
        text = texts[i * n + delta.index]
        text.keep(*text.take(delta, answer.prompt_logprobs if not text.texts else None), delta.finish_reason)
        return True

    async def take(i: int, answer: Answer, delta: Delta) -> None:
        await call_isolated(slow, keep, i, answer, delta)

    await run.run(prompts, take, keep if slow is None else None)
    return _whole(head, [text.choice(index) for index, text in texts.items()], run)


async def _text_of(backend: Backend, ids: list[int]) -> str:
    tokenizer = tokenizer_of(backend)
    text: str = await call_tokenizer(tokenizer, len(ids), tokenizer.decode, ids)
    return text


def _refuse_what_does_not_go_together(body: CompletionRequest) -> None:
    n, best_of = body.n or 1, body.best_of or 1
    if body.max_tokens == 0:
        refuse_together(not body.echo, "max_tokens must not be 0 without echo", "max_tokens")
        refuse_together(bool(body.stream), "max_tokens must not be 0 with stream", "max_tokens")
        refuse_together(n > 1, "n must be 1 if max_tokens is 0", "n")
        refuse_together(best_of > 1, "best_of must be 1 if max_tokens is 0", "best_of")
    refuse_together(
        body.echo and body.truncate_prompt_tokens == -1, "truncate_prompt_tokens must not be -1 with echo. Pass a "
        "number of tokens.", "truncate_prompt_tokens",
    )  # fmt: skip
    check_stream_options(body)
    refuse_together(bool(body.stream) and best_of > n, "best_of must equal n with stream", "best_of")


def _head(call: Call, backend: Backend) -> dict[str, Any]:
    return {
        "id": f"cmpl-{call.request_id}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": backend.name,
        "system_fingerprint": f"v{backend.card.version}",
    }


def _whole(head: dict[str, Any], choices: list[dict[str, Any]], run: Generation) -> Reply:
    counts = usage(run.num_prompt_tokens, run.num_output_tokens, run.num_cached_tokens)
    return json_reply({**head, "choices": choices, "usage": counts})


async def _echo_alone(
    call: Call, backend: Backend, prompts: list[list[int]], echoes: list[str | None], head: dict[str, Any]
) -> Reply:
    """Handle ``max_tokens`` 0: return the prompt itself, with its log-probabilities if requested."""
    body: CompletionRequest = call.body
    num_top, options = body.logprobs, options_of(body, call.settings.limits.request_s, call.client)
    choices = []
    for index, (ids, echo) in enumerate(zip(prompts, echoes, strict=True)):
        found = None
        if num_top is not None:
            score = await backend.score(ids, num_top, options, request_id=call.request_id)
            tokenizer = tokenizer_of(backend)
            listed = TextLogprobs(tokenizer, len(echo or ""))
            found = await call_tokenizer(tokenizer, len(ids), listed.prompt, ids, score.logprobs)
        choices.append({"index": index, "text": echo, "logprobs": found, "finish_reason": "length"})
    return json_reply({**head, "choices": choices, "usage": usage(sum(map(len, prompts)), 0, 0)})


async def _stream(
    call: Call,
    run: Generation,
    prompts: list[list[int]],
    texts: dict[int, _Text],
    head: dict[str, Any],
    slow: Tokenizer | None,
) -> None:
    """Send an event per step and choice; the constant parts of events are encoded once.

    ``slow``: a tokenizer in another process, which decodes tokens for the log-probabilities; None if there is none.
    """
    n, events = len(texts) // len(prompts), Events(call)
    with_usage = includes_usage(call.body)
    begin = "data: " + json.dumps(head, separators=(",", ":"))[:-1] + ',"choices":['
    end = '],"usage":null}\n\n' if with_usage else "]}\n\n"
    begun = set()

    def event(i: int, answer: Answer, delta: Delta) -> bytes:
        index = i * n + delta.index
        is_first = index not in begun
        begun.add(index)
        text, found = texts[index].take(delta, answer.prompt_logprobs if is_first else None)
        if not text and found is None and delta.finish_reason is None:
            return b""  # an incomplete character
        logprobs = "null" if found is None else json.dumps(found, separators=(",", ":"))
        reason = "null" if delta.finish_reason is None else f'"{delta.finish_reason}"'
        choice = f'{{"index":{index},"text":{quoted(text)},"logprobs":{logprobs},"finish_reason":{reason}}}'
        return (begin + choice + end).encode()

    async def take(i: int, answer: Answer, delta: Delta) -> None:
        await events.write(await call_isolated(slow, event, i, answer, delta))

    def take_now(i: int, answer: Answer, delta: Delta) -> bool:
        return events.write_now(lambda: event(i, answer, delta))

    await run.run(prompts, take, take_now if slow is None else None)
    last = b"data: [DONE]\n\n"
    if with_usage:
        counts = json.dumps(usage(run.num_prompt_tokens, run.num_output_tokens, run.num_cached_tokens))
        last = f'{begin}],"usage":{counts}}}\n\n'.encode() + last
    await events.end(last)
