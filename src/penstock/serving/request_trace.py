"""The record of one request that its spans are made from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["AnsweredPrompt", "RequestTrace"]


@dataclass(frozen=True)
class AnsweredPrompt:
    """One prompt that the engine has answered.

    ``sent`` is when it was submitted (``time.perf_counter``), ``timings`` is ``Timings.summary`` in seconds.
    """

    sent: float
    timings: Mapping[str, float]
    num_answers: int


@dataclass
class RequestTrace:
    """The data of a running request; ``carrier`` holds the caller's W3C Trace Context headers."""

    carrier: dict[str, str]
    answers: list[AnsweredPrompt] = field(default_factory=list)

    def note(self, sent: float, timings: Mapping[str, float], num_answers: int) -> None:
        """Record a prompt that was submitted at ``sent`` and whose answers are complete."""
        if timings:
            self.answers.append(AnsweredPrompt(sent, timings, num_answers))
