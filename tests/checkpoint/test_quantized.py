"""Folders that other tools quantized: exact values, logits, and what is refused."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from penstock import LLM
from penstock.checkpoint.convert import Conversion
from penstock.checkpoint.folder import Checkpoint
from penstock.errors import InvalidFileError, UnsupportedError
from penstock.graph.export import export_bundle
from penstock.models.loader import load_network, save_network
from penstock.runtime.convert import convert
from tests.support.errors import raises
from tests.support.gguf_blocks import values_of
from tests.support.quantized_folders import (
    AWQ,
    FP8,
    GPTQ,
    INTEGERS,
    PACKED,
    W8A8,
    Packed,
    awq_layer,
    compressed,
    float8_layer,
    gptq_layer,
    integer_layer,
    one_layer,
    packed_layer,
    write_folders,
)

IDS = [5, 9, 100, 31, 7, 44]


def carried(checkpoint: Checkpoint, name: str = "a.weight") -> np.ndarray:
    """The values of the blocks that a scheme computes with."""
    scheme, shape = checkpoint.block_scheme(name), checkpoint.tensors[name].shape
    assert scheme is not None
    if checkpoint.has_rows(name):
        rows = checkpoint.read_rows(name)
        return rows.q * rows.scales[:, None]
    return values_of(scheme, checkpoint.read_blocks(name)).reshape(shape)


def check_exact(folder: Path, weight: Tensor, scheme: str) -> None:
    checkpoint = Checkpoint.open(folder)
    assert checkpoint.choose_scheme(None) == checkpoint.block_scheme("a.weight") == scheme
    assert np.array_equal(checkpoint.read("a.weight"), weight.numpy())
    assert np.array_equal(carried(checkpoint), weight.numpy())
    assert checkpoint.rounding_note == ""


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group_len", [32, 64, 128, -1])
def test_gptq_is_exact_in_both_formats(tmp_path: Path, bits: int, group_len: int) -> None:
    for version in (1, 2):
        for sym in (True, False):
            rng = np.random.default_rng(bits + group_len)
            packed = gptq_layer(rng, 24, 256, bits=bits, group_len=group_len, sym=sym, version=version)
            section = GPTQ | {"bits": bits, "group_size": group_len, "sym": sym}
            section["checkpoint_format"] = "gptq" if version == 1 or sym else "gptq_v2"
            folder = one_layer(tmp_path / f"{version}{sym}", section, packed)
            check_exact(folder, packed.weight, "q8_0" if bits == 8 else "q4_0" if sym else "uint4")


@pytest.mark.parametrize("group_len", [32, 128])
def test_awq_is_exact(tmp_path: Path, group_len: int) -> None:
    packed = awq_layer(np.random.default_rng(1), 24, 256, group_len=group_len)
    check_exact(one_layer(tmp_path, AWQ | {"group_size": group_len}, packed), packed.weight, "uint4")


@pytest.mark.parametrize("bits", [4, 8])
def test_packed_integers_are_exact(tmp_path: Path, bits: int) -> None:
    for sym in (True, False):
        for group_len in (32, 128, 256):
            packed = packed_layer(np.random.default_rng(1), 20, 256, bits=bits, group_len=group_len, sym=sym)
            folder = one_layer(tmp_path / f"{sym}{group_len}", compressed("pack-quantized", num_bits=bits), packed)
            by_row = "w8a16" if sym and group_len == 256 else "q8_0"
            check_exact(folder, packed.weight, by_row if bits == 8 else "q4_0" if sym else "uint4")


@pytest.mark.parametrize(("section", "scheme"), [(INTEGERS, "w8a16"), (W8A8, "w8a8")])
@pytest.mark.parametrize("cols", [256, 71])
def test_integers_of_8_bits_are_exact(tmp_path: Path, section: dict[str, Any], scheme: str, cols: int) -> None:
    packed = integer_layer(np.random.default_rng(1), 20, cols)
    packed.tensors["input_scale"] = torch.ones(1)
    folder = one_layer(tmp_path, section, packed)
    check_exact(folder, packed.weight, scheme)
    checkpoint = Checkpoint.open(folder)
    rows = checkpoint.read_rows("a.weight")
    assert (rows.q == -128).any()
    assert np.array_equal(rows.q, packed.tensors["weight"].numpy())
    assert np.array_equal(rows.scales, packed.tensors["weight_scale"].float().numpy().reshape(-1))
    assert checkpoint.stored_bytes("a.weight") == 20 * (cols + 4)


def test_groups_with_other_activations_are_carried_in_blocks(tmp_path: Path) -> None:
    groups = {"group_0": W8A8["config_groups"]["group_0"], "group_1": INTEGERS["config_groups"]["group_0"]}
    packed = integer_layer(np.random.default_rng(1), 20, 256)
    checkpoint = Checkpoint.open(one_layer(tmp_path, INTEGERS | {"config_groups": groups}, packed))
    assert checkpoint.choose_scheme(None) == "q8_0"


@pytest.mark.parametrize(
    ("change", "param"),
    [({"dynamic": False}, "dynamic"), ({"dynamic": "local"}, "dynamic"), ({"symmetric": False}, "symmetric"),
     ({"strategy": "tensor"}, "strategy")],
)  # fmt: skip
def test_other_roundings_of_activations_are_refused(tmp_path: Path, change: dict[str, Any], param: str) -> None:
    group = W8A8["config_groups"]["group_0"]
    group = group | {"input_activations": group["input_activations"] | change}
    packed = integer_layer(np.random.default_rng(1), 20, 256)
    folder = one_layer(tmp_path, W8A8 | {"config_groups": {"group_0": group}}, packed)
    with raises(UnsupportedError, param=param):
        Checkpoint.open(folder)


def test_a_zero_point_is_carried_in_blocks(tmp_path: Path) -> None:
    packed = integer_layer(np.random.default_rng(1), 20, 256)
    packed.tensors["weight_zero_point"] = torch.full((20, 1), 3, dtype=torch.int8)
    checkpoint = Checkpoint.open(one_layer(tmp_path, W8A8, packed))
    assert checkpoint.choose_scheme(None) == "q8_0"
    expected = (packed.tensors["weight"].float() - 3) * packed.tensors["weight_scale"].float()
    assert np.array_equal(checkpoint.read("a.weight"), expected.numpy())


@pytest.mark.parametrize(
    ("section", "block", "end"),
    [
        (FP8, 128, "weight_scale_inv"),
        (FP8 | {"weight_block_size": None}, 0, "weight_scale"),
        (compressed("float-quantized", num_bits=8, type="float", strategy="tensor"), 0, "weight_scale"),
        (
            compressed("float-quantized", num_bits=8, type="float", strategy="block", block_structure=[128, 128]),
            128,
            "weight_scale",
        ),
    ],
)
def test_floats_of_8_bits_are_rounded_and_counted(
    tmp_path: Path, section: dict[str, Any], block: int, end: str
) -> None:
    packed = float8_layer(np.random.default_rng(1), 200, 352, block=block, end=end)
    checkpoint = Checkpoint.open(one_layer(tmp_path, section, packed))
    assert np.array_equal(checkpoint.read("a.weight"), packed.weight.numpy())
    assert np.linalg.norm(carried(checkpoint) - packed.weight.numpy()) < 0.008 * np.linalg.norm(packed.weight.numpy())
    assert checkpoint.rounding_note.startswith("1 of 1 quantized tensors")


def test_every_float_of_8_bits_has_its_value(tmp_path: Path) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[(codes & 127) != 127].reshape(1, -1).view(torch.float8_e4m3fn)
    packed = Packed({"weight": codes, "weight_scale": torch.ones(1)}, codes.float())
    folder = one_layer(tmp_path, FP8 | {"weight_block_size": None}, packed)
    assert np.array_equal(Checkpoint.open(folder).read("a.weight"), codes.float().numpy())


@pytest.mark.parametrize(
    ("section", "make", "change", "param", "message"),
    [
        (AWQ | {"bits": 8}, awq_layer, {}, "bits", "expected 4, got 8"),
        (AWQ | {"version": "gemv"}, awq_layer, {}, "version", "expected 'gemm', got 'gemv'"),
        (AWQ | {"zero_point": False}, awq_layer, {}, "zero_point", "expected true, got false"),
        (AWQ, awq_layer, {"scales": torch.zeros(2, 3)}, "a.scales", "shape"),
        (PACKED | {"format": "mxfp4-pack-quantized"}, packed_layer, {}, "format", "'mxfp4-pack-quantized'"),
        (PACKED | {"quantization_status": "frozen"}, packed_layer, {}, "quantization_status", "got 'frozen'"),
        (PACKED | {"transform_config": {"R1": {}}}, packed_layer, {}, "transform_config", "expected null"),
        (PACKED | {"sparsity_config": {"format": "sparse-24"}}, packed_layer, {}, "format", "expected one of dense"),
        (PACKED | {"config_groups": {}}, packed_layer, {}, "config_groups", "expected groups"),
        (compressed("pack-quantized", num_bits=3), packed_layer, {}, "num_bits", "expected 4 or 8, got 3"),
        (PACKED, packed_layer, {"weight_shape": torch.tensor([32, 999])}, "a.weight_shape", "values"),
        (PACKED, packed_layer, {"weight_scale": torch.zeros(32, 3)}, "a.weight_scale", "shape"),
        (PACKED, packed_layer, {"weight_shape": None}, "a.weight_shape", "expected tensor 'a.weight_shape'"),
        (
            INTEGERS,
            integer_layer,
            {"weight_zero_point": torch.zeros(2, dtype=torch.int8)},
            "a.weight_zero_point",
            "shape",
        ),
        (INTEGERS, integer_layer, {"weight_scale": None}, "a.weight_scale", "expected tensor 'a.weight_scale'"),
        (FP8, float8_layer, {}, "a.weight_scale_inv", r"shape: expected \[1, 2\]"),
        (FP8 | {"weight_block_size": [128]}, float8_layer, {}, "weight_block_size", "null or two numbers"),
        (FP8 | {"fmt": "e5m2"}, float8_layer, {}, "fmt", "expected one of e4m3"),
    ],
)
def test_what_other_formats_lack_is_refused_by_name(
    tmp_path: Path, section: dict[str, Any], make: Any, change: dict[str, Any], param: str | None, message: str
) -> None:
    tensors = make(np.random.default_rng(1), 32, 256).tensors | change
    packed = Packed({end: tensor for end, tensor in tensors.items() if tensor is not None}, torch.zeros(0))
    folder = one_layer(tmp_path, section, packed)
    with raises((InvalidFileError, UnsupportedError), param=param, match=message):
        Checkpoint.open(folder)


def test_a_float_of_8_bits_that_is_no_number_is_refused(tmp_path: Path) -> None:
    packed = float8_layer(np.random.default_rng(1), 32, 256)
    packed.tensors["weight"].view(torch.uint8)[3, 4] = 0xFF
    folder = one_layer(tmp_path, FP8 | {"weight_block_size": None}, packed)
    with raises(InvalidFileError, param="a.weight", match="expected numbers, got 'NaN'"):
        Checkpoint.open(folder).read("a.weight")


def test_weights_without_exact_form_are_counted(tmp_path: Path) -> None:
    packed = gptq_layer(np.random.default_rng(1), 32, 256, act_order=True)
    checkpoint = Checkpoint.open(one_layer(tmp_path, GPTQ | {"desc_act": True}, packed))
    assert np.array_equal(checkpoint.read("a.weight"), packed.weight.numpy())
    assert checkpoint.rounding_note == ""
    difference = np.linalg.norm(carried(checkpoint) - packed.weight.numpy()) / np.linalg.norm(packed.weight.numpy())
    assert 0.001 < difference < 0.008
    expected = f"1 of 1 quantized tensors .* relative error {difference:.2g} at most, {difference:.2g} on average"
    assert re.search(expected, checkpoint.rounding_note)


def test_rows_that_are_not_whole_blocks_stay_exact(tmp_path: Path) -> None:
    packed = gptq_layer(np.random.default_rng(1), 16, 40, group_len=16)
    checkpoint = Checkpoint.open(one_layer(tmp_path, GPTQ | {"group_size": 16}, packed))
    assert checkpoint.block_scheme("a.weight") is None
    assert np.array_equal(checkpoint.read("a.weight"), packed.weight.numpy())


@pytest.mark.parametrize(
    ("section", "change", "param", "message"),
    [
        ({"bits": 3}, {}, "bits", "expected 4 or 8, got 3"),
        ({"group_size": 0}, {}, "group_size", "expected -1 or a positive number, got 0"),
        ({"group_size": None}, {}, "group_size", "but the key is missing|got null"),
        ({"checkpoint_format": "marlin"}, {}, "checkpoint_format", "expected one of gptq, gptq_v2, got 'marlin'"),
        ({"is_marlin_format": True}, {}, "is_marlin_format", "expected false"),
        ({"pack_dtype": "int16"}, {}, "pack_dtype", "expected int32, got 'int16'"),
        ({"dynamic": {".*": {"bits": 8}}}, {}, "dynamic", "begin with -:"),
        ({"sym": "yes"}, {}, "sym", "expected true or false"),
        ({}, {"scales": None}, "a.scales", "expected tensor 'a.scales'"),
        ({}, {"qzeros": torch.zeros(2, 3, dtype=torch.int32)}, "a.qzeros", r"shape: expected \[2, 4\]"),
        ({}, {"qzeros": torch.zeros(2, 4)}, "a.qzeros", "dtype: expected I32, got 'F32'"),
        ({}, {"qzeros": torch.zeros(2, 4, dtype=torch.int32)}, "a.qzeros", "values: expected 7 or 8 in each"),
        ({"sym": False}, {"qzeros": torch.full((2, 4), -1, dtype=torch.int32)}, "a.qzeros", "expected at most 14"),
        ({}, {"g_idx": torch.full((256,), 2, dtype=torch.int32)}, "a.g_idx", "expected groups from 0 to 1, got 2"),
        ({}, {"g_idx": torch.full((256,), -1, dtype=torch.int32)}, "a.g_idx", "expected groups from 0 to 1"),
        ({}, {"weight": torch.zeros(32, 256)}, "a.weight", "'a.weight': found its quantized form too"),
    ],
)  # fmt: skip
def test_malformed_gptq_is_refused_by_name(
    tmp_path: Path, section: dict[str, Any], change: dict[str, Tensor | None], param: str | None, message: str
) -> None:
    tensors = gptq_layer(np.random.default_rng(1), 32, 256).tensors | change
    packed = Packed({end: tensor for end, tensor in tensors.items() if tensor is not None}, torch.zeros(0))
    folder = one_layer(tmp_path, {key: value for key, value in (GPTQ | section).items() if value is not None}, packed)
    with raises((InvalidFileError, UnsupportedError), param=param, match=message):
        carried(Checkpoint.open(folder))


def test_a_folder_without_quantized_tensors_is_refused(tmp_path: Path) -> None:
    with raises(InvalidFileError, param=None, match="expected quantized tensors in the files, got none"):
        Checkpoint.open(one_layer(tmp_path, GPTQ, Packed({"weight": torch.zeros(2, 2)}, torch.zeros(0))))


def check_logits(folder: Path, model: torch.nn.Module, scheme: str) -> None:
    """In float32 the logits are those of transformers; in the folder's own scheme activations are rounded."""
    with torch.no_grad():
        expected = model(torch.tensor([IDS])).logits[0].numpy()
    with LLM(folder, mode="eager", scheme="f32") as llm:
        assert np.abs(llm.logits(IDS) - expected).max() < 1e-4
    with LLM(folder, mode="eager") as llm:
        assert llm.info.scheme == scheme
        assert np.linalg.norm(llm.logits(IDS) - expected) < 0.03 * np.linalg.norm(expected)


def test_gptq_answers_as_its_values_do(tmp_path: Path) -> None:
    folder, model = write_folders(tmp_path / "model", GPTQ, partial(gptq_layer, np.random.default_rng(1)))
    check_logits(folder, model, "q4_0")
    report = export_bundle(folder, tmp_path / "model.psm")
    assert (report.scheme, report.rounding_note) == ("q4_0", "")
    with LLM(tmp_path / "model.psm") as llm, LLM(folder, mode="eager") as eager:
        assert np.array_equal(llm.logits(IDS), eager.logits(IDS))


@pytest.mark.parametrize(
    ("section", "layer", "scheme"),
    [(AWQ, awq_layer, "uint4"), (PACKED, packed_layer, "q4_0"), (INTEGERS, integer_layer, "w8a16"),
     (W8A8, integer_layer, "w8a8"),
     (FP8, partial(float8_layer, block=128), "q8_0")],
)  # fmt: skip
def test_other_formats_answer_as_their_values_do(
    tmp_path: Path, section: dict[str, Any], layer: Any, scheme: str
) -> None:
    folder, model = write_folders(tmp_path / "model", section, partial(layer, np.random.default_rng(1)))
    check_logits(folder, model, scheme)


def test_fused_layers_and_act_order_are_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    layer = partial(gptq_layer, np.random.default_rng(1), group_len=64, act_order=True)
    section = GPTQ | {"group_size": 64, "desc_act": True}
    folder, model = write_folders(tmp_path / "model", section, layer, "phi3")
    check_logits(folder, model, "q8_0")
    (line,) = [record.getMessage() for record in caplog.records if record.name == "penstock.eager"]
    assert "8 of 8 quantized tensors" in line
    assert "8 of 8" in export_bundle(folder, tmp_path / "model.psm").rounding_note


@pytest.mark.parametrize("model_type", ["phi3", "qwen2"])
@pytest.mark.parametrize("section", [INTEGERS, W8A8], ids=["w8a16", "w8a8"])
def test_integers_are_those_of_the_bundle(tmp_path: Path, model_type: str, section: dict[str, Any]) -> None:
    layer = partial(integer_layer, np.random.default_rng(1))
    folder, model = write_folders(tmp_path / "model", section, layer, model_type)
    scheme = "w8a8" if section is W8A8 else "w8a16"
    check_logits(folder, model, scheme)
    other = "w8a16" if scheme == "w8a8" else "w8a8"
    with LLM(folder, mode="eager", scheme=other) as llm:
        assert llm.info.scheme == other
    assert export_bundle(folder, tmp_path / "model.psm").rounding_note == ""
    with LLM(tmp_path / "model.psm") as llm, LLM(folder, mode="eager") as eager:
        assert llm.info.scheme == scheme
        assert np.array_equal(llm.logits(IDS), eager.logits(IDS))
    convert(tmp_path / "model.psm", tmp_path / "out", Conversion())
    stored, own = load_file(folder / "model.safetensors"), Checkpoint.open(tmp_path / "out")
    for name in [name for name in own.tensors if own.is_quantized(name)]:
        rows = own.read_quantized(name, own.tensors[name].shape[1])
        source = re.sub(r"[qkv]_proj", "qkv_proj", re.sub(r"(gate|up)_proj", "gate_up_proj", name))
        whole = stored[source if source in stored else name].numpy()
        assert rows.q.tobytes() in whole.tobytes(), name
    with LLM(tmp_path / "out") as llm, LLM(folder) as whole_folder:
        assert np.array_equal(llm.logits(IDS), whole_folder.logits(IDS))


def test_a_saved_network_has_floats_only(tmp_path: Path) -> None:
    folder, _ = write_folders(tmp_path / "model", GPTQ, partial(gptq_layer, np.random.default_rng(1)))
    save_network(load_network(folder), tmp_path / "floats")
    assert Checkpoint.open(tmp_path / "floats").config.foreign_quantization() is None
    name = "model.layers.0.mlp.up_proj.weight"
    saved = load_file(tmp_path / "floats/model.safetensors")[name].numpy()
    assert np.array_equal(saved, Checkpoint.open(folder).read(name))
    with raises(UnsupportedError, param="quant_method"):
        _ = Checkpoint.open(folder).tensor_files
