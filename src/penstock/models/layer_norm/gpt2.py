"""GPT-2 (Radford et al. 2019): learned positions, and checkpoints that store linears transposed (Conv1D)."""

from __future__ import annotations

from penstock.checkpoint.sources import Sources
from penstock.config import ConfigReader
from penstock.errors import UnsupportedError
from penstock.models.layer_norm.parts import read_gelu, read_sizes
from penstock.models.layer_norm.stacked import StackedConfig, StackedNetwork
from penstock.models.sources import fused_rows, renamed, transposed

__all__ = ["Config", "Network"]

_KEYS = {
    "hidden_size": "n_embd",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
    "max_position_embeddings": "n_positions",
    "intermediate_size": "n_inner",
    "layer_norm_eps": "layer_norm_epsilon",
    "num_key_value_heads": "",
}
_NAMES = (
    ("layers.", "transformer.h."),
    ("embed_tokens.", "transformer.wte."),
    ("embed_positions.", "transformer.wpe."),
    ("final_norm.", "transformer.ln_f."),
    ("self_attn.o_proj.", "attn.c_proj."),
    ("self_attn.", "attn."),
    ("input_layernorm.", "ln_1."),
    ("mlp_layernorm.", "ln_2."),
    ("mlp.up_proj.", "mlp.c_fc."),
    ("mlp.down_proj.", "mlp.c_proj."),
)
_TRANSPOSED = ("q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj")


class Config:
    """Reads config.json."""

    @staticmethod
    def read(reader: ConfigReader) -> StackedConfig:
        """Read and check config.json; errors name the key."""
        if reader.bool("add_cross_attention", False):
            raise UnsupportedError(
                f"{reader.file}: add_cross_attention: expected false, got true", param="add_cross_attention"
            )
        gelu_form = read_gelu(reader, "activation_function", "gelu_new")
        sizes = read_sizes(reader, gelu_form=gelu_form, tied=True, context_len=1024, keys=_KEYS)
        scale = sizes.head_dim**-0.5 if reader.bool("scale_attn_weights", True) else 1.0
        by_layer = reader.bool("scale_attn_by_inverse_layer_idx", False)
        scales = tuple(scale / (layer + 1 if by_layer else 1) for layer in range(sizes.num_layers))
        return StackedConfig(sizes, scales=scales, learned_positions=True)


class Network(StackedNetwork):
    """The language model."""

    tensor_prefix = "transformer."
    unread_tensors = ("*.attn.bias", "*.attn.masked_bias")

    def tensor_sources(self) -> Sources:
        """Return where the parameters come from: q, k and v are one tensor, matrices are transposed, names differ."""
        table = transposed(self, fused_rows(self, "c_attn", _TRANSPOSED[:3]), _TRANSPOSED)
        return renamed(self, table, _NAMES)
