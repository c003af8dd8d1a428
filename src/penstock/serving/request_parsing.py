"""From a checked body to what the engine is asked: token ids, SamplingParams, RequestOptions."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from penstock.api_errors import RefusalError
from penstock.engine.options import RequestOptions
from penstock.engine.params import SamplingParams
from penstock.errors import UnsupportedError
from penstock.serving.request_fields import SAMPLING
from penstock.text.tokenizer_threads import call_tokenizer

if TYPE_CHECKING:
    from penstock.llm.backend import Backend
    from penstock.text.tokenizer import Tokenizer

__all__ = [
    "chat_ids",
    "check_count",
    "check_fits",
    "cut",
    "isolated_tokenizer",
    "options_of",
    "prompts_of",
    "sampling_of",
    "text_ids",
    "tokenizer_of",
]

MAX_ANSWERS: Final = 1024


def tokenizer_of(backend: Backend) -> Tokenizer:
    """A model's tokenizer; UnsupportedError when it has none."""
    if backend.tokenizer is None:
        raise UnsupportedError("the model has no tokenizer: give token ids")
    return backend.tokenizer


def isolated_tokenizer(backend: Backend) -> Tokenizer | None:
    """A model's tokenizer when it runs in another process, which the event loop must not wait for; else None."""
    tokenizer = backend.tokenizer
    return tokenizer if tokenizer is not None and tokenizer.is_isolated else None


async def prompts_of(
    backend: Backend, given: Any, field: str, body: Mapping[str, Any]
) -> list[tuple[list[int], str | None]]:
    """Each prompt as token ids, cut where ``truncate_prompt_tokens`` says so, with its text where that is all of it.

    What no context holds is refused before anybody spends time on it.
    """
    several = [given] if isinstance(given, str) or isinstance(given[0], int) else given
    found: list[tuple[list[int], str | None]] = []
    for index, one in enumerate(several):
        name = field if several is not given else f"{field}[{index}]"
        text = one if isinstance(one, str) else None
        whole = await text_ids(backend, one, body, field) if isinstance(one, str) else one
        ids = cut(whole, backend.card.max_len, body)
        if not ids:
            message = f"{name} is empty: it must have at least one token"
            raise RefusalError(400, message, param=field, code="invalid_value")
        check_fits(backend, ids, name)
        if max(ids) >= backend.card.vocab_size:
            message = f"{name} holds token id {max(ids)}, but the model has {backend.card.vocab_size}"
            raise RefusalError(400, message, param=field, code="invalid_value")
        found.append((ids, text if len(ids) == len(whole) else None))
    return found


async def text_ids(
    backend: Backend, text: str, body: Mapping[str, Any], field: str = "prompt", **named: Any
) -> list[int]:
    """A text's token ids; of one that no context holds the end, when it is to be cut, else 400 with ``field``."""
    tokenizer = tokenizer_of(backend)
    bound = await _bound(backend, tokenizer, len(text))
    if len(text) > bound:
        if "truncate_prompt_tokens" not in body:
            raise _too_long(f"a text has {len(text)} characters", backend, field)
        text = text[-bound:]
    ids: list[int] = await call_tokenizer(tokenizer, len(text), tokenizer.encode, text, **named)
    return ids


async def _bound(backend: Backend, tokenizer: Tokenizer, num_chars: int) -> int:
    """Characters that no context holds more of; the vocabulary is looked at for a text that comes near."""
    most = 2 * backend.card.max_len  # twice as many: a normalizer may make a text shorter
    if num_chars <= most:
        return most
    longest: int = await call_tokenizer(tokenizer, num_chars, lambda: tokenizer.longest_token)
    return most * longest


def check_fits(backend: Backend, ids: Sequence[int], name: str) -> None:
    """400 for a prompt that the context does not hold, before it goes to a worker."""
    if len(ids) > backend.card.max_len:
        raise _too_long(f"{name} has {len(ids)} tokens", backend, name.partition("[")[0])


def _too_long(what: str, backend: Backend, field: str) -> RefusalError:
    message = f"{what}, but the context holds {backend.card.max_len} tokens"
    return RefusalError(400, message, param=field, code="context_length_exceeded")


async def chat_ids(backend: Backend, messages: Sequence[Mapping[str, Any]], is_open: bool) -> list[int]:
    """The token ids of a conversation, with the opening of an answer when ``is_open``."""
    tokenizer = tokenizer_of(backend)
    if tokenizer.chat_template is None:
        raise UnsupportedError("the model has no chat template: use /v1/completions")
    num_chars = sum(len(_text(one["content"])) for one in messages)
    if num_chars > await _bound(backend, tokenizer, num_chars):
        raise _too_long(f"messages have {num_chars} characters", backend, "messages")
    plain = [{**one, "role": _role(one["role"]), "content": _text(one["content"])} for one in messages]
    text = await asyncio.to_thread(_render, tokenizer, plain, is_open)  # a template's time is not its text's
    ids: list[int] = await call_tokenizer(tokenizer, len(text), tokenizer.encode, text, add_special_tokens=False)
    return ids


def _role(role: str) -> str:
    """Templates know no developer, who is OpenAI's system."""
    return "system" if role == "developer" else role


def _text(content: str | list[dict[str, str]]) -> str:
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def _render(tokenizer: Tokenizer, messages: list[dict[str, Any]], is_open: bool) -> str:
    from penstock.text.chat_template import render_chat

    template = tokenizer.chat_template or ""
    return render_chat(template, messages, tokenizer.special_tokens, add_generation_prompt=is_open)


def sampling_of(body: Mapping[str, Any], **beyond: Any) -> SamplingParams:
    """The sampling fields of a body; ``beyond`` are those that a route has under other names."""
    values = {name: body[name] for name in SAMPLING if name in body}
    if values.get("top_k") == -1:
        values["top_k"] = 0
    return SamplingParams(**values | beyond)


def options_of(body: Mapping[str, Any], request_s: float, client: str) -> RequestOptions:
    """How a request of ``client`` is served; it ends after ``request_s`` if not earlier."""
    return RequestOptions(
        priority=body.get("priority", 0),
        deadline_s=min(body.get("timeout", request_s), request_s),
        cache_salt=body.get("cache_salt", ""),
        truncate_prompt=body.get("truncate_prompt_tokens") == -1,
        client=client,
    )


def cut(ids: list[int], max_len: int, body: Mapping[str, Any]) -> list[int]:
    """The end of a prompt that ``truncate_prompt_tokens`` keeps; for -1 the engine cuts what is left of a context."""
    keep = body.get("truncate_prompt_tokens")
    if keep is None:
        return ids
    return ids[-max_len if keep < 0 else -keep :]


def check_count(num_prompts: int, body: Mapping[str, Any]) -> None:
    """Refuse a body that asks for more answers than one request may."""
    wanted = num_prompts * max(body.get("n", 1), body.get("best_of", 1))
    if wanted > MAX_ANSWERS:
        raise RefusalError(
            400, f"{wanted} answers are asked for; one request may have {MAX_ANSWERS}", param="n", code="invalid_value"
        )
