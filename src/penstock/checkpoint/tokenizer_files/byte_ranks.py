"""The ``tokenizer.json`` of a vocabulary of byte strings by rank: Mistral's ``tekken.json``, and files of tiktoken.

As in transformers 5, every two tokens that make up a token are a merge, in the order of the ranks.  The library gives
them the ids of https://github.com/mistralai/mistral-common and https://github.com/openai/tiktoken, because a piece of
text that is a token is never split (``ignore_merges``).
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from penstock.checkpoint.gguf.split_patterns import PreTokenizer, find_pre_tokenizer
from penstock.checkpoint.tokenizer_file import BYTE_ALPHABET
from penstock.checkpoint.tokenizer_files.names import TEKKEN
from penstock.checkpoint.tokenizer_files.post_processors import NO_POST_PROCESSOR
from penstock.checkpoint.tokenizer_limits import (
    MAX_ADDED_TOKENS,
    MAX_ID,
    MAX_TOKENIZER_BYTES,
    MAX_VOCAB,
    check_json_size,
)
from penstock.config import ConfigReader, parse_object, show
from penstock.errors import InvalidFileError, UnsupportedError

__all__ = ["is_tiktoken", "needs_code", "tekken_tokenizer", "tiktoken_tokenizer", "vocabulary_of_code"]

_MAX_BYTES: Final = 4 << 20
"""Limit on the length of all tokens; each of their parts is looked up."""
_LINE: Final = re.compile(rb"[A-Za-z0-9+/]+={0,2} [0-9]{1,8}")
_CHARS: Final = {byte: char for char, byte in BYTE_ALPHABET.items()}


def tekken_tokenizer(data: bytes) -> dict[str, Any]:
    """Return the tokenizer.json of a ``tekken.json``; its post-processor is ``NO_POST_PROCESSOR``.

    The special tokens have the first ids.  Raises InvalidFileError for a damaged file, and UnsupportedError for one of
    the first version, whose special tokens are in mistral-common.
    """
    raw = check_json_size(data, TEKKEN, MAX_TOKENIZER_BYTES)
    reader = ConfigReader(parse_object(raw, TEKKEN, max_bytes=len(raw), max_values=len(raw), lenient=True), TEKKEN)
    config = reader.object("config")
    if config is None:
        raise reader.error("config", "an object with a pattern", None)
    specials = _tekken_specials(reader, config)
    vocab = reader.values.get("vocab")
    if not isinstance(vocab, list) or not vocab or len(vocab) > MAX_VOCAB:
        raise reader.error("vocab", f"a list of 1 to {MAX_VOCAB} tokens", vocab)
    size = config.optional_int("default_vocab_size")
    if size is not None:  # further tokens are padding
        vocab = vocab[: max(0, size - len(specials))]
    ranks = {_decoded(reader, entry): rank for rank, entry in enumerate(vocab)}
    texts, merges = _vocab_and_merges(ranks, TEKKEN)
    ids = {text: rank + len(specials) for text, rank in texts.items()} | {text: i for i, text in enumerate(specials)}
    return _tokenizer(PreTokenizer((config.str("pattern", max_len=1 << 16),)), ids, merges, enumerate(specials))


def _tekken_specials(reader: ConfigReader, config: ConfigReader) -> list[str]:
    """Return the special tokens by rank, filled up to the number that the file gives."""
    listed = reader.values.get("special_tokens")
    if listed is None:
        raise UnsupportedError(
            f"{TEKKEN}: special_tokens: expected a list of tokens, got none, as in files of the first version. Save "
            "tokenizer.json with transformers' save_pretrained, with the package mistral-common installed.",
            param="special_tokens",
        )
    if not isinstance(listed, list) or len(listed) > MAX_ADDED_TOKENS:
        raise reader.error("special_tokens", f"a list of at most {MAX_ADDED_TOKENS} tokens", listed)
    by_rank: dict[int, str] = {}
    for entry in listed:
        rank, text = (entry.get("rank"), entry.get("token_str")) if isinstance(entry, dict) else (None, None)
        if type(rank) is not int or not isinstance(text, str) or not text or rank in by_rank:
            raise reader.error("special_tokens", "objects with a rank of their own and a token_str", entry)
        by_rank[rank] = text
    if by_rank.keys() != set(range(len(by_rank))) or len(set(by_rank.values())) != len(by_rank):
        raise reader.error("special_tokens", "different tokens with the ranks 0, 1, 2 and so on", sorted(by_rank))
    count = config.optional_int("default_num_special_tokens") or len(by_rank)
    if not len(by_rank) <= count <= MAX_ADDED_TOKENS:
        limits = f"an integer from {len(by_rank)} to {MAX_ADDED_TOKENS}"
        raise config.error("default_num_special_tokens", limits, count)
    return [by_rank.get(rank, f"<SPECIAL_{rank}>") for rank in range(count)]


def _decoded(reader: ConfigReader, entry: object) -> bytes:
    text = entry.get("token_bytes") if isinstance(entry, dict) else None
    try:
        if isinstance(text, str) and (token := base64.b64decode(text, validate=True)):
            return token
    except ValueError:
        pass
    raise reader.error("vocab", "objects with token_bytes in base64", entry)


def vocabulary_of_code(folder: Path) -> str:
    """Return the name of a file such as qwen.tiktoken, which only Python code of its model can read; "" without one."""
    return min((path.name for path in folder.glob("*.tiktoken")), default="")


def needs_code(file: str) -> str:
    """Return the text that says why a vocabulary of tiktoken makes no tokenizer, and what to do."""
    return (
        f"expected tokenizer.json, got {file}. Its pattern and special tokens are in Python code beside it, which "
        "Penstock does not run, so the model takes no text. Use a release of the model with tokenizer.json, or pass "
        "token ids."
    )


def is_tiktoken(data: bytes) -> bool:
    """Return True for a file of tiktoken, whose lines have a token in base64 and its rank."""
    return _LINE.fullmatch(data[:512].split(b"\n", 1)[0].rstrip(b"\r")) is not None


def tiktoken_tokenizer(
    data: bytes, file: str, listed: Sequence[tuple[int, Mapping[str, Any]]], extra: Sequence[str]
) -> dict[str, Any]:
    """Return the tokenizer.json of a file of tiktoken; its post-processor is ``NO_POST_PROCESSOR``.

    The file has neither a pattern nor special tokens.  The pattern is that of Llama 3, as in transformers.  ``listed``:
    the tokens of ``added_tokens_decoder`` with their ids; those between them are reserved.  ``extra``: tokens behind
    these.
    """
    ranks: dict[bytes, int] = {}
    if len(data) > MAX_TOKENIZER_BYTES or data.count(b"\n") > MAX_VOCAB:
        raise InvalidFileError(f"{file}: expected at most {MAX_TOKENIZER_BYTES} bytes and {MAX_VOCAB} lines, got more")
    for number, line in enumerate(data.splitlines(), 1):
        if not line:
            continue
        if _LINE.fullmatch(line) is None:
            actual = show(line[:80].decode("latin-1"))
            raise InvalidFileError(f"{file}: line {number}: expected a token in base64 and its rank, got {actual}")
        token, _, rank = line.partition(b" ")
        try:
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except binascii.Error:
            raise InvalidFileError(f"{file}: line {number}: expected a token in base64") from None
    if not ranks or max(ranks.values()) > MAX_ID or len(set(ranks.values())) != len(ranks):
        raise InvalidFileError(f"{file}: expected tokens with different ranks of at most {MAX_ID}")
    ids, merges = _vocab_and_merges(ranks, file)
    added = {token: own["content"] for token, own in listed}
    last = max(added, default=-1)
    if last - len(ids) >= MAX_ADDED_TOKENS:
        raise InvalidFileError(
            f"tokenizer_config.json: added_tokens_decoder: expected ids below {len(ids) + MAX_ADDED_TOKENS}, got "
            f"{last}",
            param="added_tokens_decoder",
        )
    specials = [added.get(token, f"<|reserved_token_{token}|>") for token in range(len(ids), last + 1)]
    specials += [text for text in dict.fromkeys(extra) if text not in specials]
    return _tokenizer(find_pre_tokenizer("llama-bpe", file), ids, merges, enumerate(specials, len(ids)))


def _vocab_and_merges(ranks: Mapping[bytes, int], file: str) -> tuple[dict[str, int], list[list[str]]]:
    """Return the ranks of tokens by their texts, and the pairs of tokens that make up a token, by its rank."""
    num_bytes = sum(map(len, ranks))
    if num_bytes > _MAX_BYTES:
        raise InvalidFileError(f"{file}: expected tokens of at most {_MAX_BYTES} bytes together, got {num_bytes}")
    texts = {token: "".join(map(_CHARS.__getitem__, token)) for token in ranks}
    pairs: list[tuple[int, int, int, bytes, bytes]] = []
    for token, rank in ranks.items():
        for i in range(1, len(token)):
            left, right = token[:i], token[i:]
            if left in ranks and right in ranks:
                pairs.append((rank, ranks[left], ranks[right], left, right))
    return {texts[token]: rank for token, rank in ranks.items()}, [
        [texts[left], texts[right]] for *_, left, right in sorted(pairs)
    ]


def _tokenizer(
    pre_tokenizer: PreTokenizer, ids: dict[str, int], merges: list[list[str]], specials: Iterator[tuple[int, str]]
) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {
        "version": "1.0",
        "added_tokens": [{"id": token, "content": text, **flags, "special": True} for token, text in specials],
        "normalizer": None,
        "pre_tokenizer": pre_tokenizer.components(),
        "post_processor": NO_POST_PROCESSOR,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "fuse_unk": False, "ignore_merges": True, "vocab": ids, "merges": merges},
    }
