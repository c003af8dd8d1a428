"""A damaged tokenizer.json ends in an error of ours or in a tokenizer that works, never in anything else."""

from __future__ import annotations

import json

import pytest
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from penstock.checkpoint.tokenizer_file import LibraryTokenizer
from tests.support.file_damage import count_refusals, num_mutants

NUM_MUTANTS = num_mutants(10_000)
TEXTS = ["def add(a, b):\n    return a + b\n", "Grüße, 世界 🙂", "<|begin|> a <|end|>", ""]


@pytest.fixture(scope="module")
def sound() -> bytes:
    library = Library(models.BPE())
    library.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Replace("\t", " ")])
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|begin|>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library.train_from_iterator(TEXTS * 4, trainer)
    library.post_processor = processors.TemplateProcessing(
        single="<|begin|> $A", pair="<|begin|> $A $B", special_tokens=[("<|begin|>", 0)]
    )
    return json.dumps(json.loads(library.to_str()), ensure_ascii=False).encode()


def test_mutated_tokenizers_raise_only_penstock_errors(sound: bytes) -> None:
    def use(data: bytes) -> None:
        tokenizer = LibraryTokenizer(data)  # what the tokenizer's process runs
        for text in TEXTS:
            tokenizer.decode(tokenizer.encode(text))

    assert 0 < count_refusals(7, NUM_MUTANTS, sound, use) < NUM_MUTANTS
