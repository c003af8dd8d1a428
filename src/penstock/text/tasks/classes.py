"""Classes of texts: the names of a classifier's classes with their scores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from penstock.checkpoint.pooling.head import SCORE_FUNCTIONS
from penstock.config import check_choice, check_integer
from penstock.text.tasks.options import Options, read_cut

__all__ = ["ClassificationOptions", "classes_of", "scores_of"]

_FUNCTIONS: Final = {"sigmoid": "sigmoid", "softmax": "softmax", "none": "identity"}
_UNSET: Final = "unset"
_MAX: Final = 2**31 - 1


@dataclass(frozen=True)
class ClassificationOptions(Options):
    """``top_k``: the number of classes, None for all; ``function_to_apply``: what makes scores of logits.

    ``truncation`` or ``max_length`` cuts a text to so many tokens, or to what the model reads.
    """

    top_k: int | str | None = _UNSET
    function_to_apply: str | None = None
    truncation: bool | str | None = None
    max_length: int | None = None

    def __post_init__(self) -> None:
        """Check the options."""
        if self.top_k not in (None, _UNSET):
            check_integer("top_k", self.top_k, 1, _MAX)
        if self.function_to_apply is not None:
            name = self.function_to_apply
            check_choice("function_to_apply", name.lower() if isinstance(name, str) else name, _FUNCTIONS)
        if self.max_length is not None:
            check_integer("max_length", self.max_length, 1, _MAX)
        read_cut(self.truncation, self.max_length)


def classes_of(
    logits: NDArray[np.float32], labels: Sequence[str], function: str, options: ClassificationOptions
) -> Any:
    """Return the classes of a text, the likeliest first; without ``top_k`` only that one, and not in a list."""
    scores = scores_of(logits, function, options)
    if options.top_k == _UNSET:
        return _entry(scores, labels, int(scores.argmax()))
    return [_entry(scores, labels, int(i)) for i in np.argsort(-scores, kind="stable")[: options.top_k]]


def scores_of(logits: NDArray[np.float32], function: str, options: ClassificationOptions) -> NDArray[np.float64]:
    """Return the scores of classes; ``function`` makes them of logits unless the options name another."""
    own = options.function_to_apply
    return SCORE_FUNCTIONS[function if own is None else _FUNCTIONS[own.lower()]](logits.astype(np.float64))


def _entry(scores: NDArray[np.float64], labels: Sequence[str], index: int) -> dict[str, Any]:
    return {"label": labels[index], "score": float(scores[index])}
