"""Combines and splits requests into batches of the sizes that a model accepts, by rules and by waiting time.

Nothing here reads a clock, waits or runs a model.  The caller passes the time (seconds of any monotonic clock) and asks
for a batch when a process is free to run one.  An operation takes amortized O(log n) time with n waiting requests.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from penstock.errors import InvalidArgumentError, QueueFullError
from penstock.validation import refusal

if TYPE_CHECKING:
    from penstock.servables.api.batch_rules import BatchRules

__all__ = ["OLDEST_EVERY", "BatchPart", "Batcher", "InstanceBatch"]

R = TypeVar("R", bound=Hashable)
T = TypeVar("T", bound=Hashable)

OLDEST_EVERY: Final = 8
"""At least one of this many batches starts with the request that has waited longest, whatever its priority."""


@dataclass(frozen=True, slots=True)
class BatchPart(Generic[R]):
    """``count`` instances of a request, starting with its instance ``first``."""

    request: R
    first: int
    count: int


@dataclass(frozen=True, slots=True)
class InstanceBatch(Generic[R]):
    """Instances that run together, in this order.  ``size`` is the number of instances including padding."""

    parts: tuple[BatchPart[R], ...]
    size: int
    kind: Hashable


class Batcher(Generic[R]):
    """The requests that wait for one model or stage; it decides which of them form the next batch.

    Requests wait in the order of their priorities (lower first), and in order of arrival within a priority.  A request
    that is split keeps its place.  Only requests of equal ``kind`` share a batch; a request with ``alone`` never shares
    one.  A batch is due in any of these cases:

    - ``max_size`` instances of a kind wait.
    - A preferred size is reached.  The largest one that is reached runs; the remaining instances keep waiting.
    - The oldest instance of a kind has waited ``max_delay_s``.
    - A request with ``alone`` waits.

    Starvation is bounded: of OLDEST_EVERY consecutive batches at least one starts with the oldest request that is due.
    A request that arrives after w instances therefore starts within OLDEST_EVERY * (w + 1) batches.
    """

    def __init__(self, rules: BatchRules) -> None:
        self.rules = rules
        self.num_waiting = 0
        """The number of instances that are not in a batch yet."""
        self._thresholds = (*(size for size in rules.preferred_sizes if size < rules.max_size), rules.max_size)
        self._entries: dict[R, _Entry[R]] = {}
        self._groups: dict[Hashable, _Group[R]] = {}
        self._due: _Order[_Group[R]] = _Order()  # by the key of the first request of each group
        self._due_by_age: _Order[_Group[R]] = _Order()
        self._later: _Order[_Group[R]] = _Order()  # by the time at which they become due
        self._deadlines: _Order[_Entry[R]] = _Order()
        self._num_added = 0
        self._num_overtaken = 0  # batches since one started with the oldest request
        self._now = -math.inf

    def add(
        self, request: R, num_instances: int, now: float, *, priority: int = 0, deadline: float = math.inf,
        kind: Hashable = (), alone: bool = False,
    ) -> None:  # fmt: skip
        """Queue a request with ``num_instances`` instances.  ``request`` identifies it until all of them are taken.

        ``now`` and ``deadline`` are times in seconds.  Raises QueueFullError if too many instances wait, and
        InvalidArgumentError for a count below 1 or a request that is already waiting.
        """
        if num_instances < 1:
            raise refusal("num_instances", "at least 1", num_instances)
        if request in self._entries:
            raise InvalidArgumentError("the request is already waiting", param="request")
        if self.num_waiting and self.num_waiting + num_instances > self.rules.max_waiting:
            raise QueueFullError(
                f"the queue is full: {self.num_waiting} instances are waiting and {num_instances} more "
                f"would exceed max_waiting ({self.rules.max_waiting})"
            )
        self._advance(now)
        if alone:
            group = _Group[R](kind, True)
        else:
            existing = self._groups.get(kind)
            group = self._groups[kind] = _Group(kind, False) if existing is None else existing
        self._num_added += 1
        entry = _Entry(request, group, (priority, self._num_added), self._now, num_instances)
        self._entries[request] = entry
        self.num_waiting += num_instances
        group.add(entry)
        if deadline != math.inf:
            self._deadlines.put(entry, (deadline, self._num_added))
        if not group.is_due or entry is group.first():  # any other entry leaves the position of its group as it is
            self._place(group)

    def cancel(self, request: R) -> int:
        """Remove a request.  Return how many of its instances were not in a batch yet; 0 if it does not wait."""
        entry = self._entries.get(request)
        if entry is None:
            return 0
        count = entry.left
        self.num_waiting -= count
        entry.group.num_waiting -= count
        self._forget(entry)
        self._place(entry.group)
        return count

    def expired(self, now: float) -> list[R]:
        """Remove and return the requests whose deadline has passed, the earliest first."""
        expired: list[R] = []
        while (entry := self._deadlines.first()) is not None and self._deadlines.key(entry)[0] <= now:
            expired.append(entry.request)
            self.cancel(entry.request)
        return expired

    def take(self, now: float) -> InstanceBatch[R] | None:
        """Return the next batch that is due; None if none is due."""
        self._advance(now)
        oldest_group = self._due_by_age.first()
        if oldest_group is None:
            return None
        oldest = oldest_group.oldest()
        first = self._due.first()
        is_oldest_turn = first is None or self._num_overtaken >= OLDEST_EVERY - 1
        group = oldest_group if first is None or is_oldest_turn else first
        entry = oldest if is_oldest_turn else group.first()
        self._num_overtaken = 0 if entry is oldest else self._num_overtaken + 1
        count = left = self._count(group)
        parts: list[BatchPart[R]] = []
        while True:
            number = min(entry.left, left)
            parts.append(BatchPart(entry.request, entry.next, number))
            entry.next += number
            entry.left -= number
            left -= number
            if not entry.left:
                self._forget(entry)
            if not left:
                break
            entry = group.first()
        self.num_waiting -= count
        group.num_waiting -= count
        self._place(group)
        return InstanceBatch(tuple(parts), self.rules.padded(count), group.kind)

    def wake_at(self) -> float:
        """Return when take() will next return a batch if nothing is added; a past time if a batch is due now."""
        if self._due.first() is not None:
            return self._now
        group = self._later.first()
        return math.inf if group is None else float(self._later.key(group)[0])

    def _advance(self, now: float) -> None:
        """Advance the clock: groups whose oldest request has waited long enough become due."""
        if now > self._now:
            self._now = now
        if not self._later:
            return
        while (group := self._later.first()) is not None and self._later.key(group)[0] <= self._now:
            self._place(group)

    def _count(self, group: _Group[R]) -> int:
        """Return how many instances of a due group form the next batch."""
        count = min(group.num_waiting, self.rules.max_size)
        if group.is_alone or group.oldest().arrival + self.rules.max_delay_s <= self._now:
            return count
        return max(size for size in self._thresholds if size <= count)

    def _place(self, group: _Group[R]) -> None:
        """Move a group that changed to where it belongs: due, later or nowhere."""
        if not group.num_waiting:
            for order in (self._due, self._due_by_age, self._later):
                order.drop(group)
            if not group.is_alone:
                del self._groups[group.kind]
            return
        oldest = group.oldest()
        due_at = oldest.arrival + self.rules.max_delay_s
        group.is_due = group.is_alone or group.num_waiting >= self._thresholds[0] or due_at <= self._now
        if group.is_due:
            self._later.drop(group)
            self._due.put(group, group.first().key)
            self._due_by_age.put(group, (oldest.key[1],))
        else:
            self._due.drop(group)
            self._due_by_age.drop(group)
            self._later.put(group, (due_at, oldest.key[1]))

    def _forget(self, entry: _Entry[R]) -> None:
        del self._entries[entry.request]
        self._deadlines.drop(entry)
        entry.group.remove(entry)


class _Entry(Generic[R]):
    """A waiting request.  ``next``: its first instance that is not in a batch yet.  ``left``: how many are not."""

    __slots__ = ("arrival", "group", "key", "left", "next", "request")

    def __init__(self, request: R, group: _Group[R], key: tuple[int, int], arrival: float, left: int) -> None:
        self.request, self.group, self.key, self.arrival, self.left = request, group, key, arrival, left
        self.next = 0


class _Group(Generic[R]):
    """Requests that may share batches.

    Finished requests (``left`` is 0) stay in a queue until they come first or make up more than half of it.
    """

    __slots__ = ("_by_age", "_by_priority", "_num_requests", "is_alone", "is_due", "kind", "num_waiting")

    def __init__(self, kind: Hashable, is_alone: bool) -> None:
        self.kind, self.is_alone = kind, is_alone
        self.is_due = False
        self.num_waiting = 0
        self._num_requests = 0
        self._by_age: deque[_Entry[R]] = deque()
        self._by_priority: list[tuple[tuple[int, int], _Entry[R]]] = []

    def add(self, entry: _Entry[R]) -> None:
        self._by_age.append(entry)
        heappush(self._by_priority, (entry.key, entry))
        self._num_requests += 1
        self.num_waiting += entry.left

    def remove(self, entry: _Entry[R]) -> None:
        entry.left = 0
        self._num_requests -= 1
        if len(self._by_age) > 2 * self._num_requests + 64:
            self._by_age = deque(queued for queued in self._by_age if queued.left)
        if len(self._by_priority) > 2 * self._num_requests + 64:
            self._by_priority = [item for item in self._by_priority if item[1].left]
            heapify(self._by_priority)

    def oldest(self) -> _Entry[R]:
        queue = self._by_age
        while not queue[0].left:
            queue.popleft()
        return queue[0]

    def first(self) -> _Entry[R]:
        heap = self._by_priority
        while not heap[0][1].left:
            heappop(heap)
        return heap[0][1]


class _Order(Generic[T]):
    """A priority queue of items with unique keys that may change; the least key comes first.

    Outdated entries stay in the heap until they come first or make up more than half of it.
    """

    __slots__ = ("_heap", "_keys")

    def __init__(self) -> None:
        self._keys: dict[T, tuple[float, ...]] = {}
        self._heap: list[tuple[tuple[float, ...], T]] = []

    def __len__(self) -> int:
        return len(self._keys)

    def put(self, item: T, key: tuple[float, ...]) -> None:
        """Add an item or change its key."""
        if self._keys.get(item) == key:
            return
        self._keys[item] = key
        heappush(self._heap, (key, item))
        if len(self._heap) > 2 * len(self._keys) + 64:
            self._heap = [(key, item) for item, key in self._keys.items()]
            heapify(self._heap)

    def drop(self, item: T) -> None:
        """Remove an item if it is present."""
        self._keys.pop(item, None)

    def key(self, item: T) -> tuple[float, ...]:
        return self._keys[item]

    def first(self) -> T | None:
        """Return the item with the least key; None if there is none."""
        heap, keys = self._heap, self._keys
        while heap:
            key, item = heap[0]
            if keys.get(item) == key:
                return item
            heappop(heap)
        return None
