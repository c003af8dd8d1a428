"""A bf16 checkpoint as a compressed-tensors one for vLLM: w8a8 (per row) or w4a16 (groups of 128); the head stays bf16.

python convert_vllm.py CHECKPOINT OUT w8a8|w4a16      in an environment with PyTorch and safetensors
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

GROUP = 128


def quantize_w8(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    scale = weight.abs().amax(1, keepdim=True) / 127
    return {
        "weight": (weight / scale).round().clamp(-127, 127).to(torch.int8),
        "weight_scale": scale.to(torch.bfloat16),
    }


def quantize_w4(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Pack eight values of 4 bits into an int32, the first in the lowest bits, each plus 8."""
    groups = weight.view(weight.shape[0], -1, GROUP)
    scale = groups.abs().amax(2, keepdim=True) / 7
    values = (groups / scale).round().clamp(-8, 7).add(8).to(torch.int32).view(weight.shape[0], -1, 8)
    packed = torch.zeros(values.shape[:2], dtype=torch.int32)
    for place in range(8):
        packed |= values[:, :, place] << (4 * place)
    return {
        "weight_packed": packed,
        "weight_scale": scale.squeeze(2).to(torch.bfloat16),
        "weight_shape": torch.tensor(weight.shape, dtype=torch.int64),
    }


def quantization_config(scheme: str) -> dict[str, object]:
    four = scheme == "w4a16"
    weights = {
        "num_bits": 4 if four else 8,
        "type": "int",
        "symmetric": True,
        "strategy": "group" if four else "channel",
        "dynamic": False,
        "group_size": GROUP if four else None,
        "observer": "minmax",
    }
    activations = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": None if four else activations,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized" if four else "int-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("scheme", choices=("w8a8", "w4a16"))
    args = parser.parse_args()
    quantize = quantize_w4 if args.scheme == "w4a16" else quantize_w8
    tensors: dict[str, torch.Tensor] = {}
    for name, values in load_file(args.checkpoint / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            made = quantize(values.float())
            tensors |= {f"{name.removesuffix('weight')}{part}": made[part].contiguous() for part in made}
        else:
            tensors[name] = values
    args.out.mkdir(parents=True)
    save_file(tensors, args.out / "model.safetensors", metadata={"format": "pt"})
    for path in args.checkpoint.glob("*.json"):
        shutil.copy(path, args.out)
    config = json.loads((args.checkpoint / "config.json").read_text())
    config["quantization_config"] = quantization_config(args.scheme)
    (args.out / "config.json").write_text(json.dumps(config, indent=2) + "\n")


if __name__ == "__main__":
    main()
