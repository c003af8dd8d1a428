"""Translate a decoded body to an engine request: token ids, SamplingParams, RequestOptions."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final

from penstock.api_errors import RefusalError
from penstock.engine.options import BeamSettings, RequestOptions
from penstock.engine.params import SamplingParams
from penstock.llm.backend import tokenizer_of
from penstock.sampling_fields import SAMPLING_FIELDS
from penstock.serving.admission import deadline_s
from penstock.serving.openai.answer_format import checked_grammar
from penstock.serving.openai.answer_spec import (
    answer_spec_of,
    chat_grammar,
    format_of_history,
    num_tool_chars,
    prompt_of_tools,
    template_tools,
    template_variables,
)
from penstock.serving.openai.bodies import BY_ROUTE
from penstock.serving.openai.messages import continued_field, num_chars, rendered
from penstock.serving.openai.thinking_budget import budget_fields
from penstock.serving.request_fields import SAMPLING
from penstock.text.answer.response_template import declared_formats
from penstock.text.answer.tool_prompt import render_described, with_plain_calls
from penstock.text.cut import encode_text
from penstock.text.grammar.source import GRAMMAR_FIELDS
from penstock.text.reranking import encode_pair
from penstock.text.tokenizer_threads import call_tokenizer
from penstock.validation import MAX_TOKEN

if TYPE_CHECKING:
    from penstock.checkpoint.pooling.head import PoolingHead
    from penstock.llm.backend import Backend
    from penstock.serving.call import Call
    from penstock.serving.openai.answer_spec import AnswerSpec
    from penstock.serving.openai.bodies import (
        ChatCompletionRequest,
        CompletionRequest,
        TokenizeRequest,
    )
    from penstock.serving.openai.messages import Message, continued_field
    from penstock.serving.request_fields import SamplingFields, ServingFields
    from penstock.serving.settings import GatewaySettings
    from penstock.text.answer.formats import AnswerFormat
    from penstock.text.tokenizer import Tokenizer

__all__ = [
    "EngineRequest", "chat_prompt", "chat_request", "completion_request", "options_of", "prompts_of", "text_ids",
    "text_request", "vector_ids",
]  # fmt: skip

MAX_ANSWERS: Final = 2048
_STRINGS: Final = {row.name for row in SAMPLING_FIELDS if row.kind == "strings"}


@dataclass(frozen=True)
class EngineRequest:
    """The work that a request gives to an engine: prompts with the same sampling and options.

    ``prompts``: token ids.  ``texts``: the text of each prompt that was sent as text and not truncated, else None.
    ``spec``: how the answers to a conversation are read; None if their text is the content.  ``beams``: the answers are
    the best ones of a beam search.
    """

    backend: Backend
    prompts: list[list[int]]
    texts: list[str | None]
    params: SamplingParams
    options: RequestOptions
    spec: AnswerSpec | None = None
    beams: BeamSettings | None = None


async def completion_request(call: Call) -> EngineRequest:
    """Translate a CompletionRequest."""
    body: CompletionRequest = call.body
    backend = call.model(body.model)
    if body.max_tokens == 0:  # the prompts are scored; nothing is sampled
        own: dict[str, Any] = {"max_tokens": 1}
    else:
        own = {"logprobs": body.logprobs, "prompt_logprobs": body.logprobs if body.echo else None}
        own |= {name: value for name in BY_ROUTE if (value := getattr(body, name)) is not None}
    return await text_request(call, backend, body.prompt, "prompt", body, **own)


async def text_request(
    call: Call, backend: Backend, prompt_field: Any, field: str, body: SamplingFields, **own: Any
) -> EngineRequest:
    """Translate the prompts ``prompt_field`` in a field of a body; ``own`` are sampling parameters of the route."""
    prompts = await prompts_of(backend, prompt_field, field, body)
    _check_count(len(prompts), body)
    params = _sampling_of(body, best_of=body.best_of, **await checked_grammar(body), **own)
    return EngineRequest(
        backend, [ids for ids, _ in prompts], [text for _, text in prompts], params, options_of(call, body)
    )


async def chat_request(call: Call) -> EngineRequest:
    """Translate a ChatCompletionRequest."""
    body: ChatCompletionRequest = call.body
    backend = call.model(body.model)
    prompt = await chat_prompt(backend, body.messages, body, call.settings)
    spec = await answer_spec_of(body, call.settings, tokenizer_of(backend), prompt.template, prompt.text)
    ids = _cut(prompt.ids, backend.card.max_len, body)
    _check_fits(backend, ids, "messages")
    own = await chat_grammar(body, spec) | budget_fields(body, call.settings, prompt.template, prompt.declared)
    if spec is not None and spec.kept_special_ids:
        own["kept_special_token_ids"] = spec.kept_special_ids
    num_top = (body.top_logprobs or 0) if body.logprobs else None
    max_tokens = body.max_completion_tokens or body.max_tokens
    params = _sampling_of(body, logprobs=num_top, max_tokens=max_tokens, **own)
    spec = None if spec is None or spec.is_text else spec
    return EngineRequest(backend, [ids], [None], params, options_of(call, body), spec)


async def prompts_of(
    backend: Backend, prompt_field: Any, field: str, body: ServingFields
) -> list[tuple[list[int], str | None]]:
    """Return each prompt as token ids, truncated by ``truncate_prompt_tokens``, and its text if it was not truncated.

    Prompts that cannot fit into the context are refused before they are tokenized.
    """
    several = [prompt_field] if isinstance(prompt_field, str) or isinstance(prompt_field[0], int) else prompt_field
    prompts: list[tuple[list[int], str | None]] = []
    for index, prompt in enumerate(several):
        name = field if several is not prompt_field else f"{field}[{index}]"
        text = prompt if isinstance(prompt, str) else None
        is_cut = body.truncate_prompt_tokens is not None
        whole = await text_ids(backend, prompt, field, is_cut=is_cut) if isinstance(prompt, str) else prompt
        ids = _cut(whole, backend.card.max_len, body)
        if not ids:
            message = f"{name} is empty. It must have at least one token."
            raise RefusalError(400, message, param=field, code="invalid_value")
        _check_fits(backend, ids, name)
        if max(ids) >= backend.card.vocab_size:
            message = f"{name}: token id {max(ids)} is out of range. The model has {backend.card.vocab_size} tokens."
            raise RefusalError(400, message, param=field, code="invalid_value")
        prompts.append((ids, text if len(ids) == len(whole) else None))
    return prompts


async def text_ids(
    backend: Backend, text: str, field: str = "prompt", *, is_cut: bool = False, **named: Any
) -> list[int]:
    """Return the token ids of a text.

    A text that cannot fit into the context is cut to its end if ``is_cut`` is set; otherwise the request is refused
    with 400 and ``field``.
    """
    tokenizer = tokenizer_of(backend)
    bound = await _bound(backend, tokenizer, len(text))
    if len(text) > bound:
        if not is_cut:
            raise _too_long(f"{field}: the text has {len(text)} characters", backend, field)
        text = text[-bound:]
    ids: list[int] = await call_tokenizer(tokenizer, len(text), tokenizer.encode, text, **named)
    return ids


async def vector_ids(backend: Backend, text: str, head: PoolingHead) -> list[int]:
    """Return the token ids of a text that becomes a vector, cut as the model's files say."""
    tokenizer = tokenizer_of(backend)
    text = text[: await _bound(backend, tokenizer, len(text))] if head.max_text_len else text
    return [*await call_tokenizer(tokenizer, len(text), encode_text, tokenizer.encode, text, head)]


async def pair_ids(backend: Backend, first: str, second: str, body: ServingFields, field: str) -> list[int]:
    """Return the token ids of two texts together, with the instruction of the body if it has one.

    ``truncate_prompt_tokens`` cuts the second text.  Without it a pair that does not fit is refused with 400 and
    ``field``.
    """
    tokenizer, limit = tokenizer_of(backend), backend.card.max_len
    is_cut = body.truncate_prompt_tokens is not None
    instruction: str | None = getattr(body, "instruction", None)
    num_fixed = len(first) + len(instruction or "")
    bound = await _bound(backend, tokenizer, num_fixed + len(second))
    if num_fixed + len(second) > bound:
        if not is_cut or num_fixed > bound:
            raise _too_long(f"{field}: the pair has {num_fixed + len(second)} characters", backend, field)
        second = second[: bound - num_fixed]
    if body.truncate_prompt_tokens not in (None, -1):
        limit = min(limit, body.truncate_prompt_tokens or limit)
    call = partial(encode_pair, tokenizer, first, second, limit if is_cut else None, instruction)
    # The first call reads the file's template, which may take long: the event loop must not wait for it.
    ids: list[int] = await call_tokenizer(tokenizer, MAX_TOKEN, call)
    _check_fits(backend, ids, field)
    return ids


async def _bound(backend: Backend, tokenizer: Tokenizer, num_chars: int) -> int:
    """Return the most characters that can fit into the context; the vocabulary is only scanned for long texts."""
    most = 2 * backend.card.max_len  # twice, because a normalizer may shorten a text
    if num_chars <= most:
        return most
    longest: int = await call_tokenizer(tokenizer, num_chars, lambda: tokenizer.longest_token)
    return most * longest


def _check_fits(backend: Backend, ids: Sequence[int], name: str) -> None:
    """Refuse a prompt that is longer than the context with 400, before it is sent to a worker."""
    if len(ids) > backend.card.max_len:
        raise _too_long(f"{name} has {len(ids)} tokens", backend, name.partition("[")[0])


def _too_long(what: str, backend: Backend, field: str) -> RefusalError:
    message = f"{what}, but the context holds {backend.card.max_len} tokens"
    return RefusalError(400, message, param=field, code="context_length_exceeded")


@dataclass(frozen=True)
class ChatPrompt:
    """A rendered conversation, and the template that rendered it.

    ``declared``: the formats that the model declares.
    """

    text: str
    ids: list[int]
    template: str
    declared: AnswerFormat


async def chat_prompt(
    backend: Backend,
    messages: Sequence[Message],
    body: ChatCompletionRequest | TokenizeRequest,
    settings: GatewaySettings,
) -> ChatPrompt:
    """Render a conversation, and the beginning of the assistant's message if it is asked for."""
    tokenizer, tools = tokenizer_of(backend), template_tools(body)
    from penstock.text.chat_template import find_template, render_chat

    template = find_template(tokenizer, has_tools=tools is not None)  # refuses before the messages are measured
    size = num_chars(messages) + num_tool_chars(body)
    if size > await _bound(backend, tokenizer, size):
        raise _too_long(f"messages have {size} characters", backend, "messages")
    continues = continued_field(body)
    render = partial(
        render_chat,
        template,
        special_tokens=tokenizer.special_tokens,
        add_generation_prompt=body.add_generation_prompt is not False and not continues,
        continue_final_message=continues,
        tools=tools,
        variables=template_variables(body, template),
    )
    declared = declared_formats(tokenizer)
    described = prompt_of_tools(body, settings.tool_format, template, declared)
    written = format_of_history(settings.tool_format, template, declared)

    def render_with_tools(listed: list[dict[str, Any]]) -> str:
        return render_described(render, listed if written is None else with_plain_calls(listed, written), described)

    text = await asyncio.to_thread(rendered, messages, render_with_tools)  # may be slow for a short text
    ids: list[int] = await call_tokenizer(tokenizer, len(text), tokenizer.encode, text, add_special_tokens=False)
    return ChatPrompt(text, ids, template, declared)


def _sampling_of(body: SamplingFields, **beyond: Any) -> SamplingParams:
    """Return the sampling parameters of a body; ``beyond`` are fields that a route has under other names.

    Empty strings and an empty list of biases, which ask for nothing, are left out.
    """
    named = (name for name in SAMPLING if name not in GRAMMAR_FIELDS)  # checked_grammar has returned them
    values = {name: value for name in named if (value := getattr(body, name)) is not None}
    if values.get("top_k") == -1:
        values["top_k"] = 0
    if values.get("thinking_token_budget") == -1:
        del values["thinking_token_budget"]
    for name in _STRINGS & values.keys():
        several = [values[name]] if isinstance(values[name], str) else values[name]
        values[name] = [text for text in several if text]
    if not values.get("logit_bias", True):
        del values["logit_bias"]
    return SamplingParams(**values | beyond)


def options_of(call: Call, body: ServingFields) -> RequestOptions:
    """Return the options of a request.  Raises DeadlineError if its deadline is over."""
    return RequestOptions(
        priority=body.priority or 0,
        deadline_s=deadline_s(call, body.timeout_s),
        cache_salt=body.cache_salt or "",
        truncate_prompt=body.truncate_prompt_tokens == -1,
        client=call.client,
        session=_session(call, body),
    )


def _session(call: Call, body: ServingFields) -> str:
    """Return the session of a request: that of its client and ``prompt_cache_key`` or ``user``; "" without both."""
    name = getattr(body, "prompt_cache_key", None) or body.user
    if not name:
        return ""
    return blake2b(f"{call.client}\0{name}".encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _cut(ids: list[int], max_len: int, body: ServingFields) -> list[int]:
    """Return the part of a prompt that ``truncate_prompt_tokens`` keeps; for -1 the engine makes the final cut."""
    keep = body.truncate_prompt_tokens
    if keep is None:
        return ids
    return ids[-max_len if keep < 0 else -keep :]


def _check_count(num_prompts: int, body: SamplingFields) -> None:
    """Refuse a body that asks for more answers than a request may have."""
    num_answers = num_prompts * max(body.n or 1, body.best_of or 1)
    if num_answers > MAX_ANSWERS:
        raise RefusalError(
            400,
            f"n: {num_answers} answers requested, but the maximum is {MAX_ANSWERS}",
            param="n",
            code="invalid_value",
        )
