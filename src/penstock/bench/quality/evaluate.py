"""Judges a model: perplexity, divergence from another model, tasks, speed and memory.  ``penstock eval`` prints it.

report = evaluate(Evaluation(Subject("model-w4a8.psm"), Subject("model", scheme="f32")))
print(report.divergence.mean.value, report.verdict.sentence)
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from penstock.bench.measure import Bench, bench
from penstock.bench.node_costs import kv_token_bytes
from penstock.bench.open_model import BenchModel, open_model, stored_weights
from penstock.bench.quality.bootstrap import bootstrap_mean, window_sums
from penstock.bench.quality.report import Divergence, ModelReport, QualityReport, Speed, TaskReport, TextReport
from penstock.bench.quality.scores import ROWS_PER_STEP, TokenScores, score_windows
from penstock.bench.quality.task_files import Task, open_tasks
from penstock.bench.quality.tasks import compare_tasks, score_task
from penstock.bench.quality.texts import TextSource, encode_document, open_text
from penstock.bench.quality.verdict import judge
from penstock.bench.quality.windows import WindowCut, WindowRule, cut_text
from penstock.config import check_choice, check_flag
from penstock.engine.capabilities import refuse_logits
from penstock.engine.options import EngineOptions
from penstock.errors import InvalidArgumentError, UnsupportedError
from penstock.graph.ir import Graph
from penstock.llm.llm import LLM
from penstock.runtime.build import Progress
from penstock.runtime.program import KV_LAYOUTS, PAGE_TOKENS, ProgramLimits, pages_for

__all__ = ["Evaluation", "Subject", "evaluate"]

_TASK_TOKENS: Final = 2048
_TASK_REQUESTS: Final = 8
_PROMPT_TOKENS, _NEW_TOKENS = 512, 64
_NUM_PROBED: Final = 64
"""Documents whose tokens show whether two models have the same tokenizer."""
_PROBE: Final = "The quick brown fox: def f(x):\n    return x ** 2  # naïve — 你好\n"
ProgressCallback = Callable[[Any], None]


@dataclass(frozen=True)
class Subject(BenchModel):
    """A model to judge and how to open it.  ``kv_cache``: the type of keys and values, as in LLM."""

    kv_cache: str = "auto"

    def __post_init__(self) -> None:
        """Check the type of keys and values."""
        check_choice("kv_cache", self.kv_cache, KV_LAYOUTS)


@dataclass(frozen=True)
class Evaluation:
    """The request of a measurement.

    ``against``: the model to compare with, usually the one of highest precision; None for none.  ``text``: a file
    (``open_text``); None is the built-in sample.  ``tasks``: files of multiple-choice tasks (``open_tasks``).
    ``speed``: also measure prefill, decode and memory.
    """

    model: Subject
    against: Subject | None = None
    text: Path | str | None = None
    rule: WindowRule = field(default_factory=WindowRule)
    tasks: tuple[Path | str, ...] = ()
    speed: bool = True

    def __post_init__(self) -> None:
        """Check the flag; the parts check themselves."""
        check_flag("speed", self.speed)


def evaluate(question: Evaluation, progress: ProgressCallback | None = None) -> QualityReport:
    """Measure what is asked for.

    Raises InvalidArgumentError if vocabularies differ (``vocabulary_mismatch``), a text is too short
    (``text_too_short``) or a context too small (``context_length_exceeded``); InvalidFileError for damaged files and
    for logits that are not finite (``non_finite_logits``); UnsupportedError for models and tasks of another kind; and
    the errors of opening a model.
    """
    source = open_text(question.text)
    tasks = [task for path in question.tasks for task in open_tasks(path)]
    subjects = [("model", question.model), *([("against", question.against)] if question.against else [])]
    with _open_all(subjects, question, progress) as opened:  # errors come before the long work
        llms = [llm for llm, _ in opened]
        context_len = min(llm.engine.max_len for llm in llms)  # nothing is generated, so a window may fill it
        rule = question.rule.resolve(context_len)
        cut = cut_text(source, llms[0].tokenizer, rule)
        if len(llms) == 2:
            _check_vocabularies(llms[0], llms[1], source)
    speeds = [_speed(subject, context_len, progress) if question.speed else None for _, subject in subjects]
    with _open_all(subjects, question, progress) as opened:
        named = [(name, llm) for (name, _), (llm, _) in zip(subjects, opened, strict=True)]
        scores = score_windows(named, cut.windows, _counting(progress, "tokens", "perplexity"))
        reports = [
            _model_report(subjects[number][1], llm, graph, scores, number) for number, (llm, graph) in enumerate(opened)
        ]
        task_reports = [_task_report([llm for _, llm in named], task, progress) for task in tasks]
    for report, speed in zip(reports, speeds, strict=True):
        report.speed = speed
    divergence = _divergence(scores) if len(reports) == 2 else None
    return QualityReport(
        _text_report(source, cut, rule),
        reports[0],
        reports[1] if len(reports) == 2 else None,
        divergence,
        task_reports,
        judge(reports[0], reports[1], divergence) if divergence is not None else None,
    )


@contextmanager
def _open_all(
    subjects: list[tuple[str, Subject]], question: Evaluation, progress: ProgressCallback | None
) -> Iterator[list[tuple[LLM, Graph]]]:
    """Open the models, each with its graph."""
    with ExitStack() as stack:
        yield [stack.enter_context(_opened(name, subject, question, progress)) for name, subject in subjects]


@contextmanager
def _opened(
    name: str, subject: Subject, question: Evaluation, progress: ProgressCallback | None
) -> Iterator[tuple[LLM, Graph]]:
    """Open a model with as much memory as the windows and the tasks need."""
    length = (question.rule.length or 1024) + 2
    num_requests = _TASK_REQUESTS if question.tasks else 1
    limits = ProgramLimits(
        max_tokens=ROWS_PER_STEP,
        max_requests=num_requests,
        max_rows=ROWS_PER_STEP,
        num_pages=max(pages_for(length), num_requests * pages_for(_TASK_TOKENS) if question.tasks else 0) + 2,
        kv_layout=subject.kv_cache,
    )
    with open_model(subject, limits, "eval", progress) as (opened, program, graph):
        refuse_logits("eval", program.info.tail)
        if program.info.bidirectional or program.info.prefix_token >= 0:
            raise UnsupportedError(
                f"{name}: expected a model that generates text, got {graph.network}, whose tokens also see later ones",
                param=name,
                code="unsupported_model",
            )
        llm = LLM.of_program(opened, EngineOptions(prefix_cache=bool(question.tasks)))
        try:
            yield llm, graph
        finally:
            llm.close()


def _check_vocabularies(llm: LLM, other: LLM, source: TextSource) -> None:
    """Raise InvalidArgumentError unless both models have the same tokens."""
    sizes = [model.info.vocab_size for model in (llm, other)]
    if sizes[0] != sizes[1]:
        raise InvalidArgumentError(
            f"against: expected the vocabulary of the model, {sizes[0]} tokens, got {sizes[1]}. Divergence is defined "
            "between models with the same tokens only.",
            param="against",
            code="vocabulary_mismatch",
        )
    documents = [_PROBE, *source.documents[:_NUM_PROBED]]
    for document in documents:
        if not isinstance(document, str):
            continue
        part = document[:10_000]
        if encode_document(llm.tokenizer, part, False) != encode_document(other.tokenizer, part, False):
            raise InvalidArgumentError(
                "against: expected the tokenizer of the model, got one that splits the text into other tokens",
                param="against",
                code="vocabulary_mismatch",
            )


def _counting(progress: ProgressCallback | None, unit: str, name: str) -> Callable[[int, int], None] | None:
    if progress is None:
        return None
    return lambda done, total: progress(Progress("measure", done, total, unit, name))


def _text_report(source: TextSource, cut: WindowCut, rule: WindowRule) -> TextReport:
    return TextReport(
        source.name,
        source.sha256,
        len(source.documents),
        cut.num_tokens,
        cut.num_scored,
        len(cut.windows),
        rule.convention,
        rule.length or 0,
        rule.stride or rule.length or 0,
        cut.bos,
    )


def _model_report(subject: Subject, llm: LLM, graph: Graph, scores: TokenScores, number: int) -> ModelReport:
    stored = stored_weights(subject.model, graph)
    in_file = stored.num_bytes if subject.scheme is None else 0  # else the weights are not those of the file
    num_bytes = in_file or llm.info.weight_bytes
    sums, counts = window_sums(scores.nll[number], scores.window)
    mean = bootstrap_mean(sums, counts)
    low_high = None if mean.low is None or mean.high is None else (math.exp(mean.low), math.exp(mean.high))
    return ModelReport(
        str(subject.model),
        llm.info.network,
        llm.info.scheme,
        llm.engine.program.limits.kv_layout,
        kv_token_bytes(graph, sum(plan.kv_page_bytes for plan in llm.info.plans)),
        num_bytes,
        stored.num_values,
        8 * num_bytes / stored.num_values,
        math.exp(mean.value),
        low_high,
        mean.value,
        [math.exp(value) for value in np.cumsum(sums) / np.cumsum(counts)],
    )


def _divergence(scores: TokenScores) -> Divergence:
    """Return the comparison of two models' rows."""
    kl = scores.divergence
    gain = np.exp(-scores.nll[0]) - np.exp(-scores.nll[1])
    median, p90, p99, p999 = map(float, np.percentile(kl, (50, 90, 99, 99.9)))
    same = bootstrap_mean(*window_sums(scores.same_top.astype(np.float64), scores.window))
    return Divergence(
        bootstrap_mean(*window_sums(kl, scores.window)),
        median,
        p90,
        p99,
        p999,
        float(kl.max()),
        same,
        float(np.sqrt(np.mean(gain**2))),
        bootstrap_mean(*window_sums(scores.nll[0] - scores.nll[1], scores.window)),
        [float(value) for value in np.percentile(kl, np.linspace(0, 100, 201))],
    )


def _task_report(llms: list[LLM], task: Task, progress: ProgressCallback | None) -> TaskReport:
    scores = [score_task(llm, task, _counting(progress, "questions", task.name)) for llm in llms]
    accuracies = [score.accuracy for score in scores]
    return TaskReport(
        task.name,
        task.sha256,
        len(task.questions),
        accuracies[0],
        accuracies[1] if len(scores) == 2 else None,
        compare_tasks(*scores) if len(scores) == 2 else None,
    )


def _speed(subject: Subject, context_len: int, progress: ProgressCallback | None) -> Speed:
    """Measure a model by itself, as ``penstock bench`` does."""
    room = context_len - PAGE_TOKENS
    prompt, new = max(1, min(_PROMPT_TOKENS, room // 2)), max(1, min(_NEW_TOKENS, room // 4))
    settings = Bench(
        subject.model,
        scheme=subject.scheme,
        threads=subject.threads,
        network=subject.network,
        verify=subject.verify,
        prompt_tokens=prompt,
        new_tokens=new,
        batches=(1,),
        kv_cache=subject.kv_cache,
    )
    report = bench(settings, progress)
    return Speed(
        prompt,
        new,
        report.prefill_tokens_per_s,
        report.prefill_runs,
        statistics.median(report.generation_runs),
        report.generation_runs,
        report.peak_rss_bytes,
        report.cpu_level,
        report.num_threads,
    )
