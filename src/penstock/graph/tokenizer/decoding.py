"""Decoders of tokens that are characters, or bytes where a character has no token."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from penstock.graph.tokenizer.components import Json, NotCompiledError, check_lengths, count_tokens, flatten
from penstock.graph.tokenizer.segment import STRIP_SPACE, TOKEN_BYTE, TokenizerTables

__all__ = ["compile_decoder", "decoded_texts"]

_BYTE_TOKEN: Final = re.compile(r"<0x([0-9a-fA-F]{2}|\+[0-9a-fA-F])>")  # as Rust's from_str_radix reads it


def compile_decoder(texts: Mapping[int, str], decoder: Json | None, tables: TokenizerTables) -> None:
    """Compile what ids decode to."""
    if "" in texts.values():
        raise NotCompiledError("model.vocab: a token without a text")
    decoded, flags = decoded_texts(texts, decoder, tables)
    check_lengths(decoded.values())
    num_tokens = count_tokens(texts)
    tables.token_texts = [decoded.get(i, b"") for i in range(num_tokens)]
    tables.token_flags = bytes(flags.get(i, 0) for i in range(num_tokens))


def decoded_texts(
    texts: Mapping[int, str], decoder: Json | None, tables: TokenizerTables
) -> tuple[dict[int, bytes], dict[int, int]]:
    """Return the bytes that ids decode to, and their flags."""
    parts = flatten(decoder, "decoders")
    types = [part["type"] for part in parts]
    replaces = [part for part in parts if part["type"] == "Replace" and part["pattern"].get("String")]
    tail = types[len(replaces) :]
    strip = parts[-1] if types[-1:] == ["Strip"] else None
    if strip is not None:
        tail.pop()
    expected = {"content": " ", "start": 1, "stop": 0}
    stripped = strip is None or all(strip[key] == value for key, value in expected.items())
    if (
        types[: len(replaces)] != ["Replace"] * len(replaces)
        or tail not in (["ByteFallback", "Fuse"], ["Fuse"])
        or not stripped
    ):
        raise NotCompiledError(f"decoder {', '.join(types) or 'none'} without the pre_tokenizer ByteLevel")
    tables.flags |= STRIP_SPACE * (strip is not None)
    decoded, flags = {}, {}
    for i, token in texts.items():
        text = token
        for part in replaces:
            text = text.replace(part["pattern"]["String"], part["content"])
        byte = _BYTE_TOKEN.fullmatch(text) if "ByteFallback" in tail else None
        decoded[i] = text.encode() if byte is None else bytes([int(byte[1], 16)])
        flags[i] = 0 if byte is None else TOKEN_BYTE
    return decoded, flags
