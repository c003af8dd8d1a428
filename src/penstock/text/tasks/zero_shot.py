"""Classes that the caller names, scored by a classifier of natural language inference (arXiv 1909.00161)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from string import Formatter
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from penstock.checkpoint.pooling.head import SCORE_FUNCTIONS
from penstock.checkpoint.tokenizer_frames import WindowRequest
from penstock.config import check_flag
from penstock.errors import InvalidArgumentError
from penstock.text.tasks.options import Options, TaskPrompts, windows_of
from penstock.text.tokenizer import Tokenizer
from penstock.validation import refusal, wrong_type

__all__ = ["ZeroShotOptions", "zero_shot_prompts"]

_MAX_PLACES: Final = 16
"""The most places of the label in a hypothesis, each of which repeats its text."""
_CHARS_PER_TOKEN: Final = 64
"""Texts are read once for each label: a limit of tokens is also one of so many characters for each."""


@dataclass(frozen=True)
class ZeroShotOptions(Options):
    """``candidate_labels``: a list, or names with commas between them; ``hypothesis_template`` has ``{}`` for a label.

    ``multi_label``: each label has its own probability; otherwise they sum up to 1.
    """

    candidate_labels: Any = ()
    hypothesis_template: str = "This example is {}."
    multi_label: bool = False

    def __post_init__(self) -> None:
        """Check the options."""
        check_flag("multi_label", self.multi_label)
        labels = self.candidate_labels
        if isinstance(labels, str):
            labels = [label.strip() for label in labels.split(",") if label.strip()]
        if not isinstance(labels, (list, tuple)) or not all(isinstance(label, str) for label in labels):
            raise wrong_type("candidate_labels", "a list of labels, or a string with commas between them", labels)
        object.__setattr__(self, "candidate_labels", tuple(labels))
        if not _has_place(self.hypothesis_template):
            raise refusal("hypothesis_template", "a string with {} in place of the label", self.hypothesis_template)

    def hypothesis(self, label: str) -> str:
        """Return the text that says that a label is right."""
        return self.hypothesis_template.format(label)


def _has_place(template: object) -> bool:
    """Return True for a template with ``{}``, or ``{0}`` up to 16 times, and no format that could be long or fail."""
    if not isinstance(template, str):
        return False
    try:
        parts = [part for part in Formatter().parse(template) if part[1] is not None]
    except ValueError:
        return False
    names = [name for _, name, _, _ in parts]
    plain = not any(form or conversion for _, _, form, conversion in parts)
    return plain and (names == [""] or (set(names) == {"0"} and len(names) <= _MAX_PLACES))


def zero_shot_prompts(
    tokenizer: Tokenizer,
    labels: Sequence[str],
    inputs: Sequence[str],
    options: ZeroShotOptions,
    max_len: int,
    max_tokens: int = 0,
) -> TaskPrompts:
    """Return a prompt for each text with each candidate, whose rows are the logits of ``labels``.

    A text is cut to ``max_len`` tokens of a prompt; a candidate never is.  ``max_tokens`` (0: no limit) is the most of
    all prompts.  InvalidArgumentError without candidates, or for one that leaves no room for a text.
    """
    candidates = options.candidate_labels
    if not candidates:
        raise refusal("candidate_labels", "at least one label", candidates)
    if max_tokens and len(inputs) * len(candidates) > max_tokens:
        raise refusal("candidate_labels", f"at most {max_tokens // len(inputs)} for so many texts", len(candidates))
    num_chars, limit = sum(map(len, inputs)) * len(candidates), max_tokens * _CHARS_PER_TOKEN
    if max_tokens and num_chars > limit:
        raise refusal("inputs", f"at most {limit} characters, counted once for each label", num_chars)
    hypotheses = [options.hypothesis(label) for label in candidates]
    requests = (
        WindowRequest(text, hypothesis, max_len, cut="only_first", first_only=True)
        for text in inputs
        for hypothesis in hypotheses
    )
    try:
        prompts: list[Sequence[int]] = [windows[0].ids for windows in windows_of(tokenizer, requests, max_tokens)]
    except InvalidArgumentError as error:
        if error.param != "max_length":
            raise
        raise refusal(
            "candidate_labels", f"labels that leave room for a text in {max_len} tokens", candidates
        ) from None

    def results(rows: Sequence[NDArray[np.float32]]) -> list[Any]:
        logits = np.array(rows, np.float64).reshape(len(inputs), len(candidates), len(labels))
        return [_ordered(*each, labels, options) for each in zip(inputs, logits, strict=True)]

    return TaskPrompts(prompts, results)


def _ordered(text: str, logits: NDArray[np.float64], labels: Sequence[str], options: ZeroShotOptions) -> dict[str, Any]:
    entailed = next((i for i, name in enumerate(labels) if name.lower().startswith("entail")), -1)
    if options.multi_label or len(options.candidate_labels) == 1:
        both = logits[:, [-1 if entailed == 0 else 0, entailed]]
        scores = np.array([SCORE_FUNCTIONS["softmax"](row)[1] for row in both])
    else:
        scores = SCORE_FUNCTIONS["softmax"](logits[:, entailed])
    order = scores.argsort()[::-1]
    return {
        "sequence": text,
        "labels": [options.candidate_labels[i] for i in order],
        "scores": scores[order].tolist(),
    }
