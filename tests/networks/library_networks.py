"""What the tests of networks of the transformers library share: random weights, examples, and the comparison."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from penstock.graph.general.lower import write_network
from penstock.graph.general.torch.capture import capture_module
from penstock.networks.predictor import open_predictor

Case = tuple[nn.Module, Sequence[Mapping[str, Tensor]], Mapping[str, Sequence[Any]], Mapping[str, Any]]
"""A module, examples for it, the names of its free sizes, and their ranges."""

SMALL: Final = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48}


def randomised(module: nn.Module) -> nn.Module:
    """Give norms, biases and heads, which begin as ones and zeros, values that differ from each other."""
    generator = torch.Generator().manual_seed(0)
    for part in module.modules():
        if isinstance(part, nn.BatchNorm2d) and part.running_mean is not None and part.running_var is not None:
            part.running_mean.normal_(0, 0.1, generator=generator)
            part.running_var.uniform_(0.5, 1.5, generator=generator)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.numel() and (parameter == parameter.flatten()[0]).all():
                parameter.add_(torch.empty_like(parameter).uniform_(-0.2, 0.2, generator=generator))
    return module.eval()


def free_images(module: nn.Module, sizes: Sequence[tuple[int, int]], multiple: int) -> Case:
    """Return a case whose images have any size that is a multiple."""
    examples = [{"pixel_values": torch.randn(b + 1, 3, *size)} for b, size in enumerate(sizes)]
    limits = (min(min(size) for size in sizes), 256, multiple)
    return module, examples, {"pixel_values": ("B", 3, "H", "W")}, {"H": limits, "W": limits}


def images(module: nn.Module, size: int = 32) -> Case:
    """Return a case with images of one size, in any number."""
    examples = [{"pixel_values": torch.randn(b, 3, size, size)} for b in (2, 3)]
    return module, examples, {"pixel_values": ("B", 3, size, size)}, {}


def texts(module: nn.Module, vocab: int = 60, *, has_mask: bool = True) -> Case:
    """Return a case with token ids of any length, the first row of which is padded."""
    examples = []
    for b, s in ((2, 7), (3, 12)):
        example = {"input_ids": torch.randint(2, vocab, (b, s))}
        if has_mask:
            example["attention_mask"] = torch.ones(b, s, dtype=torch.long)
            example["attention_mask"][0, s - 2 :] = 0
        examples.append(example)
    return module, examples, dict.fromkeys(examples[0], ("B", "S")), {"S": (2, 30)}


def sounds(module: nn.Module) -> Case:
    """Return a case with waves of any length."""
    examples = [{"input_values": torch.randn(b, n)} for b, n in ((2, 600), (1, 935))]
    return module, examples, {"input_values": ("B", "N")}, {"N": (400, 4000)}


def check_case(make: Callable[[], Case], folder: Path, tolerance: float = 1e-4) -> float:
    """Capture a module, and compare the outputs of the bundle with its own at all examples.

    Returns the largest difference of a number, as a part of the largest number of its output.
    """
    torch.manual_seed(0)
    largest = 0.0
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        module, examples, shapes, sizes = make()
        randomised(module)
        write_network(capture_module(module, examples[0], shapes=shapes, sizes=sizes), folder / "net.psm")
        with open_predictor(folder / "net.psm") as predictor:
            for example in examples:
                expected = [t for t in pytree.tree_leaves(module(**example)) if isinstance(t, Tensor)]
                found = predictor.run({key: value.numpy() for key, value in example.items()})
                for ours, theirs in zip(found, expected, strict=True):
                    span = float(theirs[theirs.isfinite()].abs().max()) if theirs.numel() else 0.0
                    np.testing.assert_allclose(ours, theirs.numpy(), rtol=tolerance, atol=tolerance * span)
                    apart = np.abs(ours - theirs.float().numpy())[theirs.isfinite().numpy()]
                    largest = max(largest, float(apart.max(initial=0.0)) / max(span, 1e-30))
    return largest
