"""The demo model, a real one: logits and greedy tokens equal transformers' in float32, in graph and eager mode."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from penstock import LLM, ProgramLimits, SamplingParams
from penstock.graph.export import export_bundle

FOLDER = Path(__file__).parents[2] / "demo" / "model"
PROMPTS = (
    "import os\n\n\ndef read_file(path):\n",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
    "for i in range(10):\n    print(",
)
NUM_TOKENS = 48


@pytest.fixture(scope="module", params=["graph", "eager"])
def llm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    model, limits = FOLDER, ProgramLimits(max_requests=4, context_len=256)
    if request.param == "graph":
        model = tmp_path_factory.mktemp("demo") / "demo-f32.psm"
        export_bundle(FOLDER, model, scheme="f32")
    scheme = None if request.param == "graph" else "f32"
    with LLM(model, scheme=scheme, mode=request.param, limits=limits) as opened:
        yield opened


@pytest.fixture(scope="module")
def oracle() -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def token_ids() -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    return [tokenizer(prompt)["input_ids"] for prompt in PROMPTS]


def test_prompts_become_the_same_tokens(llm: LLM, token_ids: list[list[int]]) -> None:
    results = llm.generate(list(PROMPTS), SamplingParams(max_tokens=1, temperature=0))
    assert [result.prompt_token_ids for result in results] == token_ids


def test_logits_equal_those_of_transformers(llm: LLM, oracle: torch.nn.Module, token_ids: list[list[int]]) -> None:
    for ids in token_ids:
        with torch.no_grad():
            expected = oracle(torch.tensor([ids])).logits[0].numpy()
        found = llm.logits(ids)
        assert found.dtype == np.float32
        assert float(np.abs(found - expected).max()) <= 1e-4 * float(np.abs(expected).max())


def test_embeddings_equal_hidden_states_of_transformers(
    llm: LLM, oracle: torch.nn.Module, token_ids: list[list[int]]
) -> None:
    for pooling in ("mean", "last"):
        for ids, found in zip(token_ids, llm.embed(token_ids, pooling), strict=True):
            with torch.no_grad():
                rows = oracle(torch.tensor([ids]), output_hidden_states=True).hidden_states[-1][0].numpy()
            expected = rows.mean(0) if pooling == "mean" else rows[-1]
            assert float(np.abs(found.vector - expected).max()) <= 1e-4 * float(np.abs(expected).max())


@pytest.mark.long
def test_greedy_tokens_equal_those_of_transformers(
    llm: LLM, oracle: torch.nn.Module, token_ids: list[list[int]]
) -> None:
    """In one batch here, one by one there."""
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
    results = llm.generate(token_ids, params)
    for ids, result in zip(token_ids, results, strict=True):
        with torch.no_grad():
            expected = oracle.generate(
                torch.tensor([ids]), max_new_tokens=NUM_TOKENS, min_new_tokens=NUM_TOKENS, do_sample=False,
                temperature=None, top_k=None, pad_token_id=1, eos_token_id=None,
            )  # fmt: skip
        assert result.token_ids == expected[0, len(ids) :].tolist()
