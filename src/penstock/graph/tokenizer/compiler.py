"""Compile a ``tokenizer.json`` for the core: byte pair encoding of bytes, or of characters, WordPiece, and Unigram.

The core gives the same ids as the ``tokenizers`` library.  If the core lacks a component, the compiler names it, and
the bundle then accepts and returns only token ids.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from penstock.checkpoint.generation import read_generation_config, read_tokenizer_config
from penstock.config import show
from penstock.errors import InvalidFileError, PenstockError
from penstock.graph.tokenizer.bpe import compile_bpe
from penstock.graph.tokenizer.components import MAX_ADDED_BYTES, MAX_TOKENS, Json, NotCompiledError, flatten
from penstock.graph.tokenizer.pieces import compile_unigram, compile_word_piece
from penstock.graph.tokenizer.read import read_tokenizer
from penstock.graph.tokenizer.segment import (
    ADDED_LSTRIP,
    ADDED_RSTRIP,
    ADDED_SINGLE_WORD,
    ADDED_SPECIAL,
    KIND_BYTES,
    KIND_CHARACTERS,
    NO_TOKEN,
    PREFIX_SPACE,
    SPLIT_AT_MARKS,
    STEP_NFC,
    STEP_REPLACE,
    TOKEN_SPECIAL,
    AddedEntry,
    TokenizerTables,
    encode_tables,
)
from penstock.graph.tokenizer.steps import Step, find_charsmap, normalizer_steps

__all__ = ["compile_tokenizer"]

_MODELS: Final = ("BPE", "WordPiece", "Unigram")
_LETTERS: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_NONE, _GPT2, _THREE_DIGITS, _ONE_DIGIT, _BERT, _SPACES = range(6)
_PATTERNS: Final = {
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+": _GPT2,
    r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+": _GPT2,
    _LETTERS % "{1,3}": _THREE_DIGITS,
    _LETTERS % "": _ONE_DIGIT,
}
_METASPACES: Final = {"always": 1, "first": 2, "never": 3}
_SPACE_MARK: Final = "\u2581"
_MAX_AROUND: Final = 1024
_AROUND: Final = ("BertProcessing", "RobertaProcessing")
"""Post-processors that put ``cls`` before a text and ``sep`` behind it."""


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
    except (NotCompiledError, PenstockError) as error:
        reason = str(error) if str(error).startswith("tokenizer.json") else f"tokenizer.json: {error}"
        tables = TokenizerTables(reason=reason)
    tables.eos = [token for token in generation.eos_token_ids if token < 1 << 31]
    bos = generation.bos_token_id
    tables.bos = _id_or_none(ids.get(config.special_tokens.get("bos_token", "")) if bos is None else bos, tables)
    tables.pad = _id_or_none(ids.get(config.special_tokens.get("pad_token", "")), tables)
    return encode_tables(tables), tables.reason


def _id_or_none(token: int | None, tables: TokenizerTables) -> int:
    return NO_TOKEN if token is None or token >= (len(tables.token_texts) or MAX_TOKENS) else token


def _compile(files: Mapping[str, bytes], ids: dict[str, int]) -> TokenizerTables:
    """Return the tables; store the id of every token's text in ``ids``."""
    if "tokenizer.json" not in files:
        raise NotCompiledError("the model has none")
    values, library, added = read_tokenizer(files["tokenizer.json"])
    model = values["model"]
    listed = model.get("vocab", {}) if model.get("type") in _MODELS else {}
    vocab: dict[str, int] = listed if isinstance(listed, dict) else {text: i for i, (text, _) in enumerate(listed)}
    ids |= vocab
    ids |= {token.content: i for i, token in added.items()}
    _check_model(model)
    tables = TokenizerTables()
    tables.steps = normalizer_steps(values["normalizer"])
    _compile_pre_tokenizer(values["pre_tokenizer"], tables)
    tables.charsmap, tables.charsmap_text = find_charsmap(values["normalizer"])
    if tables.metaspace == _METASPACES["first"] and any(kind != STEP_NFC for kind, _, _ in tables.steps):
        raise NotCompiledError("pre_tokenizer Metaspace with prepend_scheme first: expected no normalizer except NFC")
    texts = dict(zip(vocab.values(), vocab, strict=True))
    texts |= {} if isinstance(listed, dict) else {i: text for i, (text, _) in enumerate(listed)}
    if len(texts) < len(vocab):
        raise NotCompiledError("model.vocab: two tokens have the same id")
    texts |= {i: _written(library, token) for i, token in added.items()}
    if model["type"] == "BPE":
        compile_bpe(model, texts, values["decoder"], tables)
    elif tables.kind == KIND_BYTES:
        raise NotCompiledError(f"pre_tokenizer ByteLevel with the model {model['type']}")
    elif model["type"] == "WordPiece":
        compile_word_piece(model, texts, library, tables)
    else:
        compile_unigram(model, texts, library, tables)
    specials = {token.content for token in added.values() if token.special}
    flags = bytearray(tables.token_flags)
    for i in [i for i, text in texts.items() if text in specials]:
        flags[i] |= TOKEN_SPECIAL
    tables.token_flags = bytes(flags)
    _compile_added(library, added, tables)
    _compile_post_processor(values["post_processor"], tables)
    return tables


def _check_model(model: Json) -> None:
    if model.get("type") not in _MODELS:
        raise NotCompiledError(f"model {show(model.get('type'))}: expected {' or '.join(_MODELS)}")


def _compile_pre_tokenizer(value: Json | None, tables: TokenizerTables) -> None:
    parts = flatten(value, "pretokenizers")
    types = [part["type"] for part in parts]
    if types == ["Split", "ByteLevel"]:
        split, last = parts
        pattern = split["pattern"].get("Regex")
        whole = (split["behavior"], split["invert"]) in (("Isolated", False), ("Removed", True))
        if pattern not in _PATTERNS or not whole:
            raise NotCompiledError(
                f"pre_tokenizer Split with the pattern {show(pattern or split['pattern'])}, {split['behavior']}"
            )
        if last["use_regex"] or last["add_prefix_space"]:
            raise NotCompiledError("pre_tokenizer ByteLevel after Split with use_regex or add_prefix_space")
        tables.kind, tables.split = KIND_BYTES, _PATTERNS[pattern]
    elif types == ["ByteLevel"]:
        tables.kind, tables.split = KIND_BYTES, _GPT2 if parts[0]["use_regex"] else _NONE
        tables.flags |= PREFIX_SPACE * parts[0]["add_prefix_space"]
    elif types in (["Metaspace"], ["WhitespaceSplit", "Metaspace"]) and parts[-1]["replacement"] == _SPACE_MARK:
        tables.kind, tables.metaspace = KIND_CHARACTERS, _METASPACES[parts[-1]["prepend_scheme"]]
        tables.split = _NONE if len(parts) == 1 else _SPACES
        tables.flags |= SPLIT_AT_MARKS * parts[-1]["split"]
    elif types == ["Split"] and parts[0]["pattern"].get("String") == " " and _leaves_no_space(tables.steps):
        tables.kind = KIND_CHARACTERS  # Gemma's, which has nothing to split at
    elif types in ([], ["BertPreTokenizer"], ["WhitespaceSplit"]):
        tables.kind = KIND_CHARACTERS
        tables.split = {"BertPreTokenizer": _BERT, "WhitespaceSplit": _SPACES}[types[0]] if types else _NONE
    else:
        raise NotCompiledError(f"pre_tokenizer {', '.join(types)}")


def _leaves_no_space(steps: list[Step]) -> bool:
    """Return True if the last step of a normalizer replaces all spaces."""
    return bool(steps) and steps[-1][:2] == (STEP_REPLACE, b" ") and b" " not in steps[-1][2]


def _written(library: Any, token: Any) -> str:
    """Return an added token as it is found in a text and as the decoder gets it."""
    normalized = token.normalized and library.normalizer is not None
    text = str(library.normalizer.normalize_str(token.content)) if normalized else str(token.content)
    if len(text.encode()) > MAX_ADDED_BYTES:
        raise NotCompiledError(f"added_tokens: expected up to {MAX_ADDED_BYTES} bytes, got {show(text)}")
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
        if not 0 < len(text.encode()) <= MAX_ADDED_BYTES:
            raise NotCompiledError(f"added_tokens: expected up to {MAX_ADDED_BYTES} bytes, got {show(text)}")
        table = tables.added_normalized if token.normalized else tables.added
        table.append(AddedEntry(i, flags, text.encode()))
    for table in (tables.added, tables.added_normalized):
        if len({entry.text for entry in table}) != len(table):
            raise NotCompiledError("added_tokens: expected different texts, got two equal ones")


def _compile_post_processor(value: Json | None, tables: TokenizerTables) -> None:
    templates = 0
    for part in flatten(value, "processors"):
        if part["type"] == "ByteLevel":  # changes only offsets
            continue
        if part["type"] not in ("TemplateProcessing", *_AROUND) or templates:
            raise NotCompiledError(f"post_processor {part['type']}")
        templates = 1
        if part["type"] in _AROUND:
            tables.prefix, tables.suffix = [part["cls"][1]], [part["sep"][1]]
            continue
        target, sequences = tables.prefix, 0
        for item in part["single"]:
            if "Sequence" in item:
                target, sequences = tables.suffix, sequences + 1
                continue
            name = item["SpecialToken"]["id"]
            if name not in part["special_tokens"]:
                raise NotCompiledError(f"post_processor TemplateProcessing: special_tokens lacks {show(name)}")
            target += part["special_tokens"][name]["ids"]
        if sequences != 1:
            raise NotCompiledError("post_processor TemplateProcessing: expected the text once in its template")
    if len(tables.prefix) + len(tables.suffix) > _MAX_AROUND:
        raise NotCompiledError(f"post_processor TemplateProcessing: more than {_MAX_AROUND} special tokens")
    if any(i >= len(tables.token_texts) for i in tables.prefix + tables.suffix):
        raise NotCompiledError("post_processor: an id beyond the vocabulary")
