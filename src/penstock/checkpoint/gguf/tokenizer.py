"""The tokenizer files of a checkpoint folder, from the metadata of a GGUF file."""

from __future__ import annotations

import json
from typing import Any, Final

from penstock.checkpoint.gguf.metadata import Metadata
from penstock.checkpoint.gguf.split_patterns import find_pre_tokenizer
from penstock.checkpoint.tokenizer_limits import MAX_TOKEN_CHARS
from penstock.config import show
from penstock.errors import InvalidFileError, UnsupportedError

__all__ = ["tokenizer_files"]

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)
_SPACE_MARK: Final = "\u2581"
_ROLES: Final = (("bos_token", "bos"), ("eos_token", "eos"), ("unk_token", "unknown"), ("pad_token", "padding"))
_END_TEXTS: Final = frozenset((
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>",
    "<EOT>", "<|end_of_text|>", "<\uff5cend\u2581of\u2581sentence\uff5c>",
))  # fmt: skip
"""Control tokens that end a text in every model that has them: a GGUF file names only some of its end tokens."""


def tokenizer_files(metadata: Metadata, vocab_size: int) -> dict[str, bytes]:
    """Return tokenizer.json, tokenizer_config.json and generation_config.json; nothing for a file without a tokenizer.

    Raises UnsupportedError for a tokenizer that Penstock does not know, by name, and InvalidFileError for damage.
    """
    if "tokenizer.ggml.model" not in metadata.values or metadata.text("tokenizer.ggml.model") == "none":
        return {}
    vocab = _Vocab(metadata, vocab_size)
    model = metadata.text("tokenizer.ggml.model")
    if model == "gpt2":
        tokenizer, adds_bos = _byte_level(metadata, vocab)
    elif model == "llama":
        tokenizer, adds_bos = _sentencepiece(metadata, vocab)
    else:
        raise UnsupportedError(
            f"{metadata.file}: tokenizer.ggml.model: expected gpt2 or llama, found {show(model)}",
            param="tokenizer.ggml.model",
        )
    adds_bos = metadata.flag("tokenizer.ggml.add_bos_token", adds_bos)
    adds_eos = metadata.flag("tokenizer.ggml.add_eos_token", False)
    tokenizer["added_tokens"] = vocab.added_tokens()
    tokenizer["post_processor"] = _template(vocab, adds_bos, adds_eos)
    config: dict[str, Any] = {role: vocab.texts[i] for role, i in vocab.roles.items()}
    config |= {"add_bos_token": adds_bos and "bos_token" in vocab.roles, "add_eos_token": adds_eos}
    templates = _chat_templates(metadata)
    if templates:
        config["chat_template"] = templates
    generation: dict[str, Any] = {"eos_token_id": vocab.end_tokens()}
    if "bos_token" in vocab.roles:
        generation["bos_token_id"] = vocab.roles["bos_token"]
    return {
        "generation_config.json": json.dumps(generation).encode(),
        "tokenizer.json": json.dumps(tokenizer, ensure_ascii=False).encode(),
        "tokenizer_config.json": json.dumps(config, ensure_ascii=False).encode(),
    }


class _Vocab:
    """The tokens: ``texts`` and ``types`` by id, ``ids`` by text, ``roles`` of special tokens."""

    def __init__(self, metadata: Metadata, vocab_size: int) -> None:
        self.metadata = metadata
        self.texts = metadata.texts("tokenizer.ggml.tokens")
        if len(self.texts) > vocab_size:
            raise metadata.error("tokenizer.ggml.tokens", f"at most {vocab_size} tokens, as the embedding has rows")
        types = metadata.integers("tokenizer.ggml.token_type", len(self.texts))
        self.types = [_NORMAL] * len(self.texts) if types is None else types
        self.ids: dict[str, int] = {}
        for token, text in enumerate(self.texts):
            if text in self.ids:
                raise InvalidFileError(f"{metadata.file}: tokenizer.ggml.tokens: {show(text)} is there twice")
            if not 0 < len(text) <= MAX_TOKEN_CHARS:
                raise InvalidFileError(
                    f"{metadata.file}: tokenizer.ggml.tokens: expected 1 to {MAX_TOKEN_CHARS} characters, found token "
                    f"{token} of {len(text)}"
                )
            self.ids[text] = token
        self.roles = {}
        for role, key in _ROLES:
            token_id = self.id_of(key)
            if token_id is not None:
                self.roles[role] = token_id

    def id_of(self, name: str) -> int | None:
        """Return the token that ``tokenizer.ggml.NAME_token_id`` names, or None."""
        key = f"tokenizer.ggml.{name}_token_id"
        token = self.metadata.optional_integer(key)
        if token is not None and token >= len(self.texts):
            raise self.metadata.error(key, f"a token from 0 to {len(self.texts) - 1}")
        return token

    def added_tokens(self) -> list[dict[str, Any]]:
        """Return the tokens that are found in a text before it is split: control tokens and those of the user."""
        found = (_CONTROL, _USER_DEFINED, _UNKNOWN)
        return [
            {
                "id": token,
                "content": text,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": kind != _USER_DEFINED,
            }
            for token, (text, kind) in enumerate(zip(self.texts, self.types, strict=True))
            if kind in found
        ]

    def end_tokens(self) -> list[int]:
        """Return the tokens that end a text, that of the file first."""
        named = [token for token in map(self.id_of, ("eos", "eot", "eom")) if token is not None]
        known = [self.ids[text] for text in sorted(_END_TEXTS) if text in self.ids]
        return list(dict.fromkeys([*named, *(token for token in known if self.types[token] == _CONTROL)]))


def _byte_level(metadata: Metadata, vocab: _Vocab) -> tuple[dict[str, Any], bool]:
    """Return the tokenizer.json of byte pair encoding over bytes, and whether it adds the first token by default."""
    pre = find_pre_tokenizer(metadata.text("tokenizer.ggml.pre", "default"), metadata.file)
    merges = []
    for merge in metadata.texts("tokenizer.ggml.merges"):
        at = merge.find(" ", 1)
        left, right = merge[:at], merge[at + 1 :]
        if at < 0 or left not in vocab.ids or right not in vocab.ids or left + right not in vocab.ids:
            raise InvalidFileError(
                f"{metadata.file}: tokenizer.ggml.merges: expected two tokens that make a third, found {show(merge)}"
            )
        merges.append([left, right])
    tokenizer = {
        "version": "1.0",
        "normalizer": {"type": "NFC"} if pre.is_nfc else None,
        "pre_tokenizer": pre.components(),
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "ignore_merges": pre.ignores_merges, "vocab": vocab.ids, "merges": merges},
    }
    return tokenizer, pre.adds_bos


def _sentencepiece(metadata: Metadata, vocab: _Vocab) -> tuple[dict[str, Any], bool]:
    """Return the tokenizer.json of SentencePiece's byte pair encoding.

    Its model has scores instead of merges: of two adjacent pieces those are merged first whose result has the highest
    score.  So every way to make a token of two is a merge, with the token's score as its rank.
    """
    scores = metadata.numbers("tokenizer.ggml.scores", len(vocab.texts))
    if scores is None:
        raise metadata.error("tokenizer.ggml.scores", "an array of numbers")
    normal = {text: token for text, token in vocab.ids.items() if vocab.types[token] == _NORMAL}
    merges = []
    for text, token in normal.items():
        for at in range(1, len(text)):
            left, right = text[:at], text[at:]
            if left in normal and right in normal:
                merges.append((-scores[token], token, normal[left], normal[right], left, right))
    merges.sort(key=lambda merge: merge[:4])
    has_prefix = metadata.flag("tokenizer.ggml.add_space_prefix", True)
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE_MARK}
    steps: list[dict[str, Any]] = [{"type": "Prepend", "prepend": _SPACE_MARK}] if has_prefix else []
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": _SPACE_MARK}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if has_prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    unknown = next((text for token, text in enumerate(vocab.texts) if vocab.types[token] == _UNKNOWN), None)
    tokenizer = {
        "version": "1.0",
        "normalizer": {"type": "Sequence", "normalizers": [*steps, replace]},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {
            "type": "BPE",
            "unk_token": unknown,
            "fuse_unk": True,
            "byte_fallback": _BYTE in vocab.types,
            "vocab": vocab.ids,
            "merges": [[left, right] for *_, left, right in merges],
        },
    }
    return tokenizer, True


def _template(vocab: _Vocab, adds_bos: bool, adds_eos: bool) -> dict[str, Any] | None:
    """Return the post-processor, which adds the first and the last token; None if it adds neither."""
    around: list[dict[str, Any]] = [{"Sequence": {"id": "A", "type_id": 0}}]
    special = {}
    for role, is_added, at in (("bos_token", adds_bos, 0), ("eos_token", adds_eos, 2)):
        token = vocab.roles.get(role)
        if is_added and token is not None:
            text = vocab.texts[token]
            around.insert(at, {"SpecialToken": {"id": text, "type_id": 0}})
            special[text] = {"id": text, "ids": [token], "tokens": [text]}
    if not special:
        return None
    pair = [*around, {"Sequence": {"id": "B", "type_id": 1}}]
    return {"type": "TemplateProcessing", "single": around, "pair": pair, "special_tokens": special}


def _chat_templates(metadata: Metadata) -> str | list[dict[str, str]] | None:
    """Return the chat template, or all of them with their names."""
    key = "tokenizer.chat_template"
    named = {
        name.removeprefix(f"{key}."): metadata.text(name) for name in metadata.values if name.startswith(f"{key}.")
    }
    default = metadata.text(key) if key in metadata.values else None
    if not named:
        return default
    if default is not None:
        named = {"default": default, **named}
    return [{"name": name, "template": template} for name, template in named.items()]
