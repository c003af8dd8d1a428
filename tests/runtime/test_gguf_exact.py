"""``penstock quantize --exportable``: GGUF files that have the values of the folder to the last bit."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from penstock import LLM, PTQ, PTQConfig, RoundToNearest, load_network
from penstock.calibration.quantize import DataOptions, quantize_with_data
from penstock.checkpoint.convert import Conversion
from penstock.checkpoint.folder import Checkpoint
from penstock.checkpoint.gguf.element_types import q6_k_values
from penstock.checkpoint.quantize import quantize_checkpoint
from penstock.errors import InvalidArgumentError, UnsupportedError
from penstock.models.mapped import open_mapped
from penstock.quant.matrix import values_of
from penstock.quant.scheme import find_scheme, quantizing_scheme
from penstock.runtime.convert import convert
from tests.support.errors import raises
from tests.support.families import prompt, save
from tests.support.sharded_folders import DEMO

Kind = gguf.GGMLQuantizationType
PARTS = {"attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
         "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
         "ffn_down": "mlp.down_proj"}  # fmt: skip


def folder_values(folder: Checkpoint, name: str) -> np.ndarray:
    """The values that kernels compute with."""
    if folder.block_scheme(name) is not None:
        return q6_k_values(folder.read_blocks(name))
    rows = folder.read_quantized(name, folder.logical_shape(name)[1])
    return values_of(rows, find_scheme("w8a8" if rows.groups is None else "w4a8"))


def file_values(file: Path) -> dict[str, tuple[Any, np.ndarray]]:
    """The types and values of the tensors of a GGUF file, as its own package computes them."""
    tensors = gguf.GGUFReader(file).tensors
    return {tensor.name: (tensor.tensor_type, gguf.dequantize(tensor.data, tensor.tensor_type)) for tensor in tensors}


def check_values(folder: Checkpoint, file: Path, body: Any, rest: Any) -> None:
    """Compare a folder of the demo model; ``rest``: the type of ``down``, whose columns are no multiple of 256."""
    values, heads = file_values(file), folder.config.int("num_attention_heads")
    kv_heads = folder.config.int("num_key_value_heads")
    for name, (kind, found) in values.items():
        match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name)
        if match is None or match[2] not in PARTS:
            continue
        expected = folder_values(folder, f"model.layers.{match[1]}.{PARTS[match[2]]}.weight")
        if count := {"attn_q": heads, "attn_k": kv_heads}.get(match[2]):
            expected = expected.reshape(count, 2, -1, expected.shape[1]).swapaxes(1, 2).reshape(expected.shape)
        assert kind == (rest if match[2] == "ffn_down" else body), name
        assert found.dtype == np.float32
        assert np.array_equal(found, expected), name
    embedding = values["token_embd.weight"]
    assert np.array_equal(embedding[1], folder_values(folder, "model.embed_tokens.weight"))


@pytest.mark.parametrize(
    ("scheme", "body", "rest"),
    [("w4a8", Kind.Q4_K, Kind.Q8_0), ("w4a16", Kind.Q4_K, Kind.Q8_0), ("w8a8", Kind.Q8_0, Kind.Q8_0)],
)
def test_rounded_weights_are_the_same(tmp_path: Path, scheme: str, body: Any, rest: Any) -> None:
    quantize_checkpoint(DEMO, tmp_path / "own", quantizing_scheme(scheme, exportable=True))
    folder = Checkpoint.open(tmp_path / "own")
    assert folder.config.values["quantization_config"]["recipe"] == {"method": "rtn", "exportable": True}
    report = convert(folder.folder, tmp_path / "own.gguf", Conversion())
    check_values(folder, tmp_path / "own.gguf", body, rest)
    has_rest = body != rest
    assert report.note.startswith("blk.0.ffn_down.weight and 5 more tensors are Q8_0") if has_rest else not report.note
    with LLM(tmp_path / "own.gguf") as llm, LLM(folder.folder) as source:
        error = llm.logits(prompt(20)) - source.logits(prompt(20))
        assert np.square(error).mean() < 0.05 * np.square(source.logits(prompt(20))).mean()


@pytest.mark.parametrize("method", ["imatrix", "gptq", "smooth+gptq"])
def test_weights_with_data_are_the_same(tmp_path: Path, method: str) -> None:
    options = DataOptions(method, DEMO / "train.py", 1024, exportable=True)
    report = quantize_with_data(DEMO, tmp_path / "own", "w4a8", options)
    assert report.recipe["exportable"] is True
    convert(tmp_path / "own", tmp_path / "own.gguf", Conversion())
    check_values(Checkpoint.open(tmp_path / "own"), tmp_path / "own.gguf", Kind.Q4_K, Kind.Q8_0)


def test_a_head_in_blocks_stays(tmp_path: Path) -> None:
    quantize_checkpoint(DEMO, tmp_path / "own", quantizing_scheme("w4a8", exportable=True), head="q6_k")
    convert(tmp_path / "own", tmp_path / "own.gguf", Conversion())
    check_values(Checkpoint.open(tmp_path / "own"), tmp_path / "own.gguf", Kind.Q4_K, Kind.Q8_0)
    assert file_values(tmp_path / "own.gguf")["token_embd.weight"][0] == Kind.Q6_K


def test_ptq_writes_the_same_folder(tmp_path: Path) -> None:
    config = PTQConfig(weight_dtype="int4", act_dtype="int8", algo_args={"exportable": True})
    network = load_network(DEMO)
    ptq = PTQ(config)
    ptq.apply(network)
    ptq.convert(network)
    ptq.save(tmp_path / "ptq")
    quantize_checkpoint(DEMO, tmp_path / "own", quantizing_scheme("w4a8", exportable=True))
    files = [load_file(tmp_path / name / "model.safetensors") for name in ("ptq", "own")]
    assert files[0].keys() == files[1].keys()
    for name, values in files[0].items():
        assert torch.equal(values, files[1][name]), name
    sections = [Checkpoint.open(tmp_path / name).config.values["quantization_config"] for name in ("ptq", "own")]
    assert sections[0] == sections[1]
    with raises(InvalidArgumentError, param="algo_args.exportable"):
        RoundToNearest(config).apply(load_network(DEMO))


def test_fused_rows_are_the_same(tmp_path: Path) -> None:
    quantize_checkpoint(
        open_mapped(save("phi3", tmp_path / "floats")), tmp_path / "own", quantizing_scheme("w4a8", exportable=True)
    )
    convert(tmp_path / "own", tmp_path / "own.gguf", Conversion())
    folder = Checkpoint.open(tmp_path / "own")
    kind, found = file_values(tmp_path / "own.gguf")["blk.0.attn_qkv.weight"]
    parts = [folder_values(folder, f"model.layers.0.self_attn.{part}_proj.weight") for part in "qkv"]
    assert kind == Kind.Q8_0
    assert np.array_equal(found, np.concatenate(parts))


def test_other_folders_are_refused(tmp_path: Path) -> None:
    quantize_checkpoint(DEMO, tmp_path / "own", "w4a8")
    quantize_checkpoint(DEMO, tmp_path / "rotated", "w4a8_h32")
    quantize_checkpoint(DEMO, tmp_path / "exportable", quantizing_scheme("w8a8", exportable=True))
    for name in ("own", "rotated"):
        with raises(UnsupportedError, param="source"):
            convert(tmp_path / name, tmp_path / "out.gguf", Conversion())
    with raises(InvalidArgumentError, param="dtype"):
        convert(tmp_path / "exportable", tmp_path / "out.gguf", Conversion("q8_0"))
    with raises(InvalidArgumentError, param="exportable"):
        quantize_checkpoint(DEMO, tmp_path / "out", quantizing_scheme("w4a8_h32", exportable=True))
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "out.gguf").exists()


def test_the_command_names_tensors_of_another_type(penstock_inline, tmp_path: Path) -> None:
    own, out = tmp_path / "own", tmp_path / "own.gguf"
    done = penstock_inline("quantize", DEMO, own, "--scheme", "w4a8", "--exportable")
    assert done.returncode == 0, done.stderr
    done = penstock_inline("convert", own, out)
    assert done.returncode == 0, done.stderr
    assert "blk.0.ffn_down.weight and 5 more tensors are Q8_0" in done.stderr
    quantize_checkpoint(DEMO, tmp_path / "same", quantizing_scheme("w4a8", exportable=True))
    files = [folder / "model.safetensors" for folder in (own, tmp_path / "same")]
    assert files[0].read_bytes() == files[1].read_bytes()


@pytest.mark.parametrize("options", [("--method", "auto"), ("--budget", "5bits"), ("--scheme", "w4a8_h32")])
def test_options_that_choose_themselves_are_refused(penstock_inline, tmp_path: Path, options: tuple[str, str]) -> None:
    done = penstock_inline("quantize", DEMO, tmp_path / "out", "--scheme", "w4a8", "--exportable", *options)
    assert done.returncode == 2
    assert "exportable: expected" in done.stderr
    assert not (tmp_path / "out").exists()
