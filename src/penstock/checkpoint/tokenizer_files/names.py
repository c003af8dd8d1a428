"""The names of the files that a tokenizer is made from."""

from __future__ import annotations

from typing import Final

__all__ = ["SENTENCEPIECE_FILES", "TEKKEN", "TIKTOKEN_FILE", "TOKENIZER_INPUTS", "VOCABULARY_FILES"]

SENTENCEPIECE_FILES: Final = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "spm.model")
TEKKEN: Final = "tekken.json"
TIKTOKEN_FILE: Final = "tiktoken.model"
VOCABULARY_FILES: Final = ("vocab.txt", "vocab.json", TEKKEN, *SENTENCEPIECE_FILES, TIKTOKEN_FILE)
"""The files that have a vocabulary: a folder without ``tokenizer.json`` has one of them, or no tokenizer."""
TOKENIZER_INPUTS: Final = (
    *SENTENCEPIECE_FILES, TEKKEN, TIKTOKEN_FILE, "vocab.txt", "vocab.json", "merges.txt", "added_tokens.json",
    "special_tokens_map.json",
)  # fmt: skip
"""Names beside ``SIDE_FILES``; the completed ``tokenizer.json`` has all that these files say."""
