"""What a request's worker has delivered: with it another worker goes on with the same tokens."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import TYPE_CHECKING

from penstock.serving.proto import wire_pb2 as pb

if TYPE_CHECKING:
    from penstock.llm.engine_thread import StepEvent

__all__ = ["Delivered"]


class _Answer:
    """Tokens and number of characters of one answer so far."""

    def __init__(self) -> None:
        self.token_ids = array("i")
        self.num_chars = 0
        self.has_ended = False


class Delivered:
    """The answers of a request so far, by index.  Tokens that the primary has not received do not count."""

    def __init__(self) -> None:
        self._answers: dict[int, _Answer] = {}
        self.on_note: Callable[[], None] | None = None
        """Called after each event."""

    def note(self, event: StepEvent) -> None:
        """Add an event that goes to the reader of the answer."""
        answer = self._answers.get(event.index)
        if answer is None:
            answer = self._answers[event.index] = _Answer()
        answer.token_ids.extend(event.token_ids)
        answer.num_chars += len(event.text)
        answer.has_ended = answer.has_ended or event.finish_reason is not None
        if self.on_note is not None:
            self.on_note()

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
