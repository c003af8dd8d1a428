"""General networks as graphs made by hand, and their bundles: nothing here depends on an importer."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.core.native import Context, layout_bytes, pack
from penstock.graph.bundle import BundleWriter
from penstock.graph.ir import GENERAL_NETWORK, DType, Graph, Layout, Node, Operand, Symbol, Value, Weight

Array = npt.NDArray[Any]
ROWS = {name: Layout[f"ROWS_{name}"] for name in ("F32", "F16", "I64", "I32", "U8", "I8", "BOOL")}
NUMPY = {DType.F32: np.float32, DType.I64: np.int64, DType.I32: np.int32, DType.BOOL: np.bool_, DType.U8: np.uint8,
         DType.I8: np.int8, DType.F16: np.float16}  # fmt: skip


class NetworkBuilder:
    """Adds values, constants, weights and nodes; methods return the name of what they made."""

    def __init__(self, *symbols: Symbol) -> None:
        self.graph = Graph("tiny", "f32", 0, 0, symbols=list(symbols), kind=GENERAL_NETWORK)
        self.arrays: dict[str, Array] = {}

    def input(self, name: str, sizes: str, dtype: DType = DType.F32) -> str:
        self.graph.values[name] = Value(name, dtype, (), sizes=sizes)
        self.graph.inputs.append(name)
        return name

    def output(self, name: str, sizes: str) -> None:
        self.graph.values[name].sizes = sizes
        self.graph.outputs.append(name)

    def constant(self, name: str, array: Array) -> str:
        dtype = next(dtype for dtype, kind in NUMPY.items() if kind == array.dtype)
        self.graph.weights[name] = Weight(name, 1, max(array.size, 1), ROWS[dtype.name], (), shape=array.shape)
        self.graph.values[name] = Value(name, dtype, (), weight=name)
        self.arrays[name] = array
        return name

    def weight(self, name: str, array: Array, layout: Layout = Layout.ROWS_F32) -> Operand:
        rows, cols = array.reshape(1, -1).shape if array.ndim == 1 else array.shape
        self.graph.weights[name] = Weight(name, rows, cols, layout, ())
        self.arrays[name] = array
        return Operand("weight", name)

    def node(self, op: str, inputs: list[str | Operand | None], *outputs: str, **attrs: float | str) -> str:
        operands = [
            Operand("none") if x is None else x if isinstance(x, Operand) else Operand("value", x) for x in inputs
        ]
        dtype = DType(attrs.pop("out_dtype", DType.F32))  # type: ignore[arg-type]
        for name in outputs:
            self.graph.values[name] = Value(name, dtype, ())
        self.graph.nodes.append(Node(op, outputs[0], operands, list(outputs), dict(attrs)))
        return outputs[0]

    def linear(self, x: str, y: str, rows: int, cols: int, seed: int) -> str:
        array = np.random.default_rng(seed).standard_normal((rows, cols)).astype(np.float32) * cols**-0.5
        weight = self.weight(f"{y}.weight", array.astype(np.float32), Layout.T16_F32)
        return self.node("linear", [x, weight, None], y, out_features=rows, scheme="f32")

    def write(self, path: Path, patch: Callable[[Graph], None] | None = None) -> Path:
        """Write the bundle.  ``patch`` changes the copy that is stored, without the writer's own check."""
        stored = copy.deepcopy(self.graph)
        if patch is not None:
            patch(stored)
        with Context(1) as context, BundleWriter(path, stored, validate=patch is None, durable=False) as writer:
            for w in list(stored.weights.values()):
                data = np.zeros(layout_bytes(w.layout, w.rows, w.cols), np.uint8)
                array = self.arrays[w.name]
                if w.layout >= Layout.T16_F32:
                    pack(context, w.layout, w.rows, w.cols, 0, w.rows, 1, array, data)
                else:
                    raw = np.frombuffer(array.tobytes(), np.uint8)[: data.size]
                    data[: raw.size] = raw
                writer.add_weight(w.name, data)
        return path


def mixed_network() -> NetworkBuilder:
    """Rows of free number through linear layers, norms, products and sums, with every kind of output."""
    b = NetworkBuilder(Symbol("N", 1, 300, example=4), Symbol("h", 1, 8, example=2))
    x, y = b.input("x", "N,32"), b.input("image", "2*h,N,16*h")
    hidden = b.node("relu", [b.linear(x, "first", 48, 32, 1)], "relu")
    normed = b.node("layer_norm", [hidden, b.weight("norm", np.linspace(0.5, 2, 48, dtype=np.float32)), None], "normed",
                    eps=1e-5)  # fmt: skip
    back = b.linear(normed, "second", 32, 48, 2)
    total = b.node("add", [back, x], "total")
    b.output(total, "N,32")
    b.output(b.node("reshape", [b.node("mul", [total, back], "product")], "flat", sizes="N*4,2,4"), "4*N,2,4")
    b.output(b.node("reshape", [y], "image.flat", sizes="N*h*h*32"), "N*h*h*32")
    b.output(b.constant("table", np.arange(6, dtype=np.int64).reshape(1, 2, 3)), "1,2,3")
    b.output(x, "N,32")
    return b


def mixed_inputs(rows: int, h: int, seed: int = 0) -> list[Array]:
    rng = np.random.default_rng(seed)
    shapes = ((rows, 32), (2 * h, rows, 16 * h))
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


def mixed_result(b: NetworkBuilder, inputs: list[Array]) -> list[Array]:
    """What the mixed network computes, in float64."""
    x = inputs[0].astype(np.float64)
    hidden = np.maximum(x @ b.arrays["first.weight"].T, 0)
    spread = np.sqrt(hidden.var(1, keepdims=True) + 1e-5)
    normed = (hidden - hidden.mean(1, keepdims=True)) / spread * b.arrays["norm"]
    back = normed @ b.arrays["second.weight"].T
    total = back + x
    flat = (total * back).reshape(-1, 2, 4)
    return [total, flat, inputs[1].reshape(-1), b.arrays["table"], inputs[0]]


def selecting_network() -> NetworkBuilder:
    """Boxes that are selected of any number, what is gathered at their places, and what is written there."""
    b = NetworkBuilder(Symbol("B", 1, 4, example=2), Symbol("N", 1, 40, example=6))
    boxes, scores = b.input("boxes", "B,N,4"), b.input("scores", "B,3,N")
    b.node("nms", [boxes, scores], "rows", "number", limit="N", iou=0.5, filtered=1, score=0.25, format="corners",
           out_dtype=DType.I64)  # fmt: skip
    columns = b.constant("columns", np.array([0, 2], np.int64))
    places = b.node("gather", ["rows", columns], "places", axis=1, out_dtype=DType.I64)
    chosen = b.node("gather_nd", [boxes, places], "chosen", batch_dims=0)
    b.node("scatter_nd", [boxes, places, b.node("unary", [chosen], "turned", kind="neg", alpha=0.0, beta=0.0)],
           "written", reduction="add")  # fmt: skip
    for name, sizes in (("rows", "3*B*N,3"), ("number", "1"), ("chosen", "3*B*N,4"), ("written", "B,N,4")):
        b.output(name, sizes)
    return b


def selecting_inputs(images: int, count: int, seed: int = 0) -> list[Array]:
    generator = np.random.default_rng(seed)
    return [generator.random(shape, np.float32) for shape in ((images, count, 4), (images, 3, count))]


def winograd_network() -> NetworkBuilder:
    """Two 3x3 convolutions, of images of any size; the second adds its input."""
    b = NetworkBuilder(Symbol("N", 1, 4, example=2), Symbol("H", 1, 32, example=5), Symbol("W", 1, 32, example=4))
    x, previous = b.input("x", "N,H,W,5"), 5
    for number, name in enumerate(("first", "second")):
        array = np.random.default_rng(number).standard_normal((17, 16 * previous)).astype(np.float32) * 0.2
        weight = b.weight(f"{name}.weight", array.astype(np.float32), Layout.T16_F32)
        bias = b.weight(f"{name}.bias", np.linspace(-1, 1, 17, dtype=np.float32))
        residual = x if number else None
        x, previous = b.node("conv_winograd", [x, weight, bias, residual], name, out_channels=17, pads="1,1,1,1",
                             act=("relu", "silu")[number], alpha=0.0, beta=0.0), 17  # fmt: skip
    b.output(x, "N,H,W,17")
    return b


def winograd_inputs(images: int, height: int, width: int, seed: int = 0) -> list[Array]:
    return [np.random.default_rng(seed).standard_normal((images, height, width, 5)).astype(np.float32)]


SEEDS: dict[str, Callable[[], NetworkBuilder]] = {
    "mixed": mixed_network, "selecting": selecting_network, "winograd": winograd_network,
}  # fmt: skip
"""The networks from which the fuzzers start.  Beside golden bundles, they have every op of general networks."""


def write_seeds(folder: Path) -> list[Path]:
    """Write the bundles of ``SEEDS``, and return them with the golden ones."""
    golden = sorted((Path(__file__).parents[1] / "golden" / "networks").glob("*/*.psm"))
    return [*(make().write(folder / f"{name}.psm") for name, make in SEEDS.items()), *golden]


if __name__ == "__main__":  # seeds of `make fuzz`
    write_seeds(Path(sys.argv[1]))
