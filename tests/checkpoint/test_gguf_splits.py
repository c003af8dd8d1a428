"""Texts are split as the name of a pre-tokenizer in a GGUF file says, and special tokens take white space or not."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import tokenizers

from penstock.checkpoint.gguf.metadata import Metadata
from penstock.checkpoint.gguf.split_patterns import find_pre_tokenizer
from penstock.checkpoint.gguf.tokenizer import tokenizer_files
from tests.support.gguf_files import text_metadata
from tests.support.tokenizer_kinds import KINDS

TEXT = "I'LL pay 12345 (or ca\u0301)\n x=1"
SPLITS = {
    "lfm2": "I|'LL| pay| |123|45| (|or| ca|\u0301)\n| x|=|1",
    "falcon-h1": "I|'LL| pay| |123|45| (|or| ca|\u0301)\n| x|=|1",
    "mpt": "I|'|LL| pay| 12345| (|or| ca|\u0301)|\n| x|=|1",
    "exaone": "I|'|LL| pay| |1|2|3|4|5| (|or| ca|\u0301)|\n| x|=|1",
    "hunyuan": "I|'LL| pay| |1|2|3|4|5| (|or| ca|\u0301)\n| x|=|1",
    "hunyuan-dense": "I|'LL| pay| |123|45| (|or| ca\u0301|)\n| x|=|1",
    "minimax-m2": "I'LL| pay| |123|45| (|or| ca\u0301|)\n| x|=|1",
    "qwen35": "I|'LL| pay| |1|2|3|4|5| (|or| ca\u0301|)\n| x|=|1",
    "seed-coder": "I|'LL| pay| |1|2|3|4|5| (|or| ca|\u0301)|\n| x|=|1",
    "falcon": "I|'|LL| pay| |123|45| |(|or| ca|\u0301|)|\n| x|=|1",
    "deepseek-coder": "I|'|LL| pay| |1|2|3|4|5| (|or| ca|\u0301|)|\n| x|=|1",
    "deepseek-llm": "I|'|LL| pay| |12345| (|or| ca|\u0301|)|\n| x|=|1",
    "bloom": "I'LL| pay| 12345| (|or| ca\u0301|)\n| x=1",
}
BYTES = str.maketrans({"\u0120": " ", "\u010a": "\n", "\u00cc": "\u0301", "\u0123": None})
"""The characters that stand for the bytes of TEXT."""


def byte_level(name: str) -> Any:
    """Return the tokenizer of a file whose bytes are split by a pre-tokenizer."""
    model = json.loads(KINDS["gpt2"]().to_str())["model"]
    texts = sorted(model["vocab"], key=model["vocab"].__getitem__)
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": name,
        "tokenizer.ggml.tokens": texts,
        "tokenizer.ggml.merges": [" ".join(pair) for pair in model["merges"]],
    }
    files = tokenizer_files(Metadata(metadata, "model.gguf"), 10_000)
    return tokenizers.Tokenizer.from_str(files["tokenizer.json"].decode())


@pytest.mark.parametrize("name", SPLITS)
def test_a_text_is_split_by_its_pattern(name: str) -> None:
    tokenizer = byte_level(name)
    pieces = [piece for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str(TEXT)]
    assert "|".join(pieces).translate(BYTES) == SPLITS[name]


def test_qwen_3_5_normalizes_its_texts() -> None:
    tokenizer = byte_level("qwen35")
    assert tokenizer.encode("e\u0301").ids == tokenizer.encode("\u00e9").ids
    assert find_pre_tokenizer("lfm2", "").adds_bos


@pytest.mark.parametrize("name", ["phi3", "llama"])
def test_special_tokens_of_phi_3_take_the_space_behind_them(name: str) -> None:
    metadata = text_metadata() | {"general.architecture": name}
    metadata["tokenizer.ggml.tokens"] = [*metadata["tokenizer.ggml.tokens"], "<|end|>"]
    metadata["tokenizer.ggml.scores"] = np.array([*metadata["tokenizer.ggml.scores"], 0.0], np.float32)
    metadata["tokenizer.ggml.token_type"] = np.array([*metadata["tokenizer.ggml.token_type"], 3], np.int32)
    added = json.loads(tokenizer_files(Metadata(metadata, "model.gguf"), 300)["tokenizer.json"])["added_tokens"]
    assert [token["content"] for token in added if token["rstrip"]] == (["</s>", "<|end|>"] if name == "phi3" else [])
