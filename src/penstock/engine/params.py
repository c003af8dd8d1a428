"""SamplingParams, which a caller gives, and ResolvedSampling, which a request runs with.

The fields, their bounds and their defaults are in ``sampling_fields.py``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING, Any, Final

from penstock.config import check_flag, check_integer
from penstock.errors import InvalidArgumentError
from penstock.sampling_fields import (
    DEFAULT_MAX_TOKENS,
    FIELD_NAMES,
    MAX_LOGPROBS,
    MAX_WORD_IDS,
    SAMPLING_FIELDS,
    SamplingField,
)
from penstock.text.grammar.source import GrammarSource, grammar_of, schema_text
from penstock.validation import (
    bias_pairs,
    biases,
    check_listed,
    check_vocabulary,
    id_lists,
    nearest,
    optional_integer,
    optional_number,
    optional_text,
    refusal,
    required,
    set_fields,
    some_token_ids,
    strings,
    token_ids,
)

if TYPE_CHECKING:
    from penstock.checkpoint.generation import GenerationDefaults
    from penstock.engine.decoding.row_hook import RowHook
    from penstock.text.answer.budget import ThoughtsBudget
    from penstock.text.grammar.compiler import Grammar

__all__ = ["ResolvedSampling", "SamplingParams", "check_num_top"]


def check_num_top(value: object, vocab_size: int) -> int:
    """Check the number of likeliest tokens to list: at most MAX_LOGPROBS, and at most the vocabulary."""
    return check_integer("num_top", value, 0, min(MAX_LOGPROBS, vocab_size))


_DEFAULT: Final[dict[str, Any]] = {row.name: row.default for row in SAMPLING_FIELDS}


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of a request, with vLLM's names.  None means the value of the model's generation_config.json.

    ``max_tokens``: maximum number of tokens to generate (256 if neither caller nor model sets it).  The context length
    is a limit as well.
    ``min_tokens``: number of tokens before an end token or a stop string can end the answer.
    ``temperature``: 0 is greedy.
    ``top_k``: number of likeliest tokens to keep; 0 keeps all.
    ``top_p``: keep the smallest set of tokens whose probability reaches it; 1 keeps all, 0 the likeliest token.
    ``min_p``: drop tokens below this share of the likeliest token's probability; 0 drops none.
    ``typical_p``: keep the tokens nearest to the expected surprise whose probability reaches it; 1 keeps all.
    ``repetition_penalty``: for tokens of the prompt and the answer; 1 is off.
    ``presence_penalty``, ``frequency_penalty``: for tokens of the answer; 0 is off.
    ``logit_bias``: maps token ids to numbers from -100 to 100 that are added to their logits.
    ``allowed_token_ids``: the only tokens that are sampled; None allows all.
    ``bad_words``: strings that the answer must not contain.  ``bad_words_ids``: lists of token ids that it must not
    complete, of which the prompt may have the beginning.
    ``no_repeat_ngram_size``: sequences of so many tokens occur once in prompt and answer; 0 is off.
    ``forced_bos_token_id``: the token after a prompt of one token.  ``forced_eos_token_id``: the last token of an
    answer that reaches its maximum length.
    ``seed``: the same seed gives the same tokens in any batch.  None draws a random seed, which the result reports;
    a negative seed is reported as the unsigned number of the same 64 bits.
    ``n``: number of answers.  ``best_of``: generate that many and return the ``n`` likeliest per token.
    ``stop``: one string or several that end the text.  The text includes them only with
    ``include_stop_str_in_output``.
    ``stop_token_ids``: tokens that end the answer.  ``ignore_eos``: continue after end tokens.
    ``logprobs``: return each token's log-probability and that many of the likeliest tokens, 0 to 20.
    ``prompt_logprobs``: the same for the tokens of the prompt.
    ``echo``: begin the text with the prompt.
    ``json_schema``: a JSON schema, a mapping or its text, that the answer follows.  ``json_object``: the answer is any
    object of JSON.  ``regex``: the whole answer matches.  ``choice``: the answer is one of these strings.
    ``grammar``: a grammar in Lark with a rule ``start``, or in GBNF with a rule ``root``.  At most one of the five; the
    answer ends where it is complete.
    ``skip_special_tokens``: leave the text of special tokens out, except for those of ``kept_special_token_ids``.
    ``thinking_token_budget``: number of tokens of thoughts, after which a closing text is forced; None is no limit.
    ``thinking_format``: the name of the format of the thoughts; None or "" finds it in the model's chat template.

    Raises InvalidArgumentError naming the field that is unknown or out of range.
    """

    max_tokens: int | None = _DEFAULT["max_tokens"]
    min_tokens: int = _DEFAULT["min_tokens"]
    temperature: float | None = _DEFAULT["temperature"]
    top_k: int | None = _DEFAULT["top_k"]
    top_p: float | None = _DEFAULT["top_p"]
    min_p: float | None = _DEFAULT["min_p"]
    typical_p: float | None = _DEFAULT["typical_p"]
    repetition_penalty: float | None = _DEFAULT["repetition_penalty"]
    presence_penalty: float = _DEFAULT["presence_penalty"]
    frequency_penalty: float = _DEFAULT["frequency_penalty"]
    logit_bias: Mapping[int, float] | None = field(default=_DEFAULT["logit_bias"], hash=False)
    allowed_token_ids: Sequence[int] | None = _DEFAULT["allowed_token_ids"]
    bad_words: str | Sequence[str] = _DEFAULT["bad_words"]
    seed: int | None = _DEFAULT["seed"]
    n: int = _DEFAULT["n"]
    best_of: int | None = _DEFAULT["best_of"]
    stop: str | Sequence[str] = _DEFAULT["stop"]
    stop_token_ids: Sequence[int] = _DEFAULT["stop_token_ids"]
    include_stop_str_in_output: bool = _DEFAULT["include_stop_str_in_output"]
    ignore_eos: bool = _DEFAULT["ignore_eos"]
    logprobs: int | None = _DEFAULT["logprobs"]
    prompt_logprobs: int | None = _DEFAULT["prompt_logprobs"]
    echo: bool = _DEFAULT["echo"]
    json_schema: str | Mapping[str, Any] | None = _DEFAULT["json_schema"]
    json_object: bool = _DEFAULT["json_object"]
    regex: str | None = _DEFAULT["regex"]
    choice: str | Sequence[str] = _DEFAULT["choice"]
    grammar: str | None = _DEFAULT["grammar"]
    skip_special_tokens: bool = _DEFAULT["skip_special_tokens"]
    no_repeat_ngram_size: int | None = _DEFAULT["no_repeat_ngram_size"]
    bad_words_ids: Sequence[Sequence[int]] = _DEFAULT["bad_words_ids"]
    forced_bos_token_id: int | None = _DEFAULT["forced_bos_token_id"]
    forced_eos_token_id: int | None = _DEFAULT["forced_eos_token_id"]
    thinking_token_budget: int | None = _DEFAULT["thinking_token_budget"]
    thinking_format: str | None = _DEFAULT["thinking_format"]
    kept_special_token_ids: Sequence[int] = _DEFAULT["kept_special_token_ids"]

    if not TYPE_CHECKING:  # type checkers see the keywords of the fields

        def __init__(self, **values: Any) -> None:
            """Check every field.  Numbers of numpy become plain ones, and lists become tuples."""
            for name in values:
                if name not in _CHECKS:
                    raise _unknown_field(name)
            set_fields(self, **_DEFAULTS)  # checked once: a request names few fields
            set_fields(self, **{name: _CHECKS[name](name, value) for name, value in values.items()})
            if self.max_tokens is not None and self.min_tokens > self.max_tokens:
                raise refusal("min_tokens", f"at most max_tokens ({self.max_tokens})", self.min_tokens)
            if self.best_of is not None and self.best_of < self.n:
                raise refusal("best_of", f"at least n ({self.n})", self.best_of)
            grammar_of(vars(self))  # refuses two

    @property
    def answer_grammar(self) -> GrammarSource | None:
        """The grammar that the answer follows, if there is one."""
        return grammar_of(vars(self))


def _unknown_field(name: str) -> InvalidArgumentError:
    near = nearest(name, FIELD_NAMES)
    hint = f"did you mean {near}?" if near else f"it has {', '.join(FIELD_NAMES)}"
    return InvalidArgumentError(f"SamplingParams has no field {name!r}: {hint}", param=name)


_Check = Callable[[str, Any], Any]


def _check_of(row: SamplingField) -> _Check:
    """Return the function that checks a value of a field; it takes the field's name and the value."""
    low, high = row.bounds
    checks: dict[str, _Check] = {
        "integer": lambda name, value: optional_integer(name, value, int(low), int(high)),
        "number": lambda name, value: optional_number(name, value, low, high),
        "boolean": check_flag,
        "strings": strings,
        "token_ids": lambda name, value: (some_token_ids if row.min_items else token_ids)(name, value, row.max_items),
        "id_lists": lambda name, value: id_lists(name, value, row.max_items, MAX_WORD_IDS),
        "biases": lambda _name, value: biases(value),
        "schema": schema_text,
        "text": lambda name, value: optional_text(name, value, row.max_items or 0),
        "choices": lambda name, value: strings(name, value, row.max_items or 0),
    }
    check = checks[row.kind]
    if row.kind in ("integer", "number") and row.is_required:
        return lambda name, value: required(name, check(name, value))
    if row.kind == "token_ids" and not row.is_required:
        return lambda name, value: None if value is None else check(name, value)
    return check


_CHECKS: Final = {row.name: _check_of(row) for row in SAMPLING_FIELDS}
_DEFAULTS: Final[dict[str, Any]] = {row.name: _CHECKS[row.name](row.name, row.default) for row in SAMPLING_FIELDS}
_OFF: Final[dict[str, Any]] = {row.row_name: row.off for row in SAMPLING_FIELDS}


@dataclass(frozen=True)
class ResolvedSampling:
    """The sampling parameters that a request runs with: every field has a value, and words are token ids.

    ``logit_bias`` holds pairs of token id and bias, ``bad_words`` token sequences.  ``end_ids`` are forbidden before
    ``min_tokens``.  ``num_logprobs`` -1 asks for no log-probabilities.  ``grammar`` is compiled.  ``thoughts`` is the
    limit on the thoughts.  ``hook`` sees the row of each token and the token.
    """

    max_tokens: int = _OFF["max_tokens"]
    temperature: float = _OFF["temperature"]
    top_k: int = _OFF["top_k"]
    top_p: float = _OFF["top_p"]
    seed: int = _OFF["seed"]
    min_p: float = _OFF["min_p"]
    typical_p: float = _OFF["typical_p"]
    repetition_penalty: float = _OFF["repetition_penalty"]
    presence_penalty: float = _OFF["presence_penalty"]
    frequency_penalty: float = _OFF["frequency_penalty"]
    min_tokens: int = _OFF["min_tokens"]
    logit_bias: tuple[tuple[int, float], ...] = _OFF["logit_bias"]
    allowed_token_ids: tuple[int, ...] | None = _OFF["allowed_token_ids"]
    bad_words: tuple[tuple[int, ...], ...] = _OFF["bad_words"]
    end_ids: tuple[int, ...] = ()
    num_logprobs: int = _OFF["num_logprobs"]
    grammar: Grammar | None = None
    no_repeat_ngram_size: int = _OFF["no_repeat_ngram_size"]
    bad_words_ids: tuple[tuple[int, ...], ...] = _OFF["bad_words_ids"]
    forced_bos_token_id: int = _OFF["forced_bos_token_id"]
    forced_eos_token_id: int = _OFF["forced_eos_token_id"]
    hook: RowHook | None = None
    thoughts: ThoughtsBudget | None = None

    def __post_init__(self) -> None:
        """Check every field, because one that the core refuses would end every request of its step."""
        checked = {name: required(name, check(name, getattr(self, name))) for name, check in _RESOLVED_NUMBERS}
        if not isinstance(self.bad_words, (list, tuple)):
            raise refusal("bad_words", "a list of lists of token ids", self.bad_words)
        allowed = self.allowed_token_ids
        set_fields(
            self,
            **checked,
            logit_bias=bias_pairs("logit_bias", self.logit_bias),
            allowed_token_ids=None if allowed is None else some_token_ids("allowed_token_ids", allowed),
            bad_words=id_lists("bad_words", self.bad_words),
            bad_words_ids=id_lists("bad_words_ids", self.bad_words_ids),
            end_ids=token_ids("end_ids", self.end_ids),
        )

    def answer(self, index: int) -> ResolvedSampling:
        """Return the parameters of answer ``index`` to a prompt.

        Answer 0 has these.  Each other answer has its own seed, by SplitMix64, which gives the same answer for `n` 1.
        """
        return replace(self, seed=_mixed(self.seed + index * _GOLDEN)) if index else self

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise InvalidArgumentError naming the field that has a token outside of the vocabulary."""
        check_vocabulary("logit_bias", (token for token, _ in self.logit_bias), vocab_size)
        check_vocabulary("allowed_token_ids", self.allowed_token_ids or (), vocab_size)
        check_vocabulary("bad_words", chain.from_iterable(self.bad_words), vocab_size)
        check_vocabulary("bad_words_ids", chain.from_iterable(self.bad_words_ids), vocab_size)
        for name in ("forced_bos_token_id", "forced_eos_token_id"):
            check_vocabulary(name, (getattr(self, name),), vocab_size)
        check_listed("logprobs", self.num_logprobs, vocab_size)

    @staticmethod
    def of_model(config: GenerationDefaults) -> ResolvedSampling:
        """Return the defaults that a model's generation_config.json sets."""
        values = {name: value for name, value in vars(config).items() if name in _OFF}
        return ResolvedSampling(max_tokens=config.max_new_tokens or DEFAULT_MAX_TOKENS, **values)

    @staticmethod
    def of(params: SamplingParams, defaults: ResolvedSampling) -> ResolvedSampling:
        """Fill the fields that the caller left open.

        Naming a filter asks for sampling, so the temperature is then 1 instead of a greedy default.
        """
        values: dict[str, Any] = {}
        for row in _FILLED:
            value = getattr(params, row.name)
            values[row.name] = getattr(defaults, row.name) if value is None else row.within(value)
        if params.temperature is None and defaults.temperature == 0.0:
            values["temperature"] = 1.0 if any(getattr(params, name) is not None for name in _FILTERS) else 0.0
        if params.seed is None:
            values["seed"] = int.from_bytes(os.urandom(8), "little") >> 1
        num_logprobs = -1 if params.logprobs is None else params.logprobs
        if (params.best_of or 1) > params.n:
            num_logprobs = max(0, num_logprobs)  # to compare the answers
        max_tokens = values["max_tokens"]
        if params.min_tokens > max_tokens:
            raise refusal(
                "min_tokens", f"at most max_tokens (here the model's default, {max_tokens})", params.min_tokens
            )
        return ResolvedSampling(
            **values,
            logit_bias=tuple((params.logit_bias or {}).items()),
            allowed_token_ids=None if params.allowed_token_ids is None else tuple(params.allowed_token_ids),
            bad_words_ids=tuple(tuple(ids) for ids in params.bad_words_ids),
            num_logprobs=num_logprobs,
        )


_RESOLVED: Final = tuple(row for row in SAMPLING_FIELDS if row.row_name in ResolvedSampling.__dataclass_fields__)
_RESOLVED_NUMBERS: Final = tuple(
    (row.row_name, _check_of(replace(row, bounds=row.resolved_bounds or row.bounds)))
    for row in _RESOLVED
    if row.kind in ("integer", "number")
)
_FILLED: Final = tuple(
    row for row in _RESOLVED if row.kind in ("integer", "number") and row.row_name == row.name
)  # fmt: skip
"""The numbers that a request takes from the caller, or else from the defaults."""
_FILTERS: Final = tuple(row.name for row in SAMPLING_FIELDS if row.is_filter)
_GOLDEN: Final = 0x9E3779B97F4A7C15


def _mixed(value: int) -> int:
    """Return SplitMix64's finalizer (Steele, Lea and Flood, OOPSLA 2014) without its lowest bit: 63 bits, like a
    random seed."""
    value &= 2**64 - 1
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & 2**64 - 1
    value = (value ^ value >> 27) * 0x94D049BB133111EB & 2**64 - 1
    return (value ^ value >> 31) >> 1
