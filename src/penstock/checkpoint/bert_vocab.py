"""The ``tokenizer.json`` of a BERT checkpoint that has only ``vocab.txt``: one token a line, its id the line's number.

The form is that of BertTokenizer of transformers: https://huggingface.co/docs/transformers/model_doc/bert
"""

from __future__ import annotations

import json
from typing import Any, Final

from penstock.checkpoint.tokenizer_limits import MAX_TOKENIZER_BYTES, MAX_VOCAB, check_json_size
from penstock.config import ConfigReader, show
from penstock.errors import InvalidFileError

__all__ = ["bert_tokenizer", "wordpiece_tokenizer"]

_CLASSES: Final = frozenset(
    f"{name}{suffix}"
    for name in ("BertTokenizer", "DistilBertTokenizer", "ElectraTokenizer", "MobileBertTokenizer")
    for suffix in ("", "Fast")
)
_ROLES: Final = {
    "unk_token": "[UNK]", "sep_token": "[SEP]", "pad_token": "[PAD]", "cls_token": "[CLS]", "mask_token": "[MASK]"
}  # fmt: skip


def bert_tokenizer(vocab: bytes, config: bytes) -> bytes | None:
    """Return the ``tokenizer.json`` of ``vocab.txt`` and ``tokenizer_config.json``; None for another tokenizer's.

    A ``tokenizer_config.json`` without a class means BERT if the vocabulary has its special tokens.  Raises
    InvalidFileError for a damaged file.
    """
    file = "tokenizer_config.json"
    reader = ConfigReader.parse(check_json_size(config, file, MAX_TOKENIZER_BYTES), file)
    name = reader.optional_str("tokenizer_class")
    if name is not None and name not in _CLASSES:
        return None
    tokens = _read_vocab(vocab)
    roles = {role: _text_of(reader, role, default) for role, default in _ROLES.items()}
    if any(roles[role] not in tokens for role in ("unk_token", "sep_token", "cls_token")):
        if name is None:
            return None
        missing = next(role for role in ("unk_token", "sep_token", "cls_token") if roles[role] not in tokens)
        raise InvalidFileError(f"vocab.txt: {show(roles[missing])}, the {missing}, is not in it", param=missing)
    lowercase = reader.bool("do_lower_case", True)
    normalizer = {
        "type": "BertNormalizer",
        "clean_text": True,
        "handle_chinese_chars": reader.bool("tokenize_chinese_chars", True),
        "strip_accents": reader.bool("strip_accents") if reader.has("strip_accents") else None,
        "lowercase": lowercase,
    }
    specials = [token for token in dict.fromkeys(roles.values()) if token in tokens]
    tokenizer = wordpiece_tokenizer(tokens, specials, roles["unk_token"], (roles["cls_token"], roles["sep_token"]))
    return json.dumps(tokenizer | {"normalizer": normalizer}, ensure_ascii=False).encode()


def wordpiece_tokenizer(
    tokens: dict[str, int], specials: list[str], unknown: str, around: tuple[str, str]
) -> dict[str, Any]:
    """Return the ``tokenizer.json`` of BERT's WordPiece, without its normalizer.

    ``tokens``: the ids.  ``specials``: texts of special tokens.  ``around``: the tokens before and behind a text.
    """
    first, last = around
    text, second = {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}
    begin, end = ({"SpecialToken": {"id": token, "type_id": 0}} for token in around)
    return {
        "version": "1.0",
        "added_tokens": [
            {
                "id": tokens[token],
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for token in sorted(specials, key=tokens.__getitem__)
        ],
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [begin, text, end],
            "pair": [begin, text, end, second, {"SpecialToken": {"id": last, "type_id": 1}}],
            "special_tokens": {
                token: {"id": token, "ids": [tokens[token]], "tokens": [token]} for token in (first, last)
            },
        },
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": {
            "type": "WordPiece",
            "unk_token": unknown,
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100,
            "vocab": tokens,
        },
    }


def _read_vocab(vocab: bytes) -> dict[str, int]:
    """Return the ids of the lines; of equal lines the last one counts."""
    if len(vocab) > MAX_TOKENIZER_BYTES:
        raise InvalidFileError(
            f"vocab.txt: expected at most {MAX_TOKENIZER_BYTES} bytes, got {len(vocab)}", param="vocab.txt"
        )
    if vocab.count(b"\n") > MAX_VOCAB:
        raise InvalidFileError(f"vocab.txt: expected at most {MAX_VOCAB} lines, got more", param="vocab.txt")
    try:
        lines = vocab.decode().split("\n")
    except UnicodeDecodeError as error:
        raise InvalidFileError(
            f"vocab.txt: expected UTF-8, got none at byte {error.start}", param="vocab.txt"
        ) from None
    if lines and not lines[-1]:
        lines.pop()
    return {line.removesuffix("\r"): number for number, line in enumerate(lines)}


def _text_of(reader: ConfigReader, role: str, default: str) -> str:
    """Return the text of a special token, which is a string or an object with its ``content``."""
    value = reader.values.get(role)
    text = value.get("content") if isinstance(value, dict) else value
    if text is None:
        return default
    if not isinstance(text, str):
        raise reader.error(role, "a string or an object with content", value)
    return text
