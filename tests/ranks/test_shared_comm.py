"""Exchanges over shared memory, between threads: what arrives, and how a wait ends."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from penstock.core.comm import SharedComm, shared_bytes
from penstock.core.library import check
from penstock.core.native import Context
from penstock.errors import InvalidArgumentError, PenstockError, UnavailableError
from tests.support.errors import raises
from tests.support.rank_threads import PART_BYTES, SharedMemory


def all_gather(comm: SharedComm, data: bytes, sizes: Sequence[int], tag: int = 1) -> list[bytes]:
    struct, parts = comm.struct, (ctypes.c_void_p * comm.world)()
    ctypes.memmove(struct.part(struct.self), data, len(data))
    check(struct.all_gather(struct.self, tag, (ctypes.c_int64 * comm.world)(*sizes), parts))
    return [ctypes.string_at(part, size) for part, size in zip(parts, sizes, strict=True)]


def broadcast(comm: SharedComm, root: int, data: bytes) -> bytes:
    struct, out = comm.struct, ctypes.c_void_p()
    if comm.rank == root:
        ctypes.memmove(struct.part(struct.self), data, len(data))
    check(struct.broadcast(struct.self, 2, root, len(data), 0, ctypes.byref(out)))
    return ctypes.string_at(out, len(data))


def send(comm: SharedComm, to: int, data: bytes) -> None:
    check(comm.struct.send(comm.struct.self, to, data, len(data)))


def receive(comm: SharedComm, source: int, size: int) -> bytes:
    data = ctypes.create_string_buffer(size)
    check(comm.struct.recv(comm.struct.self, source, data, size))
    return data.raw


def on_ranks(world: int, work: Callable[[SharedComm], Any], **options: Any) -> list[Any]:
    """What ``work`` returns or raises on each rank."""
    memory = SharedMemory(world)
    results: list[Any] = [None] * world

    def run(rank: int) -> None:
        comm = memory.comm(rank, world, **options)
        try:
            results[rank] = work(comm)
        except PenstockError as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_every_exchange_brings_the_parts_of_all(world: int) -> None:
    num_exchanges = 200

    def work(comm: SharedComm) -> bool:
        rng = np.random.default_rng(1)
        for i in range(num_exchanges):
            sizes = rng.integers(0, 3000, world).tolist()
            expected = [bytes([(i + rank) % 256]) * size for rank, size in enumerate(sizes)]
            if all_gather(comm, expected[comm.rank], sizes, tag=i) != expected:
                return False
            root = i % world
            if broadcast(comm, root, bytes([root, i % 256]) * 50) != bytes([root, i % 256]) * 50:
                return False
            check(comm.struct.barrier(comm.struct.self, 3))
        return True

    assert on_ranks(world, work) == [True] * world


@pytest.mark.parametrize("size", [0, 1, 65536, 65537, 1_000_003])
def test_messages_between_two_ranks_keep_their_order(size: int) -> None:
    """A ring: each rank sends to the next one, which is behind."""

    def work(comm: SharedComm) -> list[bytes]:
        found = []
        for i in range(3):
            if comm.rank == 0:  # the others receive first: there is room for two pieces on each way
                send(comm, 1, bytes([10 * i]) * size)
            found.append(receive(comm, (comm.rank - 1) % 3, size))
            if comm.rank:
                send(comm, (comm.rank + 1) % 3, bytes([comm.rank + 10 * i]) * size)
        return found

    results = on_ranks(3, work)
    for rank, found in enumerate(results):
        assert found == [bytes([(rank - 1) % 3 + 10 * i]) * size for i in range(3)]


def test_ranks_that_do_different_things_are_told_both() -> None:
    first, second = on_ranks(2, lambda comm: all_gather(comm, b"", [0, 0], tag=7 + comm.rank))
    for error in (first, second):
        assert isinstance(error, UnavailableError)
        assert "0000000000000007" in str(error)
        assert "0000000000000008" in str(error)


def test_groups_of_another_epoch_are_refused() -> None:
    memory = SharedMemory(2)
    old, new = memory.comm(0, 2, epoch=4), memory.comm(1, 2, epoch=5)
    errors: list[PenstockError] = []

    def exchange(comm: SharedComm) -> None:
        try:
            all_gather(comm, b"", [0, 0])
        except UnavailableError as error:
            errors.append(error)

    thread = threading.Thread(target=exchange, args=(old,))
    thread.start()
    exchange(new)
    thread.join()
    assert ["do not run the same step" in str(error) for error in errors] == [True, True]


@pytest.mark.parametrize("delay_s", [0.0, 0.2], ids=["spinning", "asleep"])
def test_an_abort_ends_every_wait(delay_s: float) -> None:
    """Without it, both would wait as long as a test may take."""
    memory = SharedMemory(3)
    comms = [memory.comm(rank, 3, timeout_s=3600.0) for rank in range(3)]
    reasons: list[str] = []

    def wait(comm: SharedComm) -> None:
        with pytest.raises(UnavailableError) as caught:
            all_gather(comm, b"", [0, 0, 0])
        reasons.append(str(caught.value))

    threads = [threading.Thread(target=wait, args=(comm,)) for comm in comms[:2]]
    for thread in threads:
        thread.start()
    time.sleep(delay_s)
    comms[2].abort("rank 2 was killed")
    comms[2].abort("another reason")
    for thread in threads:
        thread.join()
    assert ["rank 2 was killed" in reason for reason in reasons] == [True, True]
    with raises(UnavailableError, match=r"rank 2 .*killed"):
        all_gather(comms[0], b"", [0, 0, 0])


@pytest.mark.parametrize(("reason", "code"), [("closed", "group_closed"), ("a link was closed", "unavailable")])
def test_a_group_that_was_closed_has_its_code(reason: str, code: str) -> None:
    memory = SharedMemory(2)
    comm = memory.comm(0, 2)
    comm.abort(reason)
    with raises(UnavailableError, code=code):
        all_gather(comm, b"", [0, 0])


def test_a_wait_for_a_rank_that_does_not_come_has_an_end() -> None:
    memory = SharedMemory(2)
    comm = memory.comm(0, 2, timeout_s=0.05)
    with raises(UnavailableError, param="ranks", match=r"rank 0 .*50 ms .*rank 1"):
        all_gather(comm, b"", [0, 0])
    with raises(UnavailableError, param="ranks", match=r"rank 0 .*50 ms"):
        receive(memory.comm(1, 2), 0, 8)


def test_ranks_that_open_have_no_timeout() -> None:
    def work(comm: SharedComm) -> str:
        with Context(1, comm=comm) as context:
            time.sleep(0.3 * comm.rank)
            context.agree("")
            time.sleep(0.3 * comm.rank)
            context.agree("")
            return "opened"

    assert on_ranks(3, work, timeout_s=0.05) == ["opened"] * 3


def test_an_abort_ends_the_wait_of_ranks_that_open() -> None:
    memory = SharedMemory(2)
    comms = [memory.comm(rank, 2, timeout_s=0.05) for rank in range(2)]
    ending = threading.Timer(0.2, comms[1].abort, ["rank 1 was killed"])
    ending.start()
    with Context(1, comm=comms[0]) as context, raises(UnavailableError, match="rank 1 was killed"):
        context.agree("")
    ending.join()


def test_ranks_compare_what_they_must_have_in_common() -> None:
    def work(comm: SharedComm) -> None:
        with Context(1, comm=comm) as context:
            context.agree("same")
            context.agree(f"file {comm.rank}")

    for error in on_ranks(2, work):
        assert str(error).startswith(("text: expected equal values on all ranks", "ranks: the group was ended: text:"))
        assert "file 0" in str(error)
        assert "file 1" in str(error)

    def levels(comm: SharedComm) -> None:
        with Context(1, cpu_level="generic" if comm.rank else None, comm=comm) as context:
            context.agree("")

    assert all("cpu_level" in str(error) for error in on_ranks(2, levels))


@pytest.mark.parametrize(
    ("arguments", "field", "message"),
    [
        ({"rank": 2}, "rank", r".*0 to 1, \w+ 2"),
        ({"rank": -1}, "rank", r".*0 to 1, \w+ -1"),
        ({"world": 0}, "world", r".*1 to 64, \w+ 0"),
        ({"world": 65}, "world", r".*1 to 64, \w+ 65"),
        ({"part_bytes": 0}, "part_bytes", ".*1 to"),
        ({"part_bytes": 1 << 50}, "part_bytes", ".*1 to"),
        ({"timeout_s": -1.0}, "timeout_s", r".*, \w+ -1\.0"),
        ({"memory": 0, "fd": 0}, "fd", ".*file"),
        ({"memory": 64}, "memory", ".* 128"),
    ],
)
def test_bad_options_are_refused_by_name(arguments: dict[str, Any], field: str, message: str) -> None:
    memory = SharedMemory(2)
    options = {"rank": 0, "world": 2, "part_bytes": 4096, "memory": memory.address} | arguments
    with raises(InvalidArgumentError, param=field, match=message):
        SharedComm(**options)


def test_bad_calls_are_refused_by_name() -> None:
    memory = SharedMemory(2)
    comm = memory.comm(0, 2)
    too_much = shared_bytes(2, PART_BYTES)
    with raises(InvalidArgumentError, param="bytes"):
        all_gather(comm, b"", [0, too_much])
    for peer in (0, 2, -1):
        with raises(InvalidArgumentError, param="to"):
            send(comm, peer, b"x")
        with raises(InvalidArgumentError, param="from"):
            receive(comm, peer, 1)
    comm.close()
    comm.close()
    with raises(InvalidArgumentError, code="closed"):
        Context(1, comm=comm)
