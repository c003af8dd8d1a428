"""Limits on a ``tokenizer.json``, checked before the ``tokenizers`` library sees the file.

The library trusts its file: chained replacements multiply the length of a text, every added token is normalized while
the file is read, and a vocabulary may contain any id.  The limits bound the time and the memory that reading a file
needs, and refuse a tokenizer whose text growth is visible in the file.  ``tokenizer_process`` bounds what is not
visible in the file, such as a pattern that backtracks.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from penstock.checkpoint.tokenizer_files.merge_table import MadeMerges
from penstock.config import parse_object, show
from penstock.errors import InvalidFileError

__all__ = [
    "MAX_ADDED_TOKENS",
    "MAX_GROWTH",
    "MAX_TOKENIZER_BYTES",
    "MadeJson",
    "check_json_size",
    "check_tokenizer_file",
]

_FILE: Final = "tokenizer.json"
MAX_TOKENIZER_BYTES: Final = 64 << 20
MAX_OBJECTS: Final = 1 << 18
MAX_VALUES: Final = 1 << 21
MAX_ADDED_TOKENS: Final = 1 << 17
MAX_VOCAB: Final = 1 << 20
MAX_MERGES: Final = 1 << 20
MAX_TOKEN_CHARS: Final = 4096
MAX_ID: Final = (1 << 24) - 1
MAX_GROWTH: Final = 4096
"""Limit on the factor by which the steps of one field may lengthen a text."""
MAX_ADDED_BYTES: Final = 64 << 20
"""Limit on the total length of the added tokens after normalization."""
MAX_TEMPLATE_IDS: Final = 1024

_CHAINS: Final = ("normalizer", "pre_tokenizer", "decoder", "post_processor")
_SEQUENCE_KEYS: Final = ("normalizers", "pretokenizers", "decoders", "processors")
_TYPE_GROWTH: Final[Mapping[str, float]] = {  # in bytes of UTF-8, at most
    "NFC": 3,
    "NFD": 3,
    "NFKC": 11,
    "NFKD": 11,
    "Lowercase": 1.5,
    "BertNormalizer": 8,
    "ByteLevel": 2,
    "Metaspace": 4,
    "WordPiece": 2,
    "BPEDecoder": 2,
}
_MAY_MATCH_NOTHING: Final = re.compile(r"[*?^$|]|\{0|\{,|\\[bBAzZGKQ]|\(\)|^$")


class MadeJson(bytes):
    """A tokenizer.json that was made here, with the object ``value`` that it was made of, which needs no parsing.

    ``value`` may have its merges as MadeMerges.
    """

    value: dict[str, Any]

    @classmethod
    def of(cls, value: dict[str, Any]) -> MadeJson:
        """Return the text of an object of JSON's own types, and of MadeMerges."""
        text = json.dumps(value, ensure_ascii=False, default=_no_merges)
        merges = value["model"].get("merges")
        if isinstance(merges, MadeMerges):
            before, _, behind = text.rpartition('"merges": []')  # once: inside a string, quotes are escaped
            text = f'{before}"merges": {merges.text}{behind}'
        return cls.with_value(text.encode(), value)

    @classmethod
    def with_value(cls, data: bytes, value: dict[str, Any]) -> MadeJson:
        """Return a text that is that of ``value``."""
        made = cls(data)
        made.value = value
        return made


def _no_merges(value: object) -> list[str]:
    """Return what stands for merges whose text is put in later."""
    if not isinstance(value, MadeMerges):
        raise TypeError(f"expected an object of JSON, got {type(value).__name__}")
    return []


def check_json_size(data: bytes | memoryview, file: str, max_bytes: int) -> bytes:
    """Return the bytes of a JSON file; InvalidFileError when parsing them would need too much time or memory.

    Counts characters instead of parsing.  Braces and commas inside strings count too; the limits allow for that.
    """
    if len(data) > max_bytes:
        raise InvalidFileError(f"{file}: expected at most {max_bytes} bytes, got {len(data)}")
    raw = bytes(data)
    num_objects, num_values = raw.count(b"{"), raw.count(b",") + raw.count(b":")
    if num_objects > MAX_OBJECTS:
        raise InvalidFileError(f"{file}: expected at most {MAX_OBJECTS} objects, got {num_objects}")
    if num_values > MAX_VALUES:
        raise InvalidFileError(f"{file}: expected at most {MAX_VALUES} values, got about {num_values}")
    return raw


def check_tokenizer_file(data: bytes | memoryview) -> dict[str, Any]:
    """Parse a ``tokenizer.json`` and return its object; InvalidFileError names the field that exceeds a limit.

    Values of a wrong type pass here, because the library refuses them.
    """
    raw = check_json_size(data, _FILE, MAX_TOKENIZER_BYTES)
    if isinstance(data, MadeJson):
        values = data.value
    else:
        values = parse_object(raw, _FILE, max_bytes=len(raw), max_values=4 * MAX_VALUES, lenient=True)
    model = values.get("model")
    if isinstance(model, dict):
        _check_vocab(model.get("vocab"))
        _check_count("model.merges", model.get("merges"), MAX_MERGES)
    growth = {name: _chain_growth(name, values.get(name)) for name in _CHAINS}
    _check_added(values.get("added_tokens"), growth["normalizer"])
    return values


def _check_count(field: str, value: object, limit: int) -> None:
    if isinstance(value, (list, dict, MadeMerges)) and len(value) > limit:
        raise InvalidFileError(f"{_FILE}: {field}: expected at most {limit} entries, got {len(value)}", param=field)


def _check_vocab(vocab: object) -> None:
    _check_count("model.vocab", vocab, MAX_VOCAB)
    if isinstance(vocab, list):  # Unigram: pairs of a token and its score
        for pair in vocab:
            if isinstance(pair, list) and pair and isinstance(pair[0], str):
                _check_length("model.vocab", pair[0])
    if not isinstance(vocab, dict) or _has_plain_ids(vocab):
        return
    tokens: dict[int, str] = {}
    for token, number in vocab.items():
        _check_length("model.vocab", token)
        if type(number) is not int:  # the library refuses it
            continue
        if not 0 <= number <= MAX_ID:
            raise InvalidFileError(
                f"{_FILE}: model.vocab: {show(token)}: expected an id from 0 to {MAX_ID}, got {show(number)}",
                param="model.vocab",
            )
        if number in tokens:
            raise InvalidFileError(
                f"{_FILE}: model.vocab: {show(tokens[number])} and {show(token)} have the same id {number}",
                param="model.vocab",
            )
        tokens[number] = token


def _has_plain_ids(vocab: dict[str, Any]) -> bool:
    """Return True for short tokens with different ids, without a loop: only another vocabulary needs one."""
    ids = vocab.values()
    if set(map(type, ids)) != {int} or len(set(ids)) < len(ids):
        return False
    return min(ids) >= 0 and max(ids) <= MAX_ID and max(map(len, vocab)) <= MAX_TOKEN_CHARS


def _check_length(field: str, token: str) -> None:
    if len(token) > MAX_TOKEN_CHARS:
        raise InvalidFileError(
            f"{_FILE}: {field}: expected tokens of at most {MAX_TOKEN_CHARS} characters, got one of {len(token)}",
            param=field,
        )


def _check_added(added: object, growth: float) -> None:
    _check_count("added_tokens", added, MAX_ADDED_TOKENS)
    if not isinstance(added, list):
        return
    num_bytes = 0.0
    for entry in added:
        if not isinstance(entry, dict):
            continue
        content, number = entry.get("content"), entry.get("id")
        if isinstance(content, str):
            _check_length("added_tokens", content)
            num_bytes += len(content.encode()) * (growth if entry.get("normalized", True) else 1)
        if isinstance(number, int) and number > MAX_ID:
            raise InvalidFileError(
                f"{_FILE}: added_tokens: expected ids up to {MAX_ID}, got {show(number)}", param="added_tokens"
            )
    if num_bytes > MAX_ADDED_BYTES:
        raise InvalidFileError(
            f"{_FILE}: added_tokens: expected at most {MAX_ADDED_BYTES} bytes after normalization, got up to "
            f"{num_bytes:.3g}",
            param="added_tokens",
        )


def _chain_growth(field: str, value: object) -> float:
    growth = 1.0
    for step in _steps(value):
        growth *= _step_growth(field, step)
        if growth > MAX_GROWTH:
            raise InvalidFileError(
                f"{_FILE}: {field}: expected steps that lengthen a text at most {MAX_GROWTH} times, got more",
                param=field,
            )
    return growth


def _steps(value: object) -> Iterator[dict[str, Any]]:
    """Yield the steps of a component in order, those inside sequences too.  Nesting is at most 64 deep."""
    if not isinstance(value, dict):
        return
    yield value
    for key in _SEQUENCE_KEYS:
        parts = value.get(key)
        for part in parts if isinstance(parts, list) else ():
            yield from _steps(part)


def _step_growth(field: str, step: dict[str, Any]) -> float:
    """Return the factor by which one step may lengthen a text.

    Steps are recognised by their keys where possible, because the library also reads some steps without "type".
    """
    if field == "post_processor":
        return _template_growth(step)
    if "content" in step and "pattern" in step:
        return _replace_growth(step["pattern"], step["content"])
    if isinstance(step.get("prepend"), str):  # added in front of each text between two added tokens
        return 1.0 + len(step["prepend"].encode())
    if isinstance(step.get("precompiled_charsmap"), str):
        return _charsmap_growth(step["precompiled_charsmap"])
    kind = step.get("type")
    return _TYPE_GROWTH.get(kind, 1.0) if isinstance(kind, str) else 1.0


def _replace_growth(pattern: object, content: object) -> float:
    if not isinstance(pattern, dict) or not isinstance(content, str):
        return 1.0
    num_new, literal, regex = len(content.encode()), pattern.get("String"), pattern.get("Regex")
    if isinstance(literal, str):
        num_old = len(literal.encode())
        return max(1.0, num_new / num_old) if num_old else 1.0 + num_new
    if isinstance(regex, str) and not _MAY_MATCH_NOTHING.search(regex):
        return max(1.0, float(num_new))  # a match has at least one byte
    return 1.0 + num_new


def _charsmap_growth(encoded: str) -> float:
    """Return the growth by the longest replacement in SentencePiece's table: a size, a trie, NUL-terminated texts."""
    try:
        blob = base64.b64decode(encoded)
    except (binascii.Error, ValueError):
        return 1.0  # the library refuses it
    texts = blob[4 + int.from_bytes(blob[:4], "little") :]
    return 1.0 + max(map(len, texts.split(b"\0")))


def _template_growth(step: dict[str, Any]) -> float:
    """Return how often a template repeats the text; checks the number of its special tokens too."""
    growth = 1.0
    for name in ("single", "pair"):
        items = step.get(name)
        if isinstance(items, list):
            _check_count(f"post_processor.{name}", items, MAX_TEMPLATE_IDS)
            growth = max(growth, float(sum(isinstance(item, dict) and "Sequence" in item for item in items)))
    special = step.get("special_tokens")
    for entry in special.values() if isinstance(special, dict) else ():
        if isinstance(entry, dict):
            _check_count("post_processor.special_tokens", entry.get("ids"), MAX_TEMPLATE_IDS)
    return growth
