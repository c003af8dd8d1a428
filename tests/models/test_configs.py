"""Configs of the networks: defaults as transformers has them, and refusals that name the key."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.config import ConfigReader
from penstock.errors import InvalidFileError, PenstockError, UnsupportedError
from penstock.models.meta import construct_on_meta
from penstock.models.registry import find_network, supported_types
from tests.support.errors import raises

LEAST: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
}


def read(model_type: str, **changes: Any) -> Any:
    values = {"model_type": model_type} | LEAST | changes
    return find_network(model_type).Config.read(ConfigReader({k: v for k, v in values.items() if v != "missing"}))


def test_the_folder_lists_the_types() -> None:
    assert {"llama", "mistral", "phi3", "qwen2", "qwen3"} <= set(supported_types())
    with raises(UnsupportedError, param="model_type", match="llama, .*qwen3.*, found 'gpt9'"):
        find_network("gpt9")
    with raises(UnsupportedError, param="model_type", match=r"found '\.\./registry'"):
        find_network("../registry")


def test_defaults() -> None:
    llama = read("llama")
    assert (llama.num_kv_heads, llama.head_dim, llama.tied, llama.attention_bias, llama.windows[0]) == (
        4,
        16,
        False,
        False,
        0,
    )
    assert read("qwen3").head_dim == 128
    assert read("qwen2").head_dim == 16
    assert read("mistral").windows[0] == 4096
    assert read("mistral", sliding_window=None).windows[0] == 0
    assert read("mistral", sliding_window=64).windows[0] == 64


def test_windows_by_layer() -> None:
    assert read("qwen2", sliding_window=8).windows == (0, 0, 0, 0)
    assert read("qwen2", sliding_window=8, use_sliding_window=True, max_window_layers=3).windows == (0, 0, 0, 8)
    kinds = ["full_attention", "sliding_attention"] * 2
    assert read("qwen3", sliding_window=8, use_sliding_window=True, layer_types=kinds).windows == (0, 8, 0, 8)


BAD = {
    "activation": ("llama", {"hidden_act": "relu"}, "silu, found 'relu'"),
    "missing": ("llama", {"hidden_size": "missing"}, "missing"),
    "heads": ("qwen2", {"num_key_value_heads": 3}, r"\(4\), found 3"),
    "rope": ("qwen3", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_scaling: .*dynamic"),
    "llama_window": ("llama", {"sliding_window": 5}, "null"),
    "layer_types_len": ("qwen2", {"layer_types": ["full_attention"]}, "4 layers, found 1"),
    "layer_types_kind": ("qwen2", {"layer_types": ["linear_attention"] * 4}, "linear_attention"),
    "layer_types_window": (
        "qwen3",
        {"layer_types": ["sliding_attention"] * 4},
        "sliding_window .*not set",
    ),
    "layers": ("llama", {"num_hidden_layers": 2**31 - 1}, "1 to 1024, "),
    "qwen_layers": ("qwen2", {"num_hidden_layers": 2**31 - 1}, "1 to 1024, "),
    "head_dim": ("qwen3", {"head_dim": 2**31 - 2}, "even .* 2 to 1024, "),
    "window_type": ("mistral", {"sliding_window": "4k"}, "'4k'"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_configs_are_refused_by_key(name: str) -> None:
    model_type, changes, fact = BAD[name]
    with raises(PenstockError, param="rope_type" if name == "rope" else next(iter(changes)), match=fact) as caught:
        read(model_type, **changes)
    assert isinstance(caught.value, InvalidFileError | UnsupportedError)


def test_sizes_that_no_network_has_are_refused() -> None:
    sizes = {"model_type": "llama", "hidden_size": 2**31 - 1, "intermediate_size": 2**31 - 1, "head_dim": 16}
    with raises(InvalidFileError, param="weight", match=r"config\.json: .* 2\^44"):
        construct_on_meta(ConfigReader(LEAST | sizes))
