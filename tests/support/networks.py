"""Networks of the table of families, with weights but without files."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from torch import Tensor, nn

from penstock.checkpoint.folder import Checkpoint
from penstock.config import ConfigReader
from penstock.graph.builder import Capture
from penstock.graph.capture import capture
from penstock.graph.tracer import trace_network
from penstock.models.registry import find_network
from penstock.models.sources import as_network
from penstock.nn import Batch, allocate_states, assign_page_groups
from penstock.nn.weight import MatrixLayer
from tests.support.families import FAMILIES, config_of, save


def network_of(family: str, device: str) -> nn.Module:
    config = config_of(family)
    definition = find_network(FAMILIES[family][0])
    with torch.device(device):
        return definition.Network(definition.Config.read(ConfigReader(config)))


def capture_of(family: str) -> Capture:
    """The network as it is captured for a user: traced."""
    return trace_network(network_of(family, "meta"), network_name=family, context_len=256, vocab_size=1003)


def export_of(family: str) -> Capture:
    """The same through torch.export, the tracer's oracle."""
    return capture(network_of(family, "meta"), network_name=family, context_len=256, vocab_size=1003)


@cache
def stored_tensors(family: str) -> dict[str, Tensor]:
    """The tensors of the family's folder by the names that the network reads."""
    with TemporaryDirectory() as folder:
        checkpoint = Checkpoint.open(save(family, Path(folder) / "model"))
        checkpoint = as_network(checkpoint, network_of(family, "meta"))
        return {
            name: torch.from_numpy(np.array(checkpoint.read(name))).view(info.shape)
            for name, info in checkpoint.tensors.items()
        }


def tensors_of(family: str, captured: Capture) -> dict[str, Tensor]:
    """Logical weights by checkpoint name, the network's constants included."""
    constants = {name: torch.from_numpy(values) for name, values in captured.constants.items()}
    return {**stored_tensors(family), **constants}


def eager_network(family: str, num_pages: int) -> nn.Module:
    """Logical float32 weights: run it under PENSTOCK_REFERENCE=1."""
    network = network_of(family, "cpu")
    tensors = stored_tensors(family)
    for path, module in network.named_modules():
        for leaf, parameter in module.named_parameters(recurse=False):
            name = f"{path}.{leaf}"
            is_matrix = isinstance(module, MatrixLayer) and leaf == "weight"
            names = [part.name for part in module.weight_parts(path)] if is_matrix else [name]
            if names[0] in tensors:  # a tied one has its first name only
                parameter.copy_(torch.cat([tensors[part] for part in names]).view(parameter.shape))
    assign_page_groups(network)
    allocate_states(network, num_pages)
    return network


def batch_of(num_groups: int, *lengths: int) -> Batch:
    """Whole prompts of several lengths; logits of every third row and the last."""

    def int32(values: object) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values, np.int32))

    total = sum(lengths)
    width = max(-(-length // 32) for length in lengths)
    tables = np.full((num_groups, len(lengths), width), -1)
    page = 0
    for request, length in enumerate(lengths):
        for tile in range(-(-length // 32)):
            tables[:, request, tile] = page
            page += 1
    ids = np.random.default_rng(total).integers(0, 1003, total)
    positions = [p for length in lengths for p in range(length)]
    rows = [*range(0, total, 3), total - 1]
    return Batch(int32(ids), int32(positions), int32(np.cumsum([0, *lengths])), int32(tables), int32(rows))
