"""Bamba (IBM): layers of Mamba-2, and some of attention with rotary positions on half of each head."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.checkpoint.sources import Sources
from penstock.config import ConfigReader
from penstock.models.decoder import CausalLM, DecoderConfig, GatedMLP, read_decoder, read_num_layers
from penstock.models.decoders.llama import LlamaAttention
from penstock.models.hybrids.mamba import MAMBA_KEYS, MambaConfig, MambaMixer, mamba_rows, read_mamba
from penstock.models.sources import renamed
from penstock.nn import Batch, Module, ModuleList, RMSNorm
from penstock.nn.base import Tensor

__all__ = ["Config", "Network"]


@dataclass(frozen=True)
class Config:
    """The values of config.json.  ``is_attention`` has one entry per layer."""

    decoder: DecoderConfig
    mamba: MambaConfig
    is_attention: tuple[bool, ...]

    @property
    def vocab_size(self) -> int:
        """The number of token ids."""
        return self.decoder.vocab_size

    @property
    def context_len(self) -> int:
        """The largest number of positions."""
        return self.decoder.context_len

    @staticmethod
    def read(reader: ConfigReader) -> Config:
        """Read and check config.json; errors name the key."""
        num_layers = read_num_layers(reader)
        own = ConfigReader({"num_key_value_heads": 8} | reader.values, reader.file)
        decoder = read_decoder(own, (0,) * num_layers, context_len=262144, norm_eps=1e-5, rotary_share=0.5)
        indices = reader.int_or_list("attn_layer_indices", max=num_layers - 1)
        mamba = read_mamba(
            reader,
            norm_eps=decoder.norm_eps,
            bias=reader.bool("mamba_proj_bias", False),
            keys=MAMBA_KEYS,
            width=reader.int("mamba_expand", 2) * decoder.hidden_size,
        )
        return Config(decoder, mamba, tuple(layer in indices for layer in range(num_layers)))


class _Layer(Module):
    """Mamba-2 or attention, then feed-forward, each after a norm and with a residual connection."""

    def __init__(self, config: Config, is_attention: bool) -> None:
        super().__init__()
        sizes = config.decoder
        self.is_attention = is_attention
        if is_attention:
            self.self_attn = LlamaAttention(sizes, 0)
        else:
            self.mamba = MambaMixer(config.mamba)
        self.input_layernorm = RMSNorm(sizes.hidden_size, sizes.norm_eps)
        self.pre_ff_layernorm = RMSNorm(sizes.hidden_size, sizes.norm_eps)
        self.feed_forward = GatedMLP(sizes.hidden_size, sizes.intermediate_size, sizes.mlp_bias)

    def forward(self, x: Tensor, cos_sin: Tensor, batch: Batch) -> Tensor:
        """Return the layer's output [T, hidden] for x [T, hidden]."""
        normed = self.input_layernorm(x)
        x = x + (self.self_attn(normed, cos_sin, batch) if self.is_attention else self.mamba(normed, batch))
        return x + self.feed_forward(self.pre_ff_layernorm(x))


class Network(CausalLM):
    """The language model."""

    def __init__(self, config: Config) -> None:
        super().__init__(config.decoder, [])
        self.model.layers = ModuleList(_Layer(config, is_attention) for is_attention in config.is_attention)

    def tensor_sources(self) -> Sources:
        """Return where the parameters come from: the last norm has another name, and in_proj is one tensor."""
        return renamed(self, mamba_rows(self), [("model.norm.", "model.final_layernorm.")])
