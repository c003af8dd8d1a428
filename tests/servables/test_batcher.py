"""The batcher with a simulated clock: which requests share batches, when and in which order; nothing is lost."""

from __future__ import annotations

import math
from typing import Any

import pytest

from penstock.errors import InvalidArgumentError, QueueFullError
from penstock.servables.api.batch_rules import BatchRules
from penstock.servables.schedule.batcher import OLDEST_EVERY, Batcher, BatchPart, InstanceBatch
from tests.support.errors import raises


def counts(batch: InstanceBatch[Any] | None) -> list[tuple[Any, int, int]]:
    assert batch is not None
    return [(part.request, part.first, part.count) for part in batch.parts]


def drain(batcher: Batcher[Any], now: float) -> list[InstanceBatch[Any]]:
    found = []
    while (batch := batcher.take(now)) is not None:
        found.append(batch)
    return found


def test_three_requests_in_batches_of_two() -> None:
    batcher: Batcher[str] = Batcher(BatchRules(max_size=2))
    for name in "abc":
        batcher.add(name, 1, 0.0)
    assert [counts(batch) for batch in drain(batcher, 0.0)] == [[("a", 0, 1), ("b", 0, 1)], [("c", 0, 1)]]
    assert batcher.num_waiting == 0
    assert batcher.wake_at() == math.inf


def test_a_request_of_a_thousand_instances_is_split() -> None:
    batcher: Batcher[str] = Batcher(BatchRules(max_size=32))
    batcher.add("large", 1000, 0.0)
    batches = drain(batcher, 0.0)
    assert [batch.size for batch in batches] == [32] * 31 + [8]
    assert [batch.parts[0].first for batch in batches] == list(range(0, 1000, 32))


def test_split_and_combined() -> None:
    batcher: Batcher[str] = Batcher(BatchRules(max_size=4))
    for name, number in (("a", 3), ("b", 6), ("c", 1)):
        batcher.add(name, number, 0.0)
    assert [counts(batch) for batch in drain(batcher, 0.0)] == [
        [("a", 0, 3), ("b", 0, 1)], [("b", 1, 4)], [("b", 5, 1), ("c", 0, 1)],
    ]  # fmt: skip


def test_a_part_of_a_batch_waits_as_long_as_its_oldest_may() -> None:
    batcher: Batcher[str] = Batcher(BatchRules(max_size=4, max_delay_s=2.0))
    batcher.add("a", 1, 10.0)
    batcher.add("b", 1, 11.0)
    assert batcher.take(11.5) is None
    assert batcher.wake_at() == 12.0
    assert counts(batcher.take(12.0)) == [("a", 0, 1), ("b", 0, 1)]
    batcher.add("c", 4, 12.5)
    assert counts(batcher.take(12.5)) == [("c", 0, 4)], "a full batch waits for nobody"


def test_rest_of_a_split_request_is_due_by_arrival() -> None:
    batcher: Batcher[str] = Batcher(BatchRules(max_size=4, max_delay_s=2.0))
    batcher.add("a", 3, 0.0)
    batcher.add("b", 3, 1.5)
    assert counts(batcher.take(1.5)) == [("a", 0, 3), ("b", 0, 1)]
    assert batcher.take(2.0) is None
    assert batcher.wake_at() == 3.5
    assert counts(batcher.take(3.5)) == [("b", 1, 2)]


def test_preferred_sizes_run_at_once() -> None:
    batcher: Batcher[str] = Batcher(BatchRules(max_size=32, preferred_sizes=(8, 16), max_delay_s=1.0))
    batcher.add("a", 7, 0.0)
    assert batcher.take(0.0) is None
    batcher.add("b", 2, 0.5)
    assert counts(batcher.take(0.5)) == [("a", 0, 7), ("b", 0, 1)], "eight of nine"
    assert batcher.take(0.5) is None
    batcher.add("c", 19, 0.6)
    assert [batch.size for batch in drain(batcher, 0.6)] == [16], "the largest that is reached"
    assert batcher.wake_at() == 1.6
    batcher.add("d", 6, 1.0)
    batcher.add("e", 3, 1.0)
    assert [batch.size for batch in drain(batcher, 1.0)] == [8]
    assert [batch.size for batch in drain(batcher, 2.0)] == [5], "what has waited long enough goes as it is"


def test_batches_are_padded_to_the_next_size() -> None:
    batcher: Batcher[str] = Batcher(BatchRules(max_size=8, padded_sizes=(2, 4, 8)))
    for number, size in ((1, 2), (2, 2), (3, 4), (5, 8), (8, 8)):
        batcher.add("a", number, 0.0)
        batch = batcher.take(0.0)
        assert batch is not None
        assert (batch.size, batch.parts) == (size, (BatchPart("a", 0, number),))


def test_lower_priorities_first_and_splits_keep_place() -> None:
    batcher: Batcher[str] = Batcher(BatchRules(max_size=2))
    batcher.add("late", 3, 0.0, priority=5)
    batcher.add("early", 1, 1.0)
    assert counts(batcher.take(1.0)) == [("early", 0, 1), ("late", 0, 1)]
    batcher.add("late too", 1, 2.0, priority=5)
    assert counts(batcher.take(2.0)) == [("late", 1, 2)]
    assert counts(batcher.take(2.0)) == [("late too", 0, 1)]


def test_low_priority_does_not_starve() -> None:
    """With w instances before it, a request starts within OLDEST_EVERY * (w + 1) batches."""
    batcher: Batcher[str] = Batcher(BatchRules(max_size=2))
    batcher.add("before", 3, 0.0, priority=9)
    batcher.add("patient", 1, 0.0, priority=9)
    begun = {}
    for number in range(OLDEST_EVERY * 4):
        batcher.add(f"new {number}", 2, float(number))
        for part in (batcher.take(float(number)) or pytest.fail("nothing was due")).parts:
            begun.setdefault(part.request, number)
    assert begun["new 0"] == 0, "the new ones go first"
    assert begun["before"] == OLDEST_EVERY - 1
    assert begun["patient"] <= 3 * OLDEST_EVERY - 1
    news = [name for name in begun if name.startswith("new")]
    assert news == [f"new {number}" for number in range(len(news))]


def test_another_kind_does_not_starve() -> None:
    batcher: Batcher[str] = Batcher(BatchRules(max_size=1))
    batcher.add("patient", 1, 0.0, priority=1, kind="rare")
    took = []
    for number in range(OLDEST_EVERY):
        batcher.add(f"new {number}", 1, 0.0, kind="common")
        took += counts(batcher.take(0.0))
    assert took[-1] == ("patient", 0, 1)


def test_only_equal_kinds_share() -> None:
    batcher: Batcher[str] = Batcher(BatchRules(max_size=4, max_delay_s=1.0))
    for name, kind in (("a", (3,)), ("b", (5,)), ("c", (3,))):
        batcher.add(name, 1, 0.0, kind=kind)
    batches = drain(batcher, 1.0)
    assert [(batch.kind, counts(batch)) for batch in batches] == [
        ((3,), [("a", 0, 1), ("c", 0, 1)]), ((5,), [("b", 0, 1)]),
    ]  # fmt: skip


def test_due_kind_runs_before_an_earlier_arrival() -> None:
    batcher: Batcher[str] = Batcher(BatchRules(max_size=2, max_delay_s=10.0))
    batcher.add("a", 1, 0.0, kind=1, priority=-1)
    batcher.add("b", 2, 1.0, kind=2)
    assert counts(batcher.take(1.0)) == [("b", 0, 2)]
    assert batcher.take(1.0) is None


def test_exclusive_requests_are_not_batched() -> None:
    batcher: Batcher[str] = Batcher(BatchRules(max_size=2, max_delay_s=5.0))
    batcher.add("a", 1, 0.0)
    batcher.add("b", 3, 0.0, alone=True)
    batcher.add("c", 1, 0.0, alone=True)
    assert [counts(batch) for batch in drain(batcher, 0.0)] == [[("b", 0, 2)], [("b", 2, 1)], [("c", 0, 1)]]
    assert batcher.num_waiting == 1


def test_cancelled_requests_are_in_no_batch() -> None:
    batcher: Batcher[str] = Batcher(BatchRules(max_size=4, max_delay_s=1.0))
    batcher.add("a", 6, 0.0)
    batcher.add("b", 1, 0.5)
    assert counts(batcher.take(0.5)) == [("a", 0, 4)]
    assert batcher.cancel("a") == 2
    assert batcher.cancel("a") == 0, "what is in a batch is not the batcher's any more"
    assert batcher.wake_at() == 1.5, "the oldest is another one"
    assert counts(batcher.take(1.5)) == [("b", 0, 1)]
    assert batcher.num_waiting == 0


def test_group_below_its_size_after_cancel_waits_again() -> None:
    batcher: Batcher[str] = Batcher(BatchRules(max_size=2, max_delay_s=1.0))
    batcher.add("a", 1, 0.0)
    batcher.add("b", 1, 0.5)
    assert batcher.wake_at() <= 0.5
    batcher.cancel("a")
    assert batcher.take(0.5) is None
    assert batcher.wake_at() == 1.5


def test_expired_requests_are_removed() -> None:
    batcher: Batcher[str] = Batcher(BatchRules(max_size=4, max_delay_s=100.0))
    for name, deadline in (("a", 3.0), ("b", 1.0), ("c", math.inf), ("d", 2.0)):
        batcher.add(name, 1, 0.0, deadline=deadline, kind=name)
    assert batcher.expired(0.9) == []
    assert batcher.expired(2.0) == ["b", "d"]
    assert batcher.num_waiting == 2
    assert batcher.expired(99.0) == ["a"]
    assert [counts(batch) for batch in drain(batcher, 100.0)] == [[("c", 0, 1)]]
    assert batcher.expired(1e9) == []


def test_full_queue_refuses_unless_it_is_empty() -> None:
    batcher: Batcher[str] = Batcher(BatchRules(max_size=2, max_waiting=4))
    batcher.add("a", 10, 0.0)
    with raises(QueueFullError, match=r"max_waiting .4"):
        batcher.add("b", 1, 0.0)
    while batcher.num_waiting > 2:
        batcher.take(0.0)
    batcher.add("b", 2, 0.0)
    with pytest.raises(QueueFullError):
        batcher.add("c", 1, 0.0)


def test_invalid_adds_are_refused() -> None:
    batcher: Batcher[str] = Batcher(BatchRules())
    with raises(InvalidArgumentError, param="num_instances"):
        batcher.add("a", 0, 0.0)
    batcher.add("a", 1, 0.0)
    with raises(InvalidArgumentError, param="request"):
        batcher.add("a", 1, 0.0)
    batcher.take(0.0)
    batcher.add("a", 1, 0.0)


@pytest.mark.parametrize(
    ("fields", "param", "fact"),
    [
        ({"max_size": 0}, "max_size", "got 0"),
        ({"max_size": True}, "max_size", "True"),
        ({"max_size": 2.0}, "max_size", "2.0"),
        ({"max_waiting": 0}, "max_waiting", "got 0"),
        ({"max_delay_s": -1}, "max_delay_s", "got -1"),
        ({"max_delay_s": math.nan}, "max_delay_s", "nan"),
        ({"max_size": 8, "preferred_sizes": (9,)}, "preferred_sizes", "got 9"),
        ({"max_size": 8, "preferred_sizes": (4, 2)}, "preferred_sizes", "ascending"),
        ({"max_size": 8, "padded_sizes": (4, 4, 8)}, "padded_sizes", "ascending"),
        ({"max_size": 8, "padded_sizes": (2, 4)}, "padded_sizes", "8, got 4"),
    ],
)
def test_invalid_rules_are_refused(fields: dict[str, Any], param: str, fact: str) -> None:
    with raises(InvalidArgumentError, param=param, match=fact):
        BatchRules(**fields)


def test_finished_requests_leave_no_memory() -> None:
    """Cancelled requests leave no memory while others of a higher priority keep arriving."""
    batcher: Batcher[int] = Batcher(BatchRules(max_size=1, max_delay_s=1.0))
    batcher.add(-1, 1, 0.0)
    for number in range(5000):
        batcher.add(number, 1, 0.0, priority=1 + number, deadline=9.0, kind=number % 3 or ())
        batcher.add(number + 10_000, 1, 0.0)
        assert counts(batcher.take(0.0))[0][0] != number
        batcher.cancel(number)
    assert batcher.num_waiting == 1
    assert _held(batcher) < 1500


def _held(value: Any) -> int:
    """Count the elements of all containers that are reachable from an object."""
    seen: set[int] = set()
    todo, found = [value], 0
    while todo:
        one = todo.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, dict):
            todo += [*one, *one.values()]
        elif not isinstance(one, int | float | str):
            named = [getattr(one, name) for name in getattr(type(one), "__slots__", ()) if hasattr(one, name)]
            todo += [*named, *getattr(one, "__dict__", {}).values()]
            todo += list(one) if hasattr(one, "__iter__") else []
        found += len(one) if hasattr(one, "__len__") else 0
    return found
