"""Bundles that earlier releases wrote open for ever after, and answer as they did: bit for bit, in every way."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock import pipeline
from penstock.core import native
from tests.golden import MAX_TOKENS, PROMPTS, WAYS, Answers, answers_of, logits_of

FOLDER = Path(__file__).parents[1] / "golden"
BUNDLES = sorted(FOLDER.glob("*/*.psm"))

Command = Callable[..., str]


def expected_of(path: Path) -> Answers:
    found: Answers = json.loads((path.parent / "expected.json").read_text())[path.stem]
    return found


golden = pytest.mark.parametrize("path", BUNDLES, ids=[f"{path.parent.name}-{path.stem}" for path in BUNDLES])


def test_none_is_lost() -> None:
    assert {f"{path.parent.name}/{path.name}" for path in BUNDLES} >= {"1.0/f32.psm", "1.0/w4a8.psm", "1.0/w8a8.psm"}


@golden
def test_logits_bit_for_bit_on_every_level(path: Path) -> None:
    for level in (name for name, runs in native.cpu_levels() if runs):
        assert zlib.crc32(logits_of(path, level).tobytes()) == expected_of(path)["logits_crc32"], level


@golden
def test_graph_mode(path: Path) -> None:
    assert answers_of(path) == expected_of(path)


@golden
def test_lite(path: Path) -> None:
    with pipeline("text_generation", path, backend="lite") as generate:
        for way, options in WAYS.items():
            found = generate(list(PROMPTS), max_tokens=MAX_TOKENS, **options)
            wanted = [one[way] for one in expected_of(path)["answers"]]
            assert [(list(one.token_ids), one.text) for one in found] == [(w["token_ids"], w["text"]) for w in wanted]


@pytest.mark.long
@golden
def test_penstock_lite_and_c(path: Path, lite: Path, c_program: Path, command: Command) -> None:
    for prompt, ways in zip(PROMPTS, expected_of(path)["answers"], strict=True):
        for way, wanted in ways.items():
            options = [f"--{name.replace('_', '-')}={value}" for name, value in WAYS[way].items()]
            words = ["--json", f"--max-tokens={MAX_TOKENS}", "--prompt-lookup=5", *options]
            found = json.loads(command(lite, path, prompt, *words))
            assert {name: found[name] for name in wanted} == wanted
        assert command(c_program, path, prompt, MAX_TOKENS) == ways["greedy"]["text"] + "\n"
