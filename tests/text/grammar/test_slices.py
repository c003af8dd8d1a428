"""Masks that take sets of tokens as a whole are those that look at each token."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from penstock import LLM
from penstock.text.grammar.compiler import GrammarCompiler
from penstock.text.grammar.source import GrammarSource

DEMO = Path(__file__).parents[3] / "demo" / "demo.psm"
TEXT = {"type": "string"}
GRAMMARS = (
    GrammarSource("json_schema", json.dumps({"type": "string", "maxLength": 9})),
    GrammarSource("json_schema", json.dumps({"type": "string", "maxLength": 300})),
    GrammarSource("json_schema", json.dumps({"type": "string", "format": "email"})),
    GrammarSource("json_schema", json.dumps({"type": "object", "properties": {"a": TEXT, "b": TEXT}})),
    GrammarSource("regex", r"[a-z0-9]{1,20}( [^\x00-\x1f]{0,140})?"),
    GrammarSource("choice", json.dumps(["returns nothing", "return None", "raise"])),
)


@pytest.fixture(scope="module")
def compilers() -> Iterator[tuple[GrammarCompiler, GrammarCompiler]]:
    """Return compilers with the sets and without any."""
    with LLM(DEMO) as llm:
        pair = [GrammarCompiler(lambda: llm.tokenizer, llm.info.vocab_size, [0]) for _ in range(2)]
        vocabulary, drops_space = pair[1]._vocabulary
        pair[1]._made = vocabulary.with_slices([]), drops_space
        yield pair[0], pair[1]


@pytest.mark.parametrize("source", GRAMMARS, ids=lambda source: source.text[:30])
def test_masks_are_those_of_each_token(source, compilers):
    rng = random.Random(source.text)
    for _ in range(3):
        matcher, plain = (compiler.compile(source).matcher() for compiler in compilers)
        for _ in range(60):
            assert np.array_equal(matcher.mask, plain.mask)
            allowed = np.flatnonzero(np.unpackbits(matcher.mask.view(np.uint8), bitorder="little"))
            token = int(rng.choice(allowed))
            assert matcher.accept([token]) == plain.accept([token])
            if not matcher.mask.any():
                break
