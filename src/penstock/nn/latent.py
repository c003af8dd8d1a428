"""Attention over latents, one row per token in pages, and the linears that each head has for itself."""

from __future__ import annotations

from penstock.nn.attention import PagedLayer
from penstock.nn.base import Tensor
from penstock.nn.batch import Batch
from penstock.nn.weight import MatrixLayer
from penstock.ops.call import ops

__all__ = ["HeadLinear", "LatentAttention"]


class HeadLinear(MatrixLayer):
    """One linear for each head: their rows lie one head after another in ``weight`` [heads * out, in].

    Over several ranks each has all heads.
    """

    def __init__(self, num_heads: int, in_features: int, out_features: int) -> None:
        super().__init__(num_heads * out_features, in_features)
        self.num_heads, self.out_features = num_heads, out_features

    def forward(self, x: Tensor) -> Tensor:
        """Return [T, heads, out] for x [T, heads, in]."""
        y: Tensor = ops.head_linear(
            x,
            self.kernel_weight(),
            num_heads=self.num_heads,
            out_features=self.out_features,
            scheme=self.scheme,
        )
        return y

    def extra_repr(self) -> str:
        """Return shape and scheme, for ``print``."""
        return f"num_heads={self.num_heads}, {super().extra_repr()}"


class LatentAttention(PagedLayer):
    """Stores a latent and a rotary key per token, and attends over them: the latent is the value too.

    The heads of the query share these rows (the absorbed form of DeepSeek-V2, arXiv 2405.04434).
    """

    def __init__(self, num_heads: int, latent_dim: int, rope_dim: int, *, scale: float) -> None:
        super().__init__(1, latent_dim + rope_dim, 0, latent_dim)
        self.num_heads, self.rope_dim, self.scale = num_heads, rope_dim, scale

    def forward(self, q: Tensor, q_rope: Tensor, latent: Tensor, rope: Tensor, batch: Batch) -> Tensor:
        """Attend: q [T, heads, latent_dim], q_rope [T, heads, rope_dim], latent [T, latent_dim], rope [T, rope_dim].

        Returns [T, heads, latent_dim].
        """
        step = (batch.positions, batch.request_starts, batch.page_tables)
        ops.latent_append(latent, rope, self.state, *step, group=self.group)
        y: Tensor = ops.latent_attention(
            q,
            self.state,
            *step,
            q_rope,
            scale=self.scale,
            group=self.group,
            causal=True,
            window=0,
            softcap=0.0,
        )
        return y

    def extra_repr(self) -> str:
        """Return sizes, for ``print``."""
        return (
            f"num_heads={self.num_heads}, latent_dim={self.latent_dim}, rope_dim={self.rope_dim}, group={self.group}, "
            f"state={list(self.state.shape)}"
        )
