"""The tokenizer files of a checkpoint folder, from the metadata of a GGUF file."""

from __future__ import annotations

import json
from typing import Any, Final

from penstock.checkpoint.gguf.metadata import Metadata
from penstock.checkpoint.gguf.pooling import RERANK_TEMPLATE
from penstock.checkpoint.gguf.split_patterns import find_pre_tokenizer
from penstock.checkpoint.gguf.tokenizer_pieces import unigram, word_piece
from penstock.checkpoint.gguf.vocab import TokenType, Vocab
from penstock.checkpoint.sentencepiece.merges import merges_by_score
from penstock.checkpoint.sentencepiece.steps import decoder_steps, normalizer_steps
from penstock.checkpoint.tokenizer_files.merge_table import MadeMerges
from penstock.checkpoint.tokenizer_limits import MadeJson
from penstock.config import show
from penstock.errors import InvalidFileError, UnsupportedError

__all__ = ["TOKENIZER_FILES", "has_tokenizer", "tokenizer_files"]

TOKENIZER_FILES: Final = ("generation_config.json", "tokenizer.json", "tokenizer_config.json")
"""The names of the files that ``tokenizer_files`` makes, in its order."""

_KEEP_SPACE: Final = {("phi3", "llama"): ("<unk>", "<s>", "<|endoftext|>")}
"""Architectures and tokenizers whose special tokens take the white space behind them, but for these; no key says so."""


def has_tokenizer(metadata: Metadata) -> bool:
    """Return True for a file with a tokenizer."""
    return "tokenizer.ggml.model" in metadata.values and metadata.text("tokenizer.ggml.model") != "none"


def tokenizer_files(metadata: Metadata, vocab_size: int) -> dict[str, bytes]:
    """Return tokenizer.json, tokenizer_config.json and generation_config.json; nothing for a file without a tokenizer.

    Raises UnsupportedError for a tokenizer that Penstock does not know, by name, and InvalidFileError for damage.
    """
    if not has_tokenizer(metadata):
        return {}
    vocab = Vocab(metadata, vocab_size)
    model = metadata.text("tokenizer.ggml.model")
    adds_bos = adds_eos = False
    if model == "gpt2":
        tokenizer, adds_bos = _byte_level(metadata, vocab)
    elif model == "llama":
        tokenizer, adds_bos = _sentencepiece(metadata, vocab)
    elif model == "bert":
        tokenizer = word_piece(metadata, vocab)
    elif model == "t5":
        tokenizer, adds_eos = unigram(metadata, vocab), True
    elif model == "gemma4":
        tokenizer, adds_bos = _space_marked(metadata, vocab), True
    else:
        raise UnsupportedError(
            f"{metadata.file}: tokenizer.ggml.model: expected gpt2, llama, bert, t5 or gemma4, got {show(model)}",
            param="tokenizer.ggml.model",
        )
    adds_bos = metadata.flag("tokenizer.ggml.add_bos_token", adds_bos)
    adds_eos = metadata.flag("tokenizer.ggml.add_eos_token", adds_eos)
    if model != "bert":
        keep_space = _KEEP_SPACE.get((metadata.text("general.architecture", ""), model))
        tokenizer["added_tokens"] = vocab.added_tokens(keep_space)
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
        "tokenizer.json": MadeJson.of(tokenizer),
        "tokenizer_config.json": json.dumps(config, ensure_ascii=False).encode(),
    }


def _byte_level(metadata: Metadata, vocab: Vocab) -> tuple[dict[str, Any], bool]:
    """Return the tokenizer.json of byte pair encoding over bytes, and whether it adds the first token by default."""
    pre = find_pre_tokenizer(metadata.text("tokenizer.ggml.pre", "default"), metadata.file)
    tokenizer = {
        "version": "1.0",
        "normalizer": {"type": "NFC"} if pre.is_nfc else None,
        "pre_tokenizer": pre.components(),
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "ignore_merges": pre.ignores_merges,
            "vocab": vocab.ids,
            "merges": _merges(metadata, vocab),
        },
    }
    return tokenizer, pre.adds_bos


def _space_marked(metadata: Metadata, vocab: Vocab) -> dict[str, Any]:
    """Return the tokenizer.json of Gemma's byte pair encoding: of a whole text, in which a mark stands for a space."""
    unknown = vocab.roles.get("unk_token")
    return {
        "version": "1.0",
        "normalizer": {"type": "Sequence", "normalizers": normalizer_steps(False)},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoder_steps(False)},
        "model": {
            "type": "BPE",
            "unk_token": None if unknown is None else vocab.texts[unknown],
            "fuse_unk": True,
            "byte_fallback": TokenType.BYTE in vocab.types,
            "vocab": vocab.ids,
            "merges": _merges(metadata, vocab),
        },
    }


def _merges(metadata: Metadata, vocab: Vocab) -> MadeMerges | list[list[str]]:
    """Return the pairs of tokens that are merged, in their order."""
    made = MadeMerges.of(metadata.texts("tokenizer.ggml.merges"), vocab.ids)
    if made is not None:
        return made
    merges = []  # a token may have a space inside
    for merge in metadata.texts("tokenizer.ggml.merges"):
        at = merge.find(" ", 1)
        left, right = merge[:at], merge[at + 1 :]
        if at < 0 or left not in vocab.ids or right not in vocab.ids or left + right not in vocab.ids:
            raise InvalidFileError(
                f"{metadata.file}: tokenizer.ggml.merges: expected two tokens that make a third, got {show(merge)}",
                param="tokenizer.ggml.merges",
            )
        merges.append([left, right])
    return merges


def _sentencepiece(metadata: Metadata, vocab: Vocab) -> tuple[dict[str, Any], bool]:
    """Return the tokenizer.json of SentencePiece's byte pair encoding.

    Its model has scores instead of merges: of two adjacent pieces those are merged first whose result has the highest
    score.  So every way to make a token of two is a merge, with the token's score as its rank.
    """
    scores = metadata.numbers("tokenizer.ggml.scores", len(vocab.texts))
    if scores is None:
        raise metadata.error("tokenizer.ggml.scores", "an array of numbers")
    normal = {text: scores[token] for text, token in vocab.ids.items() if vocab.types[token] == TokenType.NORMAL}
    merges = merges_by_score(normal, vocab.ids, "tokenizer.ggml.tokens", metadata.file)
    has_prefix = metadata.flag("tokenizer.ggml.add_space_prefix", True)
    decoders = decoder_steps(has_prefix)
    unknown = next((text for token, text in enumerate(vocab.texts) if vocab.types[token] == TokenType.UNKNOWN), None)
    tokenizer = {
        "version": "1.0",
        "normalizer": {"type": "Sequence", "normalizers": normalizer_steps(has_prefix)},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {
            "type": "BPE",
            "unk_token": unknown,
            "fuse_unk": True,
            "byte_fallback": TokenType.BYTE in vocab.types,
            "vocab": vocab.ids,
            "merges": merges,
        },
    }
    return tokenizer, True


def _template(vocab: Vocab, adds_bos: bool, adds_eos: bool) -> dict[str, Any] | None:
    """Return the post-processor, which adds the first and the last token; None if it adds neither.

    A file may name a token that separates two texts; then the second one has a last token too.
    """
    first = {"Sequence": {"id": "A", "type_id": 0}}
    around: list[dict[str, Any]] = [first]
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
    separator = vocab.id_of("seperator")  # the key is spelled so
    if vocab.metadata.flag("tokenizer.ggml.add_sep_token", False) and separator is not None:
        text = vocab.texts[separator]
        special[text] = {"id": text, "ids": [separator], "tokens": [text]}
        pair.insert(-1, {"SpecialToken": {"id": text, "type_id": 0}})
        pair += around[around.index(first) + 1 :]
    return {"type": "TemplateProcessing", "single": around, "pair": pair, "special_tokens": special}


def _chat_templates(metadata: Metadata) -> str | list[dict[str, str]] | None:
    """Return the chat template, or all of them with their names; that of a reranker belongs to its pooling head."""
    key = "tokenizer.chat_template"
    named = {
        name.removeprefix(f"{key}."): metadata.text(name)
        for name in metadata.values
        if name.startswith(f"{key}.") and name != RERANK_TEMPLATE
    }
    default = metadata.text(key) if key in metadata.values else None
    if not named:
        return default
    if default is not None:
        named = {"default": default, **named}
    return [{"name": name, "template": template} for name, template in named.items()]
