"""OpenAI's completions: from a request's body to a prompt and its sampling, from a result to the answer's body."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from penstock.engine.params import FIELDS, SamplingParams
from penstock.engine.request import TokenLogprobs
from penstock.engine.result import Choice, Result
from penstock.errors import InvalidArgumentError

if TYPE_CHECKING:
    from penstock.engine.llm import LLM
    from penstock.engine.prompts import Prompt

__all__ = ["CHAT", "COMPLETIONS", "answer_body", "read_body"]

COMPLETIONS: Final = "/v1/completions"
CHAT: Final = "/v1/chat/completions"
_LEAST: Final = -9999.0
"""The log-probability of what cannot come, as OpenAI writes it: JSON has no infinity."""


def read_body(llm: LLM, url: str, body: object) -> tuple[Prompt, SamplingParams]:
    """The prompt and how to continue it; InvalidArgumentError names the field that is wrong or not known."""
    if not isinstance(body, Mapping):
        raise InvalidArgumentError(f"body must be an object, not {body!r:.100}")
    values: dict[str, Any] = {name: value for name, value in body.items() if value is not None}
    if not isinstance(values.pop("model", ""), str):
        raise InvalidArgumentError(f"model must be a text, not {body['model']!r:.100}")
    if values.pop("stream", False) is not False:
        raise InvalidArgumentError("stream must be false: the answer is one object")
    prompt: Prompt
    if url == CHAT:
        if "max_completion_tokens" in values:
            values["max_tokens"] = values.pop("max_completion_tokens")
        wanted, num_top = values.pop("logprobs", False), values.pop("top_logprobs", 0)
        if not isinstance(wanted, bool):
            raise InvalidArgumentError(f"logprobs must be true or false, not {wanted!r:.100}")
        if num_top and not wanted:
            raise InvalidArgumentError("top_logprobs needs logprobs to be true")
        if wanted:
            values["logprobs"] = num_top
        prompt = llm.chat_prompt(values.pop("messages", None))
    elif url == COMPLETIONS:
        prompt = values.pop("prompt", None)
        if not isinstance(prompt, (str, list)) or any(
            isinstance(one, (str, list)) for one in prompt[:1] if isinstance(prompt, list)
        ):
            raise InvalidArgumentError(f"prompt must be one text or one list of token ids, not {prompt!r:.100}")
    else:
        raise InvalidArgumentError(f"url must be {COMPLETIONS} or {CHAT}, not {url!r:.100}")
    for name in values:
        if name not in FIELDS:
            raise InvalidArgumentError(f"{name} is not a field of {url}")
    return prompt, SamplingParams(**values)


def answer_body(llm: LLM, url: str, body: Mapping[str, Any], params: SamplingParams, result: Result) -> dict[str, Any]:
    """The answer's body, as OpenAI's reference has it."""
    is_chat = url == CHAT
    make = _chat_choice if is_chat else _text_choice
    num_prompt, num_answer = len(result.prompt_token_ids), sum(len(c.token_ids) for c in result.choices)
    return {
        "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{uuid.uuid4().hex}",
        "object": "chat.completion" if is_chat else "text_completion",
        "created": int(time.time()),
        "model": body.get("model") or llm.info.network,
        "choices": [make(llm, index, choice, params, result) for index, choice in enumerate(result.choices)],
        "usage": {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_answer,
            "total_tokens": num_prompt + num_answer,
            "prompt_tokens_details": {"cached_tokens": result.num_cached_tokens},
        },
    }


def _chat_choice(llm: LLM, index: int, choice: Choice, params: SamplingParams, result: Result) -> dict[str, Any]:
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


def _text_choice(llm: LLM, index: int, choice: Choice, params: SamplingParams, result: Result) -> dict[str, Any]:
    logprobs = None
    if choice.logprobs is not None:
        listed: list[TokenLogprobs | None] = list(choice.logprobs)
        ids = list(choice.token_ids)
        if params.echo and result.prompt_logprobs is not None:
            listed, ids = [*result.prompt_logprobs, *listed], [*result.prompt_token_ids, *ids]
        logprobs = _completion_logprobs(llm, ids, listed)
    return {"index": index, "text": choice.text, "logprobs": logprobs, "finish_reason": choice.finish_reason}


def _completion_logprobs(llm: LLM, ids: list[int], listed: list[TokenLogprobs | None]) -> dict[str, Any]:
    def text(token: int) -> str:
        return llm.tokenizer.decode([token], skip_special_tokens=False)

    tokens = [text(token) for token in ids]
    offsets = [0]
    for token in tokens:
        offsets.append(offsets[-1] + len(token))
    return {
        "tokens": tokens,
        "token_logprobs": [None if one is None else max(one.logprob, _LEAST) for one in listed],
        "top_logprobs": [
            None if one is None else {text(i): max(value, _LEAST) for i, value in one.top} for one in listed
        ],
        "text_offset": offsets[:-1],
    }
