"""What a Context asks for is so: threads, and the cores that they are bound to; the rest is refused by name."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from penstock import lite
from penstock.errors import InvalidArgumentError, PenstockError, UnsupportedError
from penstock.lite import affinity
from tests.support.errors import raises
from tests.support.lite_demo import IDS, ask, build

CORES = sorted(os.sched_getaffinity(0))


def masks() -> dict[int, set[int]]:
    """The cores of each thread of this process."""
    return {int(task.name): os.sched_getaffinity(int(task.name)) for task in Path("/proc/self/task").iterdir()}


@pytest.mark.parametrize("order", [CORES[:2], CORES[:2][::-1]])
def test_threads_are_bound_to_the_cores_of_the_list(order: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    if len(CORES) < 2:
        pytest.skip("one core")
    context = lite.Context(thread_num=3, thread_affinity_core_list=order)
    before = masks()
    with build(context=context) as model, build() as free:
        made = [cores for task, cores in sorted(masks().items()) if task not in before]
        assert [cores for cores in made if len(cores) == 1] == [{order[1]}, {order[0]}]
        assert all(
            cores == set(CORES) for cores in made if len(cores) > 1
        )  # the other model's, and one that just ended
        assert model.get_model_info("thread_num") == 3
        during: list[set[int]] = []
        run = model._sequences._program.run
        monkeypatch.setattr(
            model._sequences._program, "run", lambda batch: (during.append(os.sched_getaffinity(0)), run(batch))
        )
        assert np.array_equal(ask(model, [IDS]), ask(free, [IDS]))
        assert during == [{order[0]}]
    assert masks()[os.getpid()] == before[os.getpid()]


def test_a_core_list_makes_a_thread_for_each_core() -> None:
    with build(context=lite.Context(thread_affinity_core_list=CORES[:1])) as model:
        assert model.get_model_info("thread_num") == 1


def test_the_fastest_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    context = lite.Context(thread_affinity_mode=1)
    assert affinity.chosen_cores(context.cpu) == CORES or len({affinity._speed(core) for core in CORES}) > 1
    monkeypatch.setattr(affinity, "_speed", lambda core: 0)
    context.cpu.thread_affinity_mode = 2
    with raises(UnsupportedError, param="thread_affinity_mode", match="got 2"):
        build(context=context)
    monkeypatch.setattr(affinity.os, "sched_getaffinity", lambda _: {0, 1, 2, 3, 4})
    monkeypatch.setattr(affinity, "_speed", lambda core: 1024 if core in (1, 3) else 300)
    assert affinity.chosen_cores(context.cpu) == [0, 2, 4]
    context.cpu.thread_affinity_mode = 1
    assert affinity.chosen_cores(context.cpu) == [1, 3]
    context.cpu.thread_affinity_core_list = CORES[:1]
    with raises(InvalidArgumentError, param="thread_affinity_core_list", match="thread_affinity_mode"):
        affinity.chosen_cores(context.cpu)


@pytest.mark.parametrize(
    ("owner", "name", "value", "field", "words"),
    [
        ("", "target", ["gpu"], "target", ".*'cpu', got 'gpu'"),
        ("", "target", ["Ascend"], "target", ".*'Ascend'"),
        ("", "target", [], "target", ".*got "),
        ("", "target", ["cpu", "cpu"], "target", ".*one "),
        ("cpu", "thread_num", -1, "thread_num", ".* 0 to 1024, got -1"),
        ("cpu", "thread_num", 1025, "thread_num", ".* 0 to 1024, got 1025"),
        ("cpu", "thread_num", True, "thread_num", "thread_num"),
        ("cpu", "thread_affinity_mode", 3, "thread_affinity_mode", ".* 0 to 2"),
        ("cpu", "thread_affinity_core_list", [100000], "thread_affinity_core_list", ".*100000"),
        ("cpu", "thread_affinity_core_list", [CORES[0], CORES[0]], "thread_affinity_core_list", "core once"),
        ("cpu", "thread_affinity_core_list", "0", "thread_affinity_core_list", "list of cores"),
        ("cpu", "precision_mode", "preferred_fp16", "precision_mode", ".*preferred_fp16"),
        ("gpu", "provider", "tensorrt", "gpu.provider", r".* CPU"),
        ("gpu", "device_id", 1, "gpu.device_id", r"gpu\.device_id"),
        ("parallel", "workers_num", 257, "workers_num", ".* 0 to 256"),
    ],
)
def test_values_that_are_refused(owner: str, name: str, value: object, field: str, words: str) -> None:
    context = lite.Context()
    with raises(PenstockError, param=field, match=words):
        setattr(getattr(context, owner) if owner else context, name, value)


def test_a_model_is_one_worker() -> None:
    context = lite.Context()
    context.parallel.workers_num = 2
    with raises(InvalidArgumentError, param="parallel.workers_num", match="Model, got 2"):
        build(context=context)
    context.parallel.workers_num = 1
    build(context=context).close()


def test_options_that_do_not_exist_cannot_be_set() -> None:
    context = lite.Context()
    for owner in (context, context.cpu, context.gpu, context.parallel):
        with pytest.raises(AttributeError, match="provide"):
            owner.provide = "ge"  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match="npu"):
        _ = context.npu  # type: ignore[attr-defined]
    context.gpu.device_id = context.gpu.rank_id
    assert context.target == ["cpu"]
