"""Folders that the package compressed-tensors writes, whose values are those that it decompresses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import transformers

from penstock import LLM
from penstock.checkpoint.folder import Checkpoint
from tests.support.quantized_folders import SIZES

if TYPE_CHECKING:
    from compressed_tensors.quantization import QuantizationArgs

FORMS: dict[str, tuple[dict[str, Any], bool, str]] = {
    "pack-4-sym-group": ({"num_bits": 4, "strategy": "group", "group_size": 32}, False, "q4_0"),
    "pack-4-sym-group-128": ({"num_bits": 4, "strategy": "group", "group_size": 128}, False, "q4_0"),
    "pack-4-sym-channel": ({"num_bits": 4, "strategy": "channel"}, False, "q4_0"),
    "pack-4-asym-group": ({"num_bits": 4, "strategy": "group", "group_size": 64, "symmetric": False}, False, "uint4"),
    "pack-4-asym-channel": ({"num_bits": 4, "strategy": "channel", "symmetric": False}, False, "uint4"),
    "pack-4-weight-order": (
        {"num_bits": 4, "strategy": "group", "group_size": 32, "actorder": "weight"},
        False,
        "q4_0",
    ),
    "pack-8-sym-group": ({"num_bits": 8, "strategy": "group", "group_size": 64}, False, "q8_0"),
    "pack-8-asym-channel": ({"num_bits": 8, "strategy": "channel", "symmetric": False}, False, "q8_0"),
    "int-sym-channel": ({"num_bits": 8, "strategy": "channel"}, True, "w8a8"),
    "int-asym-channel": ({"num_bits": 8, "strategy": "channel", "symmetric": False}, True, "q8_0"),
    "int-sym-group": ({"num_bits": 8, "strategy": "group", "group_size": 32}, True, "q8_0"),
    "int-sym-tensor": ({"num_bits": 8, "strategy": "tensor"}, True, "w8a8"),
    "pack-8-sym-channel": ({"num_bits": 8, "strategy": "channel"}, False, "w8a16"),
    "float-tensor": ({"num_bits": 8, "type": "float", "strategy": "tensor"}, True, "q8_0"),
    "float-channel": ({"num_bits": 8, "type": "float", "strategy": "channel"}, True, "q8_0"),
    "float-block": ({"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]}, True, "q8_0"),
    "nvfp4-group": (
        {
            "num_bits": 4,
            "type": "float",
            "strategy": "tensor_group",
            "group_size": 16,
            "scale_dtype": torch.float8_e4m3fn,
        }
        | {"zp_dtype": torch.float8_e4m3fn},
        False,
        "nvfp4",
    ),
}
"""The arguments of the weights, whether activations are quantized too, and the scheme that carries them here."""
FORMATS = {
    "pack": "pack-quantized",
    "int": "int-quantized",
    "float": "float-quantized",
    "nvfp4": "nvfp4-pack-quantized",
}


def ranges(weight: torch.Tensor, args: QuantizationArgs) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the least and the greatest value of each group that has a scale."""
    if args.strategy == "tensor":
        return weight.min().reshape(1), weight.max().reshape(1)
    if args.strategy == "block":
        rows, cols = args.block_structure
        padded = torch.nn.functional.pad(weight, (0, -weight.shape[1] % cols, 0, -weight.shape[0] % rows))
        blocks = padded.reshape(len(padded) // rows, rows, -1, cols)
        return blocks.amin((1, 3)), blocks.amax((1, 3))
    groups = weight.reshape(weight.shape[0], -1, args.group_size if "group" in args.strategy else weight.shape[1])
    return groups.amin(2), groups.amax(2)


def write_folder(
    folder: Path, arguments: dict[str, Any], has_activations: bool, dtype: torch.dtype
) -> transformers.PreTrainedModel:
    """Quantize and compress a model by the package; return it decompressed by the package."""
    # Imported here: that takes nearly as long as PyTorch, in each worker that collects this file.
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationArgs,
        QuantizationConfig,
        QuantizationScheme,
        apply_quantization_config,
    )
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    torch.manual_seed(5)
    config = transformers.AutoConfig.for_model("llama", **SIZES, pad_token_id=0, attn_implementation="eager")
    model = transformers.AutoModelForCausalLM.from_config(config).to(dtype).eval()
    weights = QuantizationArgs(**arguments)
    inputs = QuantizationArgs(num_bits=8, type=weights.type, strategy="token", dynamic=True)
    scheme = QuantizationScheme(
        targets=["Linear"], weights=weights, input_activations=inputs if has_activations else None
    )
    apply_quantization_config(model, QuantizationConfig(config_groups={"group_0": scheme}, ignore=["lm_head"]))
    for module in model.modules():
        if getattr(module, "quantization_scheme", None) is not None:
            low, high = ranges(module.weight.detach(), weights)
            if weights.strategy == "tensor_group":
                module.weight_global_scale.data.copy_(generate_gparam(low.min(), high.max()))
            scale, zero = calculate_qparams(low, high, weights, getattr(module, "weight_global_scale", None))
            module.weight_scale.data.copy_(scale.reshape(module.weight_scale.shape))
            if hasattr(module, "weight_zero_point"):
                module.weight_zero_point.data.copy_(zero.reshape(module.weight_zero_point.shape))
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(str(folder))
    compressor.decompress_model(model)
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("form", FORMS)
def test_values_are_those_that_the_package_decompresses(tmp_path: Path, form: str, dtype: torch.dtype) -> None:
    arguments, has_activations, scheme = FORMS[form]
    model = write_folder(tmp_path, arguments, has_activations, dtype)
    written = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert written["format"] == FORMATS[form.split("-")[0]]
    checkpoint, count = Checkpoint.open(tmp_path), 0
    for name, expected in model.state_dict().items():
        if name.endswith("proj.weight"):
            values = torch.from_numpy(np.array(checkpoint.read(name)))
            if scheme == "nvfp4":  # of which the package rounds scales and products to bfloat16
                assert torch.allclose(values, expected.float(), rtol=2**-7, atol=0)
            else:  # the package rounds a product to the type of the scales
                assert torch.equal(values.to(dtype), expected)
            assert checkpoint.block_scheme(name) == scheme
            if checkpoint.has_rows(name):
                rows = checkpoint.read_rows(name)
                assert np.array_equal(rows.q * rows.scales[:, None], values.numpy())
            count += 1
    assert count == 7 * SIZES["num_hidden_layers"]


def test_a_folder_of_the_package_runs(tmp_path: Path) -> None:
    model, ids = write_folder(tmp_path, *FORMS["pack-4-asym-group"][:2], torch.float32), [5, 9, 100, 31]
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0].numpy()
    with LLM(tmp_path, mode="eager", scheme="f32") as llm:
        assert np.abs(llm.logits(ids) - expected).max() < 1e-4
    with LLM(tmp_path) as llm:
        assert llm.info.scheme == "uint4"
