"""Read a ``tokenizer.json`` as the ``tokenizers`` library does: with its defaults, and with old forms converted.

The library needs most of a second for the words and merges of a large vocabulary, and they come back unchanged.  So it
reads byte pair encodings without them, if a look at the file shows that it would take them as they are.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.checkpoint.tokenizer_file import open_checked_file
from penstock.checkpoint.tokenizer_files.merge_table import MadeMerges, merge_table
from penstock.checkpoint.tokenizer_limits import MAX_ID, check_tokenizer_file
from penstock.config import show
from penstock.graph.tokenizer.components import Json, NotCompiledError

__all__ = ["ReadTokenizer", "read_tokenizer"]

_ID_BITS: Final = 32


class ReadTokenizer(NamedTuple):
    """The object as the library reads it, the library's tokenizer, and its added tokens by id.

    Merges are a table, uint32 [merges, 4]: left, right, rank, token.  The library's own model may have no words.
    """

    values: Json
    library: Any
    added: dict[int, Any]


class _Words(NamedTuple):
    """The fields that the library need not read: ``vocab`` in the order of ids, ``merges``, ids of added tokens."""

    vocab: dict[str, int]
    merges: npt.NDArray[np.uint32]
    added: dict[str, int]


def read_tokenizer(data: bytes) -> ReadTokenizer:
    """Read a tokenizer.  Raises what ``open_tokenizer_file`` raises, and NotCompiledError for merges of no token."""
    checked = check_tokenizer_file(data)
    words = _plain_words(checked)
    if words is not None:
        small = {text: i for i, text in enumerate(words.added)}
        checked = {**checked, "model": {**checked["model"], "vocab": small, "merges": []}}
        data = json.dumps(checked).encode()
    library = open_checked_file(data, checked)
    values = json.loads(library.to_str())
    added = library.get_added_tokens_decoder()
    model = values["model"]
    if words is not None:
        model |= {"vocab": words.vocab, "merges": words.merges}
        ids = {words.added[token.content]: token for token in added.values()}
        return ReadTokenizer(values, library, dict(sorted(ids.items())))
    if model.get("type") == "BPE":
        try:
            lefts, rights = [left for left, _ in model["merges"]], [right for _, right in model["merges"]]
            model["merges"] = merge_table(model["vocab"], lefts, rights)
        except KeyError as error:
            raise NotCompiledError(f"model.merges: {show(error.args[0])} is not in the vocabulary") from None
    return ReadTokenizer(values, library, added)


def _plain_words(values: Json) -> _Words | None:
    """Return the words of a byte pair encoding that the library takes as they are; None for any other tokenizer."""
    model = values.get("model")
    if not isinstance(model, dict) or model.get("type") != "BPE":
        return None
    vocab = model.get("vocab")
    if not isinstance(vocab, dict) or not vocab or set(map(type, vocab.values())) != {int}:
        return None
    ids = list(vocab.values())
    if min(ids) < 0 or max(ids) > MAX_ID or len(set(ids)) < len(ids):
        return None
    merges = _plain_merges(vocab, model.get("merges"))
    added = _plain_added(vocab, values.get("added_tokens"))
    if merges is None or added is None:
        return None
    if ids != sorted(ids):
        vocab = dict(sorted(vocab.items(), key=lambda entry: entry[1]))
    return _Words(vocab, merges, added)


def _plain_merges(vocab: Mapping[str, int], merges: object) -> npt.NDArray[np.uint32] | None:
    """Return the table of merges, each of which is there once."""
    if isinstance(merges, MadeMerges):
        return _without_repetition(merges.table)
    if not isinstance(merges, list):
        return None
    if set(map(type, merges)) == {str}:  # the old form; the library skips lines with a version
        if any(merge.startswith("#") for merge in merges):
            return None
        merges = [merge.split(" ") for merge in merges]
    if not set(map(type, merges)) <= {list} or not set(map(len, merges)) <= {2}:
        return None
    try:
        table = merge_table(vocab, [left for left, _ in merges], [right for _, right in merges])
    except (KeyError, TypeError):  # the library's error is the one to raise
        return None
    return _without_repetition(table)


def _without_repetition(table: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32] | None:
    """Return a table of merges if each is there once, else None."""
    pairs = table[:, 0].astype(np.uint64) << np.uint64(_ID_BITS) | table[:, 1]
    pairs.sort()
    return None if (pairs[1:] == pairs[:-1]).any() else table


def _plain_added(vocab: Mapping[str, int], added: object) -> dict[str, int] | None:
    """Return the ids of the added tokens by text, if the library gives them the ids that the file says.

    They are those of the vocabulary, or the next ones behind it.
    """
    if added is None:
        return {}
    if not isinstance(added, list):
        return None
    ids: dict[str, int] = {}
    following = len(vocab)
    for entry in added:
        text, number = (entry.get("content"), entry.get("id")) if isinstance(entry, dict) else (None, None)
        if not isinstance(text, str) or not text or text in ids or type(number) is not int:
            return None
        expected = vocab.get(text, following)
        if number != expected or (text in vocab and number >= len(vocab)):
            return None
        following += text not in vocab
        ids[text] = number
    return ids
