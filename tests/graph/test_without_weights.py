"""Bundles without weights: the same graph and plan as with them, in any scheme, whole or cut to some layers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from penstock.core import native
from penstock.errors import UnsupportedError
from penstock.graph.bundle import read_graph
from penstock.graph.export import export_bundle
from penstock.graph.passes import assign_scheme
from penstock.graph.without_weights import cut_layers, num_layers, read_source, table_dtype, write_without_weights
from penstock.ops.table import LINEAR_SCHEMES
from penstock.runtime.native import NativeProgram
from penstock.runtime.program import ProgramLimits
from tests.support.command import DEMO, FOLDER
from tests.support.marks import mostly_long


@pytest.mark.long
def test_the_export_without_weights_differs_only_in_them(tmp_path: Path) -> None:
    export_bundle(FOLDER, tmp_path / "hole.psm", scheme="w8a8", without_weights=True)
    hole, whole = (tmp_path / "hole.psm").read_bytes(), DEMO.read_bytes()
    assert len(hole) == len(whole)
    assert read_graph(tmp_path / "hole.psm")[0] == read_graph(DEMO)[0]
    assert read_source(tmp_path / "hole.psm") == read_source(DEMO)
    assert (tmp_path / "hole.psm").stat().st_blocks * 512 < len(whole) // 2


@pytest.mark.parametrize("scheme", mostly_long(LINEAR_SCHEMES, "bf16", "w4a8"))
def test_another_scheme_of_a_bundle_is_that_of_an_export(tmp_path: Path, scheme: str) -> None:
    graph, files = read_source(DEMO)
    write_without_weights(tmp_path / "made.psm", assign_scheme(graph, scheme, table_dtype(graph)), files)
    export_bundle(FOLDER, tmp_path / "exported.psm", scheme=scheme, without_weights=True)
    assert (tmp_path / "made.psm").read_bytes() == (tmp_path / "exported.psm").read_bytes()


@pytest.mark.parametrize("count", [2, 5])
def test_a_cut_graph_runs_with_fewer_weights(tmp_path: Path, count: int) -> None:
    graph, _ = read_source(DEMO)
    cut = cut_layers(graph, count)
    assert num_layers(cut) == count
    sizes = []
    for number, each in enumerate((cut_layers(graph, count - 1) if count > 2 else cut_layers(graph, 3), cut, graph)):
        write_without_weights(tmp_path / f"{number}.psm", each)
        program, model = NativeProgram.open(tmp_path / f"{number}.psm", limits=ProgramLimits(context_len=64))
        sizes.append(model.info.weight_bytes)
        ids = np.arange(3, dtype=np.int32)
        tables = np.zeros((1, 1, 1), np.int32)
        program.run(native.StepBatch(ids, ids, np.array([0, 3], np.int32), tables, ids[2:]))
        assert program.logits().shape == (1, 4096)
        assert not program.logits().any()
        program.close()
    each_layer = (sizes[2] - sizes[1]) / (6 - count)
    assert abs(sizes[1] - sizes[0]) == pytest.approx(each_layer)


def test_a_graph_of_unlike_layers_is_not_cut() -> None:
    graph, _ = read_source(DEMO)
    for state in list(graph.states.values())[1:]:
        state.group = 1
    graph.page_groups = [0, 64]
    assert num_layers(cut_layers(graph, 2)) == 2
    list(graph.states.values())[1].group = 0
    with pytest.raises(UnsupportedError, match="page groups"):
        cut_layers(graph, 2)
    with pytest.raises(UnsupportedError, match="at least two"):
        cut_layers(graph, 1)
    assert cut_layers(graph, 6) is graph
