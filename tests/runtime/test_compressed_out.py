"""``penstock convert --format compressed-tensors``: transformers and compressed-tensors read what is written."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

from penstock import LLM
from penstock.checkpoint.convert import Conversion
from penstock.checkpoint.folder import Checkpoint
from penstock.checkpoint.quantize import quantize_checkpoint
from penstock.errors import InvalidArgumentError, UnsupportedError
from penstock.models.mapped import open_mapped
from penstock.quant.matrix import values_of
from penstock.quant.scheme import find_scheme
from penstock.runtime.convert import convert
from tests.support.errors import raises
from tests.support.families import build, prompt, save
from tests.support.sharded_folders import DEMO

COMPRESSED = Conversion(format="compressed-tensors")


def quantized(folder: Path, scheme: str, source: Checkpoint | Path = DEMO, **options: object) -> Path:
    quantize_checkpoint(source, folder, scheme, **options)
    return folder


def logits(folder: Path) -> torch.Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(torch.tensor([prompt(20)])).logits


@pytest.mark.parametrize("scheme", ["w8a8", "w8a16"])
def test_integers_and_scales_stay(tmp_path: Path, scheme: str) -> None:
    from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32

    source = Checkpoint.open(quantized(tmp_path / "own", scheme))
    report = convert(source.folder, tmp_path / "out", COMPRESSED)
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert report.num_tensors == len(written)
    linears = [name for name in source.tensors if source.is_quantized(name) and "embed" not in name]
    assert len(linears) == 42
    for name in linears:
        rows = source.read_quantized(name, source.tensors[name].shape[1])
        integers = written.get(name)
        if integers is None:
            packed, shape = written[f"{name}_packed"], written[f"{name}_shape"]
            integers = unpack_from_int32(packed, 8, torch.Size(shape.tolist()))
        assert torch.equal(integers, torch.tensor(rows.q)), name
        assert torch.equal(written[f"{name}_scale"].flatten(), torch.tensor(rows.scales)), name


@pytest.mark.parametrize("scheme", ["w8a8", "w8a16"])
def test_transformers_reads_the_folder(tmp_path: Path, scheme: str) -> None:
    model = build("qwen2")
    source = save("qwen2", tmp_path / "floats")
    own = Checkpoint.open(quantized(tmp_path / "own", scheme, source))
    convert(own.folder, tmp_path / "out", COMPRESSED)
    state = {name: tensor.float() for name, tensor in model.state_dict().items()}
    for name in own.tensors:
        if own.is_quantized(name):
            rows = own.read_quantized(name, own.tensors[name].shape[1])
            state[name] = torch.tensor(values_of(rows, find_scheme(scheme)))
    model = model.float().eval()
    model.load_state_dict(state)
    with torch.no_grad():
        expected = model(torch.tensor([prompt(20)])).logits
    error = (logits(tmp_path / "out") - expected).square().mean().sqrt() / expected.std()
    # Activations of w8a8 are rounded per token, those of w8a16 are not.
    assert 1e-4 < error < 0.05 if scheme == "w8a8" else error < 1e-4


@pytest.mark.parametrize("scheme", ["w8a8", "w8a16"])
def test_penstock_reads_the_same_integers(tmp_path: Path, scheme: str) -> None:
    """The head is floats in both: it would be integers in the folder of Penstock only."""
    own = quantized(tmp_path / "own", scheme, blacklist=["embed_tokens"])
    convert(own, tmp_path / "out", COMPRESSED)
    for mode in ("graph", "eager"):
        with LLM(own, mode=mode) as first, LLM(tmp_path / "out", mode=mode) as second:
            assert second.info.scheme == scheme
            assert np.array_equal(first.logits(prompt(20)), second.logits(prompt(20))), mode


def test_layers_that_stay_floats_are_ignored(tmp_path: Path) -> None:
    own = quantized(tmp_path / "own", "w8a16", blacklist=["layers.0.mlp"])
    convert(own, tmp_path / "out", COMPRESSED)
    section = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    parts = [f"model.layers.0.mlp.{part}_proj" for part in ("down", "gate", "up")]
    assert section["ignore"] == ["lm_head", "model.embed_tokens", *parts]
    assert torch.isfinite(logits(tmp_path / "out")).all()


@pytest.mark.parametrize("scheme", ["w4a8", "w8a8_h32", None])
def test_other_schemes_are_refused(tmp_path: Path, scheme: str | None) -> None:
    own = DEMO if scheme is None else quantized(tmp_path / "own", scheme)
    with raises(UnsupportedError, param="source", match=scheme or "not quantized"):
        convert(own, tmp_path / "out", COMPRESSED)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("out", "options", "param"),
    [
        ("out", {"dtype": "f32"}, "dtype"),
        ("out", {"layout": "split"}, "layout"),
        ("out", {"max_file_mb": 5}, "max_file_mb"),
        ("out.psm", {}, "out"),
        ("out.gguf", {}, "out"),
    ],
)
def test_other_options_are_refused(tmp_path: Path, out: str, options: dict[str, object], param: str) -> None:
    with raises(InvalidArgumentError, param=param):
        convert(DEMO, tmp_path / out, Conversion(format="compressed-tensors", **options))


def test_fused_linears_are_refused(tmp_path: Path) -> None:
    own = quantized(tmp_path / "own", "w8a8", open_mapped(save("phi3", tmp_path / "floats")))
    with raises(UnsupportedError, param="source", match="phi3"):
        convert(own, tmp_path / "out", COMPRESSED)


def test_an_unknown_format_is_refused() -> None:
    with raises(InvalidArgumentError, param="format"):
        Conversion(format="awq")
