"""Networks with latent attention: one row per token in pages, and weights per head in every scheme."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from penstock.checkpoint.quantize import quantize_checkpoint
from penstock.config import ConfigReader
from penstock.errors import InvalidFileError
from penstock.graph.bundle import read_graph
from penstock.graph.export import export_bundle
from penstock.graph.passes.shard import shard
from penstock.hub.memory_need import ModelShape
from penstock.models.loader import load_network, save_network
from penstock.models.mapped import open_mapped
from penstock.runtime.eager import EagerProgram
from penstock.runtime.native import NativeProgram
from penstock.runtime.program import ProgramLimits
from tests.models.steps import relative_error, run_whole
from tests.support.errors import raises
from tests.support.families import expected_logits, prompt, save
from tests.support.marks import mostly_long

ROW = 40 + 12  # numbers of a token in each of three layers


def limits_of(kv_layout: str) -> ProgramLimits:
    return ProgramLimits(128, 4, max_rows=128, num_pages=12, context_len=256, kv_layout=kv_layout)


@pytest.mark.parametrize(
    ("scheme", "kv_layout"),
    mostly_long(
        [("bf16", "bf16"), ("w8a8", "int8"), ("w4a8", "bf16"), ("w8a16", "f32"), ("w4a16", "bf16"), ("f16", "int8")],
        ("w8a8", "int8"),
    ),
)
def test_graph_equals_eager_in_schemes(scheme: str, kv_layout: str, tmp_path: Path) -> None:
    folder, limits = save("deepseek_v3", tmp_path / "folder"), limits_of(kv_layout)
    export_bundle(folder, tmp_path / "model.psm", scheme=scheme)
    native, _ = NativeProgram.open(tmp_path / "model.psm", threads=2, limits=limits)
    eager = EagerProgram(folder, scheme=scheme, threads=1, limits=limits)
    token_ids = prompt(70)
    whole = run_whole(native, token_ids)
    assert whole.tobytes() == run_whole(eager, token_ids).tobytes() == run_whole(native, token_ids, 7).tobytes()
    expected = expected_logits("deepseek_v3", token_ids)
    errors = [relative_error(row, other) for row, other in zip(whole, expected, strict=True)]
    assert np.median(errors) < (0.5 if "4" in scheme else 0.1)  # rounding changes the experts of some tokens
    native.close()
    eager.close()


def test_pages_hold_one_row_per_token(tmp_path: Path) -> None:
    folder = save("deepseek_v3", tmp_path / "folder")
    export_bundle(folder, tmp_path / "model.psm", scheme="f32")
    config = ConfigReader(json.loads((folder / "config.json").read_text()))
    shape = ModelShape.of(config, (folder / "model.safetensors").stat().st_size)
    for kv_layout, row_bytes in (("f32", 4 * ROW), ("bf16", 2 * ROW), ("int8", ROW + 4)):
        native, _ = NativeProgram.open(tmp_path / "model.psm", threads=1, limits=limits_of(kv_layout))
        (plan,) = native.info.plans
        native.close()
        assert plan.kv_page_bytes == 3 * 32 * row_bytes
        assert plan.kv_bytes == 12 * plan.kv_page_bytes
        assert shape.kv_bytes(12 * 32, kv_layout) == plan.kv_bytes


def test_layers_behind_the_last_are_left_out(tmp_path: Path) -> None:
    folder = save("deepseek_v3", tmp_path / "folder")
    tensors = load_file(folder / "model.safetensors")
    extra = {"model.layers.3.eh_proj.weight": tensors["lm_head.weight"].clone()}
    save_file(tensors | extra, folder / "model.safetensors")
    program = EagerProgram(folder, threads=1, limits=limits_of("f32"))
    token_ids = prompt(33)
    assert relative_error(run_whole(program, token_ids), expected_logits("deepseek_v3", token_ids)) < 1e-4
    program.close()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 0}))
    with raises(InvalidFileError, match=r"model\.layers\.3\.eh_proj\.weight"):
        EagerProgram(folder, threads=1, limits=limits_of("f32"))


def test_saved_and_quantized_folders(tmp_path: Path) -> None:
    """They have the parameters of each head under the network's own names."""
    folder, token_ids = save("minicpm3", tmp_path / "folder"), prompt(33)
    save_network(load_network(folder), tmp_path / "saved")
    quantize_checkpoint(open_mapped(folder), tmp_path / "quantized", "w8a8")
    assert "model.layers.0.self_attn.k_up_proj.weight" in load_file(tmp_path / "saved" / "model.safetensors")
    for name, source, scheme in (("saved", folder, "f32"), ("quantized", folder, "w8a8")):
        again = EagerProgram(tmp_path / name, threads=1, limits=limits_of("f32"))
        first = EagerProgram(source, scheme=scheme, threads=1, limits=limits_of("f32"))
        assert run_whole(again, token_ids).tobytes() == run_whole(first, token_ids).tobytes()
        again.close()
        first.close()


def test_latents_are_whole_on_each_rank(tmp_path: Path) -> None:
    """Its rows are not divided into heads, and its linears are: so weights are cut, and pages are not."""
    folder = save("deepseek_v3", tmp_path / "folder")
    export_bundle(folder, tmp_path / "model.psm", scheme="f32")
    graph = read_graph(tmp_path / "model.psm")[0]
    for contexts in (1, 2):
        part = shard(graph, 0, 2, contexts=contexts)[0]
        assert part.states == graph.states
        assert "context_attention" not in {node.op for node in part.nodes}
        assert sum(weight.rows for weight in part.weights.values()) < sum(w.rows for w in graph.weights.values())
