"""Computes the graph of an int8 network in float64, node by node: what the core's integers stand for."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from penstock.core.native import Context
from penstock.graph.ir import Node
from penstock.networks.int8.stored import StoredNetwork

__all__ = ["reference_outputs"]

F = torch.nn.functional
Array = Any
_LEAST = {"i8": -127, "u8": 0}


def _sizes(text: Any) -> list[int]:
    return [int(size) for size in str(text).split(",")]


def _round(values: Array, attrs: dict[str, Any]) -> Array:
    """Return values, or the integers that they become."""
    if attrs["dtype"] == "f32":
        return values
    return np.rint(np.clip(values / np.float32(attrs["y_scale"]), _LEAST[attrs["dtype"]], 127))


def _conv(node: Node, x: Array, weight: Array, bias: Array, residual: Array) -> Array:
    a: dict[str, Any] = node.attrs
    height, width = _sizes(a["kernel"])
    groups, out, channels = a["groups"], a["out_channels"], x.shape[3]
    rows = weight.T if weight.shape == (height * width, channels) and groups > 1 else weight
    kernel = rows[:out].reshape(out, height, width, channels // groups)
    top, left, bottom, right = _sizes(a["pads"])
    image = F.pad(torch.from_numpy(np.moveaxis(x, 3, 1).copy()), (left, right, top, bottom))
    strides, dilations = _sizes(a["strides"]), _sizes(a["dilations"])
    y = F.conv2d(image, torch.from_numpy(np.moveaxis(kernel, 3, 1).copy()), None, strides, 0, dilations, groups)
    total = np.moveaxis(y.numpy(), 1, 3) + bias + residual
    if a["act"] == "relu":
        return np.maximum(total, 0)
    return np.clip(total, a["alpha"], a["beta"]) if a["act"] == "clip" else total


def _run(node: Node, x: Array, values: dict[str, Array], weight_of: Any) -> Array:
    a: dict[str, Any] = node.attrs
    if node.op in ("conv", "conv_int8"):
        residual = values.get(node.inputs[3].name, 0.0) * (a.get("residual_scale") or 1.0)
        bias = weight_of(node.inputs[2].name).reshape(-1)
        y = _conv(node, x * (a.get("x_scale") or 1.0), weight_of(node.inputs[1].name), bias, residual)
        return _round(y, a) if node.op == "conv_int8" else y
    if node.op == "requantize":
        return _round(x * (a["x_scale"] or 1.0), a)
    if node.op == "permute":
        return x.transpose(_sizes(a["order"]))
    if node.op == "max_pool":
        y = F.max_pool2d(torch.from_numpy(np.moveaxis(x, 3, 1).copy()), _sizes(a["kernel"]), _sizes(a["strides"]))
        return np.moveaxis(y.numpy(), 1, 3)
    if node.op == "concat":
        return np.concatenate([values[o.name] for o in node.inputs if o.kind == "value"], a["axis"])
    if node.op == "reduce":
        assert a["kind"] == "mean"
        return x.mean(tuple(_sizes(a["axes"])))
    assert (node.op, a["scheme"]) == ("linear", "f32")
    return x @ weight_of(node.inputs[1].name).T + weight_of(node.inputs[2].name).reshape(-1)


def reference_outputs(network: StoredNetwork, inputs: dict[str, Array]) -> list[Array]:
    """Return the outputs of a network of these few ops."""
    values = {name: array.astype(np.float64) for name, array in inputs.items()}
    with Context() as context:

        def weight_of(name: str) -> Array:
            return network.rows(context, network.graph.weights[name]).astype(np.float64)

        for node in network.graph.nodes:
            values[node.outputs[0]] = _run(node, values[node.inputs[0].name], values, weight_of)
    return [values[name] for name in network.graph.outputs]
