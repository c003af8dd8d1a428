"""Encode the segment ``tokenizer.bin``, the tables of a tokenizer that the core uses in place.

docs/explanation/bundle-format.md specifies the bytes.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

__all__ = ["NO_TOKEN", "AddedEntry", "TokenizerTables", "encode_tables"]

NO_TOKEN: Final = 0xFFFFFFFF
KIND_NONE, KIND_BYTES, KIND_CHARACTERS, KIND_WORD_PIECE, KIND_UNIGRAM = range(5)
WHOLE_WORDS, FUSE_UNKNOWN, PREFIX_SPACE, SPLIT_AT_MARKS, STRIP_SPACE, FIRST_TEXTS = 1, 2, 4, 8, 16, 32
TOKEN_SPECIAL, TOKEN_BYTE, TOKEN_ABSENT = 1, 2, 4
ADDED_SINGLE_WORD, ADDED_LSTRIP, ADDED_RSTRIP, ADDED_SPECIAL = 1, 2, 4, 8
STEP_NFC, STEP_PREPEND, STEP_REPLACE, STEP_NFD, STEP_LOWERCASE, STEP_CLEAN, STEP_CHINESE = range(7)
STEP_STRIP_ACCENTS, STEP_STRIP_MARKS, STEP_STRIP_LEFT, STEP_STRIP_RIGHT = range(7, 11)
STEP_CHARSMAP, STEP_NMT, STEP_REPLACE_SPACES, STEP_NFKC, STEP_NFKD = range(11, 16)

_HEADER: Final = struct.Struct("<8s10I")
_FNV_BASIS, _FNV_PRIME = 2166136261, 16777619


@dataclass(frozen=True)
class AddedEntry:
    """An added token: its id, its flags and the text that matches it."""

    token: int
    flags: int
    text: bytes


@dataclass
class TokenizerTables:
    """The contents of the segment.

    ``token_texts``: the bytes that each id decodes to.  ``merges``: (left, right, rank, token).  ``byte_tokens``: 256
    ids, or none.  ``characters``: (code point, id).  ``words``: (id, bytes) of tokens that are looked up whole.
    ``steps``: (kind, text, second text) of the normalizer.  ``reason``: why there is no tokenizer.  ``trie``: nodes of
    (begin of children, byte << 24 | token) and one at the end.  ``model``: numbers of the model.  ``first_texts``: the
    bytes that each id decodes to as the first of a text.  ``scores``: float64 of the model's tokens.  ``charsmap``: a
    double array, with places in the zero-terminated ``charsmap_text``.
    """

    kind: int = KIND_NONE
    flags: int = 0
    split: int = 0
    metaspace: int = 0
    unknown: int = NO_TOKEN
    bos: int = NO_TOKEN
    pad: int = NO_TOKEN
    eos: list[int] = field(default_factory=list)
    token_texts: list[bytes] = field(default_factory=list)
    token_flags: bytes = b""
    merges: npt.NDArray[np.uint32] = field(default_factory=lambda: np.zeros((0, 4), np.uint32))
    byte_tokens: list[int] = field(default_factory=list)
    characters: list[tuple[int, int]] = field(default_factory=list)
    words: list[tuple[int, bytes]] = field(default_factory=list)
    added: list[AddedEntry] = field(default_factory=list)
    added_normalized: list[AddedEntry] = field(default_factory=list)
    steps: list[tuple[int, bytes, bytes]] = field(default_factory=list)
    prefix: list[int] = field(default_factory=list)
    suffix: list[int] = field(default_factory=list)
    reason: str = ""
    trie: npt.NDArray[np.uint32] = field(default_factory=lambda: np.zeros((0, 2), np.uint32))
    model: list[int] = field(default_factory=list)
    first_texts: list[bytes] = field(default_factory=list)
    scores: npt.NDArray[np.float64] = field(default_factory=lambda: np.zeros(0, np.float64))
    charsmap: bytes = b""
    charsmap_text: bytes = b""


class _Texts:
    """A buffer of concatenated texts."""

    def __init__(self) -> None:
        self.data = bytearray()

    def place(self, text: bytes) -> tuple[int, int]:
        begin = len(self.data)
        self.data += text
        return begin, len(text)


def _u32(values: object) -> bytes:
    return np.asarray(values, "<u4").tobytes()


def encode_tables(tables: TokenizerTables) -> bytes:
    """Return the bytes of the segment."""
    texts, num_tokens = _Texts(), len(tables.token_texts)
    texts.place(tables.reason.encode())
    merges = tables.merges[np.lexsort((tables.merges[:, 1], tables.merges[:, 0]))]
    merge_begins: Any = np.searchsorted(merges[:, 0], np.arange(num_tokens + 1)) if num_tokens else []
    parts: list[tuple[bytes, int]] = [
        *_texts(tables.token_texts),
        (tables.token_flags, 1),
        (_u32(merge_begins), 4),
        (_u32(merges[:, 1:]), 12),
        (_u32(tables.byte_tokens), 4),
        (_u32(sorted(tables.characters)), 8),
        (_hash_table(tables.words), 4),
        (_added_table(tables.added, texts), 16),
        (_added_table(tables.added_normalized, texts), 16),
        (_u32([(kind, *texts.place(a), *texts.place(b)) for kind, a, b in tables.steps]), 20),
        (_u32(tables.prefix), 4),
        (_u32(tables.suffix), 4),
        (_u32(tables.eos), 4),
    ]
    parts.append((bytes(texts.data), 1))
    newer = [(_u32(tables.trie), 8), (_u32(tables.model), 4), *_texts(tables.first_texts)]
    newer += [(tables.scores.astype("<f8").tobytes(), 8), (tables.charsmap, 4), (tables.charsmap_text, 1)]
    has_newer = any(part for part, _ in newer)  # else version 1, which older cores read too
    parts += newer if has_newer else []
    header = _HEADER.pack(
        b"PSTOKENS", 1 + has_newer, tables.kind, tables.flags, tables.split, tables.metaspace, num_tokens,
        tables.unknown, tables.bos, tables.pad, len(parts),
    )  # fmt: skip
    places, data, end = bytearray(), bytearray(), _HEADER.size + 8 * len(parts)
    for part, size in parts:
        places += struct.pack("<II", (end + len(data)) // 4, len(part) // size)
        data += part + bytes(-len(part) % 4)
    return header + bytes(places) + bytes(data)


def _texts(texts: list[bytes]) -> list[tuple[bytes, int]]:
    """Return the tables of begins and bytes, with the sizes of their elements."""
    begins: Any = np.concatenate([[0], np.cumsum(list(map(len, texts)))]) if texts else []
    return [(_u32(begins), 4), (b"".join(texts), 1)]


def _added_table(added: list[AddedEntry], texts: _Texts) -> bytes:
    return _u32([(a.token, a.flags, *texts.place(a.text)) for a in sorted(added, key=lambda a: a.text)])


def _hashes(words: list[bytes]) -> npt.NDArray[np.uint32]:
    """Return the FNV-1a of each word: the bytes of all words at one depth after another."""
    lengths = np.array(list(map(len, words)))
    order = np.argsort(-lengths, kind="stable")
    begins = (np.cumsum(lengths) - lengths)[order]
    data = np.frombuffer(b"".join(words), np.uint8)
    codes = np.full(len(words), _FNV_BASIS, np.uint32)
    ends = np.searchsorted(-lengths[order], -np.arange(lengths.max()))  # the number of words longer than each depth
    for depth, count in enumerate(ends.tolist()):
        codes[:count] = (codes[:count] ^ data[begins[:count] + depth]) * np.uint32(_FNV_PRIME)
    hashes = np.empty_like(codes)
    hashes[order] = codes
    return hashes


def _hash_table(words: list[tuple[int, bytes]]) -> bytes:
    """Return a hash table with open addressing by FNV-1a, at most half full."""
    if not words:
        return b""
    size = 1 << (2 * len(words)).bit_length()
    table = [NO_TOKEN] * size
    slots = (_hashes([word for _, word in words]) & np.uint32(size - 1)).tolist()
    for (token, _), slot in zip(words, slots, strict=True):
        while table[slot] != NO_TOKEN:
            slot = (slot + 1) & (size - 1)
        table[slot] = token
    return _u32(table)
