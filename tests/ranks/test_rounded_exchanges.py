"""Ranks that send activations as integers: the bits of one process, and fewer bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from penstock.bench.rank_layout import exchange_bytes
from penstock.cli.main import main
from penstock.core.comm import SharedComm
from penstock.core.rank_layout import RankLayout
from penstock.errors import InvalidArgumentError, PenstockError, UnsupportedError
from penstock.graph.bundle import read_graph
from penstock.graph.rank_bundle import WHOLE, write_rank_bundle
from penstock.runtime.export_ranks import export_ranks
from penstock.sharding.write import shard_folder
from tests.support.command import DEMO as BUNDLE
from tests.support.errors import raises
from tests.support.faulty_comm import FaultyComm
from tests.support.marks import mostly_long
from tests.support.rank_threads import RankThreads, SharedMemory, logits_of, steps, whole_logits
from tests.support.sharded_folders import DEMO, strategy_of

BundleOf = Callable[[str, str], Path]
PartsOf = Callable[[Path, RankLayout | int], list[Path]]


def run(parts: Sequence[Path], batches: Sequence[Any]) -> tuple[list[bytes], int]:
    """The logits, and the bytes that rank 1 sent in exchanges."""
    memory, sent = SharedMemory(len(parts)), []

    def comm_of(rank: int) -> Any:
        comm: SharedComm = memory.comm(rank, len(parts))
        original = comm.struct.all_gather

        def all_gather(this: int, tag: int, sizes: Any, found: Any) -> int:
            sent.append(sizes[1])
            return int(original(this, tag, sizes, found))

        return FaultyComm(comm, all_gather=all_gather) if rank == 1 else comm

    with RankThreads(parts, comm_of=comm_of) as ranks:
        return logits_of(ranks.program, batches), sum(sent)


def rounded_parts(path: Path, folder: Path, layout: RankLayout | int) -> list[Path]:
    world = layout if isinstance(layout, int) else layout.world
    parts = [folder / f"rounded_{rank}.psm" for rank in range(world)]
    for rank, part in enumerate(parts):
        write_rank_bundle(path, part, rank, layout, rounded=True)
    return parts


@pytest.mark.parametrize("scheme", mostly_long(["w8a8", "w4a8", "w8a16", "w4a16"], "w8a8", "w4a16"))
@pytest.mark.parametrize("family", mostly_long(["llama_head_dim", "mixtral", "gpt_oss", "gpt2"], "mixtral"))
def test_rounded_exchanges_have_the_bits_of_one_process(
    family: str, scheme: str, tmp_path: Path, bundle_of: BundleOf, parts_of: PartsOf
) -> None:
    """What goes into o_proj and into the last linear of a layer is sent as int8 or int16."""
    path = bundle_of(family, scheme)
    batches = steps(len(read_graph(path)[0].page_groups))
    parts = rounded_parts(path, tmp_path, 3)
    graph = read_graph(parts[0])[0]
    nodes = [node for node in graph.nodes if node.op == "all_gather_rounded"]
    assert len(nodes) == 2 * len(graph.states)
    assert {node.attrs["bits"] for node in nodes} == {8 if scheme.endswith("a8") else 16}
    found, num_bytes = run(parts, batches)
    expected, plain_bytes = run(parts_of(path, 3), batches)
    assert found == expected == whole_logits(path, batches)
    assert num_bytes < 0.95 * plain_bytes


def test_the_command_makes_ranks_that_send_less(tmp_path: Path) -> None:
    """`penstock export --rounded`: the logits of one process, and beside them about half of the bytes."""
    batches = steps(1, 4096)
    num_rows = sum(len(step.output_rows) for step in batches)
    whole = whole_logits(BUNDLE, batches)
    sent: dict[str, int] = {}
    for name, options in (("plain", ()), ("rounded", ("--rounded",))):
        assert main(["export", str(BUNDLE), str(tmp_path / name), "--tp", "2", *options]) == 0
        parts = [tmp_path / name / f"rank_{rank}.psm" for rank in range(2)]
        found, num_bytes = run(parts, batches)
        assert found == whole
        of_logits = exchange_bytes(read_graph(parts[1])[0])[-1]
        sent[name] = num_bytes - of_logits * num_rows
    assert 0 < sent["rounded"] < 0.7 * sent["plain"]


def test_rounding_that_applies_nowhere_is_refused(tmp_path: Path, bundle_of: BundleOf) -> None:
    for scheme, layout in (("f32", RankLayout(2)), ("w8a8", RankLayout(1, 2))):
        with raises(InvalidArgumentError, param="rounded", match="no exchange can be rounded"):
            write_rank_bundle(bundle_of("llama_head_dim", scheme), tmp_path / "part.psm", 1, layout, rounded=True)


def test_a_folder_that_is_cut_is_refused(tmp_path: Path) -> None:
    shard_folder(DEMO, tmp_path / "cut", strategy_of(DEMO, 2))
    with raises(UnsupportedError, param="rounded", match="expected the whole model"):
        export_ranks(tmp_path / "cut", tmp_path / "out", 2, rounded=True)


def test_ranks_that_round_and_ranks_that_do_not_differ(tmp_path: Path, bundle_of: BundleOf, parts_of: PartsOf) -> None:
    """They have another checksum of the whole, which ranks compare first; without that check the step ends."""
    path = bundle_of("llama_head_dim", "w8a8")
    parts = [parts_of(path, 2)[0], rounded_parts(path, tmp_path, 2)[1]]
    first, second = (read_graph(part)[0].properties[WHOLE] for part in parts)
    assert first != second
    with pytest.raises(PenstockError), RankThreads(parts) as ranks:
        logits_of(ranks.program, steps(1))
