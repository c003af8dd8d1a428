"""Checks of a caller's fields.  Each returns the plain value, or raises InvalidArgumentError naming the field."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from penstock.config import check_integer, is_integer, is_number
from penstock.errors import InvalidArgumentError

__all__ = [
    "MAX_TOKEN", "LogitBias", "bias_pairs", "biases", "check_listed", "check_vocabulary", "id_lists",
    "listed_token_ids", "missing_attribute", "nearest",
    "optional_integer", "optional_number", "optional_text", "printable", "refusal", "required", "set_fields",
    "some_token_ids", "strings", "token_id", "token_ids", "word_ids", "wrong_type",
]  # fmt: skip

MAX_STRINGS: Final = 64
MAX_STRING_CHARS: Final = 4096
MAX_BIASES: Final = 4096
MAX_BIAS: Final = 100
MAX_TOKEN: Final = 2**31 - 1


def refusal(name: str, expected: str, actual: object) -> InvalidArgumentError:
    """Return the error of a field with a wrong value: what is expected, and the value."""
    return InvalidArgumentError(f"{name}: expected {expected}, got {actual!r:.200}", param=name)


def wrong_type(name: str, expected: str, actual: object) -> InvalidArgumentError:
    """Return the error of a field with a wrong type: what is expected, and the type."""
    return InvalidArgumentError(f"{name}: expected {expected}, got {type(actual).__name__}", param=name)


def nearest(name: str, names: Iterable[str]) -> str:
    """Return the known name that is most similar to an unknown one; "" if none is."""
    from difflib import get_close_matches  # only an error needs it

    return next(iter(get_close_matches(name, list(names), 1)), "")


def missing_attribute(owner: str, name: str, names: Iterable[str], hints: Mapping[str, str]) -> AttributeError:
    """Return the error for an attribute that does not exist.

    It names what to use instead: from ``hints``, for names of other libraries, or the nearest of ``names``.
    """
    instead = hints.get(name) or ("" if name.startswith("_") else nearest(name, (k for k in names if k[0] != "_")))
    return AttributeError(f"{owner} has no attribute {name!r:.60}{f'. Use {instead}.' if instead else ''}")


def optional_integer(name: str, value: object, low: int, high: int) -> int | None:
    """Check an integer within bounds.  None is returned as it is."""
    return None if value is None else check_integer(name, value, low, high)


def optional_number(name: str, value: Any, low: float, high: float) -> float | None:
    """Check a number within bounds.  None is returned as it is."""
    if value is None:
        return None
    if not is_number(value, low, high):
        raise refusal(name, f"a number from {low:g} to {high:g}", value)
    return float(value)


def strings(name: str, value: object, max_items: int = MAX_STRINGS) -> tuple[str, ...]:
    """Check a string or a list of strings and return a tuple; () for None."""
    several = (value,) if isinstance(value, str) else () if value is None else value
    if not isinstance(several, (list, tuple)) or not all(isinstance(s, str) for s in several):
        raise refusal(name, "a string or a list of strings", value)
    if len(several) > max_items:
        raise InvalidArgumentError(f"{name}: expected at most {max_items} strings, got {len(several)}", param=name)
    for text in several:
        if not 0 < len(text) <= MAX_STRING_CHARS:
            raise InvalidArgumentError(
                f"{name}: expected strings of 1 to {MAX_STRING_CHARS} characters, got one of {len(text)}", param=name
            )
    return tuple(several)


def optional_text(name: str, value: object, max_chars: int) -> str | None:
    """Check a string of characters that UTF-8 has.  None and the empty string, which ask for nothing, are None."""
    if value is None or value == "":
        return None
    if not isinstance(value, str):
        raise wrong_type(name, "a string", value)
    if len(value) > max_chars:
        raise InvalidArgumentError(f"{name}: expected at most {max_chars} characters, got {len(value)}", param=name)
    try:
        value.encode()
    except UnicodeEncodeError as error:
        message = f"{name}: found half a surrogate pair at character {error.start}"
        raise InvalidArgumentError(message, param=name) from None
    return value


def token_ids(name: str, value: object, max_items: int | None = None) -> tuple[int, ...]:
    """Check token ids and return each once.  Submission checks them against the vocabulary."""
    ids = _listed(name, value)
    if max_items is not None and len(ids) > max_items:
        raise InvalidArgumentError(f"{name}: expected at most {max_items} token ids, got {len(ids)}", param=name)
    if set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) <= MAX_TOKEN:  # nearly always, and there may be many
        return tuple(dict.fromkeys(ids))
    return tuple(dict.fromkeys(token_id(f"{name}[{i}]", token) for i, token in enumerate(ids)))


def token_id(name: str, value: object) -> int:
    """Check one token id."""
    return check_integer(name, value, 0, MAX_TOKEN)


class LogitBias(Mapping[int, float]):
    """An immutable mapping from token id to bias: what was checked is what runs."""

    def __init__(self, values: Mapping[int, float]) -> None:
        self._values = dict(values)

    def __getitem__(self, token: int) -> float:
        return self._values[token]

    def __iter__(self) -> Iterator[int]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return repr(self._values)


def biases(value: object) -> LogitBias:
    """Check a mapping from token id to bias.  Ids may be strings, as in JSON."""
    if value is None:
        return LogitBias({})
    if not isinstance(value, Mapping):
        raise refusal("logit_bias", "a mapping of token ids to numbers", value)
    if len(value) > MAX_BIASES:
        raise InvalidArgumentError(
            f"logit_bias: expected at most {MAX_BIASES} token ids, got {len(value)}", param="logit_bias"
        )
    checked = {}
    for key, bias in value.items():
        token = int(key) if isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) < 11 else key
        if not is_integer(token, 0, MAX_TOKEN) or not is_number(bias, -MAX_BIAS, MAX_BIAS):
            raise refusal("logit_bias", f"token ids and numbers from -{MAX_BIAS} to {MAX_BIAS}", {key: bias})
        if int(token) in checked:  # "1" and "01", or "1" and 1
            raise InvalidArgumentError(f"logit_bias: token id {int(token)} appears twice", param="logit_bias")
        checked[int(token)] = float(bias)
    return LogitBias(checked)


def bias_pairs(name: str, value: Any) -> tuple[tuple[int, float], ...]:
    """Check pairs of token id and bias."""
    try:
        mapping = dict(value)
    except (TypeError, ValueError):
        raise refusal(name, "pairs of token id and bias", value) from None
    return tuple(biases(mapping).items())


def required(name: str, value: Any) -> Any:
    """Refuse None where a number is required."""
    if value is None:
        raise refusal(name, "a number", None)
    return value


def set_fields(instance: object, **values: object) -> None:
    """Set fields of a frozen dataclass during its construction."""
    for name, value in values.items():
        object.__setattr__(instance, name, value)


def some_token_ids(name: str, value: object, max_items: int | None = None) -> tuple[int, ...]:
    """Check token ids, at least one."""
    ids = token_ids(name, value, max_items)
    if not ids:
        raise refusal(name, "None or at least one token id", [])
    return ids


def listed_token_ids(name: str, value: object) -> tuple[int, ...]:
    """Check token ids and keep their order and repetitions."""
    ids = _listed(name, value)
    if set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) <= MAX_TOKEN:  # nearly always
        return ids
    return tuple(token_id(f"{name}[{i}]", token) for i, token in enumerate(ids))


def word_ids(name: str, value: object) -> tuple[int, ...]:
    """Check the token ids of a word, at least one, and keep their order and repetitions."""
    ids = listed_token_ids(name, value)
    if not ids:
        raise refusal(name, "at least one token id", [])
    return ids


def id_lists(name: str, value: object, max_items: int | None = None, max_ids: int | None = None) -> tuple[Any, ...]:
    """Check lists of token ids, each with at least one, and keep their order; () for None."""
    lists = () if value is None else _listed(name, value)
    if max_items is not None and len(lists) > max_items:
        raise InvalidArgumentError(f"{name}: expected at most {max_items} lists, got {len(lists)}", param=name)
    checked = tuple(word_ids(f"{name}[{i}]", ids) for i, ids in enumerate(lists))
    longest = max(map(len, checked), default=0)
    if max_ids is not None and longest > max_ids:
        raise InvalidArgumentError(f"{name}: expected lists of at most {max_ids} ids, got {longest}", param=name)
    return checked


def _listed(name: str, value: object) -> tuple[Any, ...]:
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        raise refusal(name, "a list of token ids", value)
    return tuple(value)


def check_vocabulary(name: str, ids: Iterable[int], vocab_size: int) -> None:
    """Refuse token ids outside of the vocabulary, which in a step would end the other requests as well."""
    greatest = max(ids, default=0)
    if greatest >= vocab_size:
        raise InvalidArgumentError(f"{name}: expected token ids from 0 to {vocab_size - 1}, got {greatest}", param=name)


def check_listed(name: str, num_listed: int, vocab_size: int) -> None:
    """Refuse to list more of the likeliest tokens than the vocabulary has."""
    if num_listed > vocab_size:
        raise InvalidArgumentError(f"{name}: the model has only {vocab_size} tokens", param=name)


def printable(text: str, keep: str = "") -> str:
    """Return the text with a question mark for each character that a terminal cannot show; ``keep`` stays."""
    return "".join(char if char.isprintable() or char in keep else "?" for char in text)
