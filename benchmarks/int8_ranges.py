"""Compares int8 networks with those of onnxruntime's ``quantize_static``: the same weights, samples and judges.

    python -m benchmarks.int8_ranges [--networks resnet18,mobilenet_v2] [--samples 8] [--size 96] [--folder FOLDER]
    python -m benchmarks.networks --bundle FOLDER/resnet18-mse.psm --file FOLDER/resnet18.int8.onnx --peers PYTHON

Weights are random, and batch norms have the statistics of the samples.  The error of an int8 network is the root of
the mean squared difference from the float32 one over the root of the mean square, on as many other samples.  FOLDER
keeps the files, whose speed the second command compares: NET-RANGES.psm, and NET.int8.onnx of u8 activations.  Needs
PyTorch, onnx and onnxruntime.
"""

from __future__ import annotations

import argparse
import collections
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnxruntime
import torch
from numpy.typing import NDArray
from onnxruntime.quantization import CalibrationDataReader, CalibrationMethod, QuantFormat, QuantType, quantize_static
from onnxruntime.quantization.shape_inference import quant_pre_process
from torch import nn

from benchmarks.network_modules import MODULES, conv, head
from penstock.graph.bundle import read_graph
from penstock.networks.int8.quantize import Int8Options, quantize_network
from penstock.networks.network import read_network
from penstock.networks.predictor import open_predictor

RANGES: Final = ("mse", "minmax", "percentile", "kl")
HELD_OUT_EVERY: Final = 4
Images = list[NDArray[np.float32]]


class BasicBlock(nn.Module):
    """A block of ResNet-18."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = conv(inputs, outputs, 3, stride, act=nn.ReLU)
        self.second = conv(outputs, outputs, 3)
        short = stride == 1 and inputs == outputs
        self.shortcut = nn.Identity() if short else conv(inputs, outputs, 1, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of both paths."""
        return torch.relu(self.second(self.first(x)) + self.shortcut(x))


def resnet18() -> nn.Module:
    """Return the network of He et al., arXiv 1512.03385."""
    sizes = [(64, 64, 1), (64, 64, 1), (64, 128, 2), (128, 128, 1), (128, 256, 2), (256, 256, 1), (256, 512, 2)]
    blocks = [BasicBlock(*size) for size in [*sizes, (512, 512, 1)]]
    return nn.Sequential(conv(3, 64, 7, 2, act=nn.ReLU), nn.MaxPool2d(3, 2, 1), *blocks, *head(512))


def make_onnx(name: str, images: Images, path: Path) -> None:
    """Write a network with random weights."""
    torch.manual_seed(0)
    module = (MODULES | {"resnet18": resnet18})[name]()
    batch = torch.from_numpy(np.concatenate(images))
    with torch.no_grad():
        for part in module.modules():
            if isinstance(part, torch.nn.BatchNorm2d):
                part.momentum = None  # the mean of what it sees
        module.train()(batch)
        module.eval()
        torch.onnx.export(module, (batch[:1],), str(path), input_names=["x"], opset_version=17, dynamo=False)


class Reader(CalibrationDataReader):  # type: ignore[misc]
    """Samples for onnxruntime."""

    def __init__(self, images: Images) -> None:
        self._rest: Iterator[NDArray[np.float32]] = iter(images)

    def get_next(self) -> dict[str, NDArray[np.float32]] | None:
        """Return the next sample."""
        image = next(self._rest, None)
        return None if image is None else {"x": image}


def error_of(expected: Images, found: Images) -> float:
    """Return the relative error, of root mean squares."""
    gap, own = (np.concatenate(arrays).astype(np.float64) for arrays in (found, expected))
    return float(np.sqrt(np.square(gap - own).mean() / np.square(own).mean()))


def peer_errors(path: Path, ranging: Images, answers: Callable[[Path], float]) -> dict[str, float]:
    """Return the errors of onnxruntime by type of activations and method."""
    prepared, found = path.with_suffix(".pre.onnx"), {}
    quant_pre_process(str(path), str(prepared))
    for kind, suffix in ((QuantType.QUInt8, ".int8.onnx"), (QuantType.QInt8, ".signed.onnx")):
        out = path.with_suffix(suffix)
        for method in (CalibrationMethod.MinMax, CalibrationMethod.Percentile):
            quantize_static(
                str(prepared), str(out), Reader(ranging), quant_format=QuantFormat.QDQ, per_channel=True,
                activation_type=kind, weight_type=QuantType.QInt8, calibrate_method=method,
                reduce_range=kind is QuantType.QUInt8,
            )  # fmt: skip
            found[f"onnxruntime {kind.name}, {method.name}"] = answers(out)
    return found


def compare(name: str, num_samples: int, size: int, folder: Path) -> None:
    """Print the errors of one network."""
    rng = np.random.default_rng(0)
    images = [rng.standard_normal((1, 3, size, size), np.float32) for _ in range(2 * num_samples)]
    ranging, judging = images[:num_samples], images[num_samples:]
    path, samples = folder / f"{name}.onnx", folder / name
    make_onnx(name, ranging, path)
    samples.mkdir()
    stored = list(ranging)  # with those that quantize_network holds out, at every fourth place
    for at in range(HELD_OUT_EVERY - 1, num_samples + num_samples // (HELD_OUT_EVERY - 1) + 1, HELD_OUT_EVERY):
        stored.insert(at, judging[0])
    for number, image in enumerate(stored):
        np.save(samples / f"{number:03}.npy", image)

    def run(file: Path) -> Images:
        session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
        return [session.run(None, {"x": image})[0] for image in judging]

    expected = run(path)
    print(f"{name}, {size}x{size}, ranges of {num_samples} samples, errors on {num_samples} others")
    for ranges in RANGES:
        out = folder / f"{name}-{ranges}.psm"
        network = read_network(path)
        report = quantize_network(network, out, samples, Int8Options(ranges=ranges, threads=2), label=name)
        with open_predictor(out) as predictor:
            found = [np.array(predictor.run([image])[0]) for image in judging]
        print(f"  {ranges:<34}{error_of(expected, found):.4f}", flush=True)
    print(f"  {report.num_int8} of {report.num_candidates} nodes in int8, conversions: {report.num_conversions}")
    print(f"  operators: {dict(collections.Counter(node.op for node in read_graph(out)[0].nodes))}")
    for label, error in peer_errors(path, ranging, lambda file: error_of(expected, run(file))).items():
        print(f"  {label:<34}{error:.4f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", default="resnet18,mobilenet_v2", help="resnet18 or names of network_modules")
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--size", type=int, default=96)
    parser.add_argument("--folder", type=Path, help="keeps the files (default: a temporary one)")
    args: Any = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = args.folder or Path(place)
        folder.mkdir(parents=True, exist_ok=True)
        for name in args.networks.split(","):
            compare(name, args.samples, args.size, folder)


if __name__ == "__main__":
    main()
