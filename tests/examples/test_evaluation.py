"""The example that makes an LLM a model of lm-eval's, with what it needs of lm-eval stood in for."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from penstock import LLM, InvalidArgumentError, SamplingParams, UnsupportedError
from penstock.offline.lm_eval import Evaluator
from tests.support.errors import raises

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "evaluation"
DEMO = ROOT / "demo" / "demo.psm"


class Harness:
    """What the example uses of lm-eval 0.4: a base class with a cache, a task's run, a table."""

    def __init__(self) -> None:
        self.kept: list[tuple[str, tuple[Any, ...], Any]] = []
        self.asked: dict[str, Any] = {}
        harness = self

        class LM:
            def __init__(self) -> None:
                self.cache_hook = SimpleNamespace(add_partial=lambda *what: harness.kept.append(what))

        def simple_evaluate(model: Any, tasks: list[str], **more: Any) -> dict[str, float]:
            harness.asked = {"tasks": tasks, **more}
            return {"acc": harness.accuracy(model, more["limit"])}

        self.modules = {
            "lm_eval": {"simple_evaluate": simple_evaluate},
            "lm_eval.api": {},
            "lm_eval.api.instance": {"Instance": SimpleNamespace},
            "lm_eval.api.model": {"LM": LM},
            "lm_eval.tasks": {"TaskManager": lambda include_path: include_path},
            "lm_eval.utils": {"make_table": lambda results: f"acc {results['acc']:.4f}"},
        }

    @staticmethod
    def accuracy(model: Any, limit: int | None) -> float:
        """A multiple-choice task as the harness asks it: the likeliest choice of each document."""
        lines = (FOLDER / "python_lines.jsonl").read_text().splitlines()
        documents = [json.loads(line) for line in lines][:limit]
        pairs = [(one["code"], choice) for one in documents for choice in one["choices"]]
        answers = iter(model.loglikelihood([SimpleNamespace(args=pair) for pair in pairs]))
        picked = [int(np.argmax([next(answers)[0] for _ in one["choices"]])) for one in documents]
        return float(np.mean([pick == one["answer"] for pick, one in zip(picked, documents, strict=True)]))


@pytest.fixture
def harness(monkeypatch: pytest.MonkeyPatch) -> Harness:
    made = Harness()
    for name, members in made.modules.items():
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
    return made


@pytest.fixture
def example(harness: Harness) -> ModuleType:
    spec = importlib.util.spec_from_file_location("evaluation_example", FOLDER / "run.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(DEMO) as made:
        yield made


def test_the_command_finds_the_accuracy_that_the_docs_have(harness, example, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["run.py", str(DEMO)])
    example.main()
    [documented] = re.findall(r"\|acc     \|↑  \|(0\.\d+)\|", (ROOT / "docs" / "guides" / "evaluation.md").read_text())
    assert capsys.readouterr().out == f"acc {documented}\n"
    expected = {"tasks": ["python_lines"], "task_manager": str(FOLDER), "limit": None, "num_fewshot": None}
    assert harness.asked == expected
    monkeypatch.setattr(sys, "argv", ["run.py", str(DEMO), "--tasks", "a,b", "--limit", "2", "--num-fewshot", "3"])
    example.main()
    assert harness.asked == {"tasks": ["a", "b"], "task_manager": str(FOLDER), "limit": 2, "num_fewshot": 3}


def test_answers_are_in_order_and_in_the_harness_cache(harness, example, llm):
    model, plain = example.PenstockLM(llm), Evaluator(llm)
    pairs = [("def add(a, b):", " return"), ("import", " os"), ("x = ", "1")]
    texts = ["import os\n", "def add(a, b):\n"]
    wanted = [("def add(a, b):", {"until": ["\n\n"], "max_gen_toks": 6}), ("import", {"max_gen_toks": 3})]
    asked = {
        "loglikelihood": (pairs, plain.loglikelihood(pairs)),
        "loglikelihood_rolling": ([(text,) for text in texts], plain.loglikelihood_rolling(texts)),
        "generate_until": (wanted, plain.generate_until(wanted)),
    }
    for name, (arguments, expected) in asked.items():
        harness.kept.clear()
        assert getattr(model, name)([SimpleNamespace(args=one) for one in arguments]) == expected
        assert harness.kept == [(name, *pair) for pair in zip(arguments, expected, strict=True)]


def test_add_bos_token_begins_contexts(example, llm):
    [(plain, _)] = example.PenstockLM(llm).loglikelihood([SimpleNamespace(args=("import", " os"))])
    [(begun, _)] = example.PenstockLM(llm, add_bos_token=True).loglikelihood([SimpleNamespace(args=("import", " os"))])
    head, rest = (llm.tokenizer.encode(text, add_special_tokens=False) for text in ("import", " os"))
    begun_head = llm.tokenizer.encode("import")
    assert plain == llm.score(head + rest).total(len(head))
    assert begun == llm.score(begun_head + rest).total(len(begun_head))


def test_an_empty_context_begins_with_the_prefix_token(llm):
    evaluator = Evaluator(llm)
    [found] = evaluator.generate_until([("", {"until": None, "max_gen_toks": 5})])
    assert found == llm.generate([evaluator.prefix_id], SamplingParams(max_tokens=5, temperature=0)).text


def test_sampling_is_asked_for_in_the_harness_s_words(llm):
    evaluator = Evaluator(llm)
    drawn = {"do_sample": True, "temperature": 1.5, "top_k": 20, "seed": 3, "max_gen_toks": 8}
    [found] = evaluator.generate_until([("import", drawn)])
    prompt = llm.tokenizer.encode("import", add_special_tokens=False)
    assert found == llm.generate(prompt, SamplingParams(max_tokens=8, temperature=1.5, top_k=20, seed=3)).text
    for wrong, name in (
        ({"until": 5}, "stop"),
        ({"do_sample": "no"}, "do_sample"),
        ({"max_gen_toks": "many"}, "max_tokens"),
        ({"do_sample": True, "temperature": -1}, "temperature"),
    ):
        with raises(InvalidArgumentError, param=name):
            evaluator.generate_until([("import", wrong)])


def test_scoring_without_context_needs_a_prefix_token():
    nameless = SimpleNamespace(tokenizer=SimpleNamespace(special_tokens={}, token_id=lambda _text: None))
    with raises(UnsupportedError, param="bos_token"):
        Evaluator(nameless).loglikelihood_rolling(["x"])
