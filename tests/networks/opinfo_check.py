"""Captures PyTorch's own samples of its operations (OpInfo), a few of each, and compares the results.

    python -m tests.networks.opinfo_check 2 [NAME...]

A program of its own: PyTorch's test modules change settings of the process.  Prints a line of JSON with the readers for
whose names there is no operation, and one for each operation and type of elements: its name, the type, "equal",
"refused", "wrong" or "failed", why, and the readers of ops that took part in equal results.
"""

from __future__ import annotations

import itertools
import json
import sys
import types
import unittest
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.utils import _pytree as pytree

import penstock
from penstock.errors import PenstockError
from penstock.graph.general.torch import capture as _readers  # noqa: F401  importing it declares the readers
from penstock.graph.general.torch.writer import OPS

DTYPES: Final = (torch.float32, torch.int64, torch.bool)
UNDEFINED: Final = ("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided")
"""Operations whose results hold anything."""
COMPOSED: Final = (
    *("__getitem__", "addcdiv", "addcmul", "cdist", "lerp", "movedim", "outer", "std_mean", "tile", "vstack"),
    *("nn.functional.cosine_similarity", "nn.functional.grid_sample", "nn.functional.interpolate"),
    *("nn.functional.max_unpool2d", "nn.functional.normalize", "nn.functional.one_hot", "nn.functional.rrelu"),
)
"""Operations without a reader of their name, which others make up or PyTorch splits."""
MAX_SECONDS: Final = 60


class Outcome(NamedTuple):
    """What became of samples of an operation."""

    name: str
    dtype: str
    outcome: str
    why: str
    readers: list[str]


class Samples(nn.Module):
    """Calls an operation with the arguments of samples, of which the tensors are inputs.

    With ``has_constants`` those of the further arguments are buffers, as the weights of a layer are.
    """

    def __init__(self, function: Any, samples: Sequence[Any], has_constants: bool) -> None:
        super().__init__()
        self.function = function
        self.calls: list[tuple[list[Any], Any]] = []  # the arguments without the tensors of inputs, and their tree
        inputs = []
        for sample in samples:
            first, first_spec = pytree.tree_flatten(sample.input)
            others, spec = pytree.tree_flatten((tuple(sample.args), dict(sample.kwargs)))
            kept: list[Any] = []
            for at, leaf in enumerate([*first, *others]):
                is_input = isinstance(leaf, torch.Tensor) and (at < len(first) or not has_constants)
                if is_input:
                    inputs.append(leaf.detach().clone())
                elif isinstance(leaf, torch.Tensor):
                    self.register_buffer(f"constant_{len(self.calls)}_{at}", leaf.detach().clone())
                    leaf = _Buffer(f"constant_{len(self.calls)}_{at}")
                kept.append(_INPUT if is_input else leaf)
            self.calls.append((kept, (len(first), first_spec, spec)))
        self.inputs = tuple(inputs)
        self.num_buffers = len(list(self.buffers()))

    def forward(self, *tensors: torch.Tensor) -> list[Any]:
        given = iter(tensors)
        results = []
        for kept, (count, first_spec, spec) in self.calls:
            leaves = [next(given) if leaf is _INPUT else leaf for leaf in kept]
            leaves = [getattr(self, leaf.name) if isinstance(leaf, _Buffer) else leaf for leaf in leaves]
            args, kwargs = pytree.tree_unflatten(leaves[count:], spec)
            results.append(self.function(pytree.tree_unflatten(leaves[:count], first_spec), *args, **kwargs))
        return results


class _Buffer(NamedTuple):
    name: str


_INPUT: Final = object()


def checked(module: Samples) -> tuple[str, str]:
    """Return what became of samples."""
    with torch.no_grad():
        try:
            results = module(*[tensor.clone() for tensor in module.inputs])
        except Exception as error:  # a sample that this form does not take
            return "skipped", f"{type(error).__name__}: {error}"
    expected = [t.detach().clone() for t in pytree.tree_leaves(results) if isinstance(t, torch.Tensor)]
    try:
        network = penstock.capture(module, module.inputs, max_seconds=MAX_SECONDS)
        with network.compile(threads=1) as predictor:
            outputs = predictor.run([tensor.numpy() for tensor in module.inputs])
    except PenstockError as error:
        return "refused", str(error)
    except Exception as error:  # what a user would see as a traceback
        return "failed", f"{type(error).__name__}: {error}"
    if len(outputs) != len(expected):
        return "wrong", f"{len(outputs)} outputs, not {len(expected)}"
    notes = [note for ours, tensor in zip(outputs, expected, strict=True) if (note := difference(ours, tensor.numpy()))]
    return ("wrong", "; ".join(notes)) if notes else ("equal", "")


def difference(ours: Any, theirs: Any) -> str:
    """Return in what an output differs, or ""."""
    theirs = theirs.astype(np.float32) if theirs.dtype == np.float64 else theirs  # networks have no other floats
    if ours.dtype != theirs.dtype or ours.shape != theirs.shape:
        return f"{ours.dtype} {ours.shape}, not {theirs.dtype} {theirs.shape}"
    if theirs.dtype.kind == "f":
        scale = float(np.abs(theirs[np.isfinite(theirs)].astype(np.float64)).max(initial=1.0))
        is_equal = np.allclose(ours, theirs, rtol=1e-4, atol=1e-5 * scale, equal_nan=True)
    else:
        is_equal = np.array_equal(ours, theirs)
    return "" if is_equal else f"{ours.reshape(-1)[:6]}, not {theirs.reshape(-1)[:6]}"


def recorded() -> set[str]:
    """Let the readers of PyTorch's ops put their names into the set that is returned."""
    called: set[str] = set()

    def recording(name: str, read: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            called.add(name)
            return read(*args, **kwargs)

        return call

    OPS.update({name: recording(name, read) for name, read in OPS.items()})
    return called


def names_of(op: Any) -> set[str]:
    """Return the names of an operation: in PyTorch, in ATen, and its aliases."""
    return {op.name.split(".")[-1], op.aten_name, *(alias.name.split(".")[-1] for alias in op.aliases)}


def readers() -> set[str]:
    """Return the names of the ops that have a reader, without their overloads."""
    return {target.split(".")[1] for target in OPS}


def has_reader(op: Any) -> bool:
    """Return True if a reader has the name of an operation."""
    return op.name in COMPOSED or not readers().isdisjoint(names_of(op))


def outcomes(ops: Sequence[Any], names: Sequence[str], count: int) -> Iterator[Outcome]:
    """Yield what became of ``count`` samples of each operation and type; one by one unless all are equal."""
    called = recorded()

    def outcome(op: Any, dtype: torch.dtype, module: Samples) -> Outcome:
        called.clear()
        found, why = checked(module)
        readers = sorted(called) if found == "equal" else []
        return Outcome(op.formatted_name, str(dtype).removeprefix("torch."), found, why, readers)

    for op, dtype, has_constants in itertools.product(ops, DTYPES, (False, True)):
        is_chosen = op.name in names if names else op.name not in UNDEFINED and has_reader(op)
        if not is_chosen or dtype not in op.dtypes:
            continue
        torch.manual_seed(0)
        samples = itertools.islice(op.sample_inputs("cpu", dtype), 40)
        every = [sample for sample in samples if op.name != "topk" or sample.args[3:] != (False,)]  # in any order
        kept = count if dtype == torch.float32 else 1
        chosen = every[len(every) // 3 :: max(1, len(every) // kept)][:kept]
        module = Samples(op.op, chosen, has_constants)
        if has_constants and (dtype != torch.float32 or not module.num_buffers):
            continue
        together = outcome(op, dtype, module)
        if together.outcome == "equal" or len(chosen) < 2:
            yield together
            continue
        for sample in chosen:  # as one that is refused hides the others
            yield outcome(op, dtype, Samples(op.op, [sample], has_constants))


def main() -> None:
    stub = types.ModuleType("expecttest")  # a package that only PyTorch's own tests need
    stub.TestCase = unittest.TestCase  # type: ignore[attr-defined]
    sys.modules.setdefault("expecttest", stub)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    from torch.testing._internal.common_methods_invocations import op_db

    print(json.dumps(sorted(readers().difference(*map(names_of, op_db)))))
    for outcome in outcomes(op_db, sys.argv[2:], int(sys.argv[1])):
        print(json.dumps(outcome), flush=True)


if __name__ == "__main__":
    main()
