"""Folders in NVFP4 and in BitNet's ternary values: exact values, logits, and what is refused."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from penstock import LLM
from penstock.checkpoint.folder import Checkpoint
from penstock.core.layouts import BLOCKS
from penstock.errors import InvalidFileError, UnsupportedError
from penstock.graph.export import export_bundle
from penstock.quant.scheme import find_scheme
from tests.support.errors import raises
from tests.support.gguf_blocks import values_of
from tests.support.quantized_folders import (
    BITNET,
    FLOAT4,
    NVFP4,
    Packed,
    float4_layer,
    float8_layer,
    one_layer,
    ternary_layer,
    write_folders,
)

IDS = [5, 9, 100, 31, 7, 44]
DIVIDING = BITNET | {"linear_class": "bitlinear"}
FORMS: dict[str, tuple[dict[str, Any], Any, str]] = {
    "modelopt": (NVFP4, float4_layer, "nvfp4"),
    "compressed-tensors": (FLOAT4, partial(float4_layer, divisor=True), "nvfp4"),
    "autobitlinear": (BITNET, ternary_layer, "tq2_0"),
    "bitlinear": (DIVIDING, partial(ternary_layer, divisor=True), "tq2_0"),
}
SIZES = {"vocab_size": 160, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_values_and_blocks_are_exact(tmp_path: Path, form: str) -> None:
    section, layer, scheme = FORMS[form]
    packed = layer(np.random.default_rng(1), 48, 512)
    checkpoint = Checkpoint.open(one_layer(tmp_path, section, packed))
    assert checkpoint.choose_scheme(None) == checkpoint.block_scheme("a.weight") == scheme
    assert np.array_equal(checkpoint.read("a.weight"), packed.weight.numpy())
    blocks = checkpoint.read_blocks("a.weight")
    assert np.array_equal(values_of(scheme, blocks).reshape(48, 512), packed.weight.numpy())
    assert checkpoint.rounding_note == ""
    layout = BLOCKS[find_scheme(scheme).layout]
    assert checkpoint.stored_bytes("a.weight") == blocks.size == 48 * 512 // layout.block_len * layout.block_bytes


@pytest.mark.parametrize("form", FORMS)
def test_a_folder_answers_as_its_values_do(tmp_path: Path, form: str) -> None:
    section, layer, scheme = FORMS[form]
    folder, model = write_folders(tmp_path / "model", section, partial(layer, np.random.default_rng(1)), sizes=SIZES)
    with torch.no_grad():
        expected = model(torch.tensor([IDS])).logits[0].numpy()
    with LLM(folder, mode="eager", scheme="f32") as llm:
        assert np.abs(llm.logits(IDS) - expected).max() < 1e-4 * np.abs(expected).max()
    assert export_bundle(folder, tmp_path / "model.psm").scheme == scheme
    with LLM(tmp_path / "model.psm") as llm, LLM(folder, mode="eager") as eager:
        assert np.array_equal(llm.logits(IDS), eager.logits(IDS))
        assert np.linalg.norm(llm.logits(IDS) - expected) < 0.03 * np.linalg.norm(expected)


def test_a_mix_of_4_and_8_bit_floats_is_read(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    four, eight = float4_layer(rng, 32, 64), float8_layer(rng, 32, 64, end="weight_scale")
    algos = {"a": {"quant_algo": "NVFP4", "group_size": 16}, "b": {"quant_algo": "FP8"}}
    folder = one_layer(tmp_path, NVFP4 | {"quant_algo": "MIXED_PRECISION", "quantized_layers": algos}, four)
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {f"b.{end}": tensor for end, tensor in eight.tensors.items()}, folder / "model.safetensors")
    checkpoint = Checkpoint.open(folder)
    assert [checkpoint.block_scheme(f"{name}.weight") for name in "ab"] == ["nvfp4", "q8_0"]
    assert np.array_equal(checkpoint.read("a.weight"), four.weight.numpy())
    assert np.array_equal(checkpoint.read("b.weight"), eight.weight.numpy())


def test_the_settings_of_modelopt_may_lie_in_their_own_file(tmp_path: Path) -> None:
    packed = float4_layer(np.random.default_rng(1), 32, 64)
    folder = one_layer(tmp_path, NVFP4, packed)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    settings = {"quantization": {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16}}
    (folder / "hf_quant_config.json").write_text(json.dumps(settings))
    assert np.array_equal(Checkpoint.open(folder).read("a.weight"), packed.weight.numpy())


@pytest.mark.parametrize(
    ("section", "layer", "change", "param"),
    [
        (NVFP4 | {"quant_algo": "NVFP4_AWQ"}, float4_layer, {}, "quant_algo"),
        (NVFP4 | {"group_size": 32}, float4_layer, {}, "group_size"),
        (NVFP4 | {"quantized_layers": {"a": {"quant_algo": "W4A8"}}}, float4_layer, {}, "quant_algo"),
        (NVFP4, float4_layer, {"weight_scale_2": None}, "a.weight_scale_2"),
        (NVFP4, float4_layer, {"weight_scale": torch.zeros(32, 3)}, "a.weight_scale"),
        (NVFP4, float4_layer, {"weight_scale": torch.zeros(32, 3, dtype=torch.float8_e4m3fn)}, "a.weight_scale"),
        (NVFP4, float4_layer, {"weight_scale": torch.full((32, 16), -1.0).to(torch.float8_e4m3fn)}, "a.weight_scale"),
        (NVFP4, float4_layer, {"weight_scale_2": torch.tensor([torch.inf])}, "a.weight_scale_2"),
        *(
            (NVFP4, float4_layer, {"weight_scale_2": torch.tensor([number])}, "a.weight_scale_2")
            for number in (1e-42, 1e36)
        ),
        *(
            (
                FLOAT4,
                partial(float4_layer, divisor=True),
                {"weight_global_scale": torch.tensor([number])},
                "a.weight_global_scale",
            )
            for number in (0.0, 1e-42, 3e38, torch.nan)
        ),
        (BITNET | {"use_rms_norm": True}, ternary_layer, {}, "use_rms_norm"),
        (BITNET | {"linear_class": "other"}, ternary_layer, {}, "linear_class"),
        (BITNET, ternary_layer, {"weight_scale": torch.ones(2)}, "a.weight_scale"),
        (DIVIDING, ternary_layer, {"weight_scale": torch.zeros(1)}, "a.weight_scale"),
    ],
)
def test_what_a_folder_lacks_is_refused_by_name(
    tmp_path: Path, section: dict[str, Any], layer: Any, change: dict[str, Tensor | None], param: str
) -> None:
    tensors = layer(np.random.default_rng(1), 32, 256).tensors | change
    packed = Packed({end: tensor for end, tensor in tensors.items() if tensor is not None}, torch.zeros(0))
    folder = one_layer(tmp_path, section, packed)
    with raises((InvalidFileError, UnsupportedError), param=param):
        Checkpoint.open(folder).read_blocks("a.weight")


def _bitnet(folder: Path, mode: str) -> transformers.PreTrainedModel:
    """Write a random BitNet model with its weights as transformers stores them; return the one that it computes."""
    torch.manual_seed(3)
    config = transformers.AutoConfig.for_model(
        "bitnet", **SIZES, pad_token_id=0, eos_token_id=1, initializer_range=0.1, attn_implementation="eager"
    )
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if "_proj" in name]:
        scale = 1 / tensors[name].abs().mean()
        ternary = (tensors[name] * scale).round().clamp(-1, 1)
        model.get_parameter(name).data = ternary / scale
        if mode == "offline":
            codes = (ternary + 1).to(torch.uint8).reshape(4, -1, ternary.shape[1])
            tensors[name] = codes[0] | codes[1] << 2 | codes[2] << 4 | codes[3] << 6
            tensors[f"{name}_scale"] = (1 / scale).reshape(1)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    written = json.loads((folder / "config.json").read_text())
    written["quantization_config"] = BITNET | {"quantization_mode": mode}
    (folder / "config.json").write_text(json.dumps(written))
    return model


@pytest.mark.parametrize("mode", ["offline", "online"])
def test_bitnet_answers_as_transformers(tmp_path: Path, mode: str) -> None:
    model = _bitnet(tmp_path, mode)
    with torch.no_grad():
        expected = model(torch.tensor([IDS])).logits[0].numpy()
    with LLM(tmp_path, mode="eager", scheme="f32") as llm:
        assert np.abs(llm.logits(IDS) - expected).max() < 1e-4 * np.abs(expected).max()
    with LLM(tmp_path) as llm:
        assert llm.info.scheme == "tq2_0"
        assert np.linalg.norm(llm.logits(IDS) - expected) < 0.03 * np.linalg.norm(expected)
