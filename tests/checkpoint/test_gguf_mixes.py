"""Files with llama-quantize's mixes of types keep each tensor at its own precision, whatever its number of columns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from penstock import LLM
from penstock.checkpoint.folder import Checkpoint
from penstock.checkpoint.gguf.memory_types import tensor_groups
from penstock.core.metadata import read_metadata
from penstock.core.native import Model
from penstock.graph.export import export_bundle
from penstock.graph.metadata import decode_metadata
from tests.support.gguf_mixes import FILE_TYPES, HIDDEN_SIZES, types_of, write_mix
from tests.support.gguf_models import write_gguf
from tests.support.marks import in_turn

IDS = [3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59]


def layouts_of(bundle: Path) -> dict[str, str]:
    """Return the layout of each matrix by the names of its tensors."""
    with Model.open(bundle) as model:
        graph, _ = decode_metadata(read_metadata(bundle, model.stamp))
    return {
        part.name: weight.layout.name for weight in graph.weights.values() if weight.rows > 1 for part in weight.parts
    }


def logits_of(source: Path, bundle: Path, scheme: str | None) -> np.ndarray:
    export_bundle(source, bundle, scheme=scheme)
    with LLM(bundle, kv_cache="f32", threads=2) as llm:
        return llm.logits(IDS).astype(np.float64)


@pytest.mark.parametrize(("hidden", "file_type"), in_turn(HIDDEN_SIZES, list(FILE_TYPES)))
def test_a_mix_is_held_as_it_is_stored(tmp_path: Path, hidden: int, file_type: str) -> None:
    types = write_mix(tmp_path / "model.gguf", hidden, file_type)
    check_mix(tmp_path, types)


@pytest.mark.long
@pytest.mark.parametrize(("hidden", "file_type"), [(640, "Q3_K_M"), (896, "Q2_K")])
def test_a_mix_of_older_versions_is_held_as_it_is_stored(tmp_path: Path, hidden: int, file_type: str) -> None:
    types = write_mix(tmp_path / "model.gguf", hidden, file_type, is_older=True)
    check_mix(tmp_path, types)


def check_mix(folder: Path, types: dict[str, str]) -> None:
    """Check that each matrix has the layout of its type, that weights take at most 1.1 of the file, and that the logits
    are those of the same values in float32 but for the rounding of activations."""
    path, bundle = folder / "model.gguf", folder / "model.psm"
    own = logits_of(path, bundle, None)
    layouts = layouts_of(bundle)
    checkpoint = Checkpoint.open(path)
    matrices = [name for name, info in checkpoint.tensors.items() if len(info.shape) == 2]
    assert len(matrices) == len(types) == len(layouts)
    assert sorted(layouts.values()) == sorted(f"T16_{kind.upper()}" for kind in types.values())
    for name in matrices:
        assert layouts[name] == f"T16_{str(checkpoint.block_scheme(name)).upper()}"
    groups = tensor_groups(checkpoint)
    with Model.open(bundle) as model:
        assert model.info.weight_bytes <= 1.1 * path.stat().st_size
        assert abs(sum(group.memory_bytes for group in groups) - model.info.weight_bytes) < 4096  # alignment
    assert all(group.file_type == group.memory_type and not group.reason for group in groups)
    assert sum(group.num_tensors for group in groups) == len(checkpoint.tensors)
    exact = logits_of(path, folder / "f32.psm", "f32")
    logs = [values - np.logaddexp.reduce(values, axis=1, keepdims=True) for values in (own, exact)]
    assert 0 < (np.exp(logs[1]) * (logs[1] - logs[0])).sum(axis=1).mean() < 3e-4


@pytest.mark.parametrize(
    ("table", "head"), [("f16", "q8_0"), pytest.param("bf16", "bf16", marks=pytest.mark.long),
                        pytest.param("q8_0", "f16", marks=pytest.mark.long)]
)  # fmt: skip
def test_a_table_and_a_head_of_floats_keep_their_type(tmp_path: Path, table: str, head: str) -> None:
    path, bundle = tmp_path / "model.gguf", tmp_path / "model.psm"
    write_mix(path, 1152, "Q4_K_M", changes={"token_embd": table, "output": head})
    export_bundle(path, bundle)
    layouts = layouts_of(bundle)
    assert layouts["model.embed_tokens.weight"] == f"{'T16' if table == 'q8_0' else 'ROWS'}_{table.upper()}"
    assert layouts["lm_head.weight"] == f"T16_{head.upper()}"
    with LLM(bundle) as llm, LLM(path, mode="eager") as eager:
        assert np.array_equal(llm.logits(IDS), eager.logits(IDS))


def test_inspect_shows_what_memory_holds(tmp_path: Path, penstock_command: Any) -> None:
    path = tmp_path / "model.gguf"
    types = write_mix(path, 640, "Q4_K_M")
    found = json.loads(penstock_command("inspect", path, "--json").stdout)
    groups = {(group["name"], group["file_type"]): group for group in found["tensors"]}
    assert (
        groups["blk.*.attn_q.weight", "Q5_0"]["num_tensors"] == groups["output_norm.weight", "F32"]["num_tensors"] + 1
    )
    assert groups["blk.*.attn_v.weight", "Q8_0"]["shape"] == [64, 640]
    assert {kind for _, kind in groups} == {kind.upper() for kind in types.values()} | {"F32"}
    assert found["memory_bytes"] == sum(group["memory_bytes"] for group in found["tensors"])
    text = penstock_command("inspect", path).stdout
    assert any(line.split()[:2] == ["blk.*.ffn_down.weight", "640"] for line in text.splitlines())


def test_inspect_says_why_a_matrix_becomes_float32(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    table = np.ones((125696, 32), np.float32)
    arrays = {"token_embd.weight": table, "output.weight": table, "output_norm.weight": np.ones(32, np.float32)}
    keys = {"attention.layer_norm_rms_epsilon": 1e-6, "embedding_length": 32}
    write_gguf(path, gguf.MODEL_ARCH.BAICHUAN, arrays, keys, gguf.GGMLQuantizationType.Q8_0)
    checkpoint = Checkpoint.open(path)
    (head,) = [group for group in tensor_groups(checkpoint) if group.name == "output.weight"]
    assert (head.file_type, head.memory_type, head.reason) == ("Q8_0", "F32", "each row is divided by its length")
    assert head.memory_bytes == 4 * 125696 * 32
    assert checkpoint.widening_note("q8_0").startswith("lm_head.weight becomes float32")
    assert not checkpoint.widening_note("f32")


def test_types_fall_back_where_columns_are_no_whole_blocks() -> None:
    odd, even = types_of(896, "Q4_K_M"), types_of(1536, "Q4_K_M")
    assert (odd["token_embd"], odd["blk.0.attn_q"], odd["blk.1.ffn_down"]) == ("q8_0", "q5_0", "q8_0")
    assert (even["token_embd"], even["blk.0.attn_q"], even["blk.0.attn_output"]) == ("q4_k", "q4_k", "q5_0")
    assert even["output"] == "q6_k"
    assert types_of(640, "Q3_K_M", is_older=True)["blk.0.attn_q"] == "q4_0"
