"""The memory that a model will need here, estimated from its config.json before its weights are downloaded.

The native core plans memory exactly, but only from a bundle.  This estimate follows the same parts: weights in a
scheme, keys and values of one context, temporaries of one step.  A test holds it against the core's plan.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from penstock.config import ConfigReader
from penstock.core.layouts import PAGE_TOKENS, pages_by_group, pages_for
from penstock.errors import UnsupportedError
from penstock.models.families import BOTH_IN_EACH_LAYER, DEFAULT_SIZES
from penstock.quant.scheme import GROUP_LEN, SCHEMES, find_scheme

__all__ = ["SMALLEST_SCHEME", "ModelShape", "memory_need"]

SMALLEST_SCHEME: Final = "w4a8"
MIN_CONTEXT: Final = 2048
"""A context that the user leaves open may shrink to this many tokens, as ``runtime.native.fit_limits`` has it."""
_STEP_TOKENS: Final = 512
_HEADROOM_BYTES: Final = 64 << 20
_MAMBA_KEYS: Final = (
    ("mamba_n_heads", "mamba_d_head", "mamba_d_state", "mamba_d_conv"),
    ("mamba_num_heads", "mamba_head_dim", "ssm_state_size", "conv_kernel"),
)
"""The keys of heads, their size, the size of the state and the length of the convolution in families with Mamba-2."""
_STATE_WINDOW: Final = 2
"""The window of page groups with recurrent states, in tokens."""
_DTYPE_BYTES: Final = {"f32": 4, "f16": 2, "bf16": 2}
_KV_BYTES: Final = {"f32": 4, "bf16": 2, "int8": 1}

_OTHER_KEYS: Final = {
    "hidden_size": ("n_embd", "n_embed", "d_model", "dim"),
    "num_attention_heads": ("n_head", "num_heads", "n_heads"),
    "head_dim": ("d_kv",),
    "num_hidden_layers": ("n_layer", "num_layers", "n_layers"),
    "intermediate_size": ("ffn_hidden_size", "inner_hidden_size", "n_inner", "d_ff", "hidden_dim"),
    "vocab_size": ("padded_vocab_size",),
    "max_position_embeddings": ("n_positions", "seq_length", "max_sequence_length", "model_max_length"),
}
"""Names that families such as gpt2, bloom, falcon and chatglm have for the keys of the others."""


_KINDS_OF_LAYERS = ("layers_block_type", "layer_types", "hybrid_override_pattern")
"""Keys with the kind of each layer; nemotron_h gives no number of layers beside them."""


def _with_usual_keys(config: ConfigReader) -> ConfigReader:
    """Return a config whose sizes have the usual names; a feed-forward layer without a size has 4 * hidden_size.

    The sizes of the text part of a larger network come from ``text_config``.
    """
    text = config.object("text_config") if config.has("text_config") else None
    defaults = DEFAULT_SIZES.get(config.str("model_type", ""), {})
    values = defaults | config.values | (text.values if text is not None else {})
    config = ConfigReader(values, config.file)
    for key, names in _OTHER_KEYS.items():
        own = next((name for name in names if config.has(name)), None)
        if own is not None and not config.has(key):
            values[key] = config.values[own]
    usual = ConfigReader(values, config.file)
    if not usual.has("intermediate_size"):
        values["intermediate_size"] = 4 * usual.int("hidden_size")
    kinds = next((values[key] for key in _KINDS_OF_LAYERS if usual.has(key)), None)
    if not usual.has("num_hidden_layers") and isinstance(kinds, (list, str)):
        values["num_hidden_layers"] = len(kinds)
    return usual


def _layer_counts(config: ConfigReader, num_layers: int) -> tuple[int, int]:
    """Return the number of layers that keep keys and values, and of those of a hybrid that keep a recurrent state."""
    if config.has("num_decoder_layers"):  # each with keys and values of its own, and of the encoder
        return num_layers + 2 * config.int("num_decoder_layers"), 0
    if config.has("hybrid_override_pattern"):
        pattern = config.str("hybrid_override_pattern")
        return pattern.count("*"), pattern.count("M")
    key = "layers_block_type" if config.has("layers_block_type") else "layer_types"
    kinds = config.text_list(key)
    if config.str("model_type", "") in BOTH_IN_EACH_LAYER:
        return num_layers, num_layers
    if config.has("attn_layer_indices"):
        num_attention = len(set(config.int_or_list("attn_layer_indices")))
        return num_attention, num_layers - num_attention
    if kinds is not None:
        states = sum(kind in ("linear_attention", "mamba") for kind in kinds)
        return sum(kind not in ("linear_attention", "mamba", "conv", "mlp", "moe") for kind in kinds), states
    if config.has("linear_num_value_heads"):
        num_attention = num_layers // max(1, config.int("full_attention_interval", 4))
        return num_attention, num_layers - num_attention
    return num_layers, 0


def _state_bytes(config: ConfigReader) -> int:
    """Return the bytes of the state of one recurrent layer: heads, and inputs of the convolution."""
    for names in _MAMBA_KEYS:
        if config.has(names[0]):
            return _mamba_bytes(config, *names)
    if not config.has("linear_num_value_heads"):
        return 0
    key_dim, value_dim, window = (
        config.int(f"linear_{name}") for name in ("key_head_dim", "value_head_dim", "conv_kernel_dim")
    )
    key_heads, heads = config.int("linear_num_key_heads"), config.int("linear_num_value_heads")
    channels = 2 * key_heads * key_dim + heads * value_dim
    return 4 * (heads * key_dim * value_dim + (window - 1) * channels)


def _mamba_bytes(config: ConfigReader, heads_key: str, dim_key: str, state_key: str, window_key: str) -> int:
    """Return the bytes of the state of one layer with Mamba-2; its heads are cut in about 16 blocks."""
    heads, state_dim = config.int(heads_key), config.int(state_key, 128)
    if config.values.get(dim_key) in (None, "auto"):
        width = config.optional_int("mamba_d_ssm") or config.int("mamba_expand", 2) * config.int("hidden_size")
    else:
        width = heads * config.int(dim_key)
    blocks = min(heads, 16)
    block = width // blocks
    numbers = block * state_dim + (config.int(window_key, 4) - 1) * (block + 2 * state_dim) + 1
    return 4 * blocks * (-(-numbers // 16) * 16)


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a decoder that decide its memory; ``dtype`` is that of the checkpoint ("f32", "f16", "bf16")."""

    num_parameters: int
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    context_len: int
    tied: bool
    dtype: str
    rows_per_token: int = 2  # keys and values; 1 where a latent is both
    num_attention_layers: int | None = None  # None: all layers
    state_bytes: int = 0  # of all layers with a recurrent state, for each page of their group

    @classmethod
    def of(cls, config: ConfigReader, weight_bytes: int) -> ModelShape:
        """Return the shape of a config.json whose safetensors have ``weight_bytes``; errors name the key."""
        config = _with_usual_keys(config)
        dtype = config.dtype() or "f32"
        hidden, heads = config.int("hidden_size"), config.int("num_attention_heads")
        head_dim = config.optional_int("head_dim") or hidden // heads
        kv_heads = config.optional_int("num_key_value_heads") or heads
        latent_dim = config.optional_int("kv_lora_rank")
        if latent_dim is not None:
            kv_heads, head_dim = 1, latent_dim + config.int("qk_rope_head_dim")
        layers, inner, vocab = (config.int(name) for name in ("num_hidden_layers", "intermediate_size", "vocab_size"))
        tied = config.bool("tie_word_embeddings", False)
        has_halves = config.has("num_decoder_layers")
        by_layers = layers * hidden * (2 * heads * head_dim + 2 * kv_heads * head_dim + 3 * inner)
        from_sizes = by_layers + vocab * hidden * (1 if tied else 2)
        # The files may hold a copy of a tied output head, which a bundle leaves out.
        stored = weight_bytes // _DTYPE_BYTES[dtype]
        count = min(stored, from_sizes) if tied and stored > from_sizes and not has_halves else stored
        if config.foreign_quantization() is not None:  # the bytes of the files do not tell the number of weights
            count = from_sizes
        context_len = config.optional_int("max_position_embeddings") or MIN_CONTEXT
        rows = 2 if latent_dim is None else 1
        num_attention, num_states = _layer_counts(config, layers)
        return cls(
            count, layers, hidden, inner, kv_heads, head_dim, vocab, context_len, tied, dtype, rows,
            num_attention, num_states * _state_bytes(config),
        )  # fmt: skip

    def weight_bytes(self, scheme: str) -> int:
        """Return the bytes of the weights in a scheme."""
        table = self.vocab_size * self.hidden_size
        head = SCHEMES[find_scheme(scheme).head]
        linear = self.num_parameters - (table if self.tied else 2 * table)
        num_bytes = linear * _bits_per_weight(scheme) / 8 + table * _bits_per_weight(head.name) / 8
        if not self.tied:
            num_bytes += table * _DTYPE_BYTES[self.dtype]
        return int(num_bytes)

    def kv_bytes(self, num_tokens: int, kv_cache: str) -> int:
        """Return the bytes of keys and values of one request of ``num_tokens``, and of its recurrent states."""
        if kv_cache == "int4":
            row_bytes = self._nibble_bytes()
        else:
            row_bytes = self.rows_per_token * (self.head_dim * _KV_BYTES[kv_cache] + (4 if kv_cache == "int8" else 0))
        layers = self.num_layers if self.num_attention_layers is None else self.num_attention_layers
        rows = pages_for(num_tokens) * PAGE_TOKENS * layers * self.num_kv_heads
        (num_states,) = pages_by_group((_STATE_WINDOW,), pages_for(num_tokens), 1, min(_STEP_TOKENS, num_tokens))
        return rows * row_bytes + num_states * self.state_bytes

    def _nibble_bytes(self) -> int:
        """Return the bytes of a key and a value of 4 bits: pairs of dimensions, each with a scale."""
        if self.rows_per_token == 1:
            raise UnsupportedError(
                "kv_cache: expected f32, bf16 or int8 for a model with latents (MLA), got int4", param="kv_cache"
            )
        return 2 * (-(-self.head_dim // 2) + 4)


def _bits_per_weight(scheme: str) -> float:
    row = SCHEMES[scheme]
    return row.weight_bits + (16 / GROUP_LEN if row.group_len else 0) + (0.1 if row.quantized else 0)


def memory_need(shape: ModelShape, scheme: str, *, context_len: int = 0, kv_cache: str = "auto") -> int:
    """Return the bytes that a request needs; ``context_len`` 0 is the shortest context that Penstock shrinks to."""
    tokens = min(context_len or MIN_CONTEXT, shape.context_len)
    if kv_cache == "auto":
        kv_cache = "f32" if scheme == "f32" else "bf16"
    rounded = 4 * shape.intermediate_size if scheme == "bf16" else 0  # floats again where bf16 has no instructions
    step = min(_STEP_TOKENS, tokens) * (4 * (2 * shape.hidden_size + 2 * shape.intermediate_size) + rounded)
    logits = 4 * shape.vocab_size
    return shape.weight_bytes(scheme) + shape.kv_bytes(tokens, kv_cache) + step + logits + _HEADROOM_BYTES
