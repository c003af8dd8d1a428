"""OpenAI's completions: from a request's body to a prompt and its sampling, from a result to the answer's body."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from penstock.engine.logprobs import TokenLogprobs
from penstock.engine.options import RequestOptions
from penstock.engine.params import SamplingParams
from penstock.errors import InvalidArgumentError
from penstock.llm.result import Choice, Result
from penstock.sampling_fields import FIELD_NAMES

if TYPE_CHECKING:
    from penstock.llm.llm import LLM
    from penstock.llm.prompts import Prompt

__all__ = ["CHAT", "COMPLETIONS", "answer_body", "read_body"]

COMPLETIONS: Final = "/v1/completions"
CHAT: Final = "/v1/chat/completions"
_LEAST: Final = -9999.0
"""The log-probability of what cannot come, as OpenAI writes it: JSON has no infinity."""


def read_body(llm: LLM, url: str, body: object) -> tuple[Prompt, SamplingParams, RequestOptions]:
    """The prompt and how to continue it; InvalidArgumentError names the field that is wrong or not known.

    Beside OpenAI's fields those of SamplingParams, and of a plain completion ``truncate_prompt`` (see RequestOptions).
    """
    if not isinstance(body, Mapping):
        raise InvalidArgumentError(f"body must be an object, not {body!r:.100}", param="body")
    values: dict[str, Any] = {name: value for name, value in body.items() if value is not None}
    if not isinstance(values.pop("model", ""), str):
        raise InvalidArgumentError(f"model must be a text, not {body['model']!r:.100}", param="model")
    if values.pop("stream", False) is not False:
        raise InvalidArgumentError("stream must be false: the answer is one object", param="stream")
    options = RequestOptions(truncate_prompt=values.pop("truncate_prompt", False))
    prompt: Prompt
    if url == CHAT:
        if options.truncate_prompt:
            raise InvalidArgumentError(
                "truncate_prompt must be false: a chat's messages are not cut", param="truncate_prompt"
            )
        if "max_completion_tokens" in values:
            longest = values.pop("max_completion_tokens")
            if values.setdefault("max_tokens", longest) != longest:
                raise InvalidArgumentError(
                    "max_tokens must not differ from max_completion_tokens, its other name", param="max_tokens"
                )
        wanted, num_top = values.pop("logprobs", False), values.pop("top_logprobs", 0)
        if not isinstance(wanted, bool):
            raise InvalidArgumentError(f"logprobs must be true or false, not {wanted!r:.100}", param="logprobs")
        if num_top and not wanted:
            raise InvalidArgumentError("top_logprobs needs logprobs to be true", param="top_logprobs")
        if wanted:
            values["logprobs"] = num_top
        prompt = llm.chat_prompt(values.pop("messages", None))
        allowed = [name for name in FIELD_NAMES if name not in ("echo", "prompt_logprobs")]
    elif url == COMPLETIONS:
        prompt = values.pop("prompt", None)
        if not isinstance(prompt, (str, list)) or any(
            isinstance(one, (str, list)) for one in prompt[:1] if isinstance(prompt, list)
        ):
            raise InvalidArgumentError(
                f"prompt must be one text or one list of token ids, not {prompt!r:.100}", param="prompt"
            )
        allowed = list(FIELD_NAMES)
        _resolve_echo(values)
        if options.truncate_prompt and values.get("echo"):
            raise InvalidArgumentError(
                "truncate_prompt must be false with echo, which gives the whole prompt again", param="truncate_prompt"
            )
    else:
        raise InvalidArgumentError(f"url must be {COMPLETIONS} or {CHAT}, not {url!r:.100}", param="url")
    for name in values:
        if name not in allowed:
            raise InvalidArgumentError(f"{name} is not a field of {url}", param=name)
    return prompt, SamplingParams(**values), options


def _resolve_echo(values: dict[str, Any]) -> None:
    """Echoed tokens have log-probabilities when the answer's do; an echo may be all that is wanted."""
    is_echo = values.get("echo") is True
    if "prompt_logprobs" in values and not (is_echo and "logprobs" in values):
        raise InvalidArgumentError(
            "prompt_logprobs needs echo and logprobs, among which they are given", param="prompt_logprobs"
        )
    if is_echo and "logprobs" in values:
        values.setdefault("prompt_logprobs", values["logprobs"])
    if _is_without_answer(values):
        if values.get("min_tokens"):
            raise InvalidArgumentError(
                f"min_tokens must be at most max_tokens (0), not {values['min_tokens']!r:.100}", param="min_tokens"
            )
        values["max_tokens"] = 1  # a prompt is continued by one token at least: it is left out of the answer


def _is_without_answer(body: Mapping[str, Any]) -> bool:
    """Whether a text is to be echoed and no more."""
    return body.get("echo") is True and type(body.get("max_tokens")) is int and body["max_tokens"] == 0


def answer_body(llm: LLM, url: str, body: Mapping[str, Any], result: Result) -> dict[str, Any]:
    """The answer's body, as OpenAI's reference has it; ``body`` is the request's, which ``read_body`` took."""
    is_chat = url == CHAT
    make = _chat_choice if is_chat else _text_choice
    if not is_chat and _is_without_answer(body):
        text = _echoed(llm, body, result)
        empty = (Choice(text, [], "length", one.seed, None if one.logprobs is None else []) for one in result.choices)
        result = replace(result, choices=tuple(empty))
    num_prompt, num_answer = len(result.prompt_token_ids), sum(len(c.token_ids) for c in result.choices)
    return {
        "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{uuid.uuid4().hex}",
        "object": "chat.completion" if is_chat else "text_completion",
        "created": int(time.time()),
        "model": body.get("model") or llm.info.network,
        "choices": [make(llm, index, choice, body, result) for index, choice in enumerate(result.choices)],
        "usage": {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_answer,
            "total_tokens": num_prompt + num_answer,
            "prompt_tokens_details": {"cached_tokens": result.num_cached_tokens},
        },
    }


def _chat_choice(llm: LLM, index: int, choice: Choice, body: Mapping[str, Any], result: Result) -> dict[str, Any]:
    def entry(token: int, logprob: float) -> dict[str, Any]:
        text = llm.tokenizer.decode([token], skip_special_tokens=False)
        return {"token": text, "logprob": max(logprob, _LEAST), "bytes": list(text.encode())}

    logprobs = None
    if choice.logprobs is not None:
        content = [
            {**entry(one.token_id, one.logprob), "top_logprobs": [entry(*pair) for pair in one.top]}
            for one in choice.logprobs
        ]
        logprobs = {"content": content}
    message = {"role": "assistant", "content": choice.text}
    return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": choice.finish_reason}


def _echoed(llm: LLM, body: Mapping[str, Any], result: Result) -> str:
    """What a text that echoes its prompt begins with."""
    prompt = body.get("prompt")
    return prompt if isinstance(prompt, str) else llm.tokenizer.decode(result.prompt_token_ids)


def _text_choice(llm: LLM, index: int, choice: Choice, body: Mapping[str, Any], result: Result) -> dict[str, Any]:
    logprobs = None
    if choice.logprobs is not None:
        listed: list[TokenLogprobs | None] = list(choice.logprobs)
        ids, offsets = list(choice.token_ids), _offsets(llm, choice.token_ids)
        if result.prompt_logprobs is not None:
            num_chars = len(_echoed(llm, body, result))
            before = [min(offset, num_chars) for offset in _offsets(llm, result.prompt_token_ids)]
            listed, ids = [*result.prompt_logprobs, *listed], [*result.prompt_token_ids, *ids]
            offsets = before + [num_chars + offset for offset in offsets]
        logprobs = _completion_logprobs(llm, ids, listed) | {"text_offset": offsets}
    return {"index": index, "text": choice.text, "logprobs": logprobs, "finish_reason": choice.finish_reason}


def _offsets(llm: LLM, ids: Sequence[int]) -> list[int]:
    """Characters that are complete before each token; a special token has none of its own."""
    detokenizer, offsets = llm.tokenizer.detokenizer(), [0]
    for token in ids:
        offsets.append(offsets[-1] + len(detokenizer.push(token)))
    return offsets[:-1]


def _completion_logprobs(llm: LLM, ids: list[int], listed: list[TokenLogprobs | None]) -> dict[str, Any]:
    def text(token: int) -> str:
        return llm.tokenizer.decode([token], skip_special_tokens=False)

    return {
        "tokens": [text(token) for token in ids],
        "token_logprobs": [None if one is None else max(one.logprob, _LEAST) for one in listed],
        "top_logprobs": [
            None if one is None else {text(i): max(value, _LEAST) for i, value in one.top} for one in listed
        ],
    }
