"""Gemma 3, text only (arXiv 2503.19786): Gemma 2 with norms of q and k, and another theta in windowed layers."""

from __future__ import annotations

from dataclasses import replace

from penstock.checkpoint.sources import Sources
from penstock.config import ConfigReader, RopeConfig
from penstock.models.decoders import gemma2
from penstock.models.decoders.gemma import read_gemma
from penstock.models.decoders.gemma2 import Gemma2Config, read_caps
from penstock.models.layer_windows import read_layer_windows
from penstock.models.sources import add_to_norms

__all__ = ["Config", "Network"]


class Config:
    """Reads config.json."""

    @staticmethod
    def read(reader: ConfigReader) -> Gemma2Config:
        """Read and check config.json; errors name the key."""
        plain = {key: value for key, value in reader.values.items() if key not in ("rope_parameters", "rope_scaling")}
        windows, causal = read_layer_windows(reader, window=4096, period=6), True
        if reader.bool("use_bidirectional_attention", False):  # the window counts both sides
            windows, causal = tuple(window and window // 2 + 1 for window in windows), False
        plain_reader = ConfigReader(plain, reader.file)
        decoder = read_gemma(plain_reader, windows, context_len=131072, may_look_ahead=True)
        decoder = replace(decoder, rope=_read_rope(reader, "full_attention", decoder.head_dim))
        local = _read_rope(reader, "sliding_attention", decoder.head_dim)
        divisor = reader.float("query_pre_attn_scalar", 256.0, min=1e-6)
        if reader.has("attn_logit_softcapping"):  # norms of q and k took its place
            raise reader.error("attn_logit_softcapping", "null", reader.values["attn_logit_softcapping"])
        caps = read_caps(reader, 0.0, 0.0)
        return Gemma2Config(decoder, divisor, *caps, qk_norm=True, local_rope=local, causal=causal)


def _read_rope(reader: ConfigReader, kind: str, head_dim: int) -> RopeConfig:
    """Return the rotary positions of one kind of layers, from the old keys or from an object per kind."""
    values = dict(reader.values)
    is_local = kind == "sliding_attention"
    if is_local:  # the old keys scale only the full layers
        values["rope_theta"] = values.get("rope_local_base_freq")
        values.pop("rope_scaling", None)
    section = reader.object("rope_parameters")
    if section is not None and section.has(kind):
        for name in section.values:
            if name not in ("full_attention", "sliding_attention"):
                raise section.error(name, "full_attention and sliding_attention", section.values[name])
        values["rope_parameters"] = section.values[kind]
        values.pop("rope_scaling", None)
    return ConfigReader(values, reader.file).rope(head_dim, theta=10000.0 if is_local else 1000000.0)


class Network(gemma2.Network):
    """The language model."""

    def tensor_sources(self) -> Sources:
        """Return where the parameters come from: norms, which the checkpoint stores less 1."""
        return add_to_norms(self)
