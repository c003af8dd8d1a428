"""Training a network of these layers in a program of your own: gradients, and the batch of whole texts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.nn.attention import assign_page_groups, paged_layers
from penstock.nn.base import nn, torch
from penstock.nn.batch import Batch

if TYPE_CHECKING:
    from penstock.nn.base import Tensor

__all__ = ["make_trainable", "training_batch"]


def make_trainable(network: nn.Module) -> None:
    """Let the parameters of a network take gradients, for an optimizer of PyTorch.

    While gradients are recorded, ops run their references in plain PyTorch, in float64: right, and slow.  Attention
    takes whole texts from position 0 (``training_batch``).  Recurrent, latent and T5's attention have no gradients;
    UnsupportedError names the op.
    """
    from penstock.ops.eager import record_gradients
    from penstock.ops.reference.gradients import keep_steps

    record_gradients()
    assign_page_groups(network)
    for layer in paged_layers(network).values():
        keep_steps(layer.state)
    for parameter in network.parameters():
        parameter.requires_grad_(parameter.is_floating_point())


def training_batch(token_ids: Tensor) -> Batch:
    """Return the batch of texts of equal length, token_ids [B, T]; the network returns the logits [B * T, vocab]."""
    num_texts, length = token_ids.shape
    rows = torch.arange(num_texts * length, dtype=torch.int32)
    return Batch(
        token_ids=token_ids.reshape(-1).to(torch.int32),
        positions=rows % length,
        request_starts=torch.arange(0, num_texts * length + 1, length, dtype=torch.int32),
        page_tables=torch.zeros(1, num_texts, 1, dtype=torch.int32),
        output_rows=rows,
    )
