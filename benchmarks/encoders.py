"""Compares embeddings of Penstock, ONNX Runtime and OpenVINO on the same encoder: a mix of lengths, and equal lengths.

    python benchmarks/encoders.py --shape minilm --peers PYTHON [--scheme f32] [--threads 2] [--rounds 5]

PYTHON is the interpreter of an environment with torch, transformers, onnx, onnxruntime, openvino and nncf.  The encoder
has random weights.  The peers get batches of 32 texts, sorted by length and padded to the longest, as
sentence-transformers makes them; Penstock gets all texts as they come.  With ``--scheme w8a8`` the peers are quantized
by their own tools: dynamically (ONNX Runtime), and by nncf with calibration (OpenVINO).  The sides stay open and take
turns; figures are medians of the rounds, and ratios those of the pairs.  The mean cosine to the float32 vectors of
ONNX Runtime stands beside each.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import numpy as np

SHAPES = {  # hidden, layers, heads, intermediate
    "minilm": (384, 6, 12, 1536),
    "bert-base": (768, 12, 12, 3072),
}
SIDES = ("penstock", "onnxruntime", "openvino")
BATCH, VOCAB = 32, 30522
MIXES = {"mixed lengths": 0, "equal lengths": 128}


def texts(length: int, count: int) -> list[list[int]]:
    """Return ``count`` texts as ids: of ``length`` tokens, or of 8 to 384, most of them short, if it is 0."""
    draw = random.Random(1)
    lengths = [length or min(384, max(8, round(draw.lognormvariate(3.9, 0.8)))) for _ in range(count)]
    return [[101, *(draw.randrange(1000, VOCAB) for _ in range(n - 2)), 102] for n in lengths]


class Penstock:
    def __init__(self, folder: Path, scheme: str, threads: int) -> None:
        from penstock import LLM

        self.llm = LLM(str(folder), scheme=scheme, threads=threads)

    def embed(self, ids: list[list[int]]) -> np.ndarray:
        return np.array([answer.vector for answer in self.llm.embed(ids, "mean", True)])


class Padded(ABC):
    """Sorts and pads batches; ``run`` returns the hidden rows of one."""

    @abstractmethod
    def run(self, ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
        """Return the hidden rows [batch, length, hidden] of padded ids and their mask, both [batch, length]."""

    def embed(self, ids: list[list[int]]) -> np.ndarray:
        order = sorted(range(len(ids)), key=lambda i: -len(ids[i]))
        vectors: list[Any] = [None] * len(ids)
        for start in range(0, len(ids), BATCH):
            places = order[start : start + BATCH]
            longest = len(ids[places[0]])
            padded = np.zeros((len(places), longest), np.int64)
            mask = np.zeros_like(padded)
            for row, place in enumerate(places):
                padded[row, : len(ids[place])] = ids[place]
                mask[row, : len(ids[place])] = 1
            hidden = self.run(padded, mask)
            pooled = self.pool(hidden, mask)
            for row, place in enumerate(places):
                vectors[place] = pooled[row] / np.linalg.norm(pooled[row])
        return np.array(vectors)

    def pool(self, hidden: np.ndarray, mask: np.ndarray) -> np.ndarray:
        """Return the mean of the hidden rows of each text, [batch, hidden]."""
        means: np.ndarray = (hidden * mask[:, :, None]).sum(1) / mask.sum(1)[:, None]
        return means


class OnnxRuntime(Padded):
    def __init__(self, folder: Path, scheme: str, threads: int) -> None:
        import onnxruntime
        from onnxruntime.quantization import QuantType, quantize_dynamic

        file = folder / "model.onnx"
        if scheme == "w8a8":
            quantize_dynamic(file, folder / "int8.onnx", weight_type=QuantType.QInt8, per_channel=True)
            file = folder / "int8.onnx"
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        self.session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])

    def run(self, ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
        rows: np.ndarray = self.session.run(None, {"input_ids": ids, "attention_mask": mask})[0]
        return rows


class OpenVino(Padded):
    def __init__(self, folder: Path, scheme: str, threads: int) -> None:
        import openvino

        core = openvino.Core()
        model = core.read_model(folder / "model.onnx")
        if scheme == "w8a8":
            import nncf

            samples = [
                {"input_ids": np.array([t]), "attention_mask": np.ones((1, 128), np.int64)} for t in texts(128, 64)
            ]
            model = nncf.quantize(model, nncf.Dataset(samples), model_type=nncf.ModelType.TRANSFORMER)
        hints = {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY"}
        if scheme != "bf16":
            hints["INFERENCE_PRECISION_HINT"] = "f32"
        self.request = core.compile_model(model, "CPU", hints).create_infer_request()

    def run(self, ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
        rows: np.ndarray = self.request.infer({"input_ids": ids, "attention_mask": mask})[0]
        return rows


def export(folder: Path, shape: str) -> None:
    """Write an encoder with random weights as a checkpoint folder, and as ONNX."""
    import torch
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    hidden, layers, heads, intermediate = SHAPES[shape]
    config = BertConfig(
        vocab_size=VOCAB,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=intermediate,
        attn_implementation="eager",
    )
    model = BertModel(config, add_pooling_layer=False).eval()
    model.save_pretrained(folder)

    class Rows(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, input_ids: Any, attention_mask: Any) -> Any:
            return self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state

    ids = torch.ones((2, 16), dtype=torch.int64)
    axes = {name: {0: "batch", 1: "length"} for name in ("input_ids", "attention_mask")}
    names = {"input_names": ["input_ids", "attention_mask"], "output_names": ["rows"]}
    torch.onnx.export(
        Rows(), (ids, ids), str(folder / "model.onnx"), dynamic_axes=axes, opset_version=17, dynamo=False, **names
    )


def side(name: str, folder: Path, scheme: str, threads: int) -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)  # what libraries print goes to standard error
    os.dup2(2, 1)
    if name == "export":
        export(folder, scheme)
        return
    kinds = {"penstock": Penstock, "onnxruntime": OnnxRuntime, "openvino": OpenVino}
    program = kinds[name](folder, scheme, threads)
    program.embed(texts(64, BATCH))
    print(json.dumps({"ready": name}), file=answers)
    for line in sys.stdin:
        length, count, file = line.split()
        ids = texts(int(length), int(count))
        start = time.perf_counter()
        vectors = program.embed(ids)
        seconds = time.perf_counter() - start
        np.save(file, vectors)
        print(json.dumps({"seconds": seconds, "tokens": sum(map(len, ids))}), file=answers)


class Process:
    """One side, which answers a measure at a time."""

    def __init__(self, python: str, name: str, folder: Path, scheme: str, threads: int) -> None:
        command = [python, __file__, "--side", name, str(folder), scheme, str(threads)]
        pipe = subprocess.PIPE
        self.child = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True)
        self.vectors = folder / f"{name}-{scheme}.npy"
        self.name = name
        self._answer()

    def _answer(self) -> dict[str, Any]:
        line = self.child.stdout.readline() if self.child.stdout else ""
        if not line:
            raise SystemExit(f"{self.name} ended with {self.child.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def measure(self, length: int, count: int) -> float:
        """Return tokens per second."""
        if self.child.stdin:
            self.child.stdin.write(f"{length} {count} {self.vectors}\n")
            self.child.stdin.flush()
        answer = self._answer()
        return float(answer["tokens"] / answer["seconds"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="minilm")
    parser.add_argument("--peers", metavar="PYTHON", default=sys.executable)
    parser.add_argument("--scheme", choices=("f32", "bf16", "w8a8"), default="f32")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--texts", type=int, default=128)
    parser.add_argument("--side", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        side(args.side[0], Path(args.side[1]), args.side[2], int(args.side[3]))
        return
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        subprocess.run([args.peers, __file__, "--side", "export", folder, args.shape, "1"], check=True)
        compare(args, folder)


def compare(args: argparse.Namespace, folder: Path) -> None:
    pythons = {"penstock": sys.executable, "onnxruntime": args.peers, "openvino": args.peers}
    exact = Process(args.peers, "onnxruntime", folder, "f32", args.threads)
    sides = {name: Process(pythons[name], name, folder, args.scheme, args.threads) for name in SIDES}
    print(f"{args.shape}, {args.scheme}, {args.threads} threads, {args.texts} texts, {args.rounds} rounds")
    for mix, length in MIXES.items():
        exact.measure(length, args.texts)
        rates: dict[str, list[float]] = {name: [] for name in SIDES}
        for number in range(args.rounds):
            for name in SIDES if number % 2 == 0 else reversed(SIDES):
                rates[name].append(sides[name].measure(length, args.texts))
        reference = np.load(exact.vectors)
        for name in SIDES:
            ratios = sorted(ours / theirs for ours, theirs in zip(rates["penstock"], rates[name], strict=True))
            cosine = float((np.load(sides[name].vectors) * reference).sum(1).mean())
            print(
                f"{mix:14} {name:12} {statistics.median(rates[name]):9.0f} tokens/s  ratio "
                f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})  cosine {cosine:.5f}  "
                f"load {os.getloadavg()[0]:.1f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
