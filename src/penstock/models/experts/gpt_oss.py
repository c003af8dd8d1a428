"""gpt-oss (arXiv 2508.10925): attention sinks, windows in alternate layers, and experts whose gate is clamped."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

from penstock.checkpoint.sources import Sources
from penstock.config import ConfigReader
from penstock.models.decoder import DecoderConfig, read_decoder, read_num_layers, windows_by_type
from penstock.models.decoders.llama import LlamaAttention
from penstock.models.experts.mixture import ExpertsLM, MixtureConfig, read_mixture
from penstock.models.sources import stacked_experts
from penstock.nn import Batch, ExpertLinear, Module, Router, Routing, clamped_swiglu, combine, route
from penstock.nn.base import Tensor, nn, torch

__all__ = ["Config", "GptOssConfig", "Network"]

_ROPE: Final[dict[str, Any]] = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip
"""The rotary positions of a config without the key."""


@dataclass(frozen=True)
class GptOssConfig:
    """The values of config.json: ``alpha`` and ``limit`` are those of the experts' gate.

    ``mxfp4``: the checkpoint stores the matrices of the experts so.
    """

    mixture: MixtureConfig
    alpha: float
    limit: float
    mxfp4: bool = False

    @property
    def vocab_size(self) -> int:
        """The number of token ids."""
        return self.mixture.vocab_size

    @property
    def context_len(self) -> int:
        """The number of positions."""
        return self.mixture.context_len


class Config:
    """Reads config.json."""

    @staticmethod
    def read(reader: ConfigReader) -> GptOssConfig:
        """Read and check config.json; errors name the key."""
        num_layers = read_num_layers(reader)
        window = 0 if "sliding_window" in reader.values and not reader.has("sliding_window") else 128
        kinds = ["full_attention" if layer % 2 else "sliding_attention" for layer in range(num_layers)]
        windows = windows_by_type(reader, reader.int("sliding_window", 128) if window else 0, kinds)
        if not (reader.has("rope_parameters") or reader.has("rope_scaling")):
            reader = ConfigReader(reader.values | {"rope_parameters": _ROPE}, reader.file)
        decoder = read_decoder(reader, windows, context_len=131072, head_dim=64, norm_eps=1e-5, theta=150000.0)
        decoder = replace(decoder, attention_bias=reader.bool("attention_bias", True))
        routing = Routing(reader.int("num_experts_per_tok", 4), "softmax_of_chosen")
        mixture = read_mixture(reader, decoder, routing, experts_key="num_local_experts", size_key="intermediate_size")
        alpha, limit = reader.float("swiglu_alpha", 1.702), reader.float("swiglu_limit", 7.0, min=1e-6)
        return GptOssConfig(mixture, alpha, limit, reader.has_mxfp4())


class _Attention(LlamaAttention):
    """Llama's attention with a sink for each head."""

    def __init__(self, config: DecoderConfig, window: int) -> None:
        super().__init__(config, window)
        self.sinks = nn.Parameter(torch.zeros(config.num_heads), requires_grad=False)

    def forward(self, x: Tensor, cos_sin: Tensor, batch: Batch) -> Tensor:
        """Return attention over x [T, hidden]: [T, hidden]."""
        q, k, v = self.project(x)
        rows = self.attention(self.rotate(q, cos_sin), self.rotate(k, cos_sin), v, batch, self.sinks)
        return self.o_proj(rows)


class _Experts(Module):
    """The experts of a layer.  The rows of ``gate_up_proj`` are a gate, its up value, the next gate and so on."""

    def __init__(self, config: GptOssConfig) -> None:
        super().__init__()
        sizes = config.mixture
        hidden, self._size, self._k = sizes.decoder.hidden_size, sizes.expert_size, sizes.routing.k
        self._alpha, self._limit = config.alpha, config.limit
        self.gate_up_proj = ExpertLinear(sizes.num_experts, hidden, 2 * self._size, bias=True)
        self.down_proj = ExpertLinear(sizes.num_experts, self._size, hidden, bias=True)

    def forward(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        """Return the weighted sum [T, hidden] of what the experts ids [T, k] make of x [T, hidden]."""
        pairs = self.gate_up_proj(x, ids).view(-1, 2 * self._k * self._size)
        rows = clamped_swiglu(pairs, self._alpha, self._limit)
        return combine(self.down_proj(rows.view(-1, self._k, self._size), ids), weights)


class _Mixture(Module):
    """A router with a bias, and the experts."""

    def __init__(self, config: GptOssConfig) -> None:
        super().__init__()
        self.routing = config.mixture.routing
        self.router = Router(config.mixture.decoder.hidden_size, config.mixture.num_experts, bias=True)
        self.experts = _Experts(config)

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output [T, hidden] for x [T, hidden]."""
        weights, ids = route(self.router(x), self.routing)
        return self.experts(x, weights, ids)


class Network(ExpertsLM):
    """The language model.  Matrices of experts in MXFP4 keep their blocks, or are read as bf16, which is exact."""

    reads_mxfp4 = True

    def __init__(self, config: GptOssConfig) -> None:
        decoder = config.mixture.decoder
        attentions = [_Attention(decoder, window) for window in decoder.windows]
        super().__init__(config.mixture, attentions, [_Mixture(config) for _ in attentions])
        self._mxfp4 = config.mxfp4

    def tensor_sources(self) -> Sources:
        """Return where the parameters come from: the experts are stacked, and their matrices are [in, out]."""
        return stacked_experts(self, transposed=True, mxfp4=self._mxfp4)
