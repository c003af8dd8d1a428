"""The node cases of ``onnx.backend.test``, each read, lowered, written as a bundle and run by the core.

Inputs that the ops need as constants (weights, shapes, axes) become initializers.  ``free`` leaves every size above 1
of the others open, under a name of its own.
"""

from __future__ import annotations

import importlib
import re
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

from penstock.core.native import Context, Model
from penstock.core.predict import NetworkProgram
from penstock.errors import UnsupportedError
from penstock.graph.general.draft import Draft
from penstock.graph.general.lower import write_network
from penstock.graph.onnx.reader import read_onnx

PLAIN_TYPES = (1, 2, 3, 6, 7, 9)
"""Element types of the plain cases: float, uint8, int8, int32, int64 and bool."""
_CONSTANT_INPUTS: dict[str, tuple[int, ...]] = {
    "AffineGrid": (1,), "BlackmanWindow": (0,), "CenterCropPad": (1,), "ConstantOfShape": (0,), "Conv": (1, 2),
    "ConvInteger": (1, 3), "ConvTranspose": (1, 2), "CumSum": (1,), "Dropout": (1, 2), "Expand": (1,),
    "GRU": (1, 2, 3), "RNN": (1, 2, 3), "HammingWindow": (0,), "HannWindow": (0,), "If": (0,), "LSTM": (1, 2, 3, 7),
    "NonMaxSuppression": (2, 3, 4), "OneHot": (1,), "Pad": (1, 2, 3), "QLinearConv": (3, 4, 5, 8), "Range": (0, 1, 2),
    "Reshape": (1,), "Resize": (1, 2, 3),
    "Slice": (1, 2, 3, 4), "Split": (1,), "Squeeze": (1,), "Tile": (1,), "TopK": (1,), "Trilu": (1,), "Unsqueeze": (1,),
    "Upsample": (1,),
    **{f"Reduce{kind}": (1,) for kind in ("Sum", "Mean", "Max", "Min", "Prod", "L1", "L2", "SumSquare", "LogSum",
                                          "LogSumExp")},
}  # fmt: skip


@dataclass
class Result:
    """The outcome of a case: "passed", "refused", "wrong" or "crashed"."""

    name: str
    op: str
    plain: bool
    outcome: str
    note: str = ""


def cases(modules: Sequence[str] | None = None) -> list[Any]:
    """Return the node cases, or those of some modules of ``onnx.backend.test.case.node``, which take less time."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the cases divide by zero as they are made
        if modules is None:
            from onnx.backend.test.loader import load_model_tests  # imported here: it makes all cases in ten seconds

            return list(load_model_tests(kind="node"))
        from onnx.backend.test.case import node

        for name in modules:
            importlib.import_module(f"onnx.backend.test.case.node.{name}")
        return list(node._NodeTestCases)


class Backend:
    """Runs cases in one context, in files of one folder."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "case.psm"
        self._context = Context(1)

    def close(self) -> None:
        self._context.close()

    def run(self, case: Any, *, free: bool = False) -> Result:
        """Return the outcome of a case."""
        ops = [node.op_type for node in case.model.graph.node]
        result = Result(case.name, ops[0] if len(ops) == 1 else "many", is_plain(case.model), "passed")
        try:
            model, inputs, sizes = _with_constants(case, free)
            draft = read_onnx(model.SerializeToString(), sizes)
        except UnsupportedError as error:
            result.outcome, result.note = "refused", str(error)
            return result
        except Exception as error:  # the table of outcomes says what happened
            result.outcome, result.note = "crashed", f"{type(error).__name__}: {error}"
            return result
        try:
            names = draft.source_outputs()
            write_network(draft, self._path)
            outputs = [found for found, _ in zip(self._selected(draft, self._outputs(inputs)), names, strict=False)]
        except Exception as error:
            result.outcome, result.note = "crashed", f"{type(error).__name__}: {error}"
            return result
        wanted = case.data_sets[0][1]
        assert len(names) == len(wanted)
        notes = [note for got, want in zip(outputs, wanted, strict=True) if (note := _difference(got, want, case))]
        if notes:
            result.outcome, result.note = "wrong", "; ".join(notes)
        return result

    def _selected(self, draft: Draft, outputs: list[Any]) -> list[Any]:
        """Return the outputs, the numbers of boxes last, without the rows behind selected boxes."""
        arrays = dict(zip(draft.output_names, outputs, strict=True))
        for name, (axis, count) in draft.counts.items():
            arrays[name] = np.take(arrays[name], range(int(arrays[count][0])), axis)
        return list(arrays.values())

    def _outputs(self, inputs: list[Any]) -> list[Any]:
        with Model.open(self._path) as model, NetworkProgram(model, self._context) as program:
            return program.predict([_bits(array) for array in inputs])


def is_plain(model: onnx.ModelProto) -> bool:
    """Return True if the inputs and outputs are tensors of plain types."""
    kinds = [
        value.type.tensor_type.elem_type if value.type.HasField("tensor_type") else 0
        for value in (*model.graph.input, *model.graph.output)
    ]
    return all(kind in PLAIN_TYPES for kind in kinds)


def counts(results: list[Result]) -> dict[str, Counter[str]]:
    """Return the outcomes by op."""
    table: dict[str, Counter[str]] = {}
    for result in results:
        table.setdefault(result.op, Counter())[result.outcome] += 1
    return table


def _bits(array: Any) -> Any:
    return array.view(np.uint16) if array.dtype.name == "bfloat16" else array


def _with_constants(case: Any, free: bool) -> tuple[onnx.ModelProto, list[Any], dict[str, Any]]:
    model = onnx.ModelProto()
    model.CopyFrom(case.model)
    graph = model.graph
    data = {
        value.name: numpy_helper.to_array(item) if isinstance(item, onnx.TensorProto) else item
        for value, item in zip(graph.input, case.data_sets[0][0], strict=False)
    }
    constant = set()
    for node in graph.node:
        for at in _CONSTANT_INPUTS.get(node.op_type, ()):
            if at < len(node.input) and node.input[at] in data:
                constant.add(node.input[at])
    if len(graph.node) > 1:  # bodies of functions read shapes in several places
        constant |= {
            name
            for name, item in data.items()
            if isinstance(item, np.ndarray) and item.dtype.kind in "iu" and item.ndim <= 1 and item.size <= 16
        }
    graph.initializer.extend(numpy_helper.from_array(np.asarray(data[name]), name) for name in sorted(constant))
    kept = [value for value in graph.input if value.name not in constant]
    del graph.input[:]
    graph.input.extend(kept)
    sizes = {}
    for value in graph.input if free else ():
        for axis, dim in enumerate(value.type.tensor_type.shape.dim):
            if dim.dim_value > 1:
                size = dim.dim_value
                dim.dim_param = re.sub(r"\W", "_", f"{value.name}_{axis}")
                sizes[dim.dim_param] = (size, 4 * size)
    arrays = [np.asarray(data[value.name]) for value in graph.input if not isinstance(data[value.name], list)]
    return model, arrays, sizes


def _difference(got: Any, want: Any, case: Any) -> str | None:
    want = numpy_helper.to_array(want) if isinstance(want, onnx.TensorProto) else np.asarray(want)
    loose = 0.0
    if want.dtype.name == "bfloat16":
        got, want, loose = got.view(want.dtype).astype(np.float32), want.astype(np.float32), 2**-7
    if got.shape != want.shape or got.dtype != want.dtype:
        return f"expected {want.dtype} {want.shape}, got {got.dtype} {got.shape}"
    if want.dtype.kind != "f":
        return None if np.array_equal(got, want) else "other values"
    loose = max(loose, {2: 2e-3, 4: 1e-4, 8: 1e-4}[want.itemsize])
    close = np.allclose(
        got,
        want,
        rtol=max(case.rtol, loose),
        atol=max(case.atol, loose / 2 if loose == 2**-7 else loose / 100),
        equal_nan=True,
    )
    return None if close else f"values that differ by {np.nanmax(np.abs(got.astype(float) - want.astype(float)))}"
