"""Objects of the engine as messages of ``wire.proto``, and back.

Whatever comes in is checked where it becomes an object: SamplingParams and RequestOptions refuse what is out of range,
and an unknown kind of error becomes an InternalError.  Nothing here runs code that a message brings.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any, Final

import numpy as np

from penstock import errors
from penstock.engine.logprobs import TokenLogprobs
from penstock.engine.options import RequestOptions
from penstock.engine.params import SamplingParams
from penstock.engine.stats import EngineStats
from penstock.errors import InternalError, PenstockError, UnavailableError
from penstock.llm.backend import ModelCard
from penstock.llm.engine_thread import Started, StepEvent
from penstock.sampling_fields import SAMPLING_FIELDS
from penstock.serving.proto import wire_pb2 as pb

__all__ = [
    "JOIN",
    "MAX_MESSAGE_BYTES",
    "MESSAGE_OPTIONS",
    "PROTOCOL",
    "WELCOME",
    "bearer",
    "card_from",
    "card_to",
    "error_from",
    "error_to",
    "events_from",
    "events_to",
    "options_from",
    "options_to",
    "sampling_from",
    "sampling_to",
    "stats_from",
    "stats_to",
]  # fmt: skip

JOIN: Final = "/penstock.v1.Primary/Join"
WELCOME: Final = "penstock-welcome"
"""Of the primary's first metadata, once it knows the token: before that nothing may be sent."""
PROTOCOL: Final = 1
MAX_MESSAGE_BYTES: Final = 256 << 20
"""A tokenizer.json and the scores of a long prompt are the largest that come."""
MESSAGE_OPTIONS: Final = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
)
_KINDS: Final = {name: getattr(errors, name) for name in errors.__all__ if name != "ServiceError"}
"""What an engine raises; that one is a client's."""
_CARD_FIELDS: Final = tuple(field.name for field in dataclasses.fields(ModelCard))


def bearer(token: str) -> str:
    """How a worker of another machine says its token: in front of its first message, which else would have to be read
    before anybody knows who sends it."""
    return f"Bearer {token}"


def sampling_to(params: SamplingParams) -> pb.Sampling:
    """What differs from the defaults."""
    message = pb.Sampling()
    for row in SAMPLING_FIELDS:
        name, value = row.name, getattr(params, row.name)
        if value is None or value == row.default:
            continue
        if row.kind == "biases":
            getattr(message, name).update(value)
        elif row.kind == "token_ids" and not row.is_required:
            getattr(message, name).ids.extend(value)
        elif row.kind in ("strings", "token_ids"):
            getattr(message, name).extend(value)
        else:
            setattr(message, name, value)
    return message


_ROWS: Final = {row.name: row for row in SAMPLING_FIELDS}


def sampling_from(message: pb.Sampling) -> SamplingParams:
    """The parameters; InvalidArgumentError for a value out of range."""
    given: dict[str, Any] = {}
    for descriptor, value in message.ListFields():
        row = _ROWS[descriptor.name]
        if row.kind == "biases":
            given[row.name] = dict(value)
        elif row.kind == "token_ids" and not row.is_required:
            given[row.name] = list(value.ids)
        elif row.kind in ("strings", "token_ids"):
            given[row.name] = list(value)
        else:
            given[row.name] = value
    return SamplingParams(**given)


def options_to(options: RequestOptions | None) -> pb.Options:
    """How a request is served."""
    options = options or RequestOptions()
    return pb.Options(
        priority=options.priority,
        deadline_s=options.deadline_s,
        cache_salt=options.cache_salt,
        truncate_prompt=options.truncate_prompt,
        client=options.client,
    )


def options_from(message: pb.Options) -> RequestOptions:
    """The options; InvalidArgumentError for a value out of range."""
    return RequestOptions(
        priority=message.priority,
        deadline_s=message.deadline_s if message.HasField("deadline_s") else None,
        cache_salt=message.cache_salt,
        truncate_prompt=message.truncate_prompt,
        client=message.client,
    )


def error_to(error: BaseException) -> pb.Error:
    """An error by the name of its class; one that is not ours says what it was."""
    if not isinstance(error, PenstockError):
        error = InternalError(f"{type(error).__name__}: {error}")
    kind = next(one.__name__ for one in type(error).__mro__ if one.__name__ in _KINDS)
    after = error.retry_after_s if isinstance(error, UnavailableError) else 0.0
    return pb.Error(kind=kind, text=str(error), retry_after_s=after)


def error_from(message: pb.Error) -> PenstockError:
    """The error again."""
    kind = _KINDS.get(message.kind, InternalError)
    if kind is UnavailableError:
        return UnavailableError(message.text, message.retry_after_s)
    error: PenstockError = kind(message.text)
    return error


def card_to(card: ModelCard) -> pb.Card:
    """What a model is."""
    return pb.Card(**dataclasses.asdict(card))


def card_from(message: pb.Card) -> ModelCard:
    """What a model is."""
    return ModelCard(**{name: getattr(message, name) for name in _CARD_FIELDS})


def stats_to(figures: EngineStats) -> pb.Stats:
    """An engine's counters."""
    message = pb.Stats()
    for field in dataclasses.fields(figures):
        value = getattr(figures, field.name)
        if isinstance(value, (int, float)):
            message.numbers[field.name] = value
        else:
            message.counts[field.name].of.update(value)
    return message


def stats_from(messages: Iterable[pb.Stats]) -> EngineStats:
    """The sums of several engines' counters."""
    numbers: dict[str, float] = {}
    counts: dict[str, dict[str, int]] = {}
    for message in messages:
        for name, value in message.numbers.items():
            numbers[name] = numbers.get(name, 0) + value
        for name, many in message.counts.items():
            own = counts.setdefault(name, {})
            for key, count in many.of.items():
                own[key] = own.get(key, 0) + count
    given: dict[str, Any] = {}
    for field in dataclasses.fields(EngineStats):
        if "Mapping" in str(field.type):
            given[field.name] = counts.get(field.name, {})
        else:
            number = numbers.get(field.name, 0)
            given[field.name] = number if field.type == "float" else int(number)
    return EngineStats(**given)


def _logprob_to(one: TokenLogprobs, message: pb.Logprob) -> None:
    message.token_id, message.logprob, message.rank = one.token_id, one.logprob, one.rank
    for token, logprob in one.top:
        message.top_ids.append(token)
        message.top_logprobs.append(logprob)


def _logprob_from(message: pb.Logprob) -> TokenLogprobs:
    top = tuple(zip(message.top_ids, message.top_logprobs, strict=True))
    return TokenLogprobs(message.token_id, message.logprob, message.rank, top)


def events_to(news: StepEvent, messages: Any) -> None:
    """Add what a step brought for an answer to the ``news`` of a step's message."""
    message = messages.add(
        key=news.key, index=news.index, text=news.text, token_ids=news.token_ids, is_last=news.is_last
    )
    if news.logprobs is not None:
        message.has_logprobs = True
        for one in news.logprobs:
            _logprob_to(one, message.logprobs.add())
    if news.finish_reason is not None:
        message.finish_reason = news.finish_reason
    if news.timings is not None:
        message.timings.update(news.timings)
    if news.seed is not None:
        message.seed = news.seed
    if news.started is not None:
        _opening_to(news.started, message.opening)
    if news.vector is not None:
        message.vector = news.vector.astype("<f4").tobytes()
    if news.error is not None:
        message.error.CopyFrom(error_to(news.error))


def _opening_to(opening: Started, message: pb.Started) -> None:
    message.seed = opening.seed
    message.num_prompt_tokens, message.num_cached_tokens = opening.num_prompt_tokens, opening.num_cached_tokens
    message.has_prompt_logprobs = opening.prompt_logprobs is not None
    for one in (opening.prompt_logprobs or [])[1:]:
        if one is not None:
            _logprob_to(one, message.prompt_logprobs.add())


def _opening_from(message: pb.Started) -> Started:
    rows: list[TokenLogprobs | None] | None = None
    if message.has_prompt_logprobs:
        rows = [None, *map(_logprob_from, message.prompt_logprobs)]
    return Started(message.seed, message.num_prompt_tokens, message.num_cached_tokens, rows)


def events_from(message: pb.StepEvent) -> StepEvent:
    """What a step brought."""
    news = StepEvent(message.key, message.index, message.text, list(message.token_ids), is_last=message.is_last)
    if message.has_logprobs:
        news.logprobs = [*map(_logprob_from, message.logprobs)]
    if message.HasField("seed"):
        news.seed = message.seed
    if message.HasField("opening"):
        news.started = _opening_from(message.opening)
    if message.finish_reason:
        news.finish_reason = message.finish_reason
        news.timings = dict(message.timings) or None
        news.vector = np.frombuffer(message.vector, "<f4").astype(np.float32) if message.vector else None
    if message.HasField("error"):
        news.error = error_from(message.error)
    return news
