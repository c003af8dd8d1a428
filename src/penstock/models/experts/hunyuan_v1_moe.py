"""Hunyuan-A13B: the dense model's attention, experts, and one expert that every token goes to."""

from __future__ import annotations

from penstock.config import ConfigReader
from penstock.errors import UnsupportedError
from penstock.models.decoder import GatedMLP, read_decoder, read_num_layers
from penstock.models.decoders.hunyuan_v1_dense import HunyuanAttention, with_stretched_theta
from penstock.models.experts.mixture import ExpertsLM, Mixture, MixtureConfig, read_mixture
from penstock.nn import Module, Router, Routing
from penstock.nn.base import Tensor

__all__ = ["Config", "Network"]


class Config:
    """Reads config.json."""

    @staticmethod
    def read(reader: ConfigReader) -> MixtureConfig:
        """Read and check config.json; errors name the key."""
        num_layers = read_num_layers(reader)
        for key, expected in (("use_qk_norm", True), ("use_mixed_mlp_moe", True), ("use_cla", False)):
            if reader.bool(key, expected) is not expected:
                raise UnsupportedError(
                    f"{reader.file}: {key}: expected {str(expected).lower()}, got {str(not expected).lower()}",
                    param=key,
                )
        decoder = read_decoder(with_stretched_theta(reader), (0,) * num_layers, context_len=2048, norm_eps=1e-5)
        size = reader.int("intermediate_size")
        _same_in_layers(reader, "moe_intermediate_size", size, size)
        _same_in_layers(reader, "num_shared_expert", 1, 1)
        values = {key: _same_in_layers(reader, key, 1) for key in ("num_experts", "moe_topk")}
        flat = ConfigReader(reader.values | values, reader.file)
        return read_mixture(
            flat,
            decoder,
            Routing(values["moe_topk"], renormalise=True),
            experts_key="num_experts",
            size_key="intermediate_size",
            shared_size=size,
        )


def _same_in_layers(reader: ConfigReader, key: str, default: int, expected: int | None = None) -> int:
    """Return a number, of which the config may have one for each layer; UnsupportedError if they differ."""
    numbers = set(reader.int_or_list(key, min=1)) or {default}
    expected = max(numbers) if expected is None else expected
    if numbers != {expected}:
        raise UnsupportedError(
            f"{reader.file}: {key}: expected {expected} in every layer, got {reader.values[key]}", param=key
        )
    return expected


class _Gate(Module):
    """The router, whose matrix has a name of its own."""

    def __init__(self, hidden_size: int, num_experts: int) -> None:
        super().__init__()
        self.wg = Router(hidden_size, num_experts)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits [T, experts] of x [T, hidden]."""
        return self.wg(x)


class _Mixture(Mixture):
    """The experts that a token chooses, and the shared one."""

    def __init__(self, config: MixtureConfig) -> None:
        super().__init__(config)
        self.shared_mlp = GatedMLP(config.decoder.hidden_size, config.shared_size)

    def make_gate(self, config: MixtureConfig) -> Module:
        """Return the router."""
        return _Gate(config.decoder.hidden_size, config.num_experts)

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output [T, hidden] for x [T, hidden]."""
        return super().forward(x) + self.shared_mlp(x)


class Network(ExpertsLM):
    """The language model."""

    def __init__(self, config: MixtureConfig) -> None:
        attentions = [HunyuanAttention(config.decoder, window) for window in config.decoder.windows]
        super().__init__(config, attentions, [_Mixture(config) for _ in attentions])
