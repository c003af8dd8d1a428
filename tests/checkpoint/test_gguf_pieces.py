"""The tokenizers ``bert`` and ``t5`` of GGUF files have the ids of the tokenizers that they were made from."""

from __future__ import annotations

import base64
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers

from penstock.checkpoint.folder import Checkpoint
from penstock.checkpoint.gguf.metadata import Metadata
from penstock.checkpoint.gguf.tokenizer import tokenizer_files
from penstock.core.tokenizer import NativeTokenizer
from penstock.errors import InvalidFileError
from penstock.graph.tokenizer.compiler import compile_tokenizer
from tests.support.errors import raises
from tests.support.gguf_files import llama_file
from tests.support.tokenizer_kinds import KINDS, SAMPLES, text_of

SPECIALS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def bert_metadata(lowercase: bool = True) -> tuple[dict[str, Any], tokenizers.Tokenizer]:
    """Return the metadata of a WordPiece tokenizer in the form of llama.cpp's conversion, and the tokenizer."""
    name = "WordPiece" if lowercase else "WordPiece with case"
    values = json.loads(KINDS[name]().to_str())
    values["added_tokens"] = values["added_tokens"][:5]
    values["model"]["max_input_chars_per_word"] = 100
    vocab = values["model"]["vocab"]
    marked = [
        text if text in SPECIALS else text[2:] if text.startswith("##") else f"\u2581{text}"
        for text in sorted(vocab, key=vocab.__getitem__)
    ]
    return {
        "tokenizer.ggml.model": "bert",
        "tokenizer.ggml.tokens": marked,
        "tokenizer.ggml.token_type": np.array([3 if text in SPECIALS else 1 for text in marked], np.int32),
        "tokenizer.ggml.unknown_token_id": 1,
        "tokenizer.ggml.cls_token_id": 2,
        "tokenizer.ggml.seperator_token_id": 3,
        "tokenizer.ggml.normalizer.lowercase": lowercase,
    }, tokenizers.Tokenizer.from_str(json.dumps(values))


def unigram_metadata() -> tuple[dict[str, Any], tokenizers.Tokenizer]:
    values = json.loads(KINDS["Unigram"]().to_str())
    values["added_tokens"] = values["added_tokens"][:4]
    charsmap = base64.b64decode(values["normalizer"]["normalizers"][0]["precompiled_charsmap"])
    values["normalizer"]["normalizers"][2]["strip_left"] = True
    vocab = values["model"]["vocab"]
    return {
        "tokenizer.ggml.model": "t5",
        "tokenizer.ggml.tokens": [text for text, _ in vocab],
        "tokenizer.ggml.scores": np.array([score for _, score in vocab], np.float32),
        "tokenizer.ggml.token_type": np.array([3, 3, 3, 2, *[1] * (len(vocab) - 4)], np.int32),
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 3,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.remove_extra_whitespaces": True,
        "tokenizer.ggml.precompiled_charsmap": np.frombuffer(charsmap, np.uint8),
    }, tokenizers.Tokenizer.from_str(json.dumps(values))


@pytest.mark.parametrize("kind", ["bert", "bert with case", "t5"])
def test_ids_are_those_of_the_source(kind: str) -> None:
    metadata, theirs = unigram_metadata() if kind == "t5" else bert_metadata(kind == "bert")
    segment, reason = compile_tokenizer(tokenizer_files(Metadata(metadata, "model.gguf"), 10_000))
    assert reason == ""
    ours, r = NativeTokenizer.of_segment(segment), random.Random(kind)
    for text in (*SAMPLES, *(text_of(r, []) for _ in range(40))):
        assert ours.encode(text) == theirs.encode(text).ids, repr(text)


def test_a_separator_divides_two_texts() -> None:
    metadata = unigram_metadata()[0] | {"tokenizer.ggml.seperator_token_id": 2, "tokenizer.ggml.add_sep_token": True}
    files = tokenizer_files(Metadata(metadata, "model.gguf"), 10_000)
    first, last = metadata["tokenizer.ggml.tokens"][0], metadata["tokenizer.ggml.tokens"][2]
    template = json.loads(files["tokenizer.json"])["post_processor"]
    found = [next(iter(part.values()))["id"] for part in template["pair"]]
    assert found == [first, "A", last, last, "B", last]


@pytest.mark.parametrize(
    ("metadata", "change", "field", "message"),
    [
        (bert_metadata, {"tokenizer.ggml.cls_token_id": None}, "tokenizer.ggml.cls_token_id", "expected a token"),
        (
            bert_metadata,
            {"tokenizer.ggml.unknown_token_id": None},
            "tokenizer.ggml.unknown_token_id",
            "expected a token",
        ),
        (
            bert_metadata,
            {"tokenizer.ggml.normalizer.lowercase": 3},
            "tokenizer.ggml.normalizer.lowercase",
            "tokenizer.ggml.normalizer.lowercase",
        ),
        (unigram_metadata, {"tokenizer.ggml.scores": None}, "tokenizer.ggml.scores", "expected an array"),
        (
            unigram_metadata,
            {"tokenizer.ggml.precompiled_charsmap": "a"},
            "tokenizer.ggml.precompiled_charsmap",
            "expected an array",
        ),
    ],
)
def test_damage_is_named(metadata: Any, change: dict[str, Any], field: str, message: str) -> None:
    values = {key: value for key, value in (metadata()[0] | change).items() if value is not None}
    with raises(InvalidFileError, param=field, match=message):
        tokenizer_files(Metadata(values, "model.gguf"), 10_000)


def test_a_file_has_its_tokenizer(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    metadata = {key: value.tolist() if hasattr(value, "tolist") else value for key, value in bert_metadata()[0].items()}
    path.write_bytes(llama_file(metadata, vocab_size=1000))
    segment, reason = compile_tokenizer(Checkpoint.open(path).side_files())
    assert (reason, NativeTokenizer.of_segment(segment).encode("the")[0]) == ("", 2)
