"""Models that look their tokens up in a trie: WordPiece and Unigram."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from penstock.config import show
from penstock.graph.tokenizer.components import MAX_TOKENS, Json, NotCompiledError, check_lengths, count_tokens
from penstock.graph.tokenizer.decoding import compile_decoder
from penstock.graph.tokenizer.segment import (
    FIRST_TEXTS,
    KIND_UNIGRAM,
    KIND_WORD_PIECE,
    NO_TOKEN,
    TOKEN_ABSENT,
    TokenizerTables,
)

__all__ = ["compile_unigram", "compile_word_piece", "make_trie"]

_UNKNOWN_PENALTY: Final = 10.0
"""The score that an unknown character has below the lowest one, as in SentencePiece."""
_MAX_WORD_CHARACTERS: Final = 4096
_NO_TRIE_TOKEN: Final = MAX_TOKENS - 1
_BYTE_SHIFT: Final = 24


def compile_word_piece(model: Json, texts: Mapping[int, str], library: Any, tables: TokenizerTables) -> None:
    """Compile a WordPiece model; ``texts`` are those of all tokens, by their ids."""
    vocab, unknown, limit = model["vocab"], model["unk_token"], model["max_input_chars_per_word"]
    if unknown not in vocab:
        raise NotCompiledError(f"model.unk_token: {show(unknown)} is not in the vocabulary")
    if limit > _MAX_WORD_CHARACTERS:
        raise NotCompiledError(
            f"model.max_input_chars_per_word: expected up to {_MAX_WORD_CHARACTERS}, got {show(limit)}"
        )
    tables.kind, tables.unknown = KIND_WORD_PIECE, vocab[unknown]
    tokens = {text.encode(): token for text, token in vocab.items()}
    tables.trie = make_trie(tokens)
    tables.model = [limit, find_node(tables.trie, model["continuing_subword_prefix"].encode())]
    compile_first_texts(texts, library, tables)


def compile_unigram(model: Json, texts: Mapping[int, str], library: Any, tables: TokenizerTables) -> None:
    """Compile a Unigram model; ``texts`` are those of all tokens, by their ids."""
    unknown, vocab = model["unk_id"], model["vocab"]
    if unknown is None or not vocab:
        raise NotCompiledError(f"model.unk_id: expected a token, got {show(unknown)}")
    for name in ("alpha", "nbest_size"):
        if model.get(name):
            raise NotCompiledError(f"model.{name}: expected none, got {show(model[name])}")
    tables.kind, tables.unknown = KIND_UNIGRAM, unknown
    tokens = {text: token for token, (text, _) in enumerate(vocab)}  # the last of equal ones
    tables.trie = make_trie({text.encode(): token for text, token in tokens.items()})
    tables.scores = np.array([score for _, score in vocab], np.float64)
    tables.model = np.array([tables.scores.min() - _UNKNOWN_PENALTY]).view(np.uint32).tolist()
    if model["byte_fallback"]:
        tables.byte_tokens = [tokens.get(f"<0x{byte:02X}>", NO_TOKEN) for byte in range(256)]
    decoder = library.decoder
    if decoder is None or type(decoder).__name__ == "Metaspace":
        compile_first_texts(texts, library, tables)
    else:
        compile_decoder(texts, json.loads(library.to_str())["decoder"], tables)


def compile_first_texts(texts: Mapping[int, str], library: Any, tables: TokenizerTables) -> None:
    """Compile what each token decodes to as the first of a text, and behind another."""
    num_tokens = count_tokens(texts)
    decoder = library.decoder
    kind = None if decoder is None else type(decoder).__name__
    if kind not in (None, "WordPiece", "Metaspace"):
        raise NotCompiledError(f"decoder {kind} with the model {library.model.__class__.__name__}")
    tables.flags |= FIRST_TEXTS
    first, others = [b""] * num_tokens, [b""] * num_tokens
    flags = bytearray([TOKEN_ABSENT]) * num_tokens
    for token, text in texts.items():
        first[token] = (text if decoder is None else decoder.decode([text])).encode()
        others[token] = (" " + text if decoder is None else decoder.decode(["a", text])[1:]).encode()
        flags[token] = 0
    check_lengths(first + others)
    tables.first_texts, tables.token_texts, tables.token_flags = first, others, bytes(flags)


def make_trie(tokens: Mapping[bytes, int]) -> npt.NDArray[np.uint32]:
    """Return the nodes of a trie, each (begin of its children, byte << 24 | token), and one that ends the last.

    Nodes lie in the order of their depth, so that the children of a node lie together.
    """
    words = sorted(word for word in tokens if word)
    ids = np.array([tokens[word] for word in words], np.int64)
    lengths = np.array([len(word) for word in words], np.int64)
    begins = np.cumsum(lengths) - lengths
    data = np.frombuffer(b"".join(words), np.uint8)
    labels, level_tokens, num_children = [np.zeros(1, np.int64)], [np.full(1, _NO_TRIE_TOKEN)], []
    rows, nodes, num_nodes, depth = np.arange(len(words)), np.zeros(len(words), np.int64), 1, 0
    while rows.size:  # words longer than `depth`, and the node of their first `depth` bytes within its level
        keys = nodes << 8 | data[begins[rows] + depth]
        is_new = np.concatenate([[True], keys[1:] != keys[:-1]])
        num_children.append(np.bincount(nodes[is_new], minlength=num_nodes))
        nodes, num_nodes, depth = np.cumsum(is_new) - 1, int(is_new.sum()), depth + 1
        labels.append(keys[is_new] & 255)
        ends = lengths[rows] == depth
        level = np.full(num_nodes, _NO_TRIE_TOKEN)
        level[nodes[ends]] = ids[rows[ends]]
        level_tokens.append(level)
        rows, nodes = rows[~ends], nodes[~ends]
    num_children += [np.zeros(num_nodes, np.int64), np.zeros(1, np.int64)]
    counts = np.concatenate(num_children)
    values = np.concatenate([*labels, [0]]) << _BYTE_SHIFT | np.concatenate([*level_tokens, [_NO_TRIE_TOKEN]])
    return np.stack([1 + np.cumsum(counts) - counts, values], axis=1).astype(np.uint32)


def find_node(trie: npt.NDArray[np.uint32], text: bytes) -> int:
    """Return the node of a text; NO_TOKEN: no token begins with it."""
    node = 0
    for byte in text:
        begin, end = int(trie[node, 0]), int(trie[node + 1, 0])
        at = begin + int(np.searchsorted(trie[begin:end, 1] >> _BYTE_SHIFT, byte))
        if at == end or trie[at, 1] >> _BYTE_SHIFT != byte:
            return NO_TOKEN
        node = at
    return node
