"""Qwen3-Next: the gated delta rule in three of four layers, gated attention in the fourth, and mixtures of experts."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.checkpoint.sources import Source, Sources
from penstock.config import ConfigReader
from penstock.models.decoder import GatedMLP, read_num_layers
from penstock.models.experts.mixture import MixtureConfig, read_mixture, read_sparse_layers
from penstock.models.experts.qwen2_moe import GatedSharedMixture
from penstock.models.hybrids.delta import DeltaConfig, DeltaLM, norms_and_gates, read_delta
from penstock.nn import Module, Routing

__all__ = ["Config", "Network", "Qwen3NextConfig"]


@dataclass(frozen=True)
class Qwen3NextConfig:
    """The sizes of the layers and of their mixtures."""

    delta: DeltaConfig
    mixture: MixtureConfig

    @property
    def vocab_size(self) -> int:
        """The number of token ids."""
        return self.delta.vocab_size

    @property
    def context_len(self) -> int:
        """The largest number of positions."""
        return self.delta.context_len


class Config:
    """Reads config.json."""

    @staticmethod
    def read(reader: ConfigReader) -> Qwen3NextConfig:
        """Read and check config.json; errors name the key."""
        delta = read_delta(reader)
        routing = Routing(reader.int("num_experts_per_tok", 10), renormalise=reader.bool("norm_topk_prob", True))
        sparse = read_sparse_layers(reader, read_num_layers(reader))
        shared = reader.int("shared_expert_intermediate_size", 512)
        mixture = read_mixture(
            reader, delta.decoder, routing, experts_key="num_experts", sparse=sparse, shared_size=shared
        )
        return Qwen3NextConfig(delta, mixture)


class Network(DeltaLM):
    """The language model."""

    def __init__(self, config: Qwen3NextConfig) -> None:
        self.sizes = config.delta
        super().__init__(config.delta, lambda layer: _feed_forward(config, layer))

    def tensor_sources(self) -> Sources:
        """Return where the parameters come from: in_proj_qkvz and in_proj_ba have the rows of a key head together."""
        table = norms_and_gates(self)
        for path, _ in self.named_modules():
            parent, _, last = path.rpartition(".")
            if last == "in_proj_qkv":
                table |= _projections(parent, self.sizes)
        return table


def _feed_forward(config: Qwen3NextConfig, layer: int) -> Module:
    sizes = config.delta.decoder
    if config.mixture.sparse[layer]:
        return GatedSharedMixture(config.mixture)
    return GatedMLP(sizes.hidden_size, sizes.intermediate_size)


def _projections(parent: str, sizes: DeltaConfig) -> dict[str, Source]:
    """Return the sources of the projections of a delta layer.

    The tensors have for each key head its query, its key, the values and the gates z of its value heads; and of those
    b, then a.
    """
    shared, groups = sizes.value_heads // sizes.key_heads, range(sizes.key_heads)
    widths = (sizes.key_dim, sizes.key_dim, shared * sizes.value_dim, shared * sizes.value_dim)
    starts = [sum(widths[:part]) for part in range(4)]
    q, k, v, z = (
        tuple((group * sum(widths) + start, group * sum(widths) + start + width) for group in groups)
        for start, width in zip(starts, widths, strict=True)
    )
    b, a = (
        tuple((group * 2 * shared + start, group * 2 * shared + start + shared) for group in groups)
        for start in (0, shared)
    )
    qkvz, ba = f"{parent}.in_proj_qkvz.weight", f"{parent}.in_proj_ba.weight"
    return {
        f"{parent}.in_proj_qkv.weight": Source(qkvz, q + k + v),
        f"{parent}.in_proj_z.weight": Source(qkvz, z),
        f"{parent}.in_proj_b.weight": Source(ba, b),
        f"{parent}.in_proj_a.weight": Source(ba, a),
    }
