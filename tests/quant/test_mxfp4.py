"""Weights in MXFP4: exactly what transformers reads, in a folder of gpt-oss, and refused elsewhere."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from penstock.checkpoint.folder import Checkpoint
from penstock.checkpoint.gguf.element_types import ELEMENT_TYPES, dequantize
from penstock.checkpoint.quantize import quantize_checkpoint
from penstock.errors import InvalidFileError, UnsupportedError
from penstock.graph.bundle import read_graph
from penstock.graph.export import export_bundle
from penstock.graph.ir import Layout
from penstock.graph.rank_bundle import write_rank_bundle
from penstock.models.mapped import open_mapped
from penstock.quant.mxfp4 import mxfp4_to_bf16
from penstock.runtime.eager import EagerProgram
from penstock.runtime.program import ProgramLimits
from penstock.sharding.write import shard_folder
from tests.models.steps import run_whole
from tests.support.errors import raises
from tests.support.families import prompt, save
from tests.support.rank_threads import RankThreads, logits_of, steps, whole_logits
from tests.support.sharded_folders import strategy_of

CONFIG = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}


def random_blocks(
    *shape: int, seed: int = 0, scales: tuple[int, int] = (118, 124)
) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks [*shape, 16], and scales of the given range [*shape]."""
    random = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (*shape, 16), generator=random, dtype=torch.uint8)
    return blocks, torch.randint(*scales, shape, generator=random, dtype=torch.uint8)


def test_values_are_those_of_transformers() -> None:
    blocks, scales = random_blocks(1, 256, 3, scales=(1, 252))
    expected = convert_moe_packed_tensors(blocks, scales)[0].T.contiguous().view(torch.int16).numpy().view(np.uint16)
    assert (mxfp4_to_bf16(blocks[0].numpy(), scales[0].numpy()) == expected).all()


def test_every_value_of_the_format() -> None:
    """The first row of the specification's table, and its exponents, the smallest and the largest too."""
    codes = np.arange(16, dtype=np.uint8)
    blocks = (codes | codes[::-1] << 4).reshape(1, 1, 16)
    numbers = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    numbers = np.concatenate([numbers, -numbers])
    for scale in (0, 1, 126, 127, 252):
        bits = mxfp4_to_bf16(blocks, np.array([[scale]], np.uint8)).astype(np.uint32) << 16
        expected = np.ldexp(np.stack([numbers, numbers[::-1]], axis=1).reshape(-1), scale - 127)
        assert (bits.view(np.float32)[0] == expected).all()


def test_the_scale_that_is_no_number_is_refused() -> None:
    blocks, scales = random_blocks(2, 1)
    scales[1] = 255
    with raises(InvalidFileError, param="scales", match="got 255"):
        mxfp4_to_bf16(blocks.numpy(), scales.numpy())


def packed_folder(folder: Path) -> tuple[Path, Path]:
    """Folders of gpt_oss: with experts in MXFP4, and with the same ones as transformers reads them."""
    save("gpt_oss", folder / "floats")
    tensors = load_file(folder / "floats" / "model.safetensors")
    packed = dict(tensors)
    for index, name in enumerate(sorted(tensors)):
        if name.endswith(("gate_up_proj", "down_proj")):
            num_experts, cols, rows = tensors[name].shape
            blocks, scales = random_blocks(num_experts, rows, cols // 32, seed=index)
            del packed[name]
            packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            tensors[name] = convert_moe_packed_tensors(blocks, scales).float()
    save_file(tensors, folder / "floats" / "model.safetensors", {"format": "pt"})
    (folder / "packed").mkdir()
    config = json.loads((folder / "floats" / "config.json").read_text()) | {"quantization_config": CONFIG}
    (folder / "packed" / "config.json").write_text(json.dumps(config))
    save_file(packed, folder / "packed" / "model.safetensors", {"format": "pt"})
    return folder / "floats", folder / "packed"


def test_a_folder_computes_what_its_floats_do(tmp_path: Path) -> None:
    limits = ProgramLimits(max_tokens=128, max_requests=4, max_rows=128, num_pages=12, context_len=256)
    logits = []
    for path in packed_folder(tmp_path):
        program = EagerProgram(path, scheme="f32", threads=1, limits=limits)
        logits.append(run_whole(program, prompt(33)).tobytes())
        program.close()
    assert logits[0] == logits[1]
    own = open_mapped(tmp_path / "packed")
    name = "model.layers.1.mlp.experts.2.down_proj.weight"
    assert (own.dtype, own.tensors[name].dtype, own.tensors[name].shape) == ("f32", "bf16", (160, 96))
    own.release(name, 0, 64)
    own.release(name)


def test_a_folder_keeps_its_blocks(tmp_path: Path) -> None:
    """Without a scheme the experts keep their 4 bits, with exact values; only the rounding of inputs differs."""
    floats, packed = packed_folder(tmp_path)
    assert Checkpoint.open(packed).choose_scheme(None) == "mxfp4"
    own, name = open_mapped(packed), "model.layers.1.mlp.experts.2.down_proj.weight"
    blocks = own.read_blocks(name)
    assert (own.block_scheme(name), blocks.shape, own.stored_bytes(name)) == ("mxfp4", (160, 51), 160 * 51)
    expected = load_file(floats / "model.safetensors")["model.layers.1.mlp.experts.down_proj"][2].T.numpy()
    assert (dequantize(ELEMENT_TYPES[39], blocks.reshape(-1)).reshape(160, 96) == expected).all()
    limits = ProgramLimits(max_tokens=128, max_requests=4, max_rows=128, num_pages=12, context_len=256)
    logits = []
    for path, scheme in ((floats, "f32"), (packed, None)):
        program = EagerProgram(path, scheme=scheme, threads=1, limits=limits)
        logits.append(run_whole(program, prompt(33)))
        assert program.info.scheme == (scheme or "mxfp4")
        program.close()
    error = np.abs(logits[1] - logits[0]).max() / np.abs(logits[0]).max()
    assert 0 < error < 0.05


def test_ranks_keep_the_blocks(tmp_path: Path) -> None:
    """A rank has some rows of each expert, whose blocks are those of the whole: as few bytes, and the same bits."""
    packed, whole = packed_folder(tmp_path)[1], tmp_path / "whole.psm"
    export_bundle(packed, whole)
    shard_folder(packed, tmp_path / "cut", strategy_of(packed, 2))
    own_bytes, batches = 0, steps(len(read_graph(whole)[0].page_groups))
    parts = [tmp_path / f"{rank}.psm" for rank in range(2)]
    for rank, part in enumerate(parts):
        assert export_bundle(tmp_path / "cut", part, rank=rank).scheme == "mxfp4"
        write_rank_bundle(whole, tmp_path / "cut.psm", rank, 2)
        graph, expected = (read_graph(path)[0] for path in (part, tmp_path / "cut.psm"))
        assert graph.weights == expected.weights
        own_bytes += sum(row.num_bytes for row in graph.weights.values() if row.layout is Layout.T16_MXFP4)
    blocks = [row for row in read_graph(whole)[0].weights.values() if row.layout is Layout.T16_MXFP4]
    assert own_bytes == sum(row.num_bytes for row in blocks) > 0
    with RankThreads(parts) as ranks:
        assert logits_of(ranks.program, batches) == whole_logits(whole, batches)


def test_a_folder_is_quantized_again(tmp_path: Path) -> None:
    packed = packed_folder(tmp_path)[1]
    quantize_checkpoint(open_mapped(packed), tmp_path / "quantized", "w4a8")
    limits = ProgramLimits(max_tokens=128, max_requests=4, max_rows=128, num_pages=12, context_len=256)
    logits = []
    for path in (packed, tmp_path / "quantized"):
        program = EagerProgram(path, scheme="w4a8", threads=1, limits=limits)
        logits.append(run_whole(program, prompt(20)).tobytes())
        program.close()
    assert logits[0] == logits[1]


def damaged(folder: Path, name: str, change: torch.Tensor) -> Path:
    packed = packed_folder(folder)[1]
    tensors = load_file(packed / "model.safetensors")
    assert name in tensors
    save_file(tensors | {name: change}, packed / "model.safetensors", {"format": "pt"})
    return packed


BAD = {
    "blocks": (torch.zeros(6, 160, 3, 15, dtype=torch.uint8), "_blocks", "16 the last, got"),
    "scales": (torch.zeros(6, 160, 4, dtype=torch.uint8), "_scales", r"U8 of \[6, 160, 3\], got \[6, 160, 4\]"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_wrong_shape_names_the_tensor(case: str, tmp_path: Path) -> None:
    change, end, fact = BAD[case]
    name = f"model.layers.0.mlp.experts.down_proj{end}"
    with raises(InvalidFileError, param=name, match=fact):
        open_mapped(damaged(tmp_path, name, change))


def test_another_family_is_refused_by_name(tmp_path: Path) -> None:
    folder = save("mixtral", tmp_path / "model")
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": CONFIG}
    (folder / "config.json").write_text(json.dumps(config))
    limits = ProgramLimits(max_tokens=8, max_requests=1)
    assert Checkpoint.open(folder).scheme is None
    with raises(UnsupportedError, param="quantization_config", match="'mxfp4' is not supported for model_type mixtral"):
        EagerProgram(folder, limits=limits)
