"""Folders as other tools quantize them, packed bit by bit from known integers, and the same weights as floats."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

__all__ = [
    "AWQ", "BITNET", "FLOAT4", "FP8", "GPTQ", "INTEGERS", "NVFP4", "PACKED", "Packed", "awq_layer", "compressed",
    "float4_layer", "float8_layer", "gptq_layer", "integer_layer", "one_layer", "pack", "packed_layer", "ternary_layer",
    "write_folders",
]  # fmt: skip

SIZES = {"vocab_size": 160, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}  # fmt: skip


class Packed(NamedTuple):
    """The stored tensors of a layer, by the end of their names, and its exact weight, float32 [rows, cols]."""

    tensors: dict[str, Tensor]
    weight: Tensor


def pack(integers: np.ndarray, bits: int, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """Return unsigned integers [n, m] as int32 words [n, m * bits / 32]; ``order[i]`` is in the bits i * bits..."""
    count = 32 // bits
    padded = np.pad(integers.astype(np.int64), ((0, 0), (0, -integers.shape[1] % count)))
    words = np.zeros((len(padded), padded.shape[1] // count), np.int64)
    for index, place in enumerate(order[:count]):
        words |= padded[:, place::count] << bits * index
    return torch.from_numpy(words.astype(np.uint32).view(np.int32))


def random_scales(rng: np.random.Generator, *shape: int, bits: int = 4) -> np.ndarray:
    """Return scales that give weights of about 0.1; some are negative, as AutoRound makes them."""
    scales = rng.uniform(0.5, 2, shape) * 0.2 / 2**bits
    return (scales * np.where(rng.random(shape) < 0.1, -1, 1)).astype(np.float16)


def gptq_layer(
    rng: np.random.Generator, rows: int, cols: int, *, bits: int = 4, group_len: int = 128, sym: bool = True,
    version: int = 1, act_order: bool = False,
) -> Packed:  # fmt: skip
    """Return a layer of GPTQ; ``version`` 1 stores zero points less 1."""
    group_len = cols if group_len == -1 else group_len
    groups, top = -(-cols // group_len), 2**bits
    index = np.arange(cols) // group_len
    if act_order:
        index = rng.permutation(index)
    q = rng.integers(0, top, (rows, cols))
    zeros = np.full((groups, rows), top // 2) if sym else rng.integers(top // 2 - 3, top // 2 + 3, (groups, rows))
    if bits == 8:  # differences that fit 8 bits
        q = np.clip(q, zeros.T[:, index] - 128, zeros.T[:, index] + 127)
    scales = random_scales(rng, groups, rows, bits=bits)
    tensors = {
        "qweight": pack(q, bits).T.contiguous(),
        "qzeros": pack(zeros - (version == 1), bits),
        "scales": torch.from_numpy(scales),
        "g_idx": torch.from_numpy(index.astype(np.int32)),
    }
    return Packed(tensors, torch.from_numpy((scales.astype(np.float32)[index] * (q.T - zeros[index])).T.copy()))


def awq_layer(rng: np.random.Generator, rows: int, cols: int, *, group_len: int = 128) -> Packed:
    """Return a layer of AWQ, version gemm: eight rows in a word, in the order of AutoAWQ."""
    order, index = (0, 2, 4, 6, 1, 3, 5, 7), np.arange(cols) // group_len
    q, zeros = rng.integers(0, 16, (cols, rows)), rng.integers(0, 16, (cols // group_len, rows))
    scales = random_scales(rng, cols // group_len, rows)
    tensors = {"qweight": pack(q, 4, order), "qzeros": pack(zeros, 4, order), "scales": torch.from_numpy(scales)}
    return Packed(tensors, torch.from_numpy((scales.astype(np.float32)[index] * (q - zeros[index])).T.copy()))


def packed_layer(
    rng: np.random.Generator, rows: int, cols: int, *, bits: int = 4, group_len: int = 128, sym: bool = True
) -> Packed:
    """Return a layer of compressed-tensors, pack-quantized, whose scales are bfloat16."""
    groups, half = cols // group_len, 2 ** (bits - 1)
    index = np.arange(cols) // group_len
    zeros = np.zeros((rows, groups), int) if sym else rng.integers(-3, 3, (rows, groups))
    q = np.clip(rng.integers(-half, half, (rows, cols)), zeros[:, index] - 128, zeros[:, index] + 127)
    scales = torch.from_numpy(random_scales(rng, rows, groups, bits=bits)).bfloat16()
    tensors = {
        "weight_packed": pack(q + half, bits),
        "weight_scale": scales,
        "weight_shape": torch.tensor([rows, cols]),
    }
    if not sym:
        tensors["weight_zero_point"] = pack((zeros + half).T, bits).T.contiguous()
    return Packed(tensors, scales.float()[:, index] * torch.from_numpy(q - zeros[:, index]).float())


def integer_layer(rng: np.random.Generator, rows: int, cols: int) -> Packed:
    """Return a layer of compressed-tensors, int-quantized, with one scale for each row."""
    q = torch.from_numpy(rng.integers(-128, 128, (rows, cols))).to(torch.int8)
    scales = torch.from_numpy(random_scales(rng, rows, 1, bits=8)).bfloat16()
    return Packed({"weight": q, "weight_scale": scales}, q.float() * scales.float())


def float8_layer(
    rng: np.random.Generator, rows: int, cols: int, *, block: int = 0, end: str = "weight_scale_inv"
) -> Packed:
    """Return a layer of 8-bit floats: with scales for blocks of ``block`` rows and columns, or one (0) for all."""
    weight = torch.from_numpy(rng.normal(0, 60, (rows, cols))).to(torch.float8_e4m3fn)
    shape = (-(-rows // block), -(-cols // block)) if block else ()
    scales = torch.from_numpy(np.asarray(rng.uniform(0.5, 2, shape) * 1e-3, np.float32))
    wide = scales.repeat_interleave(block, 0).repeat_interleave(block, 1)[:rows, :cols] if block else scales
    return Packed({"weight": weight, end: scales}, weight.float() * wide)


def float4_layer(rng: np.random.Generator, rows: int, cols: int, *, divisor: bool = False) -> Packed:
    """Return a layer of NVFP4: of ModelOpt, or of compressed-tensors, whose scale of a tensor is a ``divisor``."""
    codes = torch.from_numpy(rng.integers(0, 16, (rows, cols), dtype=np.uint8))
    scales = torch.from_numpy(rng.uniform(0, 448, (rows, cols // 16)) ** 2 / 448).to(torch.float8_e4m3fn)
    factor = torch.tensor([rng.uniform(5e-5, 1e-4)], dtype=torch.float32)
    stored = 1 / factor if divisor else factor
    factor = 1 / stored if divisor else factor
    floats = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])[codes.long()]
    weight = floats * (scales.float() * factor).repeat_interleave(16, dim=1)
    names = ("weight_packed", "weight_global_scale") if divisor else ("weight", "weight_scale_2")
    tensors = {names[0]: codes[:, 0::2] | codes[:, 1::2] << 4, names[1]: stored, "weight_scale": scales}
    return Packed(tensors | {"input_global_scale" if divisor else "input_scale": torch.ones(1)}, weight)


def ternary_layer(rng: np.random.Generator, rows: int, cols: int, *, divisor: bool = False) -> Packed:
    """Return a layer of BitNet, whose scale multiplies the values or is a ``divisor``."""
    codes = torch.from_numpy(rng.integers(0, 3, (rows, cols), dtype=np.uint8))
    scale = torch.tensor([rng.uniform(10, 20) if divisor else rng.uniform(0.05, 0.1)]).bfloat16()
    parts = codes.reshape(4, rows // 4, cols)
    packed = parts[0] | parts[1] << 2 | parts[2] << 4 | parts[3] << 6
    factor = 1 / scale.float() if divisor else scale.float()
    return Packed({"weight": packed, "weight_scale": scale}, (codes.float() - 1) * factor)


def write_folders(
    folder: Path,
    quantization: dict[str, Any],
    layer: Callable[[int, int], Packed],
    model_type: str = "llama",
    sizes: Mapping[str, Any] = SIZES,
) -> tuple[Path, transformers.PreTrainedModel]:
    """Write a folder whose layers but the head are quantized; return it, and the weights in a model of transformers."""
    torch.manual_seed(3)
    config = transformers.AutoConfig.for_model(
        model_type, **sizes, pad_token_id=0, eos_token_id=1, attn_implementation="eager"
    )
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    weights = {}
    for name in [name for name in tensors if "_proj" in name and name.endswith(".weight")]:
        packed = layer(*tensors.pop(name).shape)
        base = name.removesuffix(".weight")
        tensors |= {f"{base}.{end}": tensor for end, tensor in packed.tensors.items()}
        weights[name] = packed.weight
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    model.load_state_dict(weights, strict=False)
    written = json.loads((folder / "config.json").read_text()) | {"quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(written))
    return folder, model


NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4", "producer": {"name": "modelopt"}, "ignore": ["lm_head"]}
BITNET = {"quant_method": "bitnet", "linear_class": "autobitlinear", "quantization_mode": "offline"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}


def compressed(form: str, **weights: Any) -> dict[str, Any]:
    """Return the section of compressed-tensors with one group."""
    group = {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "strategy": "group"} | weights}
    return {
        "quant_method": "compressed-tensors", "format": form, "ignore": ["lm_head"], "kv_cache_scheme": None,
        "config_groups": {"group_0": group}, "quantization_status": "compressed",
    }  # fmt: skip


PACKED = compressed("pack-quantized", group_size=128)
FLOAT4 = compressed("nvfp4-pack-quantized", type="float", strategy="tensor_group", group_size=16)
INTEGERS = compressed("int-quantized", num_bits=8, strategy="channel")
_PER_TOKEN = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}
W8A8 = INTEGERS | {
    "config_groups": {"group_0": INTEGERS["config_groups"]["group_0"] | {"input_activations": _PER_TOKEN}}
}
"""As llm-compressor publishes quantized.w8a8."""


def one_layer(folder: Path, section: dict[str, Any], packed: Packed, config: str = "llama") -> Path:
    """Write a folder with the single layer a."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": config, "quantization_config": section}))
    save_file({f"a.{end}": tensor for end, tensor in packed.tensors.items()}, folder / "model.safetensors")
    return folder
