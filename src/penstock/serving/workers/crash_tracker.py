"""Counts lost workers per request, so that a request that crashes workers is refused instead of retried forever.

A worker that crashes by itself may have crashed because of any request that ran in it.  A worker that is killed from
outside, or whose machine is lost, is no request's fault, as far as can be seen: an endless number of them leads to
pauses, never to a refusal for good.  Before that a request runs alone in a worker, so that no other one is suspected.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final

__all__ = ["CONTINUED", "FAILED", "OUTCOMES", "RETRIED", "CrashTracker", "Loss", "Verdict"]

RETRIED: Final = "retried"
CONTINUED: Final = "continued"
FAILED: Final = "failed"
OUTCOMES: Final = (RETRIED, CONTINUED, FAILED)
"""Outcomes of a request whose worker was lost: another one runs it from its beginning, or from the tokens that were
delivered, or it ends with an error."""

MAX_CRASHES: Final = 2
"""A request that ran in this many workers when they crashed is refused if it ran alone in one of them.

After the first crash it runs alone, if no token of it had been delivered: it has got past that point with its first
token.  Otherwise that takes longer, and it runs alone after the second crash."""
MAX_KILLS: Final = 3
"""A request that ran in this many workers when they were killed from outside runs alone."""
MAX_KILLS_AMONG_OTHERS: Final = 6
"""After so many kills of workers in which it ran among others, each further one pauses a request.

A request runs alone only for a time, and the cause of the kills may come later in its answer."""
MAX_WAITS: Final = 3
"""The primary infers from the queue order which requests ran in a lost worker, and may be wrong.  A request that waited
during this many losses counts as having run in one."""
_FORGET_S: Final = 600.0
_PAUSE_S: Final = 2.0
_MARGIN_TOKENS: Final = 16
_MAX_REQUESTS: Final = 4096


class Verdict(IntEnum):
    """The way in which a request may run.

    ``SUSPECT``: while no other suspect runs.  ``ALONE``: in a worker without other requests.  ``PAUSED``: later,
    because workers were killed from outside while it ran alone, or were lost too often while it ran among others.
    ``REFUSED``: not again, because it crashed a worker alone.
    """

    FREE = 0
    SUSPECT = 1
    ALONE = 2
    PAUSED = 3
    REFUSED = 4


@dataclass(frozen=True)
class Loss:
    """The loss of a worker with a request that ``was_running`` there or waited.

    ``was_alone``: the worker had no other request.  ``num_tokens``: the tokens that had been delivered.
    """

    worker: str
    was_running: bool = True
    was_alone: bool = False
    num_tokens: int = 0


@dataclass
class _Record:
    when: float = 0.0
    num_crashes: int = 0
    num_kills: int = 0
    num_lone_kills: int = 0
    has_crashed_alone: bool = False
    num_tokens: int = 0
    counted: dict[str, str] = field(default_factory=dict)
    """The last worker that each counter counted: a worker counts once, however many equal requests it had."""
    num_waits: int = 0

    @property
    def num_pauses(self) -> int:
        """The number of losses each of which made the pause longer."""
        num_other_kills = self.num_kills - self.num_lone_kills
        return (
            self.num_lone_kills
            + max(0, self.num_crashes - MAX_CRASHES - 1)
            + max(0, num_other_kills - MAX_KILLS_AMONG_OTHERS)
        )

    def note(self, loss: Loss, *, has_crashed: bool) -> None:
        if not loss.was_running and not self._has_waited_often(loss):
            return
        self.num_tokens = max(self.num_tokens, loss.num_tokens)
        if has_crashed:
            self.num_crashes += self._is_new("crash", loss)
            self.has_crashed_alone |= loss.was_alone
        elif self._is_new("kill", loss):
            self.num_kills += 1
            self.num_lone_kills += loss.was_alone

    def _has_waited_often(self, loss: Loss) -> bool:
        self.num_waits += self._is_new("wait", loss)
        if self.num_waits < MAX_WAITS:
            return False
        self.num_waits = 0
        return True

    def _is_new(self, counter: str, loss: Loss) -> bool:
        last, self.counted[counter] = self.counted.get(counter), loss.worker
        return last != loss.worker


class CrashTracker:
    """Keeps what was lost by the fingerprint of a request.  It is forgotten with an answer, or after ten minutes."""

    def __init__(self) -> None:
        self._records: OrderedDict[bytes, _Record] = OrderedDict()
        self.outcomes: Counter[str] = Counter()
        """The number of requests whose worker was lost, by what came of them (``OUTCOMES``)."""

    def __len__(self) -> int:
        """Return the number of known fingerprints; without any there is nothing to look up."""
        return len(self._records)

    def note(self, fingerprint: bytes, loss: Loss, *, has_crashed: bool) -> None:
        """Note the loss of a worker that had the request; ``has_crashed``: by itself, not killed from outside."""
        record = self._known(fingerprint) or _Record()
        record.note(loss, has_crashed=has_crashed)
        record.when = time.monotonic()
        self._records[fingerprint] = record
        self._records.move_to_end(fingerprint)
        while len(self._records) > _MAX_REQUESTS:
            self._records.popitem(last=False)

    def verdict(self, fingerprint: bytes) -> Verdict:
        """Return how the request may run now."""
        record = self._known(fingerprint)
        if record is None:
            return Verdict.FREE
        if record.num_crashes >= MAX_CRASHES and record.has_crashed_alone:
            return Verdict.REFUSED
        if self.pause_s(fingerprint) > 0:
            return Verdict.PAUSED
        if record.num_crashes >= (MAX_CRASHES if record.num_tokens else 1) or record.num_kills >= MAX_KILLS:
            return Verdict.ALONE
        return Verdict.SUSPECT if record.num_crashes else Verdict.FREE

    def pause_s(self, fingerprint: bytes) -> float:
        """Return for how many more seconds a request is paused: each further worker lost with it makes that longer.

        A request can have a worker killed without a crash of its own, by a daemon that watches memory, for example.  It
        can also have workers lost so late that it does not run alone any more.
        """
        record = self._known(fingerprint)
        if record is None or not record.num_pauses:
            return 0.0
        pause_s = min(_FORGET_S, _PAUSE_S * 4.0 ** min(10, record.num_pauses - 1))
        return max(0.0, record.when + pause_s - time.monotonic())

    def num_tokens(self, fingerprint: bytes, *, goes_on: bool = False) -> int:
        """Return after how many delivered tokens the request is surely past the point where its workers were lost.

        A worker may have computed more tokens than it had delivered when it was lost.  A request that ``goes_on`` gets
        the tokens of the lost worker, and needs a smaller margin than one that begins again and may draw other ones.
        """
        record = self._known(fingerprint)
        if record is None or not record.num_tokens:
            return 0
        return (1 if goes_on else 2) * record.num_tokens + _MARGIN_TOKENS

    def clear(self, fingerprint: bytes) -> None:
        """Forget a request that was answered."""
        self._records.pop(fingerprint, None)

    def _known(self, fingerprint: bytes) -> _Record | None:
        record = self._records.get(fingerprint)
        return None if record is None or time.monotonic() - record.when >= _FORGET_S else record
