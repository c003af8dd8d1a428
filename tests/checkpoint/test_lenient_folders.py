"""Folders that transformers and vLLM open, though a file or a tensor is not where it should be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from penstock import LLM
from penstock.auto import AutoConfig
from penstock.checkpoint.folder import Checkpoint
from penstock.checkpoint.quantize import quantize_checkpoint
from penstock.errors import InvalidFileError, UnsupportedError
from penstock.models.loader import load_network
from tests.support.errors import raises
from tests.support.invariant_checkpoints import write_checkpoint
from tests.support.quantized_folders import (
    AWQ,
    FP8,
    GPTQ,
    INTEGERS,
    PACKED,
    awq_layer,
    float8_layer,
    gptq_layer,
    integer_layer,
    one_layer,
    packed_layer,
)

DEMO = Path(__file__).parents[2] / "demo" / "model"


def change_config(folder: Path, **changes: Any) -> None:
    values = json.loads((folder / "config.json").read_text()) | changes
    kept = {key: value for key, value in values.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(kept))


def add(folder: Path, **tensors: np.ndarray) -> Path:
    """Add tensors; names are written with __ for dots."""
    stored = load_file(folder / "model.safetensors")
    stored |= {name.replace("__", "."): value for name, value in tensors.items()}
    save_file(stored, folder / "model.safetensors")
    return folder


def test_a_config_with_infinity_is_one_config(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model")
    change_config(folder, time_step_limit=[0.0, float("inf")])
    assert "Infinity" in (folder / "config.json").read_text()
    assert AutoConfig.from_pretrained(folder).time_step_limit == [0.0, float("inf")]
    assert load_network(folder)


@pytest.mark.parametrize(
    "name", ["k_scale", "v_scale", "kv_scale", "q_scale", "k_proj.k_scale", "v_proj.output_scale",
             "rotary_emb.inv_freq", "rotary_emb.cos_cached", "_extra_state"]
)  # fmt: skip
def test_tensors_that_change_nothing_are_not_read(tmp_path: Path, name: str) -> None:
    folder = write_checkpoint(tmp_path / "model")
    tensor = f"model.layers.0.self_attn.{name}"
    assert load_network(add(folder, **{tensor: np.ones(1, np.float32), "v_head.summary.weight": np.ones((1, 96))}))


def test_only_a_bias_of_zeros_changes_nothing(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", hidden_size=96)
    add(folder, model__layers__0__mlp__down_proj__bias=np.zeros(96, np.float16))
    assert load_network(folder)
    quantize_checkpoint(folder, tmp_path / "quantized", "w8a8")
    assert "model.layers.0.mlp.down_proj.bias" in Checkpoint.open(tmp_path / "quantized").tensors
    add(folder, model__layers__0__mlp__down_proj__bias=np.ones(96, np.float16))
    with raises(InvalidFileError, param="model.layers.0.mlp.down_proj.bias"):
        load_network(folder)


PLACES = {
    "gptq": (GPTQ, lambda rng: gptq_layer(rng, 24, 256)),
    "awq": (AWQ, lambda rng: awq_layer(rng, 24, 256)),
    "packed": (PACKED, lambda rng: packed_layer(rng, 20, 256)),
    "integers": (INTEGERS, lambda rng: integer_layer(rng, 20, 256)),
    "fp8": (FP8, lambda rng: float8_layer(rng, 256, 256, block=128)),
}


def quantized(folder: Path, kind: str) -> tuple[Path, dict[str, Any], np.ndarray]:
    section, layer = PLACES[kind]
    packed = layer(np.random.default_rng(1))
    return one_layer(folder, section, packed), section, packed.weight.numpy()


@pytest.mark.parametrize(
    ("kind", "place", "left_out"),
    [("gptq", "quantize_config.json", ["quant_method"]), ("gptq", "quantize_config.json", []),
     ("awq", "quant_config.json", ["quant_method"]), ("awq", "quantize_config.json", ["quant_method"]),
     ("packed", "compression_config", ["quant_method"]), ("integers", "compression_config", []),
     ("fp8", "text_config", []), ("gptq", "text_config", ["quant_method"]),
     ("gptq", "quantization_config", ["quant_method"])],
)  # fmt: skip
def test_the_section_may_be_in_another_place(tmp_path: Path, kind: str, place: str, left_out: list[str]) -> None:
    folder, section, weight = quantized(tmp_path, kind)
    section = {key: value for key, value in section.items() if key not in left_out}
    change_config(folder, quantization_config=None)
    if place.endswith(".json"):
        (folder / place).write_text(json.dumps(section))
    elif place == "text_config":
        change_config(folder, text_config={"quantization_config": section})
    else:
        change_config(folder, **{place: section})
    checkpoint = Checkpoint.open(folder)
    assert np.array_equal(checkpoint.read("a.weight"), weight)
    written = json.loads(checkpoint.side_files()["config.json"])
    assert written["quantization_config"]["quant_method"] == PLACES[kind][0]["quant_method"]
    assert place.removesuffix(".json") == place or place in {stamp.name for stamp in checkpoint.files}


@pytest.mark.parametrize(
    ("kind", "changes"),
    [("gptq", {"quant_method": "GPTQ"}), ("gptq", {"quant_method": "gptq_marlin"}), ("awq", {"quant_method": "AWQ"}),
     ("packed", {"quant_method": "compressed_tensors"}), ("packed", {"kv_cache_scheme": {"num_bits": 8}}),
     ("gptq", {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq"}),
     ("awq", {"quant_method": "auto-round", "packing_format": "auto_round:auto_awq"}),
     ("fp8", {"quant_method": "modelopt", "quant_algo": "FP8"})],
)  # fmt: skip
def test_other_names_of_the_formats(tmp_path: Path, kind: str, changes: dict[str, Any]) -> None:
    folder, section, weight = quantized(tmp_path, kind)
    change_config(folder, quantization_config=section | changes)
    assert np.array_equal(Checkpoint.open(folder).read("a.weight"), weight)


def test_a_file_of_the_settings_that_modelopt_writes(tmp_path: Path) -> None:
    packed = float8_layer(np.random.default_rng(1), 256, 256, end="weight_scale")
    one_layer(tmp_path, {}, packed)
    change_config(tmp_path, quantization_config=None)
    settings = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(settings))
    assert np.array_equal(Checkpoint.open(tmp_path).read("a.weight"), packed.weight.numpy())
    settings["quantization"] = {"quant_algo": "W4A8_AWQ"}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(settings))
    with raises(UnsupportedError, param="quant_algo"):
        _ = Checkpoint.open(tmp_path).config


@pytest.mark.parametrize("kind", ["gptq", "awq", "packed", "fp8"])
def test_quantized_weights_without_a_section_are_named(tmp_path: Path, kind: str) -> None:
    folder, _, _ = quantized(tmp_path, kind)
    for empty in (None, {}):
        change_config(folder, quantization_config=empty)
        with raises(InvalidFileError, param="quantization_config"):
            Checkpoint.open(folder)


def test_settings_beside_weights_that_are_floats_do_not_count(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model")
    (folder / "quantize_config.json").write_text(json.dumps({"bits": 4, "group_size": 128}))
    assert Checkpoint.open(folder).config.foreign_quantization() is None


@pytest.mark.parametrize("tie", [True, None])
def test_a_stored_head_that_differs_counts(tmp_path: Path, tie: bool | None, caplog: pytest.LogCaptureFixture) -> None:
    """As in transformers 5; also in folders that are made of such a folder."""
    folder = write_checkpoint(tmp_path / "model", tie_word_embeddings=False)
    change_config(folder, tie_word_embeddings=tie)
    head = load_file(folder / "model.safetensors")["lm_head.weight"]
    assert np.array_equal(load_network(folder).get_parameter("lm_head.weight").detach().numpy(), head)
    assert len(caplog.records) == (tie is True)
    checkpoint = Checkpoint.open(folder)
    assert json.loads(checkpoint.side_files()["config.json"])["tie_word_embeddings"] is False
    quantize_checkpoint(folder, tmp_path / "quantized", "w8a16")
    made = Checkpoint.open(tmp_path / "quantized")
    assert made.tensors["lm_head.weight"].dtype == "i8"
    assert made.config.bool("tie_word_embeddings") is False


def test_a_stored_head_that_is_equal_is_tied(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", tie_word_embeddings=True)
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    network = load_network(add(folder, lm_head__weight=embedding))
    assert network.get_parameter("lm_head.weight") is network.get_parameter("model.embed_tokens.weight")
    assert (folder / "config.json").read_bytes() == Checkpoint.open(folder).side_files()["config.json"]


@pytest.mark.long
def test_what_is_not_used_is_a_warning_of_the_opening_process(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Also what the process that exports reads first."""
    folder = write_checkpoint(tmp_path / "model", tie_word_embeddings=False)
    change_config(folder, tie_word_embeddings=True)
    (folder / "generation_config.json").write_text('{"do_sample": true, "top_p": 7}')
    with LLM(folder, use_cache=False) as llm:
        assert len(llm.generate([3, 5], max_tokens=2, temperature=0).token_ids) == 2
        assert json.loads(llm.files["generation_config.json"]) == {"do_sample": True}
        assert json.loads(llm.files["config.json"])["tie_word_embeddings"] is False
    texts = [record.getMessage() for record in caplog.records]
    assert [("tie_word_embeddings" in text, "top_p" in text) for text in texts] == [(True, False), (False, True)]
