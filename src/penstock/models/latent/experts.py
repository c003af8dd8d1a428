"""A decoder with latent attention and a mixture of experts: its config, and the language model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from penstock.models.experts.mixture import ExpertsLM, Mixture, MixtureConfig
from penstock.models.latent.attention import LatentConfig, LatentHeads

__all__ = ["LatentExpertsConfig", "LatentExpertsLM"]


@dataclass(frozen=True)
class LatentExpertsConfig:
    """The values of config.json."""

    mixture: MixtureConfig
    latent: LatentConfig

    @property
    def vocab_size(self) -> int:
        """The number of token ids."""
        return self.mixture.vocab_size

    @property
    def context_len(self) -> int:
        """The number of positions."""
        return self.mixture.context_len


class LatentExpertsLM(ExpertsLM):
    """The language model.  ``make_mixture`` makes the feed-forward layer of a sparse layer."""

    unread_tensors: tuple[str, ...] = ()

    def __init__(self, config: LatentExpertsConfig, make_mixture: Callable[[MixtureConfig], Mixture]) -> None:
        mixture = config.mixture
        attentions = [LatentHeads(mixture.decoder, config.latent) for _ in mixture.decoder.windows]
        super().__init__(mixture, attentions, [make_mixture(mixture) for _ in attentions])
        self.unread_tensors = mixture.unread
