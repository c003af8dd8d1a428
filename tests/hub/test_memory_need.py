"""The memory that is announced before a download, against the plan that the core makes of the bundle."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from penstock import errors
from penstock.config import ConfigReader
from penstock.core import native
from penstock.hub.aliases import ALIASES
from penstock.hub.download_estimate import check_memory
from penstock.hub.memory_need import ModelShape, memory_need
from penstock.hub.names import ModelName
from penstock.models.families import built_in_families
from penstock.ops.pages import page_elements
from penstock.runtime.build import build_in_child
from penstock.runtime.machine import Memory
from penstock.runtime.native import fit_limits
from penstock.runtime.program import ProgramLimits
from tests.support.command import FOLDER
from tests.support.errors import raises
from tests.support.families import save
from tests.support.marks import mostly_long

HEADROOM = 64 << 20


@pytest.mark.long
@pytest.mark.parametrize("scheme", mostly_long(["bf16", "w8a8", "w4a8", "f32"], "w4a8"))
def test_the_estimate_is_close_to_the_plan(scheme, tmp_path):
    config = ConfigReader(json.loads((FOLDER / "config.json").read_text()))
    shape = ModelShape.of(config, (FOLDER / "model.safetensors").stat().st_size)
    build_in_child(FOLDER, tmp_path / "demo.psm", scheme=scheme)
    with native.Model.open(tmp_path / "demo.psm") as model, native.Context(1) as context:
        _, plan = fit_limits(model, context, ProgramLimits(max_requests=1))
    assert memory_need(shape, scheme) - HEADROOM == pytest.approx(plan.total_bytes, rel=0.1)
    assert shape.weight_bytes(scheme) == pytest.approx(plan.weight_bytes, rel=0.02)
    assert shape.kv_bytes(1024, "f32" if scheme == "f32" else "bf16") == plan.kv_bytes


@pytest.mark.parametrize("head_dim", [17, 80])
def test_nibbles_are_counted_in_whole_bytes(head_dim: int) -> None:
    shape = ModelShape(10**6, 2, 256, 512, 3, head_dim, 1000, 2048, True, "bf16")
    assert shape.kv_bytes(2048, "int4") == 2 * (2048 // 32) * page_elements("uint8", 3, head_dim)
    with raises(errors.UnsupportedError, param="kv_cache"):
        replace(shape, rows_per_token=1).kv_bytes(2048, "int4")


HYBRIDS = mostly_long(("qwen3_5_text", "granitemoehybrid", "falcon_h1", "nemotron_h"), "nemotron_h")


@pytest.mark.parametrize("family", HYBRIDS)
def test_states_of_hybrids_are_counted(family, tmp_path):
    folder = save(family, tmp_path / "folder")
    config = json.loads((folder / "config.json").read_text())
    weight_bytes = (folder / "model.safetensors").stat().st_size
    build_in_child(folder, tmp_path / "model.psm", scheme="f32")
    with native.Model.open(tmp_path / "model.psm") as model, native.Context(1) as context:
        _, plan = fit_limits(model, context, ProgramLimits(max_requests=1))
    shape = ModelShape.of(ConfigReader(config), weight_bytes)
    assert shape.kv_bytes(shape.context_len, "f32") == pytest.approx(plan.kv_bytes, rel=0.01)
    nested = ConfigReader({"model_type": "qwen3_5", "text_config": config})
    assert ModelShape.of(nested, weight_bytes) == shape


def test_sizes_under_names_of_a_family():
    gpt2 = {"n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024, "vocab_size": 50257}
    shape = ModelShape.of(ConfigReader(gpt2), 500_000_000)
    assert (shape.hidden_size, shape.num_layers, shape.intermediate_size) == (768, 12, 3072)
    assert (shape.context_len, shape.head_dim) == (1024, 64)
    t5 = {"d_model": 512, "num_layers": 8, "num_heads": 6, "d_kv": 64, "d_ff": 1024, "vocab_size": 32128}
    shape = ModelShape.of(ConfigReader(t5 | {"num_decoder_layers": 6, "tie_word_embeddings": True}), 300_000_000)
    assert (shape.num_attention_layers, shape.head_dim, shape.num_parameters) == (20, 64, 75_000_000)
    chatglm = {"hidden_size": 4096, "num_layers": 28, "num_attention_heads": 32, "ffn_hidden_size": 13696}
    shape = ModelShape.of(ConfigReader(chatglm | {"padded_vocab_size": 65024, "seq_length": 8192}), 12_000_000_000)
    assert (shape.num_layers, shape.intermediate_size, shape.vocab_size) == (28, 13696, 65024)
    first = {"inner_hidden_size": 16384, "vocab_size": 130528, "max_sequence_length": 2048}
    shape = ModelShape.of(ConfigReader({**chatglm, "ffn_hidden_size": None, **first}), 12_000_000_000)
    assert (shape.intermediate_size, shape.vocab_size, shape.context_len) == (16384, 130528, 2048)


@pytest.mark.parametrize("name", ALIASES)
def test_the_sizes_of_a_short_name_agree(name):
    row = ALIASES[name]
    shape = row.shape
    assert row.family in built_in_families()
    table = shape.vocab_size * shape.hidden_size
    # Attention has at least its key and value matrices, and the feed-forward layer has three.
    at_least = shape.hidden_size * (3 * shape.intermediate_size + 2 * shape.num_kv_heads * shape.head_dim)
    at_least = shape.num_layers * at_least + table * (1 if shape.tied else 2)
    assert at_least < shape.num_parameters < 1.35 * at_least
    assert 0.98 < row.download_bytes / (2 * shape.num_parameters) < 1.35  # some hold the tied output head twice


def test_memory_that_does_not_suffice_names_a_scheme_that_does(monkeypatch):
    shape = ALIASES["llama3.1-8b"].shape
    name = ModelName("meta-llama/Llama-3.1-8B-Instruct")
    monkeypatch.setattr("penstock.hub.download_estimate.memory", lambda: Memory(10 << 30, 16 << 30, None))
    check_memory(name, shape, None)
    with pytest.raises(errors.OutOfMemoryError, match=r"16.5 GB .* bf16.*--scheme w8a8"):
        check_memory(name, shape, "bf16")
    monkeypatch.setattr("penstock.hub.download_estimate.memory", lambda: Memory(1 << 30, 2 << 30, None))
    with pytest.raises(errors.OutOfMemoryError, match="Use a smaller model"):
        check_memory(name, shape, None)
