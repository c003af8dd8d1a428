"""Log-probabilities and divergences: those of numpy for rows, those of transformers for a model."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers

from penstock.bench.quality.scores import compare_rows, score_rows, score_windows
from penstock.bench.quality.task_files import open_tasks
from penstock.bench.quality.tasks import compare_tasks, score_task
from penstock.bench.quality.texts import open_text
from penstock.bench.quality.windows import WindowRule, cut_text
from penstock.llm.llm import LLM
from penstock.runtime.program import ProgramLimits
from tests.support.command import FOLDER, ROOT

VALID = FOLDER / "valid.txt"
DIVERGENCE = {"w8a16": 0.00017010448, "w8a8": 0.00124201878, "w4a16": 0.010117077, "w4a8": 0.0109460515}
"""KL(f32 || scheme) of the demo model, in nats per token, over the first 1,024 tokens."""


def test_rows_are_compared_as_numpy_does() -> None:
    random = np.random.default_rng(0)
    logits = random.normal(0, 4, (5, 700)).astype(np.float32)
    other = (logits + random.normal(0, 0.1, logits.shape)).astype(np.float32)
    targets = random.integers(0, 700, 5)

    def probabilities(rows):
        exact = np.exp(rows.astype(np.longdouble))
        return exact / exact.sum(axis=1, keepdims=True)

    p, q = probabilities(other), probabilities(logits)
    nll, other_nll, divergence, same = compare_rows(logits, other, targets)
    assert divergence == pytest.approx((p * np.log(p / q)).sum(axis=1).astype(float), rel=1e-9)
    assert nll == pytest.approx(-np.log(q[np.arange(5), targets]).astype(float), rel=1e-12)
    assert other_nll == pytest.approx(-np.log(p[np.arange(5), targets]).astype(float), rel=1e-12)
    assert (score_rows(logits, targets) == nll).all()
    assert (same == (p.argmax(axis=1) == q.argmax(axis=1))).all()
    far = np.array([[0, 900, -900]], np.float32), np.array([[900, 0, -900]], np.float32)
    assert compare_rows(*far, np.array([0]))[2][0] == pytest.approx(900)


@pytest.fixture(scope="module")
def reference():
    """The demo model in float32, in transformers and here."""
    model = transformers.AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
    limits = ProgramLimits(max_tokens=128, max_requests=4, max_rows=128, kv_layout="f32")
    with LLM(FOLDER, scheme="f32", limits=limits) as llm:
        yield model, llm


def log_probabilities(model, ids: list[int]) -> np.ndarray:
    """Those of each token but the first."""
    with torch.no_grad():
        rows = torch.log_softmax(model(torch.tensor([ids])).logits[0].double(), dim=-1)
    return rows[torch.arange(len(ids) - 1), ids[1:]].numpy()


@pytest.mark.parametrize(("convention", "stride"), [("penstock", None), ("transformers", 100), ("llama.cpp", None)])
def test_windows_have_the_likelihoods_of_transformers(reference, convention, stride) -> None:
    model, llm = reference
    rule = WindowRule(convention, 200, stride, max_windows=2).resolve(1000)
    cut = cut_text(open_text(VALID), llm.tokenizer, rule)
    seen = []
    found = score_windows([("model", llm)], cut.windows, lambda done, total: seen.append((done, total)))
    expected = np.concatenate([-log_probabilities(model, ids)[first - 1 :] for ids, first in cut.windows])
    assert found.nll[0] == pytest.approx(expected, abs=2e-4)
    assert found.window.tolist() == [0] * (len(cut.windows[0].ids) - cut.windows[0].first) + [1] * (
        len(cut.windows[1].ids) - cut.windows[1].first
    )
    assert seen[-1] == (cut.num_scored, cut.num_scored)
    assert len(seen) > 2  # in chunks


def test_tasks_have_the_accuracy_of_transformers(reference) -> None:
    model, llm = reference
    (task,) = open_tasks(ROOT / "examples/evaluation/python_lines.yaml")
    scores = score_task(llm, task)
    right, right_norm, margins = [], [], []
    for question in task.questions:
        totals = []
        for choice in question.choices:
            context = llm.tokenizer.encode(question.context.rstrip())
            whole = llm.tokenizer.encode(question.context + choice)
            totals.append(log_probabilities(model, whole)[len(context) - 1 :].sum())
        by_char = np.array(totals) / [len(choice) for choice in question.choices]
        right.append(np.argmax(totals) == question.gold)
        right_norm.append(np.argmax(by_char) == question.gold)
        margins.append(totals[question.gold] - max(np.delete(totals, question.gold)))
    accuracy = scores.accuracy
    assert accuracy.acc == np.mean(right)
    assert accuracy.acc_norm == np.mean(right_norm)
    assert accuracy.acc_stderr == pytest.approx(np.std(right, ddof=1) / len(right) ** 0.5)
    assert scores.margins == pytest.approx(margins, abs=2e-3)
    change = compare_tasks(scores, scores)
    assert (change.acc, change.lost, change.won, change.margin_stderr) == (0, 0, 0, 0)


@pytest.mark.parametrize(
    "scheme", ["w8a8", "w4a8", *(pytest.param(name, marks=pytest.mark.long) for name in ("w8a16", "w4a16"))]
)
def test_a_scheme_diverges_from_floats_as_it_did(reference, scheme) -> None:
    """Integers have the same bits on every processor, so a value that moves is a change of what is computed."""
    llm = reference[1]
    cut = cut_text(open_text(VALID), llm.tokenizer, WindowRule(max_windows=2).resolve(1000))
    limits = ProgramLimits(max_tokens=128, max_requests=1, max_rows=128, kv_layout="f32")
    with LLM(FOLDER, scheme=scheme, limits=limits) as quantized:
        scores = score_windows([("model", quantized), ("against", llm)], cut.windows)
    assert float(scores.divergence.mean()) == pytest.approx(DIVERGENCE[scheme], rel=1e-3)
