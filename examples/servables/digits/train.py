"""Train the digit classifier, a network with one hidden layer in plain numpy, and write it as ONNX.

    pip install numpy onnx scikit-learn
    python examples/servables/digits/train.py

The data comes with scikit-learn: 1,797 pictures of 8 x 8 grey values from 0 to 16.  A fifth of them is the test set.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

HIDDEN, EPOCHS, BATCH, RATE = 48, 60, 32, 0.1
Floats = NDArray[np.float32]


def digits(is_test: bool) -> tuple[Floats, NDArray[np.int64]]:
    """Return pictures [n, 64] with values from 0 to 1, and their labels: every fifth for the test, or the others."""
    from sklearn.datasets import load_digits

    pictures, labels = load_digits(return_X_y=True)
    chosen = (np.arange(len(labels)) % 5 == 0) == is_test
    return (pictures[chosen] / 16).astype(np.float32), labels[chosen].astype(np.int64)


def train(seed: int = 0) -> dict[str, Floats]:
    """Train by stochastic gradient descent on the cross-entropy; return the weights."""
    random = np.random.default_rng(seed)
    pictures, labels = digits(is_test=False)
    w1 = (random.standard_normal((64, HIDDEN)) * np.sqrt(2 / 64)).astype(np.float32)
    w2 = (random.standard_normal((HIDDEN, 10)) * np.sqrt(2 / HIDDEN)).astype(np.float32)
    b1, b2 = np.zeros(HIDDEN, np.float32), np.zeros(10, np.float32)
    for _ in range(EPOCHS):
        for rows in np.array_split(random.permutation(len(labels)), len(labels) // BATCH):
            x = pictures[rows]
            hidden = np.maximum(x @ w1 + b1, 0)
            scores = hidden @ w2 + b2
            wrong = np.exp(scores - scores.max(axis=1, keepdims=True))
            wrong /= wrong.sum(axis=1, keepdims=True)
            wrong[np.arange(len(rows)), labels[rows]] -= 1
            wrong /= len(rows)
            back = (wrong @ w2.T) * (hidden > 0)
            w2 -= RATE * hidden.T @ wrong
            b2 -= RATE * wrong.sum(axis=0)
            w1 -= RATE * x.T @ back
            b1 -= RATE * back.sum(axis=0)
    return {"w1": w1, "b1": b1, "w2": w2, "b2": b2}


def accuracy(weights: dict[str, Floats]) -> float:
    """Return the accuracy on the test set."""
    pictures, labels = digits(is_test=True)
    hidden = np.maximum(pictures @ weights["w1"] + weights["b1"], 0)
    return float((np.argmax(hidden @ weights["w2"] + weights["b2"], axis=1) == labels).mean())


def write(weights: dict[str, Floats], path: Path) -> None:
    """The network as an ONNX file: "image" FP32[n, 64] to "scores" FP32[n, 10], which sum to 1."""
    nodes = [
        helper.make_node("Gemm", ["image", "w1", "b1"], ["sum"]),
        helper.make_node("Relu", ["sum"], ["hidden"]),
        helper.make_node("Gemm", ["hidden", "w2", "b2"], ["logits"]),
        helper.make_node("Softmax", ["logits"], ["scores"], axis=1),
    ]
    graph = helper.make_graph(
        nodes,
        "digits",
        [helper.make_tensor_value_info("image", TensorProto.FLOAT, ["n", 64])],
        [helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["n", 10])],
        [numpy_helper.from_array(value, name) for name, value in weights.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model, full_check=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(model, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--into", type=Path, default=Path(__file__).parent / "1", help="the version's folder")
    args = parser.parse_args()
    weights = train()
    write(weights, args.into / "digits.onnx")
    print(f"{args.into / 'digits.onnx'}: {accuracy(weights):.1%} of the pictures kept apart")


if __name__ == "__main__":
    main()
