"""The tokens that a request's worker has delivered: with them another worker goes on with the same tokens."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable
from typing import TYPE_CHECKING

from penstock.engine.request import Timings
from penstock.serving.proto import wire_pb2 as pb

if TYPE_CHECKING:
    from penstock.llm.engine_thread import Started, StepEvent

__all__ = ["Delivered"]


class _Answer:
    """Tokens and number of characters of one answer so far."""

    def __init__(self) -> None:
        self.token_ids = array("i")
        self.num_chars = 0
        self.has_ended = False


class Delivered:
    """The answers of a request so far, by index.  Tokens that the primary has not received do not count.

    ``clock`` returns seconds, as ``time.perf_counter`` does.  Set ``has_moved`` when a second worker goes on with them.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._answers: dict[int, _Answer] = {}
        self._clock = clock
        self._began: Started | None = None
        self._began_at = 0.0
        self.has_moved = False
        self.on_note: Callable[[], None] | None = None
        """Called after each event."""

    def note(self, event: StepEvent) -> None:
        """Add an event that goes to the reader of the answer.

        The ``timings`` of a worker that only went on with an answer become those of the answer in all its workers.
        """
        answer = self._answers.get(event.index)
        if answer is None:
            answer = self._answers[event.index] = _Answer()
        answer.token_ids.extend(event.token_ids)
        answer.num_chars += len(event.text)
        answer.has_ended = answer.has_ended or event.finish_reason is not None
        if event.started is not None:
            self._began, self._began_at = event.started, self._clock()
        if event.timings is not None and event.index == 0 and self.has_moved and self._began is not None:
            event.timings = self._timings(self._began, len(answer.token_ids))
        if self.on_note is not None:
            self.on_note()

    def _timings(self, began: Started, num_tokens: int) -> dict[str, float]:
        """Return the times of an answer of several workers that ends now.

        Queue and prefill are those of the first worker.  The time after the first token is measured in this process,
        so it contains the way from worker to worker.
        """
        scheduled, first = began.queued_s, began.queued_s + began.prefill_s
        return Timings(0.0, scheduled, first, first + self._clock() - self._began_at).summary(num_tokens)

    @property
    def num_tokens(self) -> int:
        """The number of tokens of all answers."""
        return sum(len(answer.token_ids) for answer in self._answers.values())

    def open_answers(self) -> list[list[int]]:
        """Return the tokens of each answer that has not ended."""
        return [list(answer.token_ids) for answer in self._answers.values() if not answer.has_ended]

    def messages(self) -> list[pb.BegunAnswer]:
        """Return the messages with which a worker goes on."""
        return [
            pb.BegunAnswer(
                index=index, token_ids=answer.token_ids, num_chars=answer.num_chars, has_ended=answer.has_ended
            )
            for index, answer in self._answers.items()
        ]
