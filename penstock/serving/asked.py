"""From a checked body to what the engine is asked: token ids, SamplingParams, RequestOptions."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from penstock.engine.options import RequestOptions
from penstock.engine.params import SamplingParams
from penstock.errors import UnsupportedError
from penstock.serving.fields import SAMPLING
from penstock.serving.refusals import RefusalError

if TYPE_CHECKING:
    from penstock.engine.text import Tokenizer
    from penstock.serving.backend import Backend

__all__ = ["beside", "chat_ids", "check_count", "cut", "options_of", "prompts_of", "sampling_of", "tokenizer_of"]

_LONG_TEXT: Final = 2000
"""Characters from which on text is tokenized beside the event loop."""
MAX_ANSWERS: Final = 1024


def tokenizer_of(backend: Backend) -> Tokenizer:
    """A model's tokenizer; UnsupportedError when it has none."""
    if backend.tokenizer is None:
        raise UnsupportedError("the model has no tokenizer: give token ids")
    return backend.tokenizer


async def beside(num_chars: int, call: Any, *arguments: Any, **named: Any) -> Any:
    """A call whose time goes with the length of a text: here when it is short, else in a thread."""
    if num_chars < _LONG_TEXT:
        return call(*arguments, **named)
    return await asyncio.to_thread(call, *arguments, **named)


async def prompts_of(backend: Backend, given: Any, field: str) -> list[tuple[list[int], str | None]]:
    """Each prompt as token ids, with its text where it was given as one."""
    several = [given] if isinstance(given, str) or isinstance(given[0], int) else given
    found: list[tuple[list[int], str | None]] = []
    for index, one in enumerate(several):
        name = field if several is not given else f"{field}[{index}]"
        if isinstance(one, str):
            ids = await beside(len(one), tokenizer_of(backend).encode, one)
            found.append((ids, one))
        else:
            ids = one
            found.append((one, None))
        if not ids:
            raise RefusalError(
                400, f"{name} is empty: it must have at least one token", param=field, code="invalid_value"
            )
        if max(ids) >= backend.card.vocab_size:
            message = f"{name} holds token id {max(ids)}, but the model has {backend.card.vocab_size}"
            raise RefusalError(400, message, param=field, code="invalid_value")
    return found


async def chat_ids(backend: Backend, messages: Sequence[Mapping[str, Any]], is_open: bool) -> list[int]:
    """The token ids of a conversation, with the opening of an answer when ``is_open``."""
    tokenizer = tokenizer_of(backend)
    if tokenizer.chat_template is None:
        raise UnsupportedError("the model has no chat template: use /v1/completions")
    plain = [{**one, "role": _role(one["role"]), "content": _text(one["content"])} for one in messages]
    return await asyncio.to_thread(_render, tokenizer, plain, is_open)  # a template's time is not its text's


def _role(role: str) -> str:
    """Templates know no developer, who is OpenAI's system."""
    return "system" if role == "developer" else role


def _text(content: str | list[dict[str, str]]) -> str:
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def _render(tokenizer: Tokenizer, messages: list[dict[str, Any]], is_open: bool) -> list[int]:
    from penstock.engine.chat import render_chat

    template = tokenizer.chat_template or ""
    text = render_chat(template, messages, tokenizer.special_tokens, add_generation_prompt=is_open)
    return tokenizer.encode(text, add_special_tokens=False)


def sampling_of(body: Mapping[str, Any], **beyond: Any) -> SamplingParams:
    """The sampling fields of a body; ``beyond`` are those that a route has under other names."""
    values = {name: body[name] for name in SAMPLING if name in body}
    if values.get("top_k") == -1:
        values["top_k"] = 0
    return SamplingParams(**values | beyond)


def options_of(body: Mapping[str, Any], request_s: float) -> RequestOptions:
    """How a request is served; it ends after ``request_s`` if not earlier."""
    return RequestOptions(
        priority=body.get("priority", 0),
        deadline_s=min(body.get("timeout", request_s), request_s),
        cache_salt=body.get("cache_salt", ""),
        truncate_prompt=body.get("truncate_prompt_tokens") == -1,
    )


def cut(ids: list[int], body: Mapping[str, Any]) -> list[int]:
    """The end of a prompt that ``truncate_prompt_tokens`` keeps."""
    keep = body.get("truncate_prompt_tokens", -1)
    return ids if keep < 0 else ids[-keep:]


def check_count(num_prompts: int, body: Mapping[str, Any]) -> None:
    """Refuse a body that asks for more answers than one request may."""
    wanted = num_prompts * max(body.get("n", 1), body.get("best_of", 1))
    if wanted > MAX_ANSWERS:
        raise RefusalError(
            400, f"{wanted} answers are asked for; one request may have {MAX_ANSWERS}", param="n", code="invalid_value"
        )
