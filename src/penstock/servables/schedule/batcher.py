"""Batches out of requests: they are split and combined to the size that a model takes, by rules and by the time.

Nothing here reads a clock, waits or runs a model: the caller gives the time (seconds of any clock that does not go
back) and asks for a batch whenever somebody is free to run one.  An operation takes O(log n) of n requests, amortised.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Any, Final, Generic, TypeVar

from penstock.errors import InvalidArgumentError, QueueFullError

__all__ = ["MAX_BATCH_SIZE", "OLDEST_EVERY", "Batch", "BatchRules", "Batcher", "Part"]

R = TypeVar("R", bound=Hashable)
T = TypeVar("T", bound=Hashable)

OLDEST_EVERY: Final = 8
"""Of so many batches one at least begins with the request that has waited longest, whatever its priority."""

MAX_BATCH_SIZE: Final = 1 << 20


@dataclass(frozen=True)
class BatchRules:
    """How large batches are, how long they are waited for and how much may wait; InvalidArgumentError names the field.

    ``max_size``: instances of a batch at most.  ``preferred_sizes``: a batch that reaches one goes without waiting for
    more.  ``max_delay_s``: no instance is held back for longer.  ``padded_sizes``: the only sizes that the model takes,
    the largest of them ``max_size``; a batch is padded to the next one; any size when empty.  ``max_waiting``:
    instances that may wait; a larger request is taken when nothing waits.
    """

    max_size: int = 1
    preferred_sizes: tuple[int, ...] = ()
    max_delay_s: float = 0.0
    padded_sizes: tuple[int, ...] = ()
    max_waiting: int = 4096

    def __post_init__(self) -> None:
        _whole("max_size", self.max_size, MAX_BATCH_SIZE)
        _whole("max_waiting", self.max_waiting, 1 << 40)
        for name in ("preferred_sizes", "padded_sizes"):
            sizes = tuple(getattr(self, name))
            for size in sizes:
                _whole(name, size, self.max_size)
            if list(sizes) != sorted(set(sizes)):
                raise InvalidArgumentError(f"{name} must be ascending, not {sizes}", param=name)
            object.__setattr__(self, name, sizes)
        if self.padded_sizes and self.padded_sizes[-1] != self.max_size:
            told = f"the largest of padded_sizes must be the batch size, {self.max_size}, not {self.padded_sizes[-1]}"
            raise InvalidArgumentError(told)
        delay_s = self.max_delay_s
        if isinstance(delay_s, bool) or not isinstance(delay_s, int | float) or not 0 <= delay_s <= 1e6:
            raise InvalidArgumentError(
                f"max_delay_s must be a number from 0 to 1e6, not {delay_s!r}", param="max_delay_s"
            )

    def padded(self, count: int) -> int:
        """The size of the batch that ``count`` instances, up to ``max_size``, are padded to."""
        return next((size for size in self.padded_sizes if size >= count), count)


def _whole(name: str, value: Any, largest: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= largest:
        raise InvalidArgumentError(f"{name} must be a whole number from 1 to {largest}, not {value!r}", param=name)


@dataclass(frozen=True, slots=True)
class Part(Generic[R]):
    """``count`` instances of a request, from its instance ``first`` on."""

    request: R
    first: int
    count: int


@dataclass(frozen=True, slots=True)
class Batch(Generic[R]):
    """What runs together, in this order; ``size`` counts instances with the padding behind them."""

    parts: tuple[Part[R], ...]
    size: int
    kind: Hashable


class Batcher(Generic[R]):
    """The requests that wait for one model, and which of them make the next batch.

    Requests wait in the order of their priorities (lower first), of equal priority in the order that they came; one
    that is split keeps its place.  Only requests of equal ``kind`` share a batch, and ``alone`` never shares.  A batch
    is due when ``max_size`` instances of a kind wait, or a preferred size (the largest that is reached goes, what is
    above it waits on), when the oldest of a kind has waited ``max_delay_s``, and for ``alone`` at once.

    Starvation is bounded: of OLDEST_EVERY batches in a row one begins with the oldest request of those that are due.
    So a request before which w instances came is begun after at most OLDEST_EVERY * (w + 1) batches, whatever comes
    after it.
    """

    def __init__(self, rules: BatchRules) -> None:
        self.rules = rules
        self.num_waiting = 0
        """Instances that are in no batch yet."""
        self._thresholds = (*(size for size in rules.preferred_sizes if size < rules.max_size), rules.max_size)
        self._entries: dict[R, _Entry[R]] = {}
        self._groups: dict[Hashable, _Group[R]] = {}
        self._due: _Order[_Group[R]] = _Order()  # by the first of each in the order of priorities
        self._due_by_age: _Order[_Group[R]] = _Order()
        self._later: _Order[_Group[R]] = _Order()  # by when they are due
        self._deadlines: _Order[_Entry[R]] = _Order()
        self._num_added = 0
        self._num_overtaken = 0  # batches since one began with the oldest
        self._now = -math.inf

    def add(
        self, request: R, num_instances: int, now: float, *, priority: int = 0, deadline: float = math.inf,
        kind: Hashable = (), alone: bool = False,
    ) -> None:  # fmt: skip
        """Let a request wait with ``num_instances`` instances; it is known by its equality until all are taken.

        QueueFullError when too many wait; InvalidArgumentError for a count below 1 and a request that waits already.
        """
        if num_instances < 1:
            raise InvalidArgumentError(
                f"num_instances must be 1 at least, not {num_instances!r}", param="num_instances"
            )
        if request in self._entries:
            raise InvalidArgumentError("the request waits already")
        if self.num_waiting and self.num_waiting + num_instances > self.rules.max_waiting:
            told = f"{self.num_waiting} instances wait and {num_instances} more are above max_waiting"
            raise QueueFullError(f"{told}, {self.rules.max_waiting}")
        self._pass(now)
        if alone:
            group = _Group[R](kind, True)
        else:
            found = self._groups.get(kind)
            group = self._groups[kind] = _Group(kind, False) if found is None else found
        self._num_added += 1
        entry = _Entry(request, group, (priority, self._num_added), self._now, num_instances)
        self._entries[request] = entry
        self.num_waiting += num_instances
        group.add(entry)
        if deadline != math.inf:
            self._deadlines.put(entry, (deadline, self._num_added))
        if not group.is_due or entry is group.first():  # else nothing changes for the others
            self._place(group)

    def cancel(self, request: R) -> int:
        """Take a request out; returns its instances that were in no batch yet, 0 for one that does not wait."""
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
        """Take out the requests whose deadline is now or was before, the earliest first."""
        found: list[R] = []
        while (entry := self._deadlines.first()) is not None and self._deadlines.key(entry)[0] <= now:
            found.append(entry.request)
            self.cancel(entry.request)
        return found

    def take(self, now: float) -> Batch[R] | None:
        """The batch that is due and goes first; None when none is due."""
        self._pass(now)
        oldest_group = self._due_by_age.first()
        if oldest_group is None:
            return None
        oldest = oldest_group.oldest()
        first = self._due.first()
        is_turn = first is None or self._num_overtaken >= OLDEST_EVERY - 1
        group = oldest_group if first is None or is_turn else first
        entry = oldest if is_turn else group.first()
        self._num_overtaken = 0 if entry is oldest else self._num_overtaken + 1
        count = left = self._count(group)
        parts: list[Part[R]] = []
        while True:
            number = min(entry.left, left)
            parts.append(Part(entry.request, entry.next, number))
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
        return Batch(tuple(parts), self.rules.padded(count), group.kind)

    def wake_at(self) -> float:
        """When take() would next give a batch, if nothing comes meanwhile: a time that is past when one is due."""
        if self._due.first() is not None:
            return self._now
        group = self._later.first()
        return math.inf if group is None else float(self._later.key(group)[0])

    def _pass(self, now: float) -> None:
        """Let time pass: groups whose oldest has waited long enough are due."""
        if now > self._now:
            self._now = now
        if not self._later:
            return
        while (group := self._later.first()) is not None and self._later.key(group)[0] <= self._now:
            self._place(group)

    def _count(self, group: _Group[R]) -> int:
        """Instances of a group that is due which go together."""
        count = min(group.num_waiting, self.rules.max_size)
        if group.is_alone or group.oldest().arrival + self.rules.max_delay_s <= self._now:
            return count
        return max(size for size in self._thresholds if size <= count)

    def _place(self, group: _Group[R]) -> None:
        """Enter a group that has changed where it belongs: due, later or nowhere."""
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
    """A request that waits: ``next`` is its first instance that is in no batch, ``left`` how many are."""

    __slots__ = ("arrival", "group", "key", "left", "next", "request")

    def __init__(self, request: R, group: _Group[R], key: tuple[int, int], arrival: float, left: int) -> None:
        self.request, self.group, self.key, self.arrival, self.left = request, group, key, arrival, left
        self.next = 0


class _Group(Generic[R]):
    """Requests that may share batches.

    Those that are through (``left`` is 0) stay in a queue until they come first, or make up more than half of it.
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
            self._by_age = deque(one for one in self._by_age if one.left)
        if len(self._by_priority) > 2 * self._num_requests + 64:
            self._by_priority = [one for one in self._by_priority if one[1].left]
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
    """Items by keys that may change, no two items ever with the same key; the least comes first.

    What was changed or dropped stays in the heap until it comes first, or until it makes up more than half of it.
    """

    __slots__ = ("_heap", "_keys")

    def __init__(self) -> None:
        self._keys: dict[T, tuple[float, ...]] = {}
        self._heap: list[tuple[tuple[float, ...], T]] = []

    def __len__(self) -> int:
        return len(self._keys)

    def put(self, item: T, key: tuple[float, ...]) -> None:
        """Enter an item or change its key."""
        if self._keys.get(item) == key:
            return
        self._keys[item] = key
        heappush(self._heap, (key, item))
        if len(self._heap) > 2 * len(self._keys) + 64:
            self._heap = [(key, item) for item, key in self._keys.items()]
            heapify(self._heap)

    def drop(self, item: T) -> None:
        """Take an item out if it is there."""
        self._keys.pop(item, None)

    def key(self, item: T) -> tuple[float, ...]:
        return self._keys[item]

    def first(self) -> T | None:
        """The item with the least key."""
        heap, keys = self._heap, self._keys
        while heap:
            key, item = heap[0]
            if keys.get(item) == key:
                return item
            heappop(heap)
        return None
