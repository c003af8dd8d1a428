"""The compiled tokenizer of a bundle returns what the library returns, and the library is not opened."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from penstock import LLM, SamplingParams
from penstock.checkpoint.side_files import read_side_files
from penstock.checkpoint.tokenizer_limits import MadeJson
from penstock.checkpoint.tokenizer_process import TokenizerProcess
from penstock.core.tokenizer import TOKENIZER_SEGMENT
from penstock.errors import InvalidArgumentError, InvalidFileError
from penstock.graph.tokenizer import read
from penstock.graph.tokenizer.compiler import compile_tokenizer
from penstock.text.tokenizer import Tokenizer
from tests.support.errors import raises
from tests.support.fake_model import stream_of
from tests.support.tokenizer_kinds import KINDS, SAMPLES, text_of

DEMO = Path(__file__).parents[2] / "demo" / "demo.psm"
NUM_TEXTS = 40
WORDS = b'{"version": "1.0", "added_tokens": [], "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}}'


@pytest.mark.parametrize("kind", KINDS)
def test_compiled_matches_library(kind: str) -> None:
    trained = KINDS[kind]()
    files = {"tokenizer.json": trained.to_str().encode()}
    segment, refused = compile_tokenizer(files)
    assert refused == ""
    library, compiled = Tokenizer(files), Tokenizer({**files, TOKENIZER_SEGMENT: segment})
    r = random.Random(kind)
    for text in [*SAMPLES, *(text_of(r, ["<|endoftext|>", "<s>", "word"]) for _ in range(NUM_TEXTS))]:
        for adds in (True, False):
            ids = library.encode(text, add_special_tokens=adds)
            assert compiled.encode(text, add_special_tokens=adds) == ids
        assert stream_of(compiled, ids) == stream_of(library, ids)
        assert compiled.decode(ids, skip_special_tokens=False) == library.decode(ids, skip_special_tokens=False)
        assert compiled.spellings(text[:4]) == library.spellings(text[:4])
    for token in range(720):
        assert compiled.decode([token]) == library.decode([token])
        assert compiled.is_special(token) == library.is_special(token)
        if library._backend.is_byte_level:  # else the library knows byte tokens only by their names
            assert compiled.token_bytes(token) == library.token_bytes(token)
    assert compiled.longest_token >= max(len(library.decode([token])) for token in range(720))
    assert compiled.token_id("a") == library.token_id("a")


@pytest.mark.parametrize("kind", KINDS)
def test_words_the_library_does_not_read_compile_equally(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The segment has the bytes of a tokenizer that the library reads whole, also of the forms of older files."""
    values = json.loads(KINDS[kind]().to_str())
    forms = [values]
    if values["model"]["type"] == "BPE" and all(" " not in "".join(pair) for pair in values["model"]["merges"]):
        merges = [" ".join(pair) for pair in values["model"]["merges"]]
        mixed = dict(reversed(values["model"]["vocab"].items()))
        forms.append({**values, "model": {**values["model"], "merges": merges, "vocab": mixed}})
    found = [compile_tokenizer({"tokenizer.json": MadeJson.of(form)}) for form in forms]
    found += [compile_tokenizer({"tokenizer.json": bytes(MadeJson.of(form))}) for form in forms]
    monkeypatch.setattr(read, "_plain_words", lambda _: None)
    expected = [compile_tokenizer({"tokenizer.json": json.dumps(form).encode()}) for form in forms]
    assert found == [*expected, *expected]


@pytest.mark.parametrize(
    "change",
    [
        {"merges": [["a", "b"]]},  # a word is missing
        {"merges": [["a", "a"], ["a", "a"]]},  # the library drops one
        {"merges": ["#version: 0.2", "a a"]},
        {"vocab": {"a": 0, "aa": 0}},
        {"vocab": {"a": 0, "aa": 1.5}},
    ],
)
def test_doubtful_words_are_read_by_the_library(change: dict[str, Any]) -> None:
    model = {"type": "BPE", "vocab": {"a": 0, "aa": 1}, "merges": [["a", "a"]]}
    assert read._plain_words({"model": model, "added_tokens": []}) is not None
    assert read._plain_words({"model": {**model, **change}, "added_tokens": []}) is None


@pytest.mark.parametrize(("number", "is_plain"), [(2, True), (3, False), (0, False)])
def test_added_tokens_have_the_ids_of_the_library(number: int, is_plain: bool) -> None:
    model = {"type": "BPE", "vocab": {"a": 0, "aa": 1}, "merges": []}
    added = [{"id": number, "content": "<s>"}]
    assert (read._plain_words({"model": model, "added_tokens": added}) is not None) == is_plain


def test_a_prompt_of_a_bundle_never_opens_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: TokenizerProcess) -> None:
        raise AssertionError("the library was opened")

    def answer() -> tuple[str, list[int]]:
        with LLM(DEMO) as llm:
            result = llm.generate(["def add(a, b):"], SamplingParams(max_tokens=8, temperature=0, stop=["zz"]))[0]
        return result.text, list(result.prompt_token_ids)

    expected = answer()
    monkeypatch.setattr(TokenizerProcess, "_start", refuse)
    assert answer() == expected


def test_a_damaged_segment_is_refused_by_name() -> None:
    files = read_side_files(DEMO)
    assert TOKENIZER_SEGMENT in files
    with raises(InvalidFileError, param="magic", match=r"tokenizer\.bin: magic"):
        Tokenizer({**files, TOKENIZER_SEGMENT: b"x" * 64})


def test_a_kind_that_was_not_compiled_is_the_librarys() -> None:
    segment, refused = compile_tokenizer({"tokenizer.json": WORDS})
    assert "WordLevel" in refused
    assert Tokenizer({"tokenizer.json": WORDS, TOKENIZER_SEGMENT: segment}).encode("a") == [0]


def test_ids_beyond_32_bits_are_refused() -> None:
    with raises(InvalidArgumentError, param="ids[0]", match="to 2147483647"):
        Tokenizer(read_side_files(DEMO)).decode([1 << 40])
