"""Property tests of the batcher, compared with a model that searches all waiting requests."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import QueueFullError
from penstock.servables.api.batch_rules import BatchRules
from penstock.servables.schedule.batcher import OLDEST_EVERY, Batcher
from tests.support.properties import CHECKS


@dataclass
class Waiting:
    """A request as the model of the property test knows it."""

    number: int
    left: int
    arrival: float
    priority: int
    group: tuple[Any, ...]
    deadline: float
    next: int = 0


class Model:
    """The rules, implemented by searching all waiting requests; the batcher is compared with it step by step."""

    def __init__(self, rules: BatchRules) -> None:
        self.rules, self.batcher = rules, Batcher[int](rules)
        self.waiting: dict[int, Waiting] = {}
        self.now, self.num_added = 0.0, 0
        self.priorities: dict[int, int] = {}

    def add(self, count: int, priority: int, kind: int, alone: bool, wait: float | None) -> None:
        number = self.num_added
        self.num_added += 1
        self.priorities[number] = priority
        deadline = math.inf if wait is None else self.now + wait
        options: dict[str, Any] = {"priority": priority, "kind": kind, "alone": alone, "deadline": deadline}
        if self.waiting and sum(one.left for one in self.waiting.values()) + count > self.rules.max_waiting:
            with pytest.raises(QueueFullError):
                self.batcher.add(number, count, self.now, **options)
            return
        self.batcher.add(number, count, self.now, **options)
        group = (kind, number) if alone else (kind,)
        self.waiting[number] = Waiting(number, count, self.now, priority, group, deadline)

    def cancel(self, number: int) -> None:
        known = self.waiting.pop(number, None)
        assert self.batcher.cancel(number) == (known.left if known else 0)

    def expire(self) -> None:
        gone = [one for one in self.waiting.values() if one.deadline <= self.now]
        gone.sort(key=lambda one: (one.deadline, one.number))
        assert self.batcher.expired(self.now) == [one.number for one in gone]
        for one in gone:
            del self.waiting[one.number]

    def due(self) -> dict[tuple[Any, ...], int]:
        """Groups that are due, and how many instances of each go together."""
        groups: dict[tuple[Any, ...], list[Waiting]] = {}
        for one in self.waiting.values():
            groups.setdefault(one.group, []).append(one)
        found = {}
        for group, members in groups.items():
            count = min(sum(one.left for one in members), self.rules.max_size)
            reached = [size for size in (*self.rules.preferred_sizes, self.rules.max_size) if size <= count]
            if len(group) == 2 or min(one.arrival for one in members) + self.rules.max_delay_s <= self.now:
                found[group] = count
            elif reached:
                found[group] = reached[-1]
        return found

    def take(self) -> bool:
        due, wake_at = self.due(), self.batcher.wake_at()
        batch = self.batcher.take(self.now)
        if batch is None:
            assert not due
            if self.waiting:
                assert wake_at == min(one.arrival for one in self.waiting.values()) + self.rules.max_delay_s
            return False
        assert wake_at <= self.now
        parts = batch.parts
        group = self.waiting[parts[0].request].group
        count = sum(part.count for part in parts)
        assert due[group] == count
        assert batch.size == self.rules.padded(count)
        assert batch.kind == group[0]
        for part in parts:  # the first of its priority and group, from the instance that is next, as much as there is
            one = self.waiting[part.request]
            assert one.group == group
            assert part.first == one.next
            same = [other for other in self.waiting.values() if (other.group, other.priority) == (group, one.priority)]
            assert min(same, key=lambda other: other.number) is one
            assert 1 <= part.count <= one.left
            assert part is parts[-1] or part.count == one.left
            one.next += part.count
            one.left -= part.count
            if not one.left:
                del self.waiting[one.number]
        behind = parts[1:]  # the first may be the oldest; the others are in the order of priorities
        assert [part.request for part in behind] == sorted((p.request for p in behind), key=self.order)
        return True

    def order(self, number: int) -> tuple[int, int]:
        return self.priorities[number], number


SIZES = st.lists(st.integers(1, 8), max_size=3, unique=True).map(sorted)
REQUESTS = st.tuples(
    st.integers(1, 20), st.integers(-1, 1), st.integers(0, 1), st.booleans(), st.none() | st.floats(0, 5)
)
STEPS = st.one_of(
    st.tuples(st.just("add"), REQUESTS),
    st.tuples(st.just("cancel"), st.integers(0, 30)),
    st.tuples(st.just("wait"), st.floats(0, 3)),
    st.tuples(st.just("take"), st.just(1)),
    st.tuples(st.just("drain"), st.just(1)),
)


@settings(CHECKS, max_examples=300)
@given(
    max_size=st.integers(1, 8), preferred=SIZES, padded=SIZES, delay=st.sampled_from([0.0, 1.0, 2.5]),
    steps=st.lists(STEPS, max_size=40),
)  # fmt: skip
def test_batches_follow_the_rules(
    max_size: int, preferred: list[int], padded: list[int], delay: float, steps: list[tuple[str, Any]]
) -> None:
    """Nothing is lost or runs twice, order and sizes follow the rules, and no wait exceeds its bound."""
    preferred = [size for size in preferred if size <= max_size]
    padded = [*(size for size in padded if size < max_size), max_size] if padded else []
    model = Model(BatchRules(max_size, tuple(preferred), delay, tuple(padded), max_waiting=40))
    for name, value in steps:
        if name == "add":
            model.add(*value)
        elif name == "cancel":
            model.cancel(value)
        elif name == "wait":
            model.now += value
            model.expire()
        else:
            while model.take() and name == "drain":
                pass
        assert model.batcher.num_waiting == sum(one.left for one in model.waiting.values())
    model.now = max(model.now, model.batcher.wake_at()) + delay
    while model.take():
        pass
    assert not model.waiting
    assert model.batcher.num_waiting == 0


@settings(CHECKS, max_examples=100)
@given(
    max_size=st.integers(1, 4),
    flow=st.lists(st.tuples(st.integers(1, 4), st.integers(0, 3), st.integers(0, 2)), min_size=1, max_size=12),
    before=st.integers(0, 4),
)
def test_starvation_is_bounded(max_size: int, flow: list[tuple[int, int, int]], before: int) -> None:
    batcher: Batcher[str] = Batcher(BatchRules(max_size, max_waiting=1 << 20))
    for number in range(before):
        batcher.add(f"before {number}", 1, 0.0, priority=3, kind=number)
    batcher.add("patient", 1, 0.0, priority=9, kind=-1)
    for turn in range(OLDEST_EVERY * (before + 1)):
        for place, (count, priority, kind) in enumerate(flow):
            batcher.add(f"{turn} {place}", count, 0.0, priority=priority, kind=kind)
        if any(part.request == "patient" for part in (batcher.take(0.0) or pytest.fail("nothing was due")).parts):
            return
    pytest.fail(f"not begun after {OLDEST_EVERY * (before + 1)} batches")
