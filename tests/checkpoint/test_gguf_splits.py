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
    "kimi-k2": "I'LL| pay| |123|45| (|or| ca\u0301|)\n| x|=|1",
    "tiny_aya": "I'LL| pay| |12|345| (|or| ca\u0301|)\n| x|=|1",
    "superbpe": "I'LL pay |12|345| (or ca\u0301)\n x=|1",
    "youtu": "I'LL| pay| |1|2|3|4|5| (|or| ca\u0301|)\n| x|=|1",
    "bailingmoe": "I|'LL| pay| |1|2|3|4|5| (|or| ca|\u0301)\n| x|=|1",
    "viking": "I'LL| pay| |1|2|3|4|5| (|or| ca\u0301|)\n| x=|1",
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


def test_kimi_splits_han_from_other_letters() -> None:
    pieces = [piece for piece, _ in byte_level("kimi-k2").pre_tokenizer.pre_tokenize_str("ab\u4f60\u597dcD'll")]
    assert [len(piece) for piece in pieces] == [2, 6, 1, 4]


def test_a_text_with_marked_spaces_is_merged_as_a_whole() -> None:
    """Gemma 4 has merges as byte pair encoding has, over characters with a mark for each space."""
    texts = ["<unk>", "<s>", "</s>", "<0x41>", "a", "b", "\u2581", "\n", "\u2581a", "\u2581a\n", "<turn|>"]
    metadata = {
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.tokens": texts,
        "tokenizer.ggml.token_type": np.array([2, 3, 3, 6, 1, 1, 1, 1, 1, 1, 3], np.int32),
        "tokenizer.ggml.merges": ["\u2581 a", "\u2581a \n"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_space_prefix": False,
    }
    files = tokenizer_files(Metadata(metadata, "model.gguf"), 11)
    tokenizer = tokenizers.Tokenizer.from_str(files["tokenizer.json"].decode())
    ids = tokenizer.encode("b a\n<turn|>A").ids
    assert [texts[token] for token in ids] == ["<s>", "b", "\u2581a\n", "<turn|>", "<0x41>"]
    assert tokenizer.decode(ids) == "b a\nA"
    assert json.loads(files["generation_config.json"])["eos_token_id"] == [2, 10]


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
