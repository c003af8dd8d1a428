"""The fields that request bodies of several routes share; the sampling fields come from ``sampling_fields.py``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec
from msgspec import Meta

from penstock.api_errors import FieldError
from penstock.config import show
from penstock.engine.options import MAX_PRIORITY, MAX_SALT_CHARS
from penstock.sampling_fields import MAX_WORD_IDS, SAMPLING_FIELDS, SamplingField
from penstock.serving.request_decoding import check_refused, converted
from penstock.validation import MAX_BIASES, MAX_STRING_CHARS, MAX_STRINGS, MAX_TOKEN

__all__ = [
    "MAX_NAME_CHARS", "MAX_PROMPTS", "MAX_TIMEOUT_S", "SAMPLING", "Body", "Inputs", "Prompts", "SamplingFields",
    "ServingFields", "Token", "TokenIds", "checked_prompts", "extended",
]  # fmt: skip

MAX_PROMPTS: Final = 2048
"""The limit of OpenAI's API on the inputs of a request for embeddings."""
MAX_NAME_CHARS: Final = 256
MAX_TIMEOUT_S: Final = 86400.0
_PIECE: Final = 1 << 14

Token = Annotated[int, Meta(ge=0, le=MAX_TOKEN)]
TokenIds = Annotated[list[Token], Meta(min_length=1)]
String = Annotated[str, Meta(max_length=MAX_STRING_CHARS)]
Strings = String | Annotated[list[String], Meta(max_length=MAX_STRINGS)]
_BiasKey = Annotated[str, Meta(pattern=r"^[0-9]{1,10}\Z")]
_NoBiases = Annotated[list[int], Meta(max_length=0)]
"""llama.cpp's ``logit_bias`` is a list, which its clients send empty."""


class Body(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of a request or of a response.  In a request, a null field counts as absent unless it is required."""

    def __post_init__(self) -> None:
        """Check the fields that are not supported."""
        check_refused(self)


def _type_of(row: SamplingField) -> Any:
    low, high = row.json_bounds or row.bounds
    types: dict[str, Any] = {
        "integer": Annotated[int, Meta(ge=int(low), le=int(high))],
        "number": Annotated[float, Meta(ge=low, le=high)],
        "boolean": bool,
        "strings": Strings,
        "token_ids": Annotated[list[Token], Meta(min_length=row.min_items or None, max_length=row.max_items)],
        "id_lists": Annotated[
            list[Annotated[list[Token], Meta(min_length=1, max_length=MAX_WORD_IDS)]], Meta(max_length=row.max_items)
        ],
        "biases": Annotated[dict[_BiasKey, Annotated[float, Meta(ge=low, le=high)]], Meta(max_length=MAX_BIASES)]
        | _NoBiases,
        "schema": dict[str, Any] | Annotated[str, Meta(max_length=row.max_items)],
        "text": Annotated[str, Meta(max_length=row.json_max_items or row.max_items)],
        "choices": String | Annotated[list[String], Meta(max_length=row.max_items)],
    }
    return types[row.kind]


_ROWS: Final = {row.name: row for row in SAMPLING_FIELDS}
SAMPLING: Final = tuple(row.name for row in SAMPLING_FIELDS if row.is_common)
"""The names of the fields that every body of a request for text has; ``top_k`` -1 means 0, as in vLLM."""


def _field_of(name: str, row: SamplingField) -> tuple[str, Any, None]:
    return name, Annotated[_type_of(row) | None, Meta(description=row.help)], None


def extended(
    name: str,
    base: type[Body],
    sampling: dict[str, str] | Iterable[str] = (),
    fields: Mapping[str, Any] | None = None,
) -> type[Body]:
    """Return a struct ``name`` with the fields of ``base`` and more.

    ``sampling``: names of sampling fields, or a mapping from names in the body to them.  ``fields``: types of further
    fields, which may be absent, by their names, separated by spaces.
    """
    rows = sampling if isinstance(sampling, dict) else {field: field for field in sampling}
    added: list[Any] = [_field_of(field, _ROWS[of]) for field, of in rows.items()]
    for names, type_ in (fields or {}).items():
        added += [(field, type_, None) for field in names.split()]
    struct: Any = msgspec.defstruct(name, added, bases=(base,), kw_only=True, forbid_unknown_fields=True)
    kind: type[Body] = struct
    return kind


class ServingFields(Body, kw_only=True):
    """The fields that control how an engine serves a request."""

    user: Annotated[
        Annotated[str, Meta(max_length=MAX_NAME_CHARS)] | None,
        Meta(description="The end user, written to the log; requests of one user prefer the same worker."),
    ] = None
    priority: Annotated[
        Annotated[int, Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None,
        Meta(description="Requests with a lower number go first. Default: 0."),
    ] = None
    cache_salt: Annotated[
        Annotated[str, Meta(max_length=MAX_SALT_CHARS)] | None,
        Meta(description="Only requests with the same salt share cached prefixes."),
    ] = None
    timeout: Annotated[
        Annotated[float, Meta(ge=0.001, le=MAX_TIMEOUT_S)] | None,
        Meta(description="Time limit in seconds, after which the request ends with status 504."),
    ] = None
    truncate_prompt_tokens: Annotated[
        Annotated[int, Meta(ge=-1, le=MAX_TOKEN, extra_json_schema={"not": {"const": 0}})] | None,
        Meta(description="Keep only this many tokens from the end of the prompt; -1 keeps as many as fit."),
    ] = None

    def __post_init__(self) -> None:
        """Refuse a prompt of no tokens, which the type cannot exclude."""
        super().__post_init__()
        if self.truncate_prompt_tokens == 0:
            name = "truncate_prompt_tokens"
            raise FieldError(name, f"{name}: expected -1 or an integer above 0, got 0")

    @property
    def timeout_s(self) -> float | None:
        """The time limit in seconds, if there is one."""
        return self.timeout


if TYPE_CHECKING:

    class SamplingFields(ServingFields):
        """ServingFields, and the fields of SamplingParams under the same names."""

        def __getattr__(self, name: str) -> Any: ...

else:
    SamplingFields = extended("SamplingFields", ServingFields, SAMPLING)

_Input = Annotated[str, Meta(min_length=1)]
_Texts = Annotated[list[str], Meta(min_length=1, max_length=MAX_PROMPTS)]
_Inputs = Annotated[list[_Input], Meta(min_length=1, max_length=MAX_PROMPTS)]
_TokenLists = Annotated[list[TokenIds], Meta(min_length=1, max_length=MAX_PROMPTS)]


def _any_of(*kinds: Any) -> Meta:
    return Meta(extra_json_schema={"anyOf": [msgspec.json.schema(kind) for kind in kinds]})


Prompts = Annotated[Any, _any_of(str, _Texts, TokenIds, _TokenLists)]
"""Texts or token ids; no type of msgspec has both, so ``checked_prompts`` checks them."""
Inputs = Annotated[Any, _any_of(_Input, _Inputs, TokenIds, _TokenLists)]
"""Prompts without empty texts."""


def checked_prompts(value: Any, path: str, *, allows_empty: bool = True) -> Any:
    """Return a text, a list of texts, token ids or a list of lists of them; ``allows_empty`` allows empty texts.

    Raises FieldError.
    """
    if isinstance(value, str):
        kind: Any = str if allows_empty else _Input
    elif not isinstance(value, list):
        expected = "a string, a list of strings, a list of token ids, or a list of such lists"
        raise FieldError(path, f"{path}: expected {expected}, got {show(value)}")
    elif not value or isinstance(value[0], str):
        kind = _Texts if allows_empty else _Inputs
    elif isinstance(value[0], list):
        if len(value) <= MAX_PROMPTS and all(map(_are_token_ids, value)):
            return value
        kind = _TokenLists
    else:
        if _are_token_ids(value):
            return value
        kind = TokenIds
    return converted(value, kind, path)


def _are_token_ids(values: Any) -> bool:
    """Return True for a list of token ids; they are checked in pieces, between which other threads can run."""
    if type(values) is not list or not values:
        return False
    try:
        for at in range(0, len(values), _PIECE):
            msgspec.convert(values[at : at + _PIECE], TokenIds)
    except msgspec.ValidationError:
        return False
    return True
