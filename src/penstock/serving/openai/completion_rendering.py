"""The format of ``/v1/completions``."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

from penstock.llm.backend import tokenizer_of
from penstock.serving.call import Call, Reply, quoted
from penstock.serving.generation import usage
from penstock.serving.openai.logprobs import TextLogprobsBuilder, joined
from penstock.serving.openai.rendering import Rendering
from penstock.text.tokenizer_threads import call_tokenizer

if TYPE_CHECKING:
    from penstock.engine.logprobs import TokenLogprobs
    from penstock.llm.backend import Answer, Backend, TokenDelta
    from penstock.serving.openai.bodies import CompletionRequest
    from penstock.serving.translation import EngineRequest

__all__ = ["CompletionRendering", "echoes_of", "scored"]


class _Text:
    """Collects the text and log-probabilities of one choice."""

    def __init__(self, backend: Backend, ids: list[int], echo: str | None, body: CompletionRequest) -> None:
        self._ids, self._echo = ids, echo
        self._logprobs = None if body.logprobs is None else _logprobs_after(echo, backend, body)
        self._has_begun = False
        self.texts: list[str] = []
        self.logprobs: list[dict[str, Any]] = []
        self.finish_reason = ""

    def take(self, delta: TokenDelta, answer: Answer) -> tuple[str, dict[str, Any] | None]:
        """Return the new text and its log-probabilities; the first call includes the echoed prompt."""
        before: list[TokenLogprobs | None] | None = None if self._has_begun else answer.prompt_logprobs
        self._has_begun = True
        text, logprobs = delta.text, None
        if self._logprobs is not None:
            if self._echo is not None and before is not None:
                logprobs = self._logprobs.prompt(self._ids, before)
            own = self._logprobs.of(delta.token_ids, delta.logprobs or [])
            logprobs = own if logprobs is None else joined([logprobs, own])
        if self._echo is not None:
            text, self._echo = self._echo + text, None
        return text, logprobs

    def keep(self, delta: TokenDelta, answer: Answer) -> None:
        """Store a delta for an answer that is sent whole."""
        text, logprobs = self.take(delta, answer)
        self.texts.append(text)
        if logprobs is not None:
            self.logprobs.append(logprobs)
        self.finish_reason = delta.finish_reason or self.finish_reason

    def choice(self, index: int) -> dict[str, Any]:
        """Return the whole choice."""
        logprobs = joined(self.logprobs) if self._logprobs is not None else None
        return {
            "index": index, "text": "".join(self.texts), "logprobs": logprobs, "finish_reason": self.finish_reason
        }  # fmt: skip


class CompletionRendering(Rendering):
    """Renders completions.  ``echoes``: the text that the answer to each prompt begins with, or None."""

    def __init__(self, call: Call, request: EngineRequest, echoes: list[str | None]) -> None:
        super().__init__(call, request, "cmpl", "text_completion", "text_completion")
        self._texts = [
            _Text(request.backend, ids, echo, call.body)
            for ids, echo in zip(request.prompts, echoes, strict=True)
            for _ in range(self._num_each)
        ]

    def event(self, prompt: int, answer: Answer, delta: TokenDelta) -> bytes:
        """Return the event of a delta; empty for an incomplete character."""
        index = prompt * self._num_each + delta.index
        text, logprobs = self._texts[index].take(delta, answer)
        if not text and logprobs is None and delta.finish_reason is None:
            return b""
        logprobs_json = "null" if logprobs is None else json.dumps(logprobs, separators=(",", ":"))
        reason = "null" if delta.finish_reason is None else f'"{delta.finish_reason}"'
        choice = f'{{"index":{index},"text":{quoted(text)},"logprobs":{logprobs_json},"finish_reason":{reason}}}'
        return (self._begin + choice + self._end).encode()

    def keep(self, prompt: int, answer: Answer, delta: TokenDelta) -> None:
        """Store a delta for an answer that is sent whole."""
        self._texts[prompt * self._num_each + delta.index].keep(delta, answer)

    def choices(self) -> list[dict[str, Any]]:
        """Return the answers that were stored."""
        return [text.choice(index) for index, text in enumerate(self._texts)]


def _logprobs_after(echo: str | None, backend: Backend, body: CompletionRequest) -> TextLogprobsBuilder:
    return TextLogprobsBuilder(tokenizer_of(backend), len(echo or ""), bool(body.return_tokens_as_token_ids))


async def echoes_of(call: Call, request: EngineRequest) -> list[str | None]:
    """Return the texts of the prompts if they are echoed, else None for each."""
    body: CompletionRequest = call.body
    if not body.echo:
        return [None] * len(request.prompts)
    return [
        await _text_of(request.backend, ids) if text is None else text
        for ids, text in zip(request.prompts, request.texts, strict=True)
    ]


async def _text_of(backend: Backend, ids: list[int]) -> str:
    tokenizer = tokenizer_of(backend)
    text: str = await call_tokenizer(tokenizer, len(ids), tokenizer.decode, ids)
    return text


async def scored(call: Call, request: EngineRequest, echoes: list[str | None]) -> Reply:
    """Return the prompts themselves, with their log-probabilities if they are requested (``max_tokens`` 0)."""
    body: CompletionRequest = call.body
    backend, num_top, choices, start = request.backend, body.logprobs, [], time.monotonic()
    for index, (ids, echo) in enumerate(zip(request.prompts, echoes, strict=True)):
        logprobs = None
        if num_top is not None:
            score = await backend.score(ids, num_top, request.options.since(start), request_id=call.request_id)
            tokenizer = tokenizer_of(backend)
            listed = _logprobs_after(echo, backend, body)
            logprobs = await call_tokenizer(tokenizer, len(ids), listed.prompt, ids, score.logprobs)
        choices.append({"index": index, "text": echo, "logprobs": logprobs, "finish_reason": "length"})
    num_tokens = call.facts["prompt_tokens"] = sum(map(len, request.prompts))
    return CompletionRendering(call, request, echoes).whole(choices, usage(num_tokens, 0, 0))
