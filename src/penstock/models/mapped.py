"""Open a checkpoint folder under the names of its network's parameters, and construct it only where they differ."""

from __future__ import annotations

from pathlib import Path

from penstock.checkpoint.folder import Checkpoint
from penstock.checkpoint.sources import has_stacked_experts
from penstock.checkpoint.stored.tied_head import has_only_head
from penstock.models.families import maps_tensors

__all__ = ["open_mapped"]


def open_mapped(folder: Path | str) -> Checkpoint:
    """Return the checkpoint of a folder, its tensors mapped to the names of the built-in network of its model_type.

    Raises what ``Checkpoint.open`` raises, and InvalidFileError for tensors that the network cannot read.
    """
    checkpoint = Checkpoint.open(folder)
    model_type = checkpoint.config.optional_str("model_type") or ""
    tensors = checkpoint.tensors
    is_mapped = maps_tensors(model_type) or has_stacked_experts(tensors) or has_only_head(tensors)
    if checkpoint.scheme is not None or not is_mapped:
        return checkpoint
    from penstock.models.meta import construct_on_meta
    from penstock.models.sources import as_network

    return as_network(checkpoint, construct_on_meta(checkpoint.config).network)
