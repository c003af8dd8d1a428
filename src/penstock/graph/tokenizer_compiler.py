"""Compile a ``tokenizer.json`` for the core: byte pair encoding of bytes, or of characters with byte fallback.

The core gives the same ids as the ``tokenizers`` library.  If the core lacks a component, the compiler names it, and
the bundle then accepts and returns only token ids.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from penstock.checkpoint.generation import read_generation_config, read_tokenizer_config
from penstock.checkpoint.tokenizer_file import BYTE_ALPHABET, open_tokenizer_file
from penstock.config import show
from penstock.errors import InvalidFileError, PenstockError
from penstock.graph.tokenizer_segment import (
    ADDED_LSTRIP,
    ADDED_RSTRIP,
    ADDED_SINGLE_WORD,
    ADDED_SPECIAL,
    FUSE_UNKNOWN,
    KIND_BYTES,
    KIND_CHARACTERS,
    NO_TOKEN,
    PREFIX_SPACE,
    SPLIT_SPACES,
    STEP_NFC,
    STEP_PREPEND,
    STEP_REPLACE,
    STRIP_SPACE,
    TOKEN_BYTE,
    TOKEN_SPECIAL,
    WHOLE_WORDS,
    AddedEntry,
    TokenizerTables,
    encode_tables,
)

__all__ = ["compile_tokenizer"]

_LETTERS: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_NONE, _GPT2, _THREE_DIGITS, _ONE_DIGIT = range(4)
_PATTERNS: Final = {
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+": _GPT2,
    r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+": _GPT2,
    _LETTERS % "{1,3}": _THREE_DIGITS,
    _LETTERS % "": _ONE_DIGIT,
}
_METASPACES: Final = {"always": 1, "first": 2, "never": 3}
_SPACE_MARK: Final = "\u2581"
_MAX_TOKENS: Final = 1 << 24
_MAX_ADDED_BYTES: Final = 1024
_MAX_TOKEN_BYTES: Final = 4096
_MAX_AROUND: Final = 1024
_MAX_STEPS, _MAX_STEP_BYTES = 16, 16
_BYTE_TOKEN: Final = re.compile(r"<0x([0-9a-fA-F]{2}|\+[0-9a-fA-F])>")  # as Rust's from_str_radix reads it

Json = dict[str, Any]


class _NotCompiledError(Exception):
    """Raised for a component that the core lacks; the message names it."""


def compile_tokenizer(files: Mapping[str, bytes]) -> tuple[bytes, str]:
    """Compile the tokenizer among a checkpoint's ``files``.

    Returns the segment, and the reason why the core cannot encode and decode, "" if it can.  In both cases the segment
    has the ids that end a text.  Raises InvalidFileError for a damaged generation_config.json, tokenizer_config.json or
    tokenizer.json.
    """
    generation, config = read_generation_config(files), read_tokenizer_config(files)
    ids: dict[str, int] = {}
    try:
        tables = _compile(files, ids)
    except InvalidFileError:
        raise
    except (_NotCompiledError, PenstockError) as error:
        reason = str(error) if str(error).startswith("tokenizer.json") else f"tokenizer.json: {error}"
        tables = TokenizerTables(reason=reason)
    tables.eos = [token for token in generation.eos_token_ids if token < 1 << 31]
    bos = generation.bos_token_id
    tables.bos = _id_or_none(ids.get(config.special_tokens.get("bos_token", "")) if bos is None else bos, tables)
    tables.pad = _id_or_none(ids.get(config.special_tokens.get("pad_token", "")), tables)
    return encode_tables(tables), tables.reason


def _id_or_none(token: int | None, tables: TokenizerTables) -> int:
    return NO_TOKEN if token is None or token >= (len(tables.token_texts) or _MAX_TOKENS) else token


def _compile(files: Mapping[str, bytes], ids: dict[str, int]) -> TokenizerTables:
    """Return the tables; store the id of every token's text in ``ids``."""
    if "tokenizer.json" not in files:
        raise _NotCompiledError("the model has none")
    library = open_tokenizer_file(files["tokenizer.json"])
    values = json.loads(library.to_str())  # as the library reads it: with defaults, and old forms converted
    vocab: dict[str, int] = values["model"].get("vocab", {}) if values["model"].get("type") == "BPE" else {}
    added = library.get_added_tokens_decoder()
    ids |= vocab | {token.content: i for i, token in added.items()}
    model = _check_model(values["model"])
    tables = TokenizerTables()
    _compile_pre_tokenizer(values["pre_tokenizer"], tables)
    tables.steps = _steps(values["normalizer"])
    if tables.metaspace and any(kind != STEP_NFC for kind, _, _ in tables.steps):
        raise _NotCompiledError("pre_tokenizer Metaspace: expected no normalizer except NFC")
    written = {i: _written(library, token) for i, token in added.items()}
    _compile_vocab(model, vocab, written, values["decoder"], tables)
    specials = {token.content for token in added.values() if token.special}
    texts = {i: text for text, i in vocab.items()} | written
    flags = bytearray(tables.token_flags)
    for i, text in texts.items():
        flags[i] |= TOKEN_SPECIAL * (text in specials)
    tables.token_flags = bytes(flags)
    _compile_added(library, added, tables)
    _compile_post_processor(values["post_processor"], tables)
    return tables


def _check_model(model: Json) -> Json:
    if model.get("type") != "BPE":
        raise _NotCompiledError(f"model {show(model.get('type'))}: expected BPE")
    for name in ("continuing_subword_prefix", "end_of_word_suffix", "dropout"):
        if model.get(name):
            raise _NotCompiledError(f"model.{name}: expected none, found {show(model[name])}")
    return model


def _steps(normalizer: Json | None) -> list[tuple[int, bytes, bytes]]:
    """Return the steps of a normalizer."""
    kind = None if normalizer is None else normalizer["type"]
    steps: list[tuple[int, bytes, bytes]] = []
    if normalizer is None:
        pass
    elif kind == "NFC":
        steps = [(STEP_NFC, b"", b"")]
    elif kind == "Prepend":
        steps = [(STEP_PREPEND, normalizer["prepend"].encode(), b"")]
    elif kind == "Replace" and normalizer["pattern"].get("String"):
        steps = [(STEP_REPLACE, normalizer["pattern"]["String"].encode(), normalizer["content"].encode())]
    elif kind == "Sequence":
        steps = [step for part in normalizer["normalizers"] for step in _steps(part)]
    else:
        raise _NotCompiledError(f"normalizer {kind}")
    if len(steps) > _MAX_STEPS or any(max(len(a), len(b)) > _MAX_STEP_BYTES for _, a, b in steps):
        raise _NotCompiledError(
            f"normalizer: expected up to {_MAX_STEPS} steps with strings of up to {_MAX_STEP_BYTES} bytes"
        )
    return steps


def _flatten(value: Json | None, key: str) -> list[Json]:
    """Return components in order, with sequences flattened."""
    if value is None:
        return []
    return [part for inner in value[key] for part in _flatten(inner, key)] if value["type"] == "Sequence" else [value]


def _compile_pre_tokenizer(value: Json | None, tables: TokenizerTables) -> None:
    parts = _flatten(value, "pretokenizers")
    types = [part["type"] for part in parts]
    if types == ["Split", "ByteLevel"]:
        split, last = parts
        pattern = split["pattern"].get("Regex")
        whole = (split["behavior"], split["invert"]) in (("Isolated", False), ("Removed", True))
        if pattern not in _PATTERNS or not whole:
            raise _NotCompiledError(
                f"pre_tokenizer Split with the pattern {show(split['pattern'])}, {split['behavior']}"
            )
        if last["use_regex"] or last["add_prefix_space"]:
            raise _NotCompiledError("pre_tokenizer ByteLevel after Split with use_regex or add_prefix_space")
        tables.kind, tables.split = KIND_BYTES, _PATTERNS[pattern]
    elif types == ["ByteLevel"]:
        tables.kind, tables.split = KIND_BYTES, _GPT2 if parts[0]["use_regex"] else _NONE
        tables.flags |= PREFIX_SPACE * parts[0]["add_prefix_space"]
    elif types == ["Metaspace"] and parts[0]["replacement"] == _SPACE_MARK:
        tables.kind, tables.metaspace = KIND_CHARACTERS, _METASPACES[parts[0]["prepend_scheme"]]
        tables.flags |= SPLIT_SPACES * parts[0]["split"]
    elif not parts:
        tables.kind = KIND_CHARACTERS
    else:
        raise _NotCompiledError(f"pre_tokenizer {', '.join(types)}")


def _compile_vocab(
    model: Json, vocab: dict[str, int], added: dict[int, str], decoder: Json | None, tables: TokenizerTables
) -> None:
    texts = {i: text for text, i in vocab.items()}
    if len(texts) != len(vocab):
        raise _NotCompiledError("model.vocab: two tokens have the same id")
    texts |= added
    num_tokens = max(texts, default=-1) + 1
    if not 0 < num_tokens <= min(_MAX_TOKENS, 4 * len(texts) + 65536):
        raise _NotCompiledError(f"model.vocab: {len(texts)} tokens have ids up to {num_tokens - 1}")
    unknown = model["unk_token"]
    if unknown is not None and unknown not in vocab:
        raise _NotCompiledError(f"model.unk_token: {show(unknown)} is not in the vocabulary")
    tables.unknown = NO_TOKEN if unknown is None else vocab[unknown]
    tables.flags |= FUSE_UNKNOWN * bool(model["fuse_unk"])
    try:
        merges = [
            (vocab[left], vocab[right], rank, vocab[left + right]) for rank, (left, right) in enumerate(model["merges"])
        ]
    except KeyError as error:
        raise _NotCompiledError(f"model.merges: {show(error.args[0])} is not in the vocabulary") from None
    tables.merges = np.array(merges, np.uint32).reshape(-1, 4)
    if tables.kind == KIND_BYTES:
        _compile_bytes(model, vocab, decoder, tables)
        decoded, flags = {i: _byte_text(text) for i, text in texts.items()}, dict.fromkeys(texts, 0)
    else:
        decoded, flags = _compile_characters(model, vocab, texts, decoder, tables)
    if max(map(len, decoded.values())) > _MAX_TOKEN_BYTES:
        raise _NotCompiledError(f"model.vocab: a token with a text of more than {_MAX_TOKEN_BYTES} bytes")
    tables.token_texts = [decoded.get(i, b"") for i in range(num_tokens)]
    tables.token_flags = bytes(flags.get(i, 0) for i in range(num_tokens))


def _byte_text(token: str) -> bytes:
    """Return the bytes that the ByteLevel decoder returns for a token."""
    try:
        return bytes(BYTE_ALPHABET[char] for char in token)
    except KeyError:
        return token.encode()


def _compile_bytes(model: Json, vocab: dict[str, int], decoder: Json | None, tables: TokenizerTables) -> None:
    types = [part["type"] for part in _flatten(decoder, "decoders")]
    if types != ["ByteLevel"]:
        raise _NotCompiledError(f"decoder {', '.join(types) or 'none'} with the pre_tokenizer ByteLevel")
    chars = {byte: char for char, byte in BYTE_ALPHABET.items()}
    tables.byte_tokens = [vocab.get(chars[byte], NO_TOKEN) for byte in range(256)]
    if model["byte_fallback"] and NO_TOKEN in tables.byte_tokens:
        raise _NotCompiledError("model.byte_fallback with the pre_tokenizer ByteLevel and bytes without a token")
    if model["ignore_merges"]:
        tables.flags |= WHOLE_WORDS
        tables.words = [
            (i, _byte_text(text)) for text, i in vocab.items() if text and set(text) <= BYTE_ALPHABET.keys()
        ]


def _compile_characters(
    model: Json, vocab: dict[str, int], texts: dict[int, str], decoder: Json | None, tables: TokenizerTables
) -> tuple[dict[int, bytes], dict[int, int]]:
    """Return the bytes that ids decode to, and their flags."""
    if model["ignore_merges"]:
        raise _NotCompiledError("model.ignore_merges without the pre_tokenizer ByteLevel")
    if "" in texts.values():
        raise _NotCompiledError("model.vocab: a token without a text")
    tables.characters = [(ord(text), i) for text, i in vocab.items() if len(text) == 1]
    if model["byte_fallback"]:
        tables.byte_tokens = [vocab.get(f"<0x{byte:02X}>", NO_TOKEN) for byte in range(256)]
    parts = _flatten(decoder, "decoders")
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
        raise _NotCompiledError(f"decoder {', '.join(types) or 'none'} without the pre_tokenizer ByteLevel")
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


def _written(library: Any, token: Any) -> str:
    """Return an added token as it is found in a text and as the decoder gets it."""
    normalized = token.normalized and library.normalizer is not None
    text = str(library.normalizer.normalize_str(token.content)) if normalized else str(token.content)
    if len(text.encode()) > _MAX_ADDED_BYTES:
        raise _NotCompiledError(f"added_tokens: expected up to {_MAX_ADDED_BYTES} bytes, found {show(text)}")
    return text


def _compile_added(library: Any, added: Mapping[int, Any], tables: TokenizerTables) -> None:
    for i, token in sorted(added.items()):
        flags = (
            ADDED_SINGLE_WORD * token.single_word
            | ADDED_LSTRIP * token.lstrip
            | ADDED_RSTRIP * token.rstrip
            | ADDED_SPECIAL * token.special
        )
        text = _written(library, token)
        if not 0 < len(text.encode()) <= _MAX_ADDED_BYTES:
            raise _NotCompiledError(f"added_tokens: expected up to {_MAX_ADDED_BYTES} bytes, found {show(text)}")
        table = tables.added_normalized if token.normalized else tables.added
        table.append(AddedEntry(i, flags, text.encode()))
    for table in (tables.added, tables.added_normalized):
        if len({entry.text for entry in table}) != len(table):
            raise _NotCompiledError("added_tokens: expected different texts, found two equal ones")


def _compile_post_processor(value: Json | None, tables: TokenizerTables) -> None:
    templates = 0
    for part in _flatten(value, "processors"):
        if part["type"] == "ByteLevel":  # changes only offsets
            continue
        if part["type"] != "TemplateProcessing" or templates:
            raise _NotCompiledError(f"post_processor {part['type']}")
        templates = 1
        target, sequences = tables.prefix, 0
        for item in part["single"]:
            if "Sequence" in item:
                target, sequences = tables.suffix, sequences + 1
                continue
            target += part["special_tokens"][item["SpecialToken"]["id"]]["ids"]
        if sequences != 1:
            raise _NotCompiledError("post_processor TemplateProcessing: expected the text once in its template")
    if len(tables.prefix) + len(tables.suffix) > _MAX_AROUND:
        raise _NotCompiledError(f"post_processor TemplateProcessing: more than {_MAX_AROUND} special tokens")
    if any(i >= len(tables.token_texts) for i in tables.prefix + tables.suffix):
        raise _NotCompiledError("post_processor TemplateProcessing: an id beyond the vocabulary")
