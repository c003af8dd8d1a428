"""A bundle that ends in token ids, from its export to its answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock import LLM, InvalidArgumentError, SamplingParams, UnsupportedError
from penstock.cli.main import main
from penstock.engine.params import ResolvedSampling
from penstock.graph.export import export_bundle
from tests.support.errors import raises

FOLDER = Path(__file__).parents[2] / "demo" / "model"
PROMPTS = ("def add(a, b):", "import ", "for i in range(10):\n    print(")


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tail") / "topk.psm"
    export_bundle(FOLDER, path, scheme="w8a8", tail="topk:4")
    return path


@pytest.fixture(scope="module")
def llm(bundle: Path) -> Iterator[LLM]:
    with LLM(bundle) as opened:
        yield opened


def test_a_tail_answers_greedily_despite_sampling_defaults(llm: LLM, tmp_path: Path) -> None:
    export_bundle(FOLDER, tmp_path / "plain.psm", scheme="w8a8")
    with LLM(tmp_path / "plain.psm") as plain:
        assert plain.generation.temperature > 0
        expected = plain.generate(PROMPTS, SamplingParams(max_tokens=20, temperature=0))
        vectors = [one.vector.tobytes() for one in plain.embed(PROMPTS)]
    found = llm.generate(PROMPTS, SamplingParams(max_tokens=20))
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]
    assert [one.text for one in llm.generate(PROMPTS, SamplingParams(max_tokens=20, temperature=0, top_k=3))] == [
        one.text for one in expected
    ]
    assert [one.vector.tobytes() for one in llm.embed(PROMPTS)] == vectors


@pytest.mark.parametrize(
    "given",
    [
        {"temperature": 0.5},
        {"top_k": 3},
        {"min_p": 0.1},
        {"repetition_penalty": 1.1},
        {"presence_penalty": 0.5},
        {"frequency_penalty": 0.5},
        {"min_tokens": 1},
        {"logit_bias": {3: 1}},
        {"allowed_token_ids": [3]},
        {"bad_words": "self"},
        {"best_of": 2},
        {"logprobs": 0},
        {"prompt_logprobs": 0},
    ],
    ids=lambda given: next(iter(given)),
)
def test_all_but_greedy_is_refused_by_name(llm: LLM, given: dict[str, Any]) -> None:
    with raises(UnsupportedError, param=next(iter(given)), match="topk"):
        llm.generate("x", SamplingParams(**given))


@pytest.mark.parametrize("given", [{"temperature": 0.5}, {"num_logprobs": 0}, {"min_tokens": 1}])
def test_the_engine_refuses_sampling_on_a_bundle_with_a_tail(llm: LLM, given: dict[str, Any]) -> None:
    healthy = llm.stream("x", SamplingParams(max_tokens=5, ignore_eos=True))
    with raises(UnsupportedError, param=next(iter(given)), match="topk"):
        llm.engine.submit([5, 6], ResolvedSampling(max_tokens=4, **given))
    assert sum(len(delta.token_ids) for delta in healthy) == 5


def test_scores_and_logits_are_refused(llm: LLM) -> None:
    with raises(UnsupportedError, param="score", match="topk"):
        llm.score("x = 1")
    with raises(UnsupportedError, param="logits", match="topk"):
        llm.logits("x = 1")


@pytest.mark.long
def test_the_command_line_makes_and_runs_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "argmax.psm")
    assert main(["export", str(FOLDER), path, "--scheme", "w4a8", "--tail", "argmax"]) == 0
    assert main(["inspect", path]) == 0
    assert "ends in        argmax, 1 ids per row: greedy answers only" in capsys.readouterr().out
    assert main(["run", path, "import ", "--max-tokens", "8", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["token_ids"]) == 8
    assert main(["run", path, "import ", "--temperature", "0.5"]) == 2
    assert "temperature: the bundle ends in argmax" in capsys.readouterr().err
    with raises(InvalidArgumentError, param="tail"):
        export_bundle(FOLDER, path, tail="softmax")
