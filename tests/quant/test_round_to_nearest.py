"""RoundToNearest on networks: apply, convert and save agree with the folder that penstock quantize writes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from safetensors.torch import load_file as torch_tensors
from torch import nn

from penstock import load_network
from penstock.checkpoint.quantize import quantize_checkpoint
from penstock.errors import InvalidArgumentError, InvalidFileError, UnsupportedError
from penstock.models.loader import save_network
from penstock.models.mapped import open_mapped
from penstock.nn import Embedding, Linear, LMHead, RMSNorm
from penstock.quant.round_to_nearest import RoundToNearest, RoundToNearestConfig
from tests.support import families
from tests.support.errors import raises
from tests.support.invariant_checkpoints import write_checkpoint
from tests.support.marks import mostly_long


class Small(nn.Module):
    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embed_tokens = Embedding(40, 64)
        self.up = Linear(64, 48)
        self.norm = RMSNorm(64, 1e-5)
        self.lm_head = LMHead(64, 40, tied=self.embed_tokens if tied else None)


def make_network(tied: bool) -> Small:
    torch.manual_seed(0)
    network = Small(tied)
    for parameter in network.parameters():
        nn.init.normal_(parameter)
    return network


def tensors_of(network: nn.Module) -> dict[str, np.ndarray]:
    return {name: parameter.detach().numpy().copy() for name, parameter in network.named_parameters()}


@pytest.mark.parametrize("scheme", ["w8a16", "w8a8", "w4a16", "w4a8"])
@pytest.mark.parametrize("tied", [False, True])
def test_save_writes_what_penstock_quantize_writes(tmp_path: Path, scheme: str, tied: bool) -> None:
    network = make_network(tied)
    config = json.dumps({"model_type": "x", "tie_word_embeddings": tied}).encode()
    (tmp_path / "source").mkdir()
    save_file(tensors_of(network), tmp_path / "source" / "model.safetensors")
    (tmp_path / "source" / "config.json").write_bytes(config)
    quantize_checkpoint(tmp_path / "source", tmp_path / "folder", scheme)
    algorithm = RoundToNearest(RoundToNearestConfig(scheme))
    algorithm.convert(algorithm.apply(network))
    algorithm.save(tmp_path / "saved", {"config.json": config})
    expected = load_file(tmp_path / "folder" / "model.safetensors")
    found = load_file(tmp_path / "saved" / "model.safetensors")
    assert {name: array.tobytes() for name, array in found.items()} == {
        name: array.tobytes() for name, array in expected.items()
    }


def test_apply_keeps_floats_near_and_convert_keeps_their_values() -> None:
    network = make_network(tied=False)
    before = tensors_of(network)
    algorithm = RoundToNearest(RoundToNearestConfig("w4a8"))
    algorithm.apply(network)
    rounded = tensors_of(network)
    error = np.linalg.norm(rounded["up.weight"] - before["up.weight"]) / np.linalg.norm(before["up.weight"])
    assert 0 < error < 0.12
    assert (rounded["embed_tokens.weight"] == before["embed_tokens.weight"]).all()
    algorithm.convert(network)
    assert network.up.is_packed
    assert (network.up.weight.numpy() == rounded["up.weight"]).all()
    assert network.lm_head.scheme == "w8a8"


def test_misuse_is_refused(tmp_path: Path) -> None:
    with raises(InvalidArgumentError, match="bf16"):
        RoundToNearestConfig("bf16")
    algorithm = RoundToNearest(RoundToNearestConfig("w8a8"))
    with raises(InvalidArgumentError, param="network", match="linear layers"):
        algorithm.apply(nn.Sequential())
    with raises(InvalidArgumentError, param="network", match="apply"):
        algorithm.convert(make_network(tied=False))
    with raises(InvalidArgumentError, param="save", match="apply"):
        algorithm.save(tmp_path / "out", {"config.json": b"{}"})
    algorithm.apply(make_network(tied=False))
    with raises(InvalidArgumentError, param="side_files", match=r"config\.json"):
        algorithm.save(tmp_path / "out", {})


@pytest.mark.parametrize("tied", [False, True])
def test_round_to_nearest_saves_what_penstock_quantize_does(tmp_path: Path, tied: bool) -> None:
    source = write_checkpoint(tmp_path / "model", tie_word_embeddings=tied)
    algorithm = RoundToNearest(RoundToNearestConfig("w4a8"))
    algorithm.convert(algorithm.apply(load_network(source)))
    algorithm.save(tmp_path / "saved")
    quantize_checkpoint(source, tmp_path / "folder", "w4a8")
    for name in ("config.json", "model.safetensors"):
        expected, found = (tmp_path / folder / name for folder in ("folder", "saved"))
        if name == "config.json":
            assert json.loads(found.read_text()) == json.loads(expected.read_text())
        else:
            assert {k: v.tobytes() for k, v in load_file(found).items()} == {
                k: v.tobytes() for k, v in load_file(expected).items()
            }
    with raises(UnsupportedError, match="w4a8"):
        load_network(tmp_path / "saved")


def test_loading_refuses_missing_unused_and_misshapen_tensors(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "model")
    tensors = load_file(source / "model.safetensors")
    damaged = {
        "lacks .*'model.norm.weight'": {k: v for k, v in tensors.items() if k != "model.norm.weight"},
        "has .*'stray'": tensors | {"stray": np.zeros(3, np.float32)},
        r"shape: .*\[96\], got \[95\]": tensors | {"model.norm.weight": np.zeros(95, np.float32)},
    }
    for message, found in damaged.items():
        save_file(found, source / "model.safetensors")
        with pytest.raises(InvalidFileError, match=message):
            load_network(source)


@pytest.mark.parametrize("family", mostly_long(["mixtral", "minicpm3", "gpt_oss", "deepseek_v3"], "mixtral"))
def test_networks_with_experts_load_and_are_quantized(family: str, tmp_path: Path) -> None:
    """The experts of a normal folder are one tensor each; the layers of each head are linears, too."""
    source = families.save(family, tmp_path / "model")
    network = load_network(source)
    save_network(network, tmp_path / "again")
    again = dict(load_network(tmp_path / "again").named_parameters())
    assert {name for name, own in network.named_parameters() if not torch.equal(own, again[name])} == set()
    algorithm = RoundToNearest(RoundToNearestConfig("w4a8"))
    algorithm.convert(algorithm.apply(network))
    algorithm.save(tmp_path / "saved")
    quantize_checkpoint(open_mapped(source), tmp_path / "folder", "w4a8")
    expected, found = tmp_path / "folder", tmp_path / "saved"
    assert json.loads((found / "config.json").read_text()) == json.loads((expected / "config.json").read_text())
    mine, theirs = (torch_tensors(folder / "model.safetensors") for folder in (found, expected))
    assert mine.keys() == theirs.keys()
    assert {name for name, own in mine.items() if not torch.equal(own, theirs[name])} == set()
