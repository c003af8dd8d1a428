"""A damaged tokenizer file either raises a PenstockError or gives a tokenizer that works."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from penstock.checkpoint.bert_vocab import bert_tokenizer
from penstock.checkpoint.sentencepiece.tokenizer import sentencepiece_tokenizer
from penstock.checkpoint.tokenizer_file import LibraryTokenizer
from penstock.core.tokenizer import NativeTokenizer
from penstock.graph.tokenizer.compiler import compile_tokenizer
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


def use_in_the_core(data: bytes) -> bool:
    """Compile a tokenizer.json, and encode and decode where the core can; return whether it can."""
    segment, reason = compile_tokenizer({"tokenizer.json": data})
    compiled = NativeTokenizer.of_segment(segment)
    for text in TEXTS if not reason else ():
        compiled.decode(compiled.encode(text))
    return not reason


def test_mutated_tokenizers_raise_only_penstock_errors(sound: bytes) -> None:
    def use(data: bytes) -> None:
        tokenizer = LibraryTokenizer(data)  # what the tokenizer's process runs
        for text in TEXTS:
            tokenizer.decode(tokenizer.encode(text))

    assert 0 < count_refusals(7, NUM_MUTANTS, sound, use) < NUM_MUTANTS


def test_mutated_tokenizers_compile_or_are_refused(sound: bytes) -> None:
    counts = [0, 0]

    def use(data: bytes) -> None:
        counts[use_in_the_core(data)] += 1

    assert 0 < count_refusals(8, NUM_MUTANTS // 5, sound, use) < NUM_MUTANTS // 5
    assert counts[True] > 0


def test_mutated_sentencepiece_models_are_read_or_refused() -> None:
    model, count = (Path(__file__).parent / "data/pieces.model").read_bytes(), max(1, NUM_MUTANTS // 5)

    def use(data: bytes) -> None:
        made = sentencepiece_tokenizer(data, b"{}")
        if made is not None:
            use_in_the_core(made)

    assert 0 < count_refusals(9, count, model, use) < count


def test_mutated_vocabularies_are_read_or_refused() -> None:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefgh", "##a", "##b", "def", "Grüße", "世界"]
    made_any, count = [], max(1, NUM_MUTANTS // 5)

    def use(data: bytes) -> None:
        made = bert_tokenizer(data, b'{"tokenizer_class": "BertTokenizer"}')
        if made is not None:
            made_any.append(use_in_the_core(made))

    assert 0 < count_refusals(10, count, "\n".join(words).encode(), use) < count
    assert any(made_any)


def test_a_template_without_its_special_token_is_not_compiled(sound: bytes) -> None:
    values = json.loads(sound)
    tokens = values["post_processor"]["special_tokens"]
    tokens["<|other|>"] = tokens.pop("<|begin|>") | {"id": "<|other|>"}
    _, reason = compile_tokenizer({"tokenizer.json": json.dumps(values).encode()})
    assert reason.endswith("special_tokens lacks '<|begin|>'")
