"""The sampling fields of a request, each declared once.

Everything that knows a sampling field reads this table: the checks of SamplingParams and of ResolvedSampling, the JSON
schemas of the service, the messages to its workers, and the arrays that the native core samples with.  Python's type
checker needs the names a second time, in ``engine/params.py``, and protobuf in ``wire.proto``; a test compares both
with the table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal

from penstock.validation import MAX_BIAS, MAX_TOKEN

__all__ = [
    "DEFAULT_MAX_TOKENS", "FIELD_NAMES", "MAX_ANSWERS", "MAX_GRAMMAR_CHARS", "MAX_LOGPROBS", "MAX_SCHEMA_CHARS",
    "MAX_WORD_IDS", "NATIVE_FIELDS", "SAMPLING_FIELDS",
    "SamplingField",
]  # fmt: skip

DEFAULT_MAX_TOKENS: Final = 256
MAX_LOGPROBS: Final = 20
MAX_ANSWERS: Final = 128
MAX_ALLOWED: Final = 1 << 18
"""The limit on a list of token ids: as many as the largest vocabularies have."""
MAX_STOP_IDS: Final = 4096
MAX_WORDS: Final = 1024
"""The limit on the lists of token ids of ``bad_words_ids``."""
MAX_WORD_IDS: Final = 64
"""The limit on the token ids of one of them."""
MAX_NGRAM: Final = 1024
MAX_CHOICES: Final = 1024
MAX_GRAMMAR_CHARS: Final = 1 << 17
MAX_SCHEMA_CHARS: Final = 1 << 18
MAX_RULES_CHARS: Final = 1 << 21
"""The limit on a grammar that the service writes around another one, in which each character may be an escape."""
MIN_PROBABILITY: Final = 1e-6
MIN_SEED: Final = -(2**63)

Bounds = tuple[float, float]
Kind = Literal[
    "integer", "number", "boolean", "strings", "token_ids", "id_lists", "biases", "schema", "text", "choices"
]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class SamplingField:
    """One sampling field.

    ``wire``: its number in the message ``Sampling`` of ``wire.proto``.  ``default``: its value in SamplingParams when
    the caller gives none.  ``bounds``: the smallest and the largest value of a number.  ``json_bounds``: those of the
    service's JSON fields, if they differ.  ``is_common``: every kind of body that generates text accepts the field.
    ``min_items``, ``max_items``: the smallest and the largest length of a list, or of a text in characters;
    ``json_max_items`` is the largest one in the service's JSON fields, if it differs.

    A field that a request runs with also has ``off``, the value that switches it off and the default in
    ResolvedSampling.  There it may have other bounds (``resolved_bounds``) and another name (``resolved_name``).
    ``dtype``: the numpy type of the array that the native core reads it from.

    ``is_filter``: it restricts the tokens to draw from, so naming it asks for sampling.  ``is_penalty``: it changes the
    logits of tokens that occurred.  ``needs_logits``: a bundle that chooses its tokens itself cannot do it.
    """

    name: str
    kind: Kind
    wire: int
    help: str
    default: Any = None
    bounds: Bounds = (0, 0)
    json_bounds: Bounds | None = None
    is_common: bool = True
    min_items: int = 0
    max_items: int | None = None
    json_max_items: int | None = None
    off: Any = None
    resolved_bounds: Bounds | None = None
    resolved_name: str = ""
    dtype: str = ""
    is_filter: bool = False
    is_penalty: bool = False
    needs_logits: bool = False

    @property
    def row_name(self) -> str:
        """The name in ResolvedSampling and in the native arrays."""
        return self.resolved_name or self.name

    @property
    def is_required(self) -> bool:
        """True if None is not a value of the field in SamplingParams."""
        return self.default is not None

    def within(self, value: Any) -> Any:
        """Return a number as a request runs with it: a share of 0 as the smallest above it, and a negative seed as the
        unsigned number of the same 64 bits.
        """
        if self.kind == "integer" and self.bounds[0] == MIN_SEED:
            return value % 2**64
        return max(value, MIN_PROBABILITY) if self.resolved_bounds == (MIN_PROBABILITY, 1) else value


SAMPLING_FIELDS: Final = (
    SamplingField(
        name="max_tokens", kind="integer", wire=1, bounds=(1, MAX_TOKEN), json_bounds=(0, MAX_TOKEN),
        off=DEFAULT_MAX_TOKENS, resolved_bounds=(0, MAX_TOKEN),
        help="Maximum number of tokens to generate. Default: the model's own, else 256.",
    ),
    SamplingField(
        name="min_tokens", kind="integer", wire=2, default=0, bounds=(0, MAX_TOKEN), off=0, needs_logits=True,
        help="Number of tokens to generate before an end token or a stop string can end the answer. Default: 0.",
    ),
    SamplingField(
        name="temperature", kind="number", wire=3, bounds=(0, 100), off=0.0, resolved_bounds=(0, 1000), dtype="f4",
        needs_logits=True,
        help="Sampling temperature. 0 is greedy. Default: the model's own, else 0.",
    ),
    SamplingField(
        name="top_k", kind="integer", wire=4, bounds=(0, MAX_TOKEN), json_bounds=(-1, MAX_TOKEN), off=0, dtype="i4",
        is_filter=True,
        help="Number of likeliest tokens to keep. 0 or -1 keeps all. Default: the model's own, else 0.",
    ),
    SamplingField(
        name="top_p", kind="number", wire=5, bounds=(0, 1), off=1.0, resolved_bounds=(MIN_PROBABILITY, 1),
        dtype="f4", is_filter=True,
        help="Keep the smallest set of tokens whose probability reaches this. Default: the model's own, else 1.",
    ),
    SamplingField(
        name="min_p", kind="number", wire=6, bounds=(0, 1), off=0.0, dtype="f4", is_filter=True,
        help="Drop tokens below this share of the likeliest token's probability. Default: the model's own, else 0.",
    ),
    SamplingField(
        name="typical_p", kind="number", wire=7, bounds=(0, 1), off=1.0, resolved_bounds=(MIN_PROBABILITY, 1),
        dtype="f4", is_filter=True,
        help="Keep the tokens nearest to the expected surprise whose probability reaches this. "
        "Default: the model's own, else 1.",
    ),
    SamplingField(
        name="repetition_penalty", kind="number", wire=8, bounds=(0.01, 100), off=1.0, dtype="f4", is_penalty=True,
        needs_logits=True,
        help="Penalty on tokens of the prompt and the answer, which divides positive logits. "
        "Default: the model's own, else 1.",
    ),
    SamplingField(
        name="presence_penalty", kind="number", wire=9, default=0.0, bounds=(-2, 2), off=0.0, dtype="f4",
        is_penalty=True, needs_logits=True,
        help="Subtracted from the logit of each token that is in the answer. Default: 0.",
    ),
    SamplingField(
        name="frequency_penalty", kind="number", wire=10, default=0.0, bounds=(-2, 2), off=0.0, dtype="f4",
        is_penalty=True, needs_logits=True,
        help="Subtracted from the logit of a token once for each time that it is in the answer. Default: 0.",
    ),
    SamplingField(
        name="logit_bias", kind="biases", wire=11, bounds=(-MAX_BIAS, MAX_BIAS), off=(), needs_logits=True,
        help="Number to add to the logit of each of these token ids, from -100 to 100.",
    ),
    SamplingField(
        name="allowed_token_ids", kind="token_ids", wire=12, min_items=1, max_items=MAX_ALLOWED, needs_logits=True,
        help="The only token ids that may be generated. Default: all.",
    ),
    SamplingField(
        name="bad_words", kind="strings", wire=13, default=(), off=(), needs_logits=True,
        help="Strings that the answer must not contain.",
    ),
    SamplingField(
        name="seed", kind="integer", wire=14, bounds=(MIN_SEED, 2**64 - 1), json_bounds=(MIN_SEED, 2**63 - 1), off=0,
        resolved_bounds=(0, 2**64 - 1), dtype="u8",
        help="Seed of the random numbers. The same seed gives the same tokens in any batch. Default: a random one.",
    ),
    SamplingField(
        name="n", kind="integer", wire=15, default=1, bounds=(1, MAX_ANSWERS),
        help="Number of answers to return. Default: 1.",
    ),
    SamplingField(
        name="best_of", kind="integer", wire=16, bounds=(1, MAX_ANSWERS), is_common=False, off=1, needs_logits=True,
        help="Number of answers to generate, of which the n likeliest per token are returned. Default: n.",
    ),
    SamplingField(
        name="stop", kind="strings", wire=17, default=(),
        help="Strings that end the answer, which does not include them.",
    ),
    SamplingField(
        name="stop_token_ids", kind="token_ids", wire=18, default=(), max_items=MAX_STOP_IDS,
        help="Token ids that end the answer.",
    ),
    SamplingField(
        name="include_stop_str_in_output", kind="boolean", wire=19, default=False,
        help="Include the stop string in the answer. Default: false.",
    ),
    SamplingField(
        name="ignore_eos", kind="boolean", wire=20, default=False,
        help="Continue after the model's end tokens. Default: false.",
    ),
    SamplingField(
        name="logprobs", kind="integer", wire=21, bounds=(0, MAX_LOGPROBS), is_common=False, off=-1,
        resolved_bounds=(-1, MAX_LOGPROBS), resolved_name="num_logprobs", dtype="i4", needs_logits=True,
        help="Return the log-probability of each token and of this many likeliest tokens, 0 to 20.",
    ),
    SamplingField(
        name="prompt_logprobs", kind="integer", wire=22, bounds=(0, MAX_LOGPROBS), is_common=False, needs_logits=True,
        help="Return the log-probability of each token of the prompt and of this many likeliest tokens, 0 to 20.",
    ),
    SamplingField(
        name="echo", kind="boolean", wire=23, default=False, is_common=False,
        help="Begin the text with the prompt. Default: false.",
    ),
    SamplingField(
        name="json_schema", kind="schema", wire=24, max_items=MAX_SCHEMA_CHARS, needs_logits=True,
        help="JSON schema, an object or its text, that the answer follows.",
    ),
    SamplingField(
        name="json_object", kind="boolean", wire=25, default=False, off=False, needs_logits=True,
        help="The answer is an object of JSON. Default: false.",
    ),
    SamplingField(
        name="regex", kind="text", wire=26, max_items=MAX_GRAMMAR_CHARS, needs_logits=True,
        help="Regular expression that the whole answer matches.",
    ),
    SamplingField(
        name="choice", kind="choices", wire=27, default=(), off=(), max_items=MAX_CHOICES, needs_logits=True,
        help="Strings, one of which is the answer.",
    ),
    SamplingField(
        name="grammar", kind="text", wire=28, max_items=MAX_RULES_CHARS, json_max_items=MAX_GRAMMAR_CHARS,
        needs_logits=True,
        help="Grammar in Lark or GBNF that the answer follows.",
    ),
    SamplingField(
        name="skip_special_tokens", kind="boolean", wire=29, default=True,
        help="Leave the text of special tokens out of the answer. Default: true.",
    ),
    SamplingField(
        name="no_repeat_ngram_size", kind="integer", wire=30, bounds=(0, MAX_NGRAM), off=0, needs_logits=True,
        help="Length in tokens of sequences that prompt and answer have only once. 0 is off. "
        "Default: the model's own, else 0.",
    ),
    SamplingField(
        name="bad_words_ids", kind="id_lists", wire=31, default=(), max_items=MAX_WORDS, off=(), needs_logits=True,
        help="Lists of token ids that the answer must not complete; a list may begin in the prompt.",
    ),
    SamplingField(
        name="forced_bos_token_id", kind="integer", wire=32, bounds=(0, MAX_TOKEN), off=-1,
        resolved_bounds=(-1, MAX_TOKEN), needs_logits=True,
        help="Token id that follows a prompt of one token. Default: the model's own, else none.",
    ),
    SamplingField(
        name="forced_eos_token_id", kind="integer", wire=33, bounds=(0, MAX_TOKEN), off=-1,
        resolved_bounds=(-1, MAX_TOKEN), needs_logits=True,
        help="Token id that an answer of the maximum length ends with. Default: the model's own, else none.",
    ),
    SamplingField(
        name="thinking_token_budget", kind="integer", wire=34, bounds=(0, MAX_TOKEN), json_bounds=(-1, MAX_TOKEN),
        needs_logits=True,
        help="Number of tokens of thoughts, after which a closing text ends them. Default and -1: no limit.",
    ),
    SamplingField(
        name="thinking_format", kind="text", wire=35, max_items=64, is_common=False,
        help="Name of the format of the model's thoughts. Default: that of its chat template.",
    ),
    SamplingField(
        name="kept_special_token_ids", kind="token_ids", wire=36, default=(), max_items=MAX_STOP_IDS, is_common=False,
        help="Special tokens whose text is in the answer, even if skip_special_tokens leaves out that of others.",
    ),
)  # fmt: skip

FIELD_NAMES: Final = tuple(field.name for field in SAMPLING_FIELDS)
NATIVE_FIELDS: Final = tuple(field for field in SAMPLING_FIELDS if field.dtype)
"""The fields that the native core reads, one number per row."""
