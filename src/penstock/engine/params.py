"""What a caller may ask of an answer, each field checked, and what a request runs with once nothing is left open."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import chain
from typing import TYPE_CHECKING, Any, Final, TypedDict, Unpack

from penstock.errors import InvalidArgumentError
from penstock.validation import (
    MAX_TOKEN,
    bias_pairs,
    biases,
    check_listed,
    check_vocabulary,
    flag,
    given_number,
    nearest,
    number,
    refusal,
    set_fields,
    some_token_ids,
    strings,
    token_ids,
    whole,
    word_ids,
)

if TYPE_CHECKING:
    from penstock.checkpoint.generation import GenerationConfig

__all__ = [
    "FIELDS", "Filters", "Penalties", "ResolvedSampling", "SamplingFields", "SamplingParams", "check_num_top",
]  # fmt: skip

DEFAULT_MAX_TOKENS: Final = 256
MAX_LOGPROBS: Final = 20
MAX_ANSWERS: Final = 128


def check_num_top(value: object, vocab_size: int) -> int:
    """How many of the likeliest tokens are listed; InvalidArgumentError for more than may be, or than there are."""
    count = whole("num_top", value, 0, min(MAX_LOGPROBS, vocab_size))
    if count is None:
        raise refusal("num_top", "a whole number", None)
    return count


@dataclass(frozen=True, kw_only=True)
class Filters:
    """Which tokens are left to draw from: the fields of SamplingParams of the same names."""

    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None

    def __post_init__(self) -> None:
        """Check every field."""
        positive = "a number above 0 and up to 1"
        set_fields(
            self,
            top_k=whole("top_k", self.top_k, 0, MAX_TOKEN),
            top_p=number("top_p", self.top_p, 1e-6, 1, positive),
            min_p=number("min_p", self.min_p, 0, 1),
            typical_p=number("typical_p", self.typical_p, 1e-6, 1, positive),
        )


@dataclass(frozen=True, kw_only=True)
class Penalties:
    """What repeating costs: the fields of SamplingParams of the same names."""

    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0

    def __post_init__(self) -> None:
        """Check every field."""
        set_fields(
            self,
            repetition_penalty=number("repetition_penalty", self.repetition_penalty, 0.01, 100),
            presence_penalty=given_number("presence_penalty", number("presence_penalty", self.presence_penalty, -2, 2)),
            frequency_penalty=given_number(
                "frequency_penalty", number("frequency_penalty", self.frequency_penalty, -2, 2)
            ),
        )


class SamplingFields(TypedDict, total=False):
    """What SamplingParams is called with: vLLM's names, and its two groups as a whole."""

    max_tokens: int | None
    min_tokens: int
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    typical_p: float | None
    repetition_penalty: float | None
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float] | None
    allowed_token_ids: Sequence[int] | None
    bad_words: str | Sequence[str]
    seed: int | None
    n: int
    best_of: int | None
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    include_stop_str_in_output: bool
    ignore_eos: bool
    logprobs: int | None
    prompt_logprobs: int | None
    echo: bool
    filters: Filters
    penalties: Penalties


FIELDS: Final = tuple(name for name in SamplingFields.__annotations__ if name not in ("filters", "penalties"))
"""The names that a request may use."""


@dataclass(frozen=True, init=False)
class SamplingParams:
    """How to continue a prompt, in vLLM's words.  None leaves a field to the model's own generation_config.

    ``max_tokens``: tokens to make at most (256 where nobody says; the context length bounds it too).
    ``min_tokens``: neither end token nor stop before that many.  ``temperature``: 0 is greedy.  ``top_k``: keep that
    many tokens, 0 all.  ``top_p``: keep the smallest set whose probability reaches it, 1 all.  ``min_p``: drop tokens
    below that share of the likeliest's probability, 0 none.  ``typical_p``: keep the tokens nearest to the expected
    surprise whose probability reaches it, 1 all.  ``repetition_penalty`` (prompt and answer; 1 off),
    ``presence_penalty`` and ``frequency_penalty`` (answer; 0 off).  ``logit_bias``: token id to what is added, -100 to
    100.  ``allowed_token_ids``: nothing else is sampled; None all.  ``bad_words``: texts that the answer must not
    contain.  ``seed``: the same seed gives the same tokens in any company; None draws a fresh one, which the result
    reports.  ``n``: answers to the prompt; ``best_of``: make that many and give the ``n`` likeliest per token.
    ``stop``: a string or several that end the text and are not part of it unless ``include_stop_str_in_output``.
    ``stop_token_ids``: tokens that end the answer.  ``ignore_eos``: go on past end tokens.  ``logprobs``: give each
    token's log-probability and that many of the likeliest (0 to 20); ``prompt_logprobs``: the prompt's, too.
    ``echo``: the text begins with the prompt.

    All are keywords of the call.  ``filters`` holds top_k, top_p, min_p and typical_p, ``penalties`` the three
    penalties; each is an attribute, too.  Raises InvalidArgumentError naming the field that is unknown or out of range.
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float | None = None
    filters: Filters = Filters()
    penalties: Penalties = Penalties()
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] = ()
    seed: int | None = None
    n: int = 1
    best_of: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    echo: bool = False

    def __init__(self, **given: Unpack[SamplingFields]) -> None:
        """Check every field; numbers of numpy become plain ones, lists tuples."""
        values: dict[str, Any] = {**given}
        for name, kind, default in _GROUPS:
            group = values.get(name, default)
            if not isinstance(group, kind):
                raise refusal(name, kind.__name__, group)
            flat = {one: values.pop(one) for one in kind.__dataclass_fields__ if one in values}
            if flat:
                values[name] = replace(group, **flat)
        unknown = next((name for name in values if name not in _CHECKS), None)
        if unknown is not None:
            near = nearest(unknown, FIELDS)
            hint = f"did you mean {near}?" if near else f"it has {', '.join(FIELDS)}"
            raise InvalidArgumentError(f"SamplingParams has no field {unknown!r}: {hint}")
        set_fields(self, **_DEFAULTS)  # checked once: a request names few fields
        set_fields(self, **{name: check(name, values[name]) for name, check in _CHECKS.items() if name in values})
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise refusal("min_tokens", f"at most max_tokens ({self.max_tokens})", self.min_tokens)
        if self.best_of is not None and self.best_of < self.n:
            raise refusal("best_of", f"at least n ({self.n})", self.best_of)

    @property
    def top_k(self) -> int | None:
        """Of ``filters``."""
        return self.filters.top_k

    @property
    def top_p(self) -> float | None:
        """Of ``filters``."""
        return self.filters.top_p

    @property
    def min_p(self) -> float | None:
        """Of ``filters``."""
        return self.filters.min_p

    @property
    def typical_p(self) -> float | None:
        """Of ``filters``."""
        return self.filters.typical_p

    @property
    def repetition_penalty(self) -> float | None:
        """Of ``penalties``."""
        return self.penalties.repetition_penalty

    @property
    def presence_penalty(self) -> float:
        """Of ``penalties``."""
        return self.penalties.presence_penalty

    @property
    def frequency_penalty(self) -> float:
        """Of ``penalties``."""
        return self.penalties.frequency_penalty


_CHECKS: Final[dict[str, Callable[[str, Any], Any]]] = {
    "max_tokens": lambda name, value: whole(name, value, 1, MAX_TOKEN),
    "min_tokens": lambda name, value: given_number(name, whole(name, value, 0, MAX_TOKEN)),
    "temperature": lambda name, value: number(name, value, 0, 100),
    "filters": lambda _name, value: value,
    "penalties": lambda _name, value: value,
    "logit_bias": lambda _name, value: biases(value),
    "allowed_token_ids": lambda name, value: None if value is None else some_token_ids(name, value),
    "bad_words": strings,
    "seed": lambda name, value: whole(name, value, 0, 2**64 - 1),
    "n": lambda name, value: given_number(name, whole(name, value, 1, MAX_ANSWERS)),
    "best_of": lambda name, value: whole(name, value, 1, MAX_ANSWERS),
    "stop": strings,
    "stop_token_ids": token_ids,
    "include_stop_str_in_output": flag,
    "ignore_eos": flag,
    "logprobs": lambda name, value: whole(name, value, 0, MAX_LOGPROBS),
    "prompt_logprobs": lambda name, value: whole(name, value, 0, MAX_LOGPROBS),
    "echo": flag,
}
_GROUPS: Final = (("filters", Filters, Filters()), ("penalties", Penalties, Penalties()))
_DEFAULTS: Final[dict[str, Any]] = {
    one.name: _CHECKS[one.name](one.name, one.default) for one in fields(SamplingParams)
}


@dataclass(frozen=True)
class ResolvedSampling:
    """What a request runs with: nothing left open, texts turned into token ids.

    ``logit_bias`` holds pairs of token id and bias; ``bad_words`` token sequences; ``end_ids`` are forbidden before
    ``min_tokens``; ``num_logprobs`` -1 asks for none.
    """

    max_tokens: int = DEFAULT_MAX_TOKENS
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_tokens: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    end_ids: tuple[int, ...] = ()
    num_logprobs: int = -1

    def __post_init__(self) -> None:
        """Check every field: one that the core refuses would end every request of its step."""
        positive = "a number above 0 and up to 1"
        wholes = {
            "max_tokens": (0, MAX_TOKEN),
            "top_k": (0, MAX_TOKEN),
            "seed": (0, 2**64 - 1),
            "min_tokens": (0, MAX_TOKEN),
            "num_logprobs": (-1, MAX_LOGPROBS),
        }
        numbers: dict[str, tuple[float, float, str]] = {
            "temperature": (0, 1000, ""),
            "top_p": (1e-6, 1, positive),
            "min_p": (0, 1, ""),
            "typical_p": (1e-6, 1, positive),
            "repetition_penalty": (0.01, 100, ""),
            "presence_penalty": (-2, 2, ""),
            "frequency_penalty": (-2, 2, ""),
        }
        checked: dict[str, Any] = {name: whole(name, getattr(self, name), *bounds) for name, bounds in wholes.items()}
        checked |= {name: number(name, getattr(self, name), *bounds) for name, bounds in numbers.items()}
        for name, value in checked.items():
            given_number(name, value)
        if not isinstance(self.bad_words, (list, tuple)):
            raise refusal("bad_words", "a list of lists of token ids", self.bad_words)
        allowed = self.allowed_token_ids
        set_fields(
            self,
            **checked,
            logit_bias=bias_pairs("logit_bias", self.logit_bias),
            allowed_token_ids=None if allowed is None else some_token_ids("allowed_token_ids", allowed),
            bad_words=tuple(word_ids(f"bad_words[{i}]", word) for i, word in enumerate(self.bad_words)),
            end_ids=token_ids("end_ids", self.end_ids),
        )

    def answer(self, index: int) -> ResolvedSampling:
        """What answer ``index`` to a prompt runs with: answer 0 this, the others a seed of their own (SplitMix64's),
        with which each can be made again alone.
        """
        return replace(self, seed=_mixed(self.seed + index * _GOLDEN)) if index else self

    def check_vocabulary(self, vocab_size: int) -> None:
        """InvalidArgumentError naming the field that asks for tokens beyond a vocabulary."""
        check_vocabulary("logit_bias", (token for token, _ in self.logit_bias), vocab_size)
        check_vocabulary("allowed_token_ids", self.allowed_token_ids or (), vocab_size)
        check_vocabulary("bad_words", chain.from_iterable(self.bad_words), vocab_size)
        check_listed("logprobs", self.num_logprobs, vocab_size)

    @staticmethod
    def of_model(config: GenerationConfig) -> ResolvedSampling:
        """What a model's generation_config.json asks for."""
        names = ("temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty")
        most = config.max_new_tokens or DEFAULT_MAX_TOKENS
        return ResolvedSampling(max_tokens=most, **{name: getattr(config, name) for name in names})

    @staticmethod
    def of(params: SamplingParams, defaults: ResolvedSampling) -> ResolvedSampling:
        """Fill what the caller left open.  Naming a filter asks for sampling, so a greedy default gives way."""
        temperature = params.temperature
        if temperature is None:
            filters = (params.top_k, params.top_p, params.min_p, params.typical_p)
            wants_sampling = any(one is not None for one in filters)
            temperature = 1.0 if wants_sampling and defaults.temperature == 0.0 else defaults.temperature

        def given(name: str) -> float:
            value = getattr(params, name)
            return float(getattr(defaults, name) if value is None else value)

        num_logprobs = -1 if params.logprobs is None else params.logprobs
        if (params.best_of or 1) > params.n:
            num_logprobs = max(0, num_logprobs)  # to compare the answers
        max_tokens = defaults.max_tokens if params.max_tokens is None else params.max_tokens
        if params.min_tokens > max_tokens:
            raise refusal(
                "min_tokens", f"at most max_tokens (here the model's default, {max_tokens})", params.min_tokens
            )
        return ResolvedSampling(
            max_tokens=max_tokens,
            temperature=float(temperature),
            top_k=defaults.top_k if params.top_k is None else params.top_k,
            top_p=given("top_p"),
            seed=int.from_bytes(os.urandom(8), "little") >> 1 if params.seed is None else params.seed,
            min_p=given("min_p"),
            typical_p=given("typical_p"),
            repetition_penalty=given("repetition_penalty"),
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            min_tokens=params.min_tokens,
            logit_bias=tuple((params.logit_bias or {}).items()),
            allowed_token_ids=None if params.allowed_token_ids is None else tuple(params.allowed_token_ids),
            num_logprobs=num_logprobs,
        )


_GOLDEN: Final = 0x9E3779B97F4A7C15


def _mixed(value: int) -> int:
    """The finalizer of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014), less its lowest bit: 63 bits, as drawn ones."""
    value &= 2**64 - 1
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & 2**64 - 1
    value = (value ^ value >> 27) * 0x94D049BB133111EB & 2**64 - 1
    return (value ^ value >> 31) >> 1
