"""The number of replicas that a load wants: more at once, fewer only after a while.

The load is counted in replicas: the seconds of prefill that wait, over the seconds that may wait, and the KV pages and
places of a step in use, over the share that may be in use.  Replicas are added when the load has wanted more for
``up_after_s``, by the least that it wanted in that time.  They are removed when for ``down_after_s`` it would have left
``low_share`` or more free on those that stay.  Between the two nothing changes, so a load that comes and goes faster
than ``down_after_s`` does not start and end replicas.  A replica that is being started counts as one that is there.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Final

from penstock.config import check_integer, check_number
from penstock.errors import InvalidArgumentError
from penstock.validation import set_fields

__all__ = ["SAMPLE_S", "Autoscaler", "Load", "ScalePolicy", "parse_range"]

SAMPLE_S: Final = 0.5
"""The interval of looks at the load, in seconds."""
MAX_REPLICAS: Final = 100_000


@dataclass(frozen=True)
class ScalePolicy:
    """The limits of the number of replicas, and when it changes.

    ``min_replicas`` 0 lets the last one end while there is nothing to do; the next request starts one.  ``queue_s``:
    seconds of prefill that may wait per replica.  ``full_share``: the share of its KV pages, or of the places of its
    step, that may be in use.  ``low_share``: how full those that stay may be, as a share of both limits, before one is
    removed.
    """

    min_replicas: int = 1
    max_replicas: int = 1
    queue_s: float = 2.0
    full_share: float = 0.9
    low_share: float = 0.6
    up_after_s: float = 1.0
    down_after_s: float = 120.0

    def __post_init__(self) -> None:
        """Check every field; InvalidArgumentError."""
        check_integer("replicas", self.min_replicas, 0, MAX_REPLICAS)
        check_integer("replicas", self.max_replicas, max(1, self.min_replicas), MAX_REPLICAS)
        for name, high in (("queue_s", 1e6), ("full_share", 1.0), ("low_share", 1.0), ("down_after_s", 1e6)):
            set_fields(self, **{name: check_number(name, getattr(self, name), high)})
        set_fields(self, up_after_s=check_number("up_after_s", self.up_after_s, 1e6, may_be_zero=True))


@dataclass(frozen=True)
class Load:
    """The load at one moment.

    ``queued_s``: seconds of prefill that wait, of all replicas together.  ``num_busy``: the KV pages in use, or the
    places of a step that requests hold or wait for, whichever is more, as a number of replicas: 1.5 is one full replica
    and half of another.
    """

    queued_s: float = 0.0
    num_busy: float = 0.0


class Autoscaler:
    """Decides how many replicas are ``wanted``; at first ``num_replicas``.  It reads no clock."""

    def __init__(self, policy: ScalePolicy, num_replicas: int) -> None:
        self.policy = policy
        self.wanted = min(max(num_replicas, policy.min_replicas), policy.max_replicas)
        self._times: deque[float] = deque()  # of the samples of the last down_after_s
        # Time and demand of the samples that are less, or more, than all later ones: the first is the window's extreme
        self._least: deque[tuple[float, float]] = deque()
        self._most: deque[tuple[float, float]] = deque()
        self._since = -math.inf  # the time of the first sample, or of the last change upwards

    def update(self, now: float, load: Load) -> int:
        """Note the load at ``now``, in seconds, and return the number of replicas that is wanted from now on."""
        policy = self.policy
        demand = max(load.queued_s / policy.queue_s, load.num_busy / policy.full_share)
        if self._since == -math.inf:
            self._since = now
        self._note(now, demand)
        up = self._clamped(self._least[0][1])
        is_seen = self._times[0] <= now - policy.up_after_s or now - self._since >= policy.up_after_s
        if not self.wanted and demand > 0:
            up, is_seen = self._clamped(demand), True  # a request waits for it
        if up > self.wanted and is_seen:
            self.wanted, self._since = up, now
        elif now - self._since >= policy.down_after_s:
            down = self._clamped(self._most[0][1] / policy.low_share)
            self.wanted = min(self.wanted, down)
        return self.wanted

    def _note(self, now: float, demand: float) -> None:
        """Add a sample, and drop those that are older than the time in which they count."""
        while self._least and self._least[-1][1] >= demand:
            self._least.pop()
        while self._most and self._most[-1][1] <= demand:
            self._most.pop()
        for samples in (self._least, self._most):
            samples.append((now, demand))
        self._times.append(now)
        end = now - max(self.policy.down_after_s, self.policy.up_after_s)
        while self._times[0] <= end:
            self._times.popleft()
        while self._most[0][0] <= end:
            self._most.popleft()
        while self._least[0][0] <= end or self._least[0][0] < now - self.policy.up_after_s:
            self._least.popleft()

    def _clamped(self, demand: float) -> int:
        return min(max(math.ceil(demand), self.policy.min_replicas), self.policy.max_replicas)


def parse_range(text: str) -> tuple[int, int]:
    """Return the limits in "MIN..MAX"; "N" is "N..N".  Raises InvalidArgumentError."""
    low, separator, high = text.partition("..")
    if not low.isascii() or not low.isdigit() or (separator and (not high.isascii() or not high.isdigit())):
        raise InvalidArgumentError(f"replicas: expected N or MIN..MAX, got {text!r:.40}", param="replicas")
    limits = int(low), int(high if separator else low)
    if limits[0] > limits[1]:
        raise InvalidArgumentError(f"replicas: expected MIN..MAX with MIN up to MAX, got {text:.40}", param="replicas")
    return limits
