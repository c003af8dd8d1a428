"""Byte pair encoding of bytes, or of characters with bytes as the fallback."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import repeat

from penstock.checkpoint.tokenizer_file import BYTE_ALPHABET, byte_level_texts
from penstock.config import show
from penstock.graph.tokenizer.components import Json, NotCompiledError, check_lengths, count_tokens, flatten
from penstock.graph.tokenizer.decoding import decoded_texts
from penstock.graph.tokenizer.segment import (
    FUSE_UNKNOWN,
    KIND_BYTES,
    NO_TOKEN,
    WHOLE_WORDS,
    TokenizerTables,
)

__all__ = ["compile_bpe"]


def compile_bpe(model: Json, texts: Mapping[int, str], decoder: Json | None, tables: TokenizerTables) -> None:
    """Compile a BPE model, whose merges are a table; ``texts`` are those of all tokens, by their ids.

    ``tables.kind`` says what is encoded: bytes or characters.
    """
    for name in ("continuing_subword_prefix", "end_of_word_suffix", "dropout"):
        if model.get(name):
            raise NotCompiledError(f"model.{name}: expected none, got {show(model[name])}")
    vocab = model["vocab"]
    num_tokens = count_tokens(texts)
    unknown = model["unk_token"]
    if unknown is not None and unknown not in vocab:
        raise NotCompiledError(f"model.unk_token: {show(unknown)} is not in the vocabulary")
    tables.unknown = NO_TOKEN if unknown is None else vocab[unknown]
    tables.flags |= FUSE_UNKNOWN * bool(model["fuse_unk"])
    tables.merges = model["merges"]
    flags: dict[int, int] = {}
    if tables.kind == KIND_BYTES:
        _compile_bytes(model, vocab, decoder, tables)
        listed = byte_level_texts(list(texts.values()))
        if list(texts) != list(range(num_tokens)):
            listed = list(map(dict(zip(texts, listed, strict=True)).get, range(num_tokens), repeat(b"")))
    else:
        decoded, flags = _compile_characters(model, vocab, texts, decoder, tables)
        listed = list(map(decoded.get, range(num_tokens), repeat(b"")))
    check_lengths(listed)
    tables.token_texts = listed
    tables.token_flags = bytes(flags.get(i, 0) for i in range(num_tokens)) if flags else bytes(num_tokens)


def _compile_bytes(model: Json, vocab: dict[str, int], decoder: Json | None, tables: TokenizerTables) -> None:
    types = [part["type"] for part in flatten(decoder, "decoders")]
    if types != ["ByteLevel"]:
        raise NotCompiledError(f"decoder {', '.join(types) or 'none'} with the pre_tokenizer ByteLevel")
    chars = {byte: char for char, byte in BYTE_ALPHABET.items()}
    tables.byte_tokens = [vocab.get(chars[byte], NO_TOKEN) for byte in range(256)]
    if model["byte_fallback"] and NO_TOKEN in tables.byte_tokens:
        raise NotCompiledError("model.byte_fallback with the pre_tokenizer ByteLevel and bytes without a token")
    if model["ignore_merges"]:
        tables.flags |= WHOLE_WORDS
        words = [text for text in vocab if text and BYTE_ALPHABET.keys() >= set(text)]
        tables.words = list(zip(map(vocab.__getitem__, words), byte_level_texts(words), strict=True))


def _compile_characters(
    model: Json, vocab: dict[str, int], texts: Mapping[int, str], decoder: Json | None, tables: TokenizerTables
) -> tuple[dict[int, bytes], dict[int, int]]:
    """Return the bytes that ids decode to, and their flags."""
    if model["ignore_merges"]:
        raise NotCompiledError("model.ignore_merges without the pre_tokenizer ByteLevel")
    if "" in texts.values():
        raise NotCompiledError("model.vocab: a token without a text")
    tables.characters = [(ord(text), i) for text, i in vocab.items() if len(text) == 1]
    if model["byte_fallback"]:
        tables.byte_tokens = [vocab.get(f"<0x{byte:02X}>", NO_TOKEN) for byte in range(256)]
    return decoded_texts(texts, decoder, tables)
