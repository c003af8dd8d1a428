"""Nodes store what ranks send straight into the memory of the exchange."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.core.comm import SharedComm
from tests.support.core_steps import batch
from tests.support.faulty_comm import FaultyComm
from tests.support.rank_threads import PART_BYTES, RankThreads, SharedMemory, logits_of, whole_logits

BundleOf = Callable[[str, str], Path]
PartsOf = Callable[[Path, int], list[Path]]
UNTOUCHED = b"\xa5" * 16
# Steps of one token, so that a node of the list runs once.
STEPS = [batch([(i, [7 + i], (0,))], output_rows=np.array([0], np.int32)) for i in range(3)]
LAYERS = 2


class _Watch:
    """Marks the part of each exchange before it is written, and counts the parts that are full before the copy.

    ``has_one_part``: each exchange has the same part, as a transport may have it that copies what it sends.
    """

    def __init__(self, comm: SharedComm, has_one_part: bool) -> None:
        self._part, self._gather = comm.struct.part, comm.struct.all_gather
        self._own = ctypes.create_string_buffer(PART_BYTES + 64)
        self._at = -(-ctypes.addressof(self._own) // 64) * 64 if has_one_part else 0
        self._seen: list[bytes] = []  # the beginning of the part at each call since the last exchange
        self.num_direct = 0
        self.comm = FaultyComm(comm, part=self._look, all_gather=self._exchange)

    def _look(self, this: int) -> int:
        at = self._at or self._part(this)
        if not self._seen:
            ctypes.memmove(at, UNTOUCHED, len(UNTOUCHED))
        self._seen.append(ctypes.string_at(at, len(UNTOUCHED)))
        return int(at)

    def _exchange(self, this: int, tag: int, sizes: Any, parts: Any) -> int:
        # The part is asked for after the last exchange, before the copy, and before this exchange.
        self.num_direct += len(self._seen) == 3 and self._seen[1] != UNTOUCHED
        if self._at:
            ctypes.memmove(self._part(this), self._at, sizes[1])
        status = int(self._gather(this, tag, sizes, parts))
        self._seen.clear()
        return status


def num_direct(path: Path, parts: list[Path], has_one_part: bool = False) -> int:
    """How many exchanges of rank 1 need no copy in; the logits are those of one process."""
    memory, watches = SharedMemory(2), []

    def comm_of(rank: int) -> Any:
        comm = memory.comm(rank, 2)
        if rank == 0:
            return comm
        watches.append(_Watch(comm, has_one_part))
        return watches[0].comm

    with RankThreads(parts, comm_of=comm_of) as ranks:
        assert logits_of(ranks.program, STEPS) == whole_logits(path, STEPS)
    return watches[0].num_direct


@pytest.mark.parametrize("scheme", ["bf16", "w8a8"])
def test_nodes_store_into_the_exchange(scheme: str, bundle_of: BundleOf, parts_of: PartsOf) -> None:
    """Attention, o_proj, the product of gate and up, and down_proj; rows of the table are written there anyway."""
    path = bundle_of("llama_head_dim", scheme)
    assert num_direct(path, parts_of(path, 2)) == 4 * LAYERS * len(STEPS)


def test_a_transport_with_one_part_gets_copies(bundle_of: BundleOf, parts_of: PartsOf) -> None:
    """Threads may still read what the rank has sent when the node for the next exchange begins."""
    path = bundle_of("llama_head_dim", "bf16")
    assert num_direct(path, parts_of(path, 2), has_one_part=True) == 0
