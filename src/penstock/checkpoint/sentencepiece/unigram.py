"""The ``tokenizer.json`` of a SentencePiece model in the forms of T5, XLM-RoBERTa, CamemBERT and DeBERTa: Unigram.

https://huggingface.co/docs/transformers/model_doc/t5, .../xlm-roberta, .../camembert and .../deberta-v2
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any, Final

from penstock.checkpoint.sentencepiece.model import CONTROL, USER_DEFINED, SentencePieceModel
from penstock.checkpoint.sentencepiece.steps import SPACE_MARK
from penstock.checkpoint.tokenizer_files.post_processors import NO_POST_PROCESSOR
from penstock.config import ConfigReader

__all__ = ["UNIGRAM", "UNIGRAM_CLASSES", "unigram_tokenizer"]

_DEBERTA: Final = "DebertaV2Tokenizer"
UNIGRAM: Final = 1
"""The value of ``model_type`` of such a model."""
UNIGRAM_CLASSES: Final = ("T5Tokenizer", "XLMRobertaTokenizer", "CamembertTokenizer", _DEBERTA)
_MAX_EXTRA_IDS: Final = 4096
_NOT_USED: Final = ("<s>NOTUSED", "</s>NOTUSED", "<unk>NOTUSED")


def unigram_tokenizer(
    model: SentencePieceModel, name: str, roles: Mapping[str, str], config: ConfigReader
) -> dict[str, Any]:
    """Return the tokenizer.json of one of ``UNIGRAM_CLASSES``, whose post-processor is ``NO_POST_PROCESSOR``.

    ``roles``: the texts of the special tokens.
    """
    pieces: list[list[Any]] = [list(pair) for pair in zip(model.texts, model.scores, strict=True)]
    specials = [text for text, kind in zip(model.texts, model.kinds, strict=True) if kind == CONTROL]
    plain = [text for text, kind in zip(model.texts, model.kinds, strict=True) if kind == USER_DEFINED]
    if name == _DEBERTA:
        if roles["mask_token"] not in model.texts:
            pieces.append([roles["mask_token"], 0.0])
        specials.append(roles["mask_token"])
        return _deberta(pieces, _added(pieces, specials, plain), roles, config)
    has_prefix, unknown = True, 2
    if name == "T5Tokenizer":
        extra = [f"<extra_id_{i}>" for i in reversed(range(config.int("extra_ids", 100, min=0, max=_MAX_EXTRA_IDS)))]
        vocab = pieces + [[text, 0.0] for text in extra]
        specials += extra
    else:
        has_prefix, unknown = config.bool("add_prefix_space", True), 3
        if name == "XLMRobertaTokenizer":
            first = [roles[role] for role in ("bos_token", "pad_token", "eos_token", "unk_token")]
            vocab = [[text, 0.0] for text in first] + pieces[3:]
        else:
            first = [_NOT_USED[0], roles["pad_token"], _NOT_USED[1], roles["unk_token"]]
            vocab = [[text, 0.0] for text in first] + [[_NOT_USED[2], -100.0]] + pieces[1:]
            specials += _NOT_USED
        vocab.append([roles["mask_token"], 0.0])
    metaspace = {
        "type": "Metaspace",
        "replacement": SPACE_MARK,
        "prepend_scheme": "always" if has_prefix else "never",
        "split": True,
    }
    charsmap = base64.b64encode(model.charsmap).decode()
    return {
        "version": "1.0",
        "added_tokens": _added(vocab, specials, plain),
        "normalizer": {"type": "Precompiled", "precompiled_charsmap": charsmap} if charsmap else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}, metaspace]},
        "post_processor": NO_POST_PROCESSOR,
        "decoder": metaspace,
        "model": {"type": "Unigram", "unk_id": unknown, "byte_fallback": False, "vocab": vocab},
    }


def _deberta(
    pieces: list[list[Any]], added: list[dict[str, Any]], roles: Mapping[str, str], config: ConfigReader
) -> dict[str, Any]:
    """Return the tokenizer of DeBERTa, which does not use the character map of the model."""
    texts = [text for text, _ in pieces]
    unknown = texts.index(roles["unk_token"]) if roles["unk_token"] in texts else 1
    normalizers: list[dict[str, Any]] = [{"type": "Lowercase"}] if config.bool("do_lower_case", False) else []
    normalizers += [
        {"type": "Replace", "pattern": {"Regex": r"\s{2,}|[\n\r\t]"}, "content": " "},
        {"type": "NFC"},
        {"type": "Strip", "strip_left": False, "strip_right": True},
    ]
    scheme = "always" if config.bool("add_prefix_space", True) else "first"
    metaspace = {"type": "Metaspace", "replacement": SPACE_MARK, "prepend_scheme": scheme, "split": True}
    by_punctuation = [{"type": "Punctuation", "behavior": "Isolated"}] if config.bool("split_by_punct", False) else []
    return {
        "version": "1.0",
        "added_tokens": added,
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*by_punctuation, metaspace]},
        "post_processor": NO_POST_PROCESSOR,
        "decoder": metaspace,
        "model": {"type": "Unigram", "unk_id": unknown, "byte_fallback": False, "vocab": pieces},
    }


def _added(vocab: list[list[Any]], specials: list[str], plain: list[str]) -> list[dict[str, Any]]:
    """Return the tokens that are found in a text before it is split, by id."""
    ids = {text: token for token, (text, _) in enumerate(vocab)}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    texts = {**dict.fromkeys(plain, False), **dict.fromkeys(specials, True)}
    added = [
        {"id": ids[text], "content": text, **flags, "special": special}
        for text, special in texts.items()
        if text in ids
    ]
    return sorted(added, key=lambda token: token["id"])
