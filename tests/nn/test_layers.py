"""Layers: what they hold, print and share; packing; rotary frequencies; page groups."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from penstock.config import ConfigReader, RopeConfig
from penstock.core import layouts
from penstock.core.native import QuantizedRows
from penstock.errors import UnsupportedError
from penstock.nn import (
    Attention,
    Embedding,
    LayerNorm,
    Linear,
    LMHead,
    Module,
    ModuleList,
    RMSNorm,
    RotaryEmbedding,
    allocate_states,
    assign_page_groups,
    pack_network,
    shared_matrices,
)
from penstock.nn.packing import pack_matrix, pack_quantized
from penstock.nn.rope import inverse_frequencies
from penstock.ops.table import LINEAR_SCHEMES
from penstock.quant.scheme import find_scheme
from tests.support.errors import raises


def random_linear(kind: type[Linear] = Linear, bias: bool = True) -> Linear:
    layer = kind(40, 24, bias)
    generator = torch.Generator().manual_seed(0)
    for parameter in layer.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return layer


@pytest.mark.parametrize("scheme", LINEAR_SCHEMES)
def test_packed_weight_prints_dequantized_in_its_logical_shape(scheme: str) -> None:
    layer = random_linear()
    original = layer.weight.clone()
    x = torch.randn(3, 40, generator=torch.Generator().manual_seed(1))
    expected = x @ original.T + layer.bias
    pack_network(layer, scheme)
    assert layer.is_packed
    assert layer.weight.shape == (24, 40)
    assert layer.weight.dtype == torch.float32
    assert "weight" not in dict(layer.named_parameters())
    tolerance = {"f32": 0.0, "f16": 1e-3, "bf16": 1e-2}.get(scheme, 0.02 if scheme.startswith("w8") else 0.3)
    assert (layer.weight - original).abs().max() <= tolerance * original.abs().max()
    assert (layer(x) - expected).abs().max() <= (tolerance or 1e-6) * 8 * expected.abs().max()
    assert repr(layer) == f"Linear(weight=[24, 40], scheme={scheme}, bias=True)"


def test_an_adapter_is_added_to_the_output() -> None:
    layer = random_linear(Linear)
    pack_network(layer, "f32")
    x = torch.randn(2, 40)
    plain = layer(x)
    layer.adapter = lambda rows: rows[:, :24].contiguous() * 2
    assert layer(x).equal(plain + x[:, :24] * 2)
    layer.adapter = None
    assert layer(x).equal(plain)


def test_an_unpacked_layer_says_what_to_do() -> None:
    with pytest.raises(ValueError, match=r"\[linear\] weight: "):
        random_linear()(torch.randn(1, 40))


class Tied(Module):
    """A table, a head on the same weight, a body."""

    def __init__(self) -> None:
        super().__init__()
        self.table = Embedding(33, 16)
        self.body = Linear(16, 16)
        self.head = LMHead(16, 33, tied=self.table)


def test_tied_layers_share_one_matrix_before_and_after_packing() -> None:
    network = Tied()
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter)
    assert network.head.weight is network.table.weight
    assert [matrix.name for matrix in shared_matrices(network)] == ["table.weight", "body.weight"]
    pack_network(network, "w4a8")
    assert network.head.packed_weight is network.table.packed_weight
    assert (network.head.scheme, network.body.scheme) == ("w8a8", "w4a8")
    assert network.table.weight.equal(network.head.weight)


def test_an_untied_table_keeps_the_type_of_the_checkpoint() -> None:
    table = Embedding(33, 16)
    torch.nn.init.normal_(table.weight)
    pack_network(table, "w8a8", "bf16")
    assert table.packed_weight.dtype == torch.bfloat16
    assert table(torch.tensor([32], dtype=torch.int32)).equal(table.weight[32:])


def test_packing_quantized_values_keeps_them() -> None:
    generator = torch.Generator().manual_seed(0)
    q = torch.randint(-127, 128, (17, 40), generator=generator, dtype=torch.int8)
    scales = torch.rand(17, generator=generator)
    packed = pack_quantized(QuantizedRows(q.numpy(), scales.numpy()), layouts.T16_I8)
    layer = Linear(40, 17)
    layer.set_packed(packed, "w8a16")
    assert layer.weight.equal(q.float() * scales[:, None])
    assert pack_matrix(torch.zeros(17, 40), find_scheme("w8a8").layout).shape == packed.shape


def test_layers_print_their_shapes() -> None:
    assert repr(RMSNorm(8, 1e-5)) == "RMSNorm(dim=8, eps=1e-05)"
    assert repr(LayerNorm(8, bias=False)) == "LayerNorm(dim=8, eps=1e-05, bias=False)"
    assert repr(Embedding(5, 8)) == "Embedding(weight=[5, 8], scheme=f32)"
    assert repr(RotaryEmbedding(RopeConfig(10000.0, rotary_dim=8))) == (
        "RotaryEmbedding(type=default, theta=10000, rotary_dim=8)"
    )
    assert "window=7, group=0, state=[1, 2048]" in repr(Attention(4, 2, 16, window=7))


def test_page_groups_follow_window_and_heads() -> None:
    layers = [Attention(4, 2, 16), Attention(8, 2, 16, window=5), Attention(8, 2, 16), Attention(4, 4, 16)]
    groups = assign_page_groups(ModuleList(layers))
    assert [layer.group for layer in layers] == [0, 1, 0, 2]
    assert [group.window for group in groups] == [0, 5, 0]
    assert allocate_states(ModuleList(layers), 3, torch.int8) == 3 * (3 * 2 + 4) * (64 * 16 + 256)


ROPES = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32768},
    "yarn_mscale": {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "mscale": 0.7,
        "mscale_all_dim": 1.0,
        "beta_fast": 24.0,
        "beta_slow": 2.0,
    },
}


@pytest.mark.parametrize("name", ROPES)
def test_frequencies_match_transformers(name: str) -> None:
    config = LlamaConfig(
        hidden_size=512, num_attention_heads=4, max_position_embeddings=131072, rope_parameters=dict(ROPES[name])
    )
    rope = ConfigReader(config.to_dict()).rope(128)
    found = torch.from_numpy(inverse_frequencies(rope))
    if name == "default":
        expected, factor = 1.0 / (10000.0 ** (torch.arange(0, 128, 2).float() / 128)), 1.0
    else:
        expected, factor = ROPE_INIT_FUNCTIONS[name.partition("_")[0]](config, torch.device("cpu"))
    torch.testing.assert_close(found, expected, rtol=2e-6, atol=0)
    assert rope.attention_factor == pytest.approx(factor)


def test_unknown_rope_types_are_refused_by_name() -> None:
    with raises(UnsupportedError, param="rope_type", match="'ntk'"):
        inverse_frequencies(RopeConfig(10000.0, "ntk", 8))
