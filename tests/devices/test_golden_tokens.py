"""Five ways to run one model, one answer: PyTorch, graph mode, ``penstock.lite``, a C program and ``penstock-lite``.

Greedy and seeded, in three schemes; ``penstock-lite`` with and without tokens guessed ahead: nothing else guesses.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from penstock import pipeline
from tests.devices.conftest import DEMO

pytestmark = pytest.mark.long

PROMPTS = [
    "def add(a, b):",
    "class Stack:\n    def push(self, item):",
    "x = {'é': [1, 2]}\ny = {'é': [1, 2]}\nz = {'é':",  # says everything twice
]
MAX_TOKENS = 48
SAMPLING = {"greedy": (0.0, 0), "seeded": (0.8, 11)}  # temperature and seed

Command = Callable[..., str]


class Answer(NamedTuple):
    token_ids: list[int]
    text: str


def by_pipeline(source: Path, temperature: float, seed: int, **options: object) -> list[Answer]:
    with pipeline("text_generation", source, **options) as generate:
        found = generate(PROMPTS, max_tokens=MAX_TOKENS, temperature=temperature, seed=seed, top_k=0, top_p=1.0)
        return [Answer(list(one.token_ids), one.text) for one in found]


def by_lite(program: Path, bundle: Path, temperature: float, seed: int, guesses: int) -> tuple[list[Answer], int, int]:
    """The answers of penstock-lite; how many tokens it guessed, and how many guesses were right."""
    answers, guessed, accepted = [], 0, 0
    for prompt in PROMPTS:
        words = [program, bundle, prompt, "--json", "--max-tokens", MAX_TOKENS, "--temperature", temperature]
        words += ["--seed", seed, "--top-k", 0, "--top-p", 1, "--prompt-lookup", guesses]
        done = subprocess.run(list(map(str, words)), capture_output=True, text=True, check=True)
        found = json.loads(done.stdout)
        answers.append(Answer(found["token_ids"], found["text"]))
        guessed += found["num_guessed_tokens"]
        accepted += found["num_accepted_tokens"]
    return answers, guessed, accepted


@pytest.mark.parametrize("way", SAMPLING)
@pytest.mark.parametrize("scheme", ["f32", "w8a8", "w4a8"])
def test_five_ways_one_answer(
    scheme: str, way: str, bundles: dict[str, Path], lite: Path, c_program: Path, command: Command
) -> None:
    bundle, (temperature, seed) = bundles[scheme], SAMPLING[way]
    wanted = by_pipeline(bundle, temperature, seed, backend="graph")
    assert sum(len(answer.token_ids) for answer in wanted) > MAX_TOKENS
    assert by_pipeline(bundle, temperature, seed, backend="lite") == wanted
    assert by_pipeline(DEMO / "model", temperature, seed, backend="eager", scheme=scheme) == wanted
    for prompt, answer in zip(PROMPTS, wanted, strict=True):
        assert command(c_program, bundle, prompt, MAX_TOKENS, temperature, seed) == answer.text + "\n"
    assert by_lite(lite, bundle, temperature, seed, 0) == (wanted, 0, 0)
    for guesses in (1, 4, 15):
        found, guessed, accepted = by_lite(lite, bundle, temperature, seed, guesses)
        assert found == wanted
        assert 0 < accepted <= guessed
