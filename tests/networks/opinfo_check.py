"""Captures PyTorch's own samples of its operations (OpInfo), a few of each, and compares the results.

A program of its own: PyTorch's test modules change settings of the process.  Prints a line of JSON for each operation:
its name, "equal", "refused", "wrong" or "failed", and why.
"""

from __future__ import annotations

import itertools
import json
import sys
import types
import unittest
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils import _pytree as pytree

import penstock
from penstock.errors import PenstockError

NAMES = (
    *("add", "sub", "mul", "div", "pow", "fmod", "remainder", "floor_divide", "maximum", "minimum", "where", "clamp"),
    *("eq", "gt", "le", "logical_and", "isnan", "abs", "exp", "log", "sqrt", "sin", "erf", "round", "sign", "neg"),
    *("sum", "mean", "prod", "amax", "amin", "max", "min", "var", "std", "logsumexp", "argmax", "cumsum", "any", "all"),
    *("topk", "sort", "gather", "scatter", "scatter_add", "index_select", "take_along_dim", "masked_fill", "cat"),
    *(
        "stack",
        "split",
        "chunk",
        "unbind",
        "narrow",
        "roll",
        "flip",
        "tile",
        "repeat",
        "expand",
        "permute",
        "transpose",
    ),
    *("squeeze", "unsqueeze", "reshape", "flatten", "tril", "triu", "matmul", "bmm", "addmm", "einsum", "outer"),
    *("__getitem__", "movedim", "diagonal", "meshgrid", "lerp", "addcmul", "softmax", "log_softmax", "baddbmm"),
    *("nn.functional.relu", "nn.functional.gelu", "nn.functional.hardtanh", "nn.functional.hardswish"),
    *("nn.functional.softplus", "nn.functional.leaky_relu", "nn.functional.prelu", "nn.functional.elu"),
    *("nn.functional.conv2d", "nn.functional.conv1d", "nn.functional.conv_transpose2d", "nn.functional.linear"),
    *("nn.functional.max_pool2d", "nn.functional.avg_pool2d", "nn.functional.avg_pool1d", "nn.functional.pad"),
    *("nn.functional.adaptive_avg_pool2d", "nn.functional.interpolate", "nn.functional.layer_norm"),
    *("nn.functional.group_norm", "nn.functional.batch_norm", "nn.functional.rms_norm", "nn.functional.glu"),
    *("nn.functional.scaled_dot_product_attention", "nn.functional.pixel_shuffle", "nn.functional.normalize"),
    *("nn.functional.embedding", "nn.functional.unfold", "nn.functional.cosine_similarity", "nn.functional.one_hot"),
)


class Samples(nn.Module):
    """Calls an operation with the arguments of samples, of which the tensors are inputs."""

    def __init__(self, function: Any, samples: Sequence[Any]) -> None:
        super().__init__()
        self.function = function
        self.trees = [pytree.tree_flatten((s.input, tuple(s.args), dict(s.kwargs))) for s in samples]
        self.inputs = tuple(
            leaf.detach().clone() for leaves, _ in self.trees for leaf in leaves if isinstance(leaf, torch.Tensor)
        )

    def forward(self, *tensors: torch.Tensor) -> list[Any]:
        given = iter(tensors)
        results = []
        for leaves, spec in self.trees:
            filled = [next(given) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
            x, args, kwargs = pytree.tree_unflatten(filled, spec)
            results.append(self.function(x, *args, **kwargs))
        return results


def checked(function: Any, samples: Sequence[Any]) -> tuple[str, str]:
    """Return what became of samples."""
    module = Samples(function, samples)
    with torch.no_grad():
        expected = [t for t in pytree.tree_leaves(module(*module.inputs)) if isinstance(t, torch.Tensor)]
    try:
        with penstock.capture(module, module.inputs).compile(threads=1) as predictor:
            results = predictor.run([tensor.numpy() for tensor in module.inputs])
    except PenstockError as error:
        return "refused", str(error)
    except Exception as error:  # what a user would see as a traceback
        return "failed", f"{type(error).__name__}: {error}"
    if len(results) != len(expected):
        return "wrong", f"{len(results)} outputs, not {len(expected)}"
    for ours, tensor in zip(results, expected, strict=True):
        theirs = tensor.numpy()
        if ours.dtype != theirs.dtype or ours.shape != theirs.shape:
            return "wrong", f"{ours.dtype} {ours.shape}, not {theirs.dtype} {theirs.shape}"
        scale = float(np.abs(theirs[np.isfinite(theirs)].astype(np.float64)).max(initial=1.0))
        if not np.allclose(ours, theirs, rtol=1e-4, atol=1e-5 * scale, equal_nan=True):
            return "wrong", f"{ours.reshape(-1)[:6]}, not {theirs.reshape(-1)[:6]}"
    return "equal", ""


def outcomes(ops: Sequence[Any], names: Sequence[str], count: int) -> Iterator[tuple[str, str, str]]:
    """Yield the name of each operation, what became of its samples, and why."""
    for op in ops:
        if op.name not in names or op.variant_test_name or torch.float32 not in op.dtypes:
            continue
        torch.manual_seed(0)
        every = list(itertools.islice(op.sample_inputs("cpu", torch.float32), 40))
        chosen = every[:: max(1, len(every) // count)][:count]
        outcome, why = checked(op.op, chosen)
        if outcome == "equal" or len(chosen) < 2:
            yield op.name, outcome, why
            continue
        for sample in chosen:  # one by one, as one that is refused hides the others
            yield op.name, *checked(op.op, [sample])


def main() -> None:
    stub = types.ModuleType("expecttest")  # a package that only PyTorch's own tests need
    stub.TestCase = unittest.TestCase  # type: ignore[attr-defined]
    sys.modules.setdefault("expecttest", stub)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    from torch.testing._internal.common_methods_invocations import op_db

    names = sys.argv[2:] or NAMES
    for outcome in outcomes(op_db, names, int(sys.argv[1])):
        print(json.dumps(outcome), flush=True)


if __name__ == "__main__":
    main()
