"""The network of examples/my_network.py: its script, random weights, and its logits in plain PyTorch."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from penstock.config import ConfigReader
from penstock.models.registry import load_network_script

SCRIPT = Path(__file__).parents[2] / "examples" / "my_network.py"
SPEC = f"{SCRIPT}:Net"
CONFIG = {"model_type": "mine", "vocab_size": 103, "max_position_embeddings": 96, "width": 48}
CONFIG |= {"num_layers": 2, "num_heads": 3}


@pytest.fixture(scope="module")
def tensors() -> dict[str, np.ndarray]:
    network = load_network_script(SPEC).Network(load_network_script(SPEC).Config.read(ConfigReader(CONFIG)))
    generator = torch.Generator().manual_seed(0)
    found = {}
    for name, parameter in network.named_parameters():
        scale = 0.3 if parameter.ndim == 1 else parameter.shape[1] ** -0.5
        shift = 1.0 if "norm" in name and name.endswith("weight") else 0.0
        found[name] = (torch.randn(parameter.shape, generator=generator) * scale + shift).numpy()
    return found


@pytest.fixture(scope="module")
def folder(tensors: dict[str, np.ndarray], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mine")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_file(tensors, folder / "model.safetensors")
    return folder


def plain_logits(tensors: dict[str, np.ndarray], token_ids: list[int], causal: bool = True) -> np.ndarray:
    """The same network in plain PyTorch, over one prompt."""
    w = {name: torch.from_numpy(values) for name, values in tensors.items()}
    f = torch.nn.functional

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        return f.linear(x, w[f"{name}.weight"], w.get(f"{name}.bias"))

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return f.layer_norm(x, (48,), w[f"{name}.weight"], w[f"{name}.bias"])

    x = w["tokens.weight"][token_ids] + w["positions.weight"][: len(token_ids)]
    for block in ("blocks.0", "blocks.1"):
        heads = [
            t.view(-1, 3, 16).transpose(0, 1) for t in linear(norm(x, f"{block}.norm1"), f"{block}.qkv").chunk(3, -1)
        ]
        mixed = f.scaled_dot_product_attention(*heads, is_causal=causal).transpose(0, 1).reshape(-1, 48)
        x = x + linear(mixed, f"{block}.out")
        x = x + linear(f.gelu(linear(norm(x, f"{block}.norm2"), f"{block}.up"), approximate="tanh"), f"{block}.down")
    return linear(norm(x, "norm"), "head").numpy()
