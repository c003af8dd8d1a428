"""Gemma (arXiv 2403.08295): a gate of GELU, a scaled embedding, and norms whose stored weights lack 1."""

from __future__ import annotations

import math

from penstock.checkpoint.sources import Sources
from penstock.config import ConfigReader
from penstock.errors import UnsupportedError
from penstock.models.decoder import CausalLM, DecoderConfig, DecoderLayer, GatedMLP, read_decoder, read_num_layers
from penstock.models.decoders.llama import LlamaAttention
from penstock.models.sources import add_to_norms
from penstock.nn import Batch, Module, ModuleList, gelu, scale
from penstock.nn.base import Tensor

__all__ = ["Config", "GeluGatedMLP", "Network", "read_gemma"]


def read_gemma(
    reader: ConfigReader,
    windows: tuple[int, ...],
    *,
    activation: str = "hidden_activation",
    context_len: int = 8192,
    may_look_ahead: bool = False,
) -> DecoderConfig:
    """Read and check what the Gemma families share; errors name the key.

    ``activation`` is the key of the activation, and ``context_len`` the family's default.  ``may_look_ahead``: the
    family has a form whose attention is not causal.
    """
    reader.one_of(activation, ("gelu_pytorch_tanh",), "gelu_pytorch_tanh")
    if not may_look_ahead and reader.bool("use_bidirectional_attention", False):
        raise UnsupportedError(
            f"{reader.file}: use_bidirectional_attention: expected false, got true",
            param="use_bidirectional_attention",
        )
    values = {key: value for key, value in reader.values.items() if key != "hidden_act"}
    return read_decoder(ConfigReader(values, reader.file), windows, context_len=context_len, head_dim=256, tied=True)


class Config:
    """Reads config.json."""

    @staticmethod
    def read(reader: ConfigReader) -> DecoderConfig:
        """Read and check config.json; errors name the key."""
        # Folders of the first release say "gelu" and mean the tanh form, which hidden_activation then names.
        activation = "hidden_activation" if reader.has("hidden_activation") else "hidden_act"
        if reader.values.get(activation) == "gelu":
            activation = "hidden_activation"
        return read_gemma(reader, (0,) * read_num_layers(reader), activation=activation)


class GeluGatedMLP(GatedMLP):
    """The feed-forward layer with a gate of GELU in the tanh form."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output [T, hidden] for x [T, hidden]."""
        return self.down_proj(gelu(self.gate_proj(x), "tanh") * self.up_proj(x))


class GemmaLayer(DecoderLayer):
    """Llama's layer with a gate of GELU."""

    def __init__(self, config: DecoderConfig, attention: Module) -> None:
        super().__init__(config, attention)
        self.mlp = GeluGatedMLP(config.hidden_size, config.intermediate_size)


class Network(CausalLM):
    """The language model."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config, [])
        self.model.layers = ModuleList(GemmaLayer(config, LlamaAttention(config, 0)) for _ in config.windows)

    def forward(self, batch: Batch) -> Tensor:
        """Return the logits of the wanted rows, [R, vocab]."""
        model = self.model
        x = scale(model.embed_tokens(batch.token_ids), math.sqrt(self.config.hidden_size))
        cos_sin = model.rotary_emb(batch.positions)
        for layer in model.layers:
            x = layer(x, cos_sin, batch)
        return self.lm_head(model.norm(x), batch.output_rows)

    def tensor_sources(self) -> Sources:
        """Return where the parameters come from: norms, which the checkpoint stores less 1."""
        return add_to_norms(self)
