"""The result of judging a model.  Times are in seconds, sizes in bytes, log-probabilities and divergences in nats."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.bench.quality.bootstrap import Interval
    from penstock.bench.quality.tasks import Accuracy, TaskChange

__all__ = ["Divergence", "ModelReport", "QualityReport", "Speed", "TaskReport", "TextReport", "WorthVerdict"]


@dataclass(frozen=True)
class TextReport:
    """The text and its windows.

    ``name``: its path, or "built-in sample"; ``sha256``: of the file.  ``num_tokens`` are those of the text by the
    model's tokenizer, ``num_scored`` those that the perplexity is about.  ``convention``, ``length``, ``stride`` and
    ``bos``: see ``WindowRule``.
    """

    name: str
    sha256: str
    num_documents: int
    num_tokens: int
    num_scored: int
    num_windows: int
    convention: str
    length: int
    stride: int
    bos: str


@dataclass(frozen=True)
class Speed:
    """Speed and memory on this machine: a prompt alone, one answer at a time.

    The runs are the rates of repetitions.  ``peak_rss_bytes``: the most memory of the process meanwhile.
    """

    prompt_tokens: int
    new_tokens: int
    prefill_tokens_per_s: float
    prefill_runs: list[float]
    decode_tokens_per_s: float
    decode_runs: list[float]
    peak_rss_bytes: int
    cpu_level: str
    num_threads: int


@dataclass
class ModelReport:
    """A model: its weights, its perplexity with an interval of 95 % (None with few windows), and its speed.

    ``weight_bytes``: those of the weights in the file.  ``kv_token_bytes``: of keys and values, for each token.
    ``running_perplexity``: after each window, over all before.
    """

    model: str
    network: str
    scheme: str
    kv_cache: str
    kv_token_bytes: int
    weight_bytes: int
    num_parameters: int
    bits_per_weight: float
    perplexity: float
    perplexity_interval: tuple[float, float] | None
    mean_nll: float
    running_perplexity: list[float]
    speed: Speed | None = None


@dataclass(frozen=True)
class Divergence:
    """How far the model is from the other one.

    ``mean``, ``median``, ``p90``, ``p99``, ``p999`` and ``max``: of KL(other || model) over tokens.  ``same_top``: the
    share of tokens at which both have the same likeliest token.  ``rms_probability_change``: of the right token.
    ``nll_change``: mean of the model's negative log-probability less that of the other one: the logarithm of the ratio
    of their perplexities.  ``percentiles``: of the divergence, in steps of 0.5 %.
    """

    mean: Interval
    median: float
    p90: float
    p99: float
    p999: float
    max: float
    same_top: Interval
    rms_probability_change: float
    nll_change: Interval
    percentiles: list[float]


@dataclass(frozen=True)
class TaskReport:
    """A task: the accuracy of the model, that of the other one, and the paired difference."""

    name: str
    sha256: str
    num_questions: int
    model: Accuracy
    against: Accuracy | None
    change: TaskChange | None


@dataclass(frozen=True)
class WorthVerdict:
    """``worth``: "yes" (a gain at no measurable cost), "trade" (a gain at a measured cost), "no" (no gain), "mixed"
    (a gain in one respect, a loss in another) or "unknown" (too little text).

    ``size``, ``kv_size``, ``prefill`` and ``decode``: how many times smaller the model and its keys and values are, or
    how many times faster it is; 1 if it cannot be told apart, and None if it was not measured.  ``perplexity_change``:
    as a share; ``is_measurable``: whether its interval excludes zero.
    """

    worth: str
    sentence: str
    size: float
    kv_size: float
    prefill: float | None
    decode: float | None
    perplexity_change: float
    is_measurable: bool


@dataclass(frozen=True)
class QualityReport:
    """Everything that was measured.  ``against``, ``divergence`` and ``verdict`` are None without another model."""

    text: TextReport
    model: ModelReport
    against: ModelReport | None
    divergence: Divergence | None
    tasks: list[TaskReport]
    verdict: WorthVerdict | None
