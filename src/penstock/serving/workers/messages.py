"""Convert objects of the engine to messages of ``wire.proto`` and back.

Each incoming message is checked when it becomes an object: SamplingParams and RequestOptions reject values out of
range, and an unknown kind of error becomes an InternalError.  No code from a message is run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any, Final

import numpy as np

from penstock import errors
from penstock.engine.logprobs import TokenLogprobs
from penstock.engine.options import BeamSettings, RequestOptions
from penstock.engine.page_journal import PageReport
from penstock.engine.params import SamplingParams
from penstock.engine.prompt_logits import Places
from penstock.engine.request import BegunAnswer
from penstock.engine.stats import EngineStats
from penstock.errors import InternalError, PenstockError, UnavailableError
from penstock.llm.backend import ModelCard
from penstock.llm.engine_thread import Started, StepEvent
from penstock.sampling_fields import SAMPLING_FIELDS
from penstock.serving.proto import wire_pb2 as pb

__all__ = [
    "KEY_BYTES",
    "MAX_MESSAGE_BYTES",
    "beams_from",
    "beams_to",
    "begun_from",
    "card_from",
    "card_to",
    "error_from",
    "error_to",
    "event_from",
    "event_to",
    "merge_steps",
    "options_from",
    "options_to",
    "pages_from",
    "pages_to",
    "places_from",
    "places_to",
    "sampling_from",
    "sampling_to",
    "stats_from",
    "stats_to",
]  # fmt: skip

MAX_MESSAGE_BYTES: Final = 256 << 20
"""Limit on the size of a message.  The largest ones carry a tokenizer.json or the scores of a long prompt."""
KEY_BYTES: Final = 8
"""The reported bytes of a page's key.  If two keys agree in them, a request may go to another worker."""
_KINDS: Final = {name: getattr(errors, name) for name in errors.__all__ if name != "ServiceError"}
"""The errors that an engine may raise; ServiceError is raised by clients only."""
_CARD_FIELDS: Final = tuple(field.name for field in dataclasses.fields(ModelCard))


def sampling_to(params: SamplingParams) -> pb.Sampling:
    """Return the message of sampling parameters; it has only those that differ from the defaults."""
    message = pb.Sampling()
    for row in SAMPLING_FIELDS:
        name, value = row.name, getattr(params, row.name)
        if value is None or value == row.default:
            continue
        if row.kind == "biases":
            getattr(message, name).update(value)
        elif row.kind == "token_ids" and not row.is_required:
            getattr(message, name).ids.extend(value)
        elif row.kind == "id_lists":
            getattr(message, name).extend(pb.TokenIds(ids=ids) for ids in value)
        elif row.kind in ("strings", "token_ids", "choices"):
            getattr(message, name).extend(value)
        else:
            setattr(message, name, row.within(value))
    return message


_ROWS: Final = {row.name: row for row in SAMPLING_FIELDS}


def sampling_from(message: pb.Sampling) -> SamplingParams:
    """Return the sampling parameters of a message; InvalidArgumentError for a value out of range."""
    params: dict[str, Any] = {}
    for descriptor, value in message.ListFields():
        row = _ROWS[descriptor.name]
        if row.kind == "biases":
            params[row.name] = dict(value)
        elif row.kind == "token_ids" and not row.is_required:
            params[row.name] = list(value.ids)
        elif row.kind == "id_lists":
            params[row.name] = [list(ids.ids) for ids in value]
        elif row.kind in ("strings", "token_ids", "choices"):
            params[row.name] = list(value)
        else:
            params[row.name] = value
    return SamplingParams(**params)


def begun_from(messages: Iterable[pb.BegunAnswer]) -> list[BegunAnswer]:
    """Return what another worker has delivered of answers."""
    return [
        BegunAnswer(message.index, list(message.token_ids), message.num_chars, message.has_ended)
        for message in messages
    ]


def beams_to(beams: BeamSettings | None) -> pb.Beams | None:
    """Return the message of a beam search; None without one."""
    if beams is None or beams.num_beams == 1:
        return None
    early = str(beams.early_stopping).lower()
    return pb.Beams(num_beams=beams.num_beams, length_penalty=beams.length_penalty, early_stopping=early)


def beams_from(message: pb.Submit) -> BeamSettings | None:
    """Return the beam search of a request; InvalidArgumentError for a value out of range."""
    if not message.HasField("beams"):
        return None
    beams, flags = message.beams, {"true": True, "false": False}
    early = flags.get(beams.early_stopping, beams.early_stopping)
    return BeamSettings(beams.num_beams, beams.length_penalty, early)


def places_to(places: Places | None) -> pb.Places | None:
    """Return the message of the positions to score; None for all."""
    return None if places is None else pb.Places(positions=places.positions, token_ids=places.token_ids)


def places_from(message: pb.Score) -> Places | None:
    """Return the positions that a request scores; the engine checks them."""
    places = message.places
    return Places(tuple(places.positions), tuple(places.token_ids)) if message.HasField("places") else None


def options_to(options: RequestOptions | None) -> pb.Options:
    """Return the message of a request's options."""
    options = options or RequestOptions()
    return pb.Options(
        priority=options.priority,
        deadline_s=options.deadline_s,
        cache_salt=options.cache_salt,
        truncate_prompt=options.truncate_prompt,
        client=options.client,
    )


def options_from(message: pb.Options) -> RequestOptions:
    """Return the options of a message; InvalidArgumentError for a value out of range."""
    return RequestOptions(
        priority=message.priority,
        deadline_s=message.deadline_s if message.HasField("deadline_s") else None,
        cache_salt=message.cache_salt,
        truncate_prompt=message.truncate_prompt,
        client=message.client,
    )


def error_to(error: BaseException) -> pb.Error:
    """Return the message of an error.  One that is not a PenstockError becomes an InternalError that names its type."""
    if not isinstance(error, PenstockError):
        error = InternalError(f"{type(error).__name__}: {error}")
    kind = next(parent.__name__ for parent in type(error).__mro__ if parent.__name__ in _KINDS)
    after = error.retry_after_s if isinstance(error, UnavailableError) else 0.0
    return pb.Error(kind=kind, text=str(error), retry_after_s=after, param=error.param, code=error.code)


def error_from(message: pb.Error) -> PenstockError:
    """Return the error of a message."""
    kind = _KINDS.get(message.kind, InternalError)
    after = {"retry_after_s": message.retry_after_s} if kind is UnavailableError else {}
    error: PenstockError = kind(message.text, **after, param=message.param or None, code=message.code or None)
    return error


def card_to(card: ModelCard) -> pb.Card:
    """Return the message of a model's description."""
    return pb.Card(**dataclasses.asdict(card))


def card_from(message: pb.Card) -> ModelCard:
    """Return the model's description of a message."""
    return ModelCard(**{name: getattr(message, name) for name in _CARD_FIELDS})


def stats_to(stats: EngineStats) -> pb.Stats:
    """Return the message of an engine's counters."""
    message = pb.Stats()
    for field in dataclasses.fields(stats):
        value = getattr(stats, field.name)
        if isinstance(value, (int, float)):
            message.numbers[field.name] = value
        else:
            message.counts[field.name].by_name.update(value)
    return message


def pages_to(report: PageReport, message: pb.PageReport) -> None:
    """Fill the message of a page report."""
    message.number, message.is_full, message.num_blank = report.number, report.is_full, report.num_blank
    message.gained = b"".join(key[:KEY_BYTES] for key in report.gained)
    message.dropped = b"".join(key[:KEY_BYTES] for key in report.dropped)


def pages_from(message: pb.PageReport) -> PageReport:
    """Return the page report of a message; InternalError unless its keys are whole."""
    gained, dropped = (_keys_of(data) for data in (message.gained, message.dropped))
    return PageReport(message.number, message.is_full, gained, dropped, message.num_blank)


def _keys_of(data: bytes) -> list[bytes]:
    if len(data) % KEY_BYTES:
        raise InternalError(f"page report: expected keys of {KEY_BYTES} bytes, got {len(data)} bytes")
    return [data[start : start + KEY_BYTES] for start in range(0, len(data), KEY_BYTES)]


def stats_from(messages: Iterable[pb.Stats]) -> EngineStats:
    """Return the sums of the counters of several engines."""
    numbers: dict[str, float] = {}
    counts: dict[str, dict[str, int]] = {}
    for message in messages:
        for name, value in message.numbers.items():
            numbers[name] = numbers.get(name, 0) + value
        for name, counter in message.counts.items():
            sums = counts.setdefault(name, {})
            for key, count in counter.by_name.items():
                sums[key] = sums.get(key, 0) + count
    fields: dict[str, Any] = {}
    for field in dataclasses.fields(EngineStats):
        if "Mapping" in str(field.type):
            fields[field.name] = counts.get(field.name, {})
        else:
            number = numbers.get(field.name, 0)
            fields[field.name] = number if field.type == "float" else int(number)
    return EngineStats(**fields)


def _logprob_to(logprobs: TokenLogprobs, message: pb.Logprob) -> None:
    message.token_id, message.logprob, message.rank = logprobs.token_id, logprobs.logprob, logprobs.rank
    for token, logprob in logprobs.top:
        message.top_ids.append(token)
        message.top_logprobs.append(logprob)


def _logprob_from(message: pb.Logprob) -> TokenLogprobs:
    top = tuple(zip(message.top_ids, message.top_logprobs, strict=True))
    return TokenLogprobs(message.token_id, message.logprob, message.rank, top)


def event_to(event: StepEvent, messages: Any) -> None:
    """Add an event to ``messages``, the ``events`` of a step's message."""
    message = messages.add(
        key=event.key, index=event.index, text=event.text, token_ids=event.token_ids, is_last=event.is_last
    )
    if event.logprobs is not None:
        message.has_logprobs = True
        for logprobs in event.logprobs:
            _logprob_to(logprobs, message.logprobs.add())
    if event.finish_reason is not None:
        message.finish_reason = event.finish_reason
    if event.timings is not None:
        message.timings.update(event.timings)
    if event.seed is not None:
        message.seed = event.seed
    if event.started is not None:
        _started_to(event.started, message.started)
    if event.vector is not None:
        message.vector = event.vector.astype("<f4").tobytes()
    if event.error is not None:
        message.error.CopyFrom(error_to(event.error))


def _started_to(started: Started, message: pb.Started) -> None:
    message.seed = started.seed
    message.num_prompt_tokens, message.num_cached_tokens = started.num_prompt_tokens, started.num_cached_tokens
    message.queued_s, message.prefill_s = started.queued_s, started.prefill_s
    message.has_prompt_logprobs = started.prompt_logprobs is not None
    for logprobs in (started.prompt_logprobs or [])[1:]:
        if logprobs is not None:
            _logprob_to(logprobs, message.prompt_logprobs.add())


def _started_from(message: pb.Started) -> Started:
    rows: list[TokenLogprobs | None] | None = None
    if message.has_prompt_logprobs:
        rows = [None, *map(_logprob_from, message.prompt_logprobs)]
    counts = message.num_prompt_tokens, message.num_cached_tokens
    return Started(message.seed, *counts, rows, message.queued_s, message.prefill_s)


def event_from(message: pb.StepEvent) -> StepEvent:
    """Return the event of a message."""
    event = StepEvent(message.key, message.index, message.text, list(message.token_ids), is_last=message.is_last)
    if message.has_logprobs:
        event.logprobs = [*map(_logprob_from, message.logprobs)]
    if message.HasField("seed"):
        event.seed = message.seed
    if message.HasField("started"):
        event.started = _started_from(message.started)
    if message.finish_reason:
        event.finish_reason = message.finish_reason
        event.timings = dict(message.timings) or None
        event.vector = np.frombuffer(message.vector, "<f4").astype(np.float32) if message.vector else None
    if message.HasField("error"):
        event.error = error_from(message.error)
    return event


def merge_steps(first: pb.FromWorker, second: pb.FromWorker) -> bool:
    """Add the events of a step to those of the step before, so that each answer has one; False for other messages.

    The worker is ahead of this process: an event of two tokens costs about as much as one of a single token.
    """
    if not (first.HasField("step") and second.HasField("step")) or second.step.HasField("pages"):
        return False
    events = first.step.events
    known = {(event.key, event.index): event for event in events}
    for event in second.step.events:
        before = known.get((event.key, event.index))
        if before is None or event.is_last or event.HasField("error"):  # the last event of a request stays behind all
            known[event.key, event.index] = events.add()
            known[event.key, event.index].CopyFrom(event)
        else:
            text = before.text + event.text
            before.MergeFrom(event)
            before.text = text
    return True
