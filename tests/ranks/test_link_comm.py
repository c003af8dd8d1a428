"""Ranks whose messages Python carries: equal bits in a pipeline, and what ends a group."""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.core.link_comm import PART, ROWS, LinkComm
from penstock.core.rank_layout import RankLayout
from penstock.errors import UnavailableError
from tests.support.errors import raises
from tests.support.rank_threads import PART_BYTES, RankThreads, logits_of, steps, whole_logits

BundleOf = Callable[[str, str], Path]
PartsOf = Callable[[Path, RankLayout], list[Path]]


class Network:
    """Carries the messages of ranks in one process; ``change`` may return other bytes for a message, or None."""

    def __init__(
        self,
        world: int,
        change: Callable[[int, int, int, bytes], bytes | None] | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        """``timeout_s``: how long rank 0 waits; the others wait longer than a test may take."""
        self.comms = [self._comm(rank, world, 600.0 if rank else timeout_s) for rank in range(world)]
        self._change = change

    def _comm(self, rank: int, world: int, timeout_s: float) -> LinkComm:
        def transmit(kind: int, target: int, data: bytes) -> bool:
            sent = data if self._change is None else self._change(kind, rank, target, data)
            if sent is None:
                return False
            self.comms[target].deliver(kind, rank, sent)
            return True

        def end_all(reason: str) -> None:
            for comm in self.comms:
                comm.end(reason)

        return LinkComm(rank, world, PART_BYTES, transmit, end_all, timeout_s=timeout_s)


@pytest.mark.parametrize("num_stages", [2, 3])
def test_stages_compute_the_same_logits(num_stages: int, bundle_of: BundleOf, parts_of: PartsOf) -> None:
    path = bundle_of("llama_head_dim", "w8a8")
    layout = RankLayout(pp=num_stages)
    network = Network(layout.world)
    with RankThreads(parts_of(path, layout), comm_of=network.comms.__getitem__, stage_ranks=1) as ranks:
        assert logits_of(ranks.program, steps(1)) == whole_logits(path, steps(1))
    assert not ranks.errors


def shorten(kind: int, source: int, target: int, data: bytes) -> bytes | None:
    return data[:-4] if (kind, source, target) == (ROWS, 1, 2) and len(data) > 4096 else data


def lose(kind: int, source: int, target: int, data: bytes) -> bytes | None:
    return None if (kind, source, target) == (ROWS, 1, 2) else data


@pytest.mark.parametrize(
    ("change", "message"), [(shorten, r"rank 2 expected \d+ bytes from rank 1"), (lose, "rank 1 lost its connection")]
)
def test_a_fault_ends_the_group(
    change: Callable[[int, int, int, bytes], bytes | None], message: str, bundle_of: BundleOf, parts_of: PartsOf
) -> None:
    path = bundle_of("llama_head_dim", "w8a8")
    layout = RankLayout(pp=2)
    network = Network(layout.world, change)
    with (
        RankThreads(parts_of(path, layout), comm_of=network.comms.__getitem__, stage_ranks=1) as ranks,
        raises(UnavailableError, param="ranks", match=message),
    ):
        logits_of(ranks.program, steps(1))


@pytest.mark.parametrize(
    ("theirs", "sent"),
    [
        ((8, 0), "rank 1 sent tag 0000000000000008 with 0 bytes"),
        ((7, 4), "rank 1 sent tag 0000000000000007 with 4 bytes"),
        (None, "rank 1 sent 3 bytes without a tag"),
    ],
)
def test_ranks_in_different_steps_are_named_with_both(theirs: tuple[int, int] | None, sent: str) -> None:
    comm = Network(2).comms[0]
    comm.deliver(PART, 1, b"abc" if theirs is None else struct.pack("<Q", theirs[0]) + bytes(theirs[1]))
    with pytest.raises(UnavailableError) as caught:
        comm._exchange(7, [0, 0])
    text = str(caught.value)
    assert "rank 0 is in the exchange with tag 0000000000000007 and expects 0 bytes" in text
    assert sent in text


def test_a_rank_that_waits_too_long_ends_the_group(bundle_of: BundleOf, parts_of: PartsOf) -> None:
    path = bundle_of("llama_head_dim", "w8a8")
    layout = RankLayout(pp=2)
    lock = threading.Event()

    def delay(kind: int, source: int, target: int, data: bytes) -> bytes:
        if target == 0 and kind == ROWS:
            lock.wait()
        return data

    network = Network(layout.world, delay, timeout_s=2.0)
    with RankThreads(parts_of(path, layout), comm_of=network.comms.__getitem__, stage_ranks=1) as ranks:
        try:
            with raises(UnavailableError, param="ranks", match="rank 0 waited 2000 ms for rank 2"):
                logits_of(ranks.program, steps(1))
        finally:
            lock.set()
