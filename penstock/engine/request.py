"""A request: what the caller asks for, and where the engine stands with it.  No tensors here."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from numbers import Integral, Real
from typing import TYPE_CHECKING, Final

from penstock.engine.options import RequestOptions
from penstock.errors import InvalidArgumentError, PenstockError

if TYPE_CHECKING:
    from penstock.engine.pages import PageTables
    from penstock.engine.text import TextStream

__all__ = ["Request", "ResolvedSampling", "SamplingParams", "Status", "Timings"]

DEFAULT_MAX_TOKENS: Final = 256
MAX_STOP_STRINGS: Final = 64
MAX_STOP_CHARS: Final = 4096


def _refuse(name: str, expected: str, found: object) -> InvalidArgumentError:
    return InvalidArgumentError(f"{name} must be {expected}, not {found!r}")


def _int(name: str, value: object, low: int, high: int) -> int | None:
    """None, or a whole number of any kind (numpy's too) within bounds."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, Integral) or not low <= int(value) <= high:
        raise _refuse(name, f"a whole number from {low} to {high}", value)
    return int(value)


def _float(name: str, value: object, low: float, high: float, expected: str) -> float | None:
    """None, or a number of any kind within bounds; NaN is within none."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, Real) or not low <= float(value) <= high:
        raise _refuse(name, expected, value)
    return float(value)


def _check_stop(stop: object) -> tuple[str, ...]:
    strings = (stop,) if isinstance(stop, str) else stop
    if not isinstance(strings, (list, tuple)) or not all(isinstance(s, str) for s in strings):
        raise _refuse("stop", "a string or a list of strings", stop)
    if len(strings) > MAX_STOP_STRINGS:
        raise _refuse("stop", f"at most {MAX_STOP_STRINGS} strings", len(strings))
    if any(not s or len(s) > MAX_STOP_CHARS for s in strings):
        raise _refuse("stop", f"strings of 1 to {MAX_STOP_CHARS} characters", stop)
    return tuple(strings)


@dataclass(frozen=True, init=False)
class SamplingParams:
    """How to continue a prompt.  None leaves a field to the model's own generation_config.

    ``max_tokens``: tokens to make at most (256 where nobody says; the context length bounds it too).
    ``temperature``: 0 is greedy.  ``top_k``: keep that many tokens, 0 all.  ``top_p``: keep the smallest set
    whose probability reaches it, 1 all.  ``seed``: the same seed gives the same tokens in any company; None
    draws a fresh one, which the result reports.  ``stop``: a string or several that end the text and are
    not part of it.  ``ignore_eos``: go on past end tokens.

    Raises InvalidArgumentError naming the field that is unknown or out of range.
    """

    max_tokens: int | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    seed: int | None
    stop: tuple[str, ...]
    ignore_eos: bool

    def __init__(
        self,
        *,
        max_tokens: int | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int | None = None,
        stop: str | Sequence[str] = (),
        ignore_eos: bool = False,
        **unknown: object,
    ) -> None:
        if unknown:
            known = ", ".join(self.__dataclass_fields__)
            raise InvalidArgumentError(f"SamplingParams has no field {next(iter(unknown))!r}; it has {known}")
        if not isinstance(ignore_eos, bool):
            raise _refuse("ignore_eos", "True or False", ignore_eos)
        values = (
            _int("max_tokens", max_tokens, 1, 2**31 - 1),
            _float("temperature", temperature, 0.0, 100.0, "a number from 0 to 100"),
            _int("top_k", top_k, 0, 2**31 - 1),
            _float("top_p", top_p, 1e-6, 1.0, "a number above 0 and up to 1"),
            _int("seed", seed, 0, 2**64 - 1),
            _check_stop(stop),
            ignore_eos,
        )
        for name, value in zip(self.__dataclass_fields__, values, strict=True):
            object.__setattr__(self, name, value)


@dataclass(frozen=True)
class ResolvedSampling:
    """What a request runs with: nothing left open."""

    max_tokens: int = DEFAULT_MAX_TOKENS
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    @staticmethod
    def of(params: SamplingParams, defaults: ResolvedSampling) -> ResolvedSampling:
        """Fill what the caller left open.  Naming top_k or top_p asks for sampling, so a greedy default gives way."""
        temperature = params.temperature
        if temperature is None:
            wants_sampling = params.top_k is not None or params.top_p is not None
            temperature = 1.0 if wants_sampling and defaults.temperature == 0.0 else defaults.temperature
        return ResolvedSampling(
            max_tokens=defaults.max_tokens if params.max_tokens is None else params.max_tokens,
            temperature=float(temperature),
            top_k=defaults.top_k if params.top_k is None else params.top_k,
            top_p=float(defaults.top_p if params.top_p is None else params.top_p),
            seed=int.from_bytes(os.urandom(8), "little") >> 1 if params.seed is None else params.seed,
        )


class Status(Enum):
    """Where a request stands."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass
class Timings:
    """When things happened, in seconds of ``time.perf_counter``; 0 is not yet."""

    submitted: float = field(default_factory=time.perf_counter)
    scheduled: float = 0.0
    first_token: float = 0.0
    finished: float = 0.0

    def summary(self, num_tokens: int) -> dict[str, float]:
        """Seconds queued, from there to the first token (prefill), from submission to it, in all and per later token;
        tokens per second after the first.
        """
        decode_s = self.finished - self.first_token
        rate = (num_tokens - 1) / decode_s if num_tokens > 1 and decode_s > 0 else 0.0
        return {
            "queued_s": max(0.0, self.scheduled - self.submitted) if self.scheduled else 0.0,
            "prefill_s": max(0.0, self.first_token - self.scheduled) if self.first_token else 0.0,
            "first_token_s": self.first_token - self.submitted if self.first_token else 0.0,
            "total_s": self.finished - self.submitted,
            "per_token_s": 1 / rate if rate else 0.0,
            "decode_tokens_per_s": rate,
        }


@dataclass(eq=False)
class Request:
    """One prompt being continued.

    ``num_computed`` counts the leading tokens whose keys and values are in pages; a preempted request falls
    back to 0 and is computed again from its prompt and its answer so far.  ``num_cached`` of the prompt's tokens were
    not computed for it but shared.  ``order`` sorts requests by urgency and arrival.  ``slot`` is its place among the
    running ones, ``page_keys`` are the names of its leading pages.
    """

    id: int
    prompt_ids: list[int]
    max_tokens: int
    sampling: ResolvedSampling = field(default_factory=ResolvedSampling)
    stop_ids: frozenset[int] = frozenset()
    text: TextStream | None = None
    status: Status = Status.WAITING
    output_ids: list[int] = field(default_factory=list)
    num_computed: int = 0
    pages: PageTables | None = None
    finish_reason: str | None = None
    error: PenstockError | None = None
    num_preemptions: int = 0
    timings: Timings = field(default_factory=Timings)
    options: RequestOptions = field(default_factory=RequestOptions)
    order: tuple[int, int] = (0, 0)
    slot: int = -1
    num_cached: int = 0
    page_keys: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        """The order follows from priority and id."""
        self.order = (self.options.priority, self.id)

    @property
    def num_tokens(self) -> int:
        """Tokens known so far: prompt and answer."""
        return len(self.prompt_ids) + len(self.output_ids)

    def token_at(self, position: int) -> int:
        """The token id at a position of prompt and answer."""
        prompt_len = len(self.prompt_ids)
        return self.prompt_ids[position] if position < prompt_len else self.output_ids[position - prompt_len]

    def tokens(self, start: int, stop: int) -> list[int]:
        """The token ids at positions ``start`` to ``stop``."""
        prompt_len = len(self.prompt_ids)
        if start >= prompt_len:
            return self.output_ids[start - prompt_len : stop - prompt_len]
        head = self.prompt_ids[start:stop]
        return head + self.output_ids[: stop - prompt_len] if stop > prompt_len else head

    def accept(self, token: int) -> None:
        """Take a sampled token: append it, stream its text, and see whether the request ends with it."""
        if not self.output_ids:
            self.timings.first_token = time.perf_counter()
        self.output_ids.append(token)
        try:
            stops = token in self.stop_ids or (self.text is not None and self.text.push(token))
        except PenstockError as error:  # a damaged tokenizer is this request's misfortune alone
            self.finish("error", error)
            return
        if stops:
            self.finish("stop")
        elif len(self.output_ids) >= self.max_tokens:
            self.finish("length")

    def finish(self, reason: str, error: PenstockError | None = None) -> None:
        """End the request: "length", "stop", "abort" or "error"; whoever holds its pages gives them back."""
        self.finish_reason = reason
        self.error = error
        self.timings.finished = time.perf_counter()
        try:
            if self.text is not None:
                self.text.finish()
        except PenstockError as damage:
            self.error = error or damage
        self.status = Status.FINISHED  # last: who waits in another thread then finds all of it
