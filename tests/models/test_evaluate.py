"""What lm-eval asks of a model, on the demo model in float32, against transformers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from penstock import LLM, InvalidArgumentError, ProgramLimits
from penstock.graph.export import export_bundle
from penstock.offline.lm_eval import Evaluator
from tests.support.errors import raises

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "demo" / "model"
CONTEXT_LEN = 96
TEXT = "".join(f"def f{i}(x):\n    return x * {i} + len('{i}')\n" for i in range(20))


class Oracle:
    """Log-probabilities by the book: one forward pass for each question."""

    def __init__(self) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(FOLDER)

    def ids(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def score(self, context: list[int], rest: list[int]) -> tuple[float, bool]:
        with torch.no_grad():
            logits = self.model(torch.tensor([context + rest])).logits[0, len(context) - 1 : -1].double()
        chosen = torch.log_softmax(logits, -1).gather(1, torch.tensor(rest)[:, None])
        return float(chosen.sum()), logits.argmax(-1).tolist() == rest


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return Oracle()


@pytest.fixture(scope="module")
def evaluator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Evaluator]:
    path = tmp_path_factory.mktemp("demo") / "f32.psm"
    export_bundle(FOLDER, path, scheme="f32")
    with LLM(path, limits=ProgramLimits(max_requests=4, context_len=CONTEXT_LEN)) as llm:
        yield Evaluator(llm)


@pytest.mark.long
def test_continuations_are_scored_behind_their_contexts(evaluator: Evaluator, oracle: Oracle) -> None:
    lines = (ROOT / "examples" / "evaluation" / "python_lines.jsonl").read_text().splitlines()
    documents = [json.loads(line) for line in lines][:6]
    pairs = [(document["code"], choice) for document in documents for choice in document["choices"]]
    pairs += [("x = ", "1"), ("", "import os"), ("  \n ", "pass"), ("x", "")]
    found = evaluator.loglikelihood(pairs)
    for (context, continuation), (total, is_greedy) in zip(pairs[:-3], found, strict=False):
        bare = context.rstrip()
        head, whole = oracle.ids(bare), oracle.ids(context + continuation)
        expected = oracle.score(head, whole[len(head) :])
        assert total == pytest.approx(expected[0], abs=1e-3)
        assert is_greedy == expected[1]
    assert {greedy for _, greedy in found[:-4]} == {False, True}
    for text, (total, _) in zip(("import os", "  \n pass"), found[-3:-1], strict=True):
        assert total == pytest.approx(oracle.score([0], oracle.ids(text))[0], abs=1e-3)
    assert found[-1] == (0.0, True)


def test_long_contexts_are_cut_and_long_continuations_refused(evaluator: Evaluator, oracle: Oracle) -> None:
    head = oracle.ids(TEXT.rstrip())  # the spaces at its end go with the continuation
    rest = oracle.ids(TEXT + "y = 3")[len(head) :]
    kept = head[-(CONTEXT_LEN - len(rest)) :]
    [(total, _)] = evaluator.loglikelihood([(TEXT, "y = 3")])
    assert total == pytest.approx(oracle.score(kept, rest)[0], abs=1e-3)
    with raises(InvalidArgumentError, param="continuation", match="holds 96"):
        evaluator.loglikelihood([("x", TEXT)])


def test_a_whole_text_is_scored_in_windows_each_token_once(evaluator: Evaluator, oracle: Oracle) -> None:
    ids = [0, *oracle.ids(TEXT)]
    assert len(ids) > 3 * CONTEXT_LEN
    expected, start = 0.0, 1
    while start < len(ids):
        end = min(len(ids), start + CONTEXT_LEN - 1)
        first = max(0, end - CONTEXT_LEN)
        expected += oracle.score(ids[first:start], ids[start:end])[0]
        start = end
    short = oracle.score([0], oracle.ids("import os"))[0]
    found = evaluator.loglikelihood_rolling([TEXT, "", "import os"])
    assert found == pytest.approx([expected, 0.0, short], rel=1e-4, abs=1e-3)


def test_answers_end_before_a_stop_or_at_their_length(evaluator: Evaluator) -> None:
    llm = evaluator.llm
    whole, stopped, long = evaluator.generate_until(
        [
            ("def add(a, b):", {"until": [], "max_gen_toks": 12, "do_sample": False, "temperature": 0.7}),
            ("def add(a, b):", {"until": ["\n", "return"], "max_gen_toks": 12}),
            (TEXT, {"until": "\n\n\n\n", "max_new_tokens": 10}),
        ]
    )
    greedy = llm.generate("def add(a, b):", _greedy(12)).text
    assert whole == greedy
    assert stopped == greedy[: min(greedy.find(end) for end in ("\n", "return") if end in greedy)]
    kept = llm.tokenizer.encode(TEXT, add_special_tokens=False)[-(CONTEXT_LEN - 10) :]
    assert long == llm.generate(kept, _greedy(10)).text
    with raises(InvalidArgumentError, param="generate_until", match="num_beams"):
        evaluator.generate_until([("x", {"num_beams": 2})])
    assert evaluator.generate_until([]) == []


def _greedy(max_tokens: int):
    from penstock import SamplingParams

    return SamplingParams(max_tokens=max_tokens, temperature=0)
