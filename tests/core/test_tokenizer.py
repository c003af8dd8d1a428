"""The core's tokenizers give the ids and the texts of the ``tokenizers`` library.

``PENSTOCK_TOKENIZER_TEXTS`` makes it as many texts of each kind (``make check-tokenizers``).
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import tokenizers
from tokenizers import normalizers

from penstock.core.native import Model
from penstock.core.tokenizer import TOKENIZER_SEGMENT, NativeTokenizer
from tests.support.charsmap import REPLACEMENTS, charsmap
from tests.support.tiny_graph import tiny_graph, write_bundle
from tests.support.tokenizer_kinds import KINDS, SAMPLES, bytes_only, segment_of, text_of

ASSIGNED = (*range(0, 0x33500, 256), *range(0xE0000, 0xE0200, 256), 0x10FF00)  # and all around
NORMALIZERS = (
    normalizers.NFD(),
    normalizers.Lowercase(),
    normalizers.StripAccents(),
    normalizers.Strip(),
    normalizers.BertNormalizer(),
    normalizers.BertNormalizer(lowercase=False),
    normalizers.NFKC(),
    normalizers.NFKD(),
    normalizers.Nmt(),
    normalizers.Precompiled(charsmap(REPLACEMENTS)),
)
NUM_TEXTS = int(os.environ.get("PENSTOCK_TOKENIZER_TEXTS", "200"))


@dataclass
class Pair:
    ours: NativeTokenizer
    theirs: tokenizers.Tokenizer
    added: list[str]

    def check_text(self, text: str) -> None:
        for special in (False, True):
            expected = self.theirs.encode(text, add_special_tokens=special).ids
            assert self.ours.encode(text, add_special_tokens=special) == expected, repr(text)
        self.theirs.encode_special_tokens = True
        expected = self.theirs.encode(text, add_special_tokens=False).ids
        self.theirs.encode_special_tokens = False
        found = self.ours.encode(text, add_special_tokens=False, parse_special_tokens=False)
        assert found == expected, repr(text)

    def check_ids(self, ids: list[int]) -> None:
        for skip in (False, True):
            expected = self.theirs.decode(ids, skip_special_tokens=skip)
            assert self.ours.decode(ids, skip_special_tokens=skip) == expected, ids
            stream = self.ours.stream(skip_special_tokens=skip)
            assert "".join([*map(stream.push, ids), stream.flush()]) == expected, ids


@pytest.fixture(scope="module")
def pair_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[tokenizers.Tokenizer], Pair]:
    """A library's tokenizer beside the core's, which is compiled from its file."""

    def get(theirs: tokenizers.Tokenizer) -> Pair:
        theirs = tokenizers.Tokenizer.from_str(theirs.to_str())  # training leaves added tokens as they were
        path = tmp_path_factory.mktemp("pair") / "a.psm"
        with Model.open(write_bundle(path, tiny_graph(), segments={TOKENIZER_SEGMENT: segment_of(theirs)})) as model:
            ours = NativeTokenizer(model)
        added = [token.content for token in theirs.get_added_tokens_decoder().values()]
        return Pair(ours, theirs, added)

    return get


@pytest.mark.parametrize("kind", KINDS)
def test_ids_and_texts_are_those_of_the_library(kind: str, pair_of: Callable[..., Pair]) -> None:
    pair = pair_of(KINDS[kind]())
    r = random.Random(kind)
    for text in ("", *SAMPLES):
        pair.check_text(text)
    num_ids = pair.theirs.get_vocab_size() + 10
    for _ in range(NUM_TEXTS):
        text = text_of(r, pair.added)
        pair.check_text(text)
        ids = pair.theirs.encode(text).ids
        for _ in range(r.randrange(3)):  # damaged: halves of characters, special tokens anywhere
            ids.insert(r.randrange(len(ids) + 1), r.randrange(num_ids))
        pair.check_ids(ids)
    assert pair.ours.info.num_tokens == pair.theirs.get_vocab_size()


@pytest.mark.long
def test_long_words_take_no_time_to_speak_of(pair_of: Callable[..., Pair]) -> None:
    """A million of one letter, of white space, of marks, of an added token: what is more than n log n never ends."""
    r = random.Random(1)
    for kind, part in (
        ("demo", "a"),
        ("demo", " "),
        ("llama3", "\n"),
        ("gpt2", "\n\n"),
        ("qwen2", "\u0301\u0323"),
        ("llama2 by its normalizer", "ab"),
        ("llama2 by Metaspace always", "\u2581"),
    ):
        pair = pair_of(KINDS[kind]())
        ids = pair.ours.encode(part * 500_000, add_special_tokens=False)
        assert len(ids) > 1000, kind
        pair.check_text(part * r.randrange(3000, 6000))


@pytest.mark.parametrize("normalizer", NORMALIZERS, ids=lambda normalizer: type(normalizer).__name__)
def test_normalizers_are_those_of_the_library(
    normalizer: tokenizers.normalizers.Normalizer, pair_of: Callable[..., Pair]
) -> None:
    """Each code point, before and behind others.  The tokens are bytes, so they are the normalized text."""
    ours = pair_of(bytes_only(normalizer)).ours
    r = random.Random(str(normalizer))
    texts = [text_of(r, []) for _ in range(NUM_TEXTS // 4)]
    for begin in ASSIGNED:
        chars = [chr(c) for c in range(begin, begin + 256) if not 0xD800 <= c < 0xE000]
        texts += ["".join(f"{char}a{char}\u0301\u0323" for char in chars), chars[0] if chars else ""]
    for text in texts:
        assert ours.decode(ours.encode(text)) == normalizer.normalize_str(text), repr(text[:9])


@pytest.mark.long
def test_every_code_point_is_of_its_class(pair_of: Callable[..., Pair]) -> None:
    """Letters, numbers, white space; what a word is for added tokens; what composes: the library's, whose Unicode is
    neither Python's nor the newest."""
    split, words, composed = (pair_of(KINDS[kind]()) for kind in ("llama3", "gpt2", "qwen2"))
    for begin in ASSIGNED:
        chars = [chr(c) for c in range(begin, begin + 256) if not 0xD800 <= c < 0xE000]
        for pair, text in (
            (split, "".join(f" {char}x{char}1" for char in chars)),
            (words, "".join(f"!word{char}" for char in chars)),
        ):
            assert pair.ours.encode(text) == pair.theirs.encode(text).ids, hex(begin)
        text = "".join(f"{char}\u0301\u0323 {char}" for char in chars)
        normalizer = composed.theirs.normalizer
        assert normalizer is not None
        decoded = composed.ours.decode(composed.ours.encode(text), skip_special_tokens=False)
        assert decoded == normalizer.normalize_str(text), hex(begin)
