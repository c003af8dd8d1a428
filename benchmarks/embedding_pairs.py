"""Compares embeddings of a GGUF file by Penstock and llama.cpp, and of its weights as floats by other programs.

    python -m benchmarks.make_gguf EMBEDDING.gguf --shape 0.6b-embedding --type Q8_0
    python -m benchmarks.embedding_pairs EMBEDDING.gguf --llama-cpp PYTHON [--onnxruntime PYTHON] [--openvino PYTHON]

Each PYTHON is the interpreter of an environment with that package and NumPy.  The file is a Qwen3 whose vector is the
last hidden row.  llama.cpp gets as many whole texts as fit into a batch of 512 tokens, its default size.  ONNX Runtime
and OpenVINO run the file's weights in float32 (OpenVINO with ``--openvino-type bf16`` in bfloat16) on batches of 32
texts, sorted by length and padded to the longest; PyTorch and transformers, here, export them.  Mixed lengths are 8 to
384 tokens, most of them short; equal lengths are 128.  The sides stay open and take turns; figures are medians of the
rounds, and ratios those of the pairs.  The mean cosine to Penstock's vectors stands beside each.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from benchmarks.child import Child
from benchmarks.encoders import BATCH, MIXES, OnnxRuntime, OpenVino, texts

MOST_TEXTS = 64


class Embedder(Protocol):
    """A program with an open model."""

    def embed(self, ids: list[list[int]]) -> np.ndarray:
        """Return the vectors [texts, width], each of length 1."""


class Penstock:
    """The file at its own precision."""

    def __init__(self, file: Path, folder: Path, option: str, threads: int) -> None:
        from penstock import LLM

        self.llm = LLM(str(file), threads=threads, prefix_cache=False)  # the texts are the same in each round

    def embed(self, ids: list[list[int]]) -> np.ndarray:
        return np.array([answer.vector for answer in self.llm.embed(ids, "last", True)])


class LlamaCpp:
    """llama.cpp's functions, by llama-cpp-python."""

    def __init__(self, file: Path, folder: Path, option: str, threads: int) -> None:
        self.lib: Any = importlib.import_module("llama_cpp")
        self.lib.llama_backend_init()
        self.model = self.lib.llama_model_load_from_file(str(file).encode(), self.lib.llama_model_default_params())
        params = self.lib.llama_context_default_params()
        params.embeddings, params.pooling_type = True, self.lib.LLAMA_POOLING_TYPE_LAST
        self.tokens = int(option)
        params.n_ctx = params.n_batch = params.n_ubatch = self.tokens
        params.n_seq_max, params.kv_unified = MOST_TEXTS, True
        params.n_threads = params.n_threads_batch = threads
        self.context = self.lib.llama_init_from_model(self.model, params)
        self.width = self.lib.llama_model_n_embd(self.model)
        self.batch = self.lib.llama_batch_init(self.tokens, 0, 1)

    def embed(self, ids: list[list[int]]) -> np.ndarray:
        vectors: list[np.ndarray] = []
        while len(vectors) < len(ids):
            some, count = [], 0
            for text in ids[len(vectors) : len(vectors) + MOST_TEXTS]:
                count += len(text)
                if some and count > self.tokens:
                    break
                some.append(text)
            vectors += self._embed_batch(some)
        return np.array(vectors)

    def _embed_batch(self, some: list[list[int]]) -> list[np.ndarray]:
        self.lib.llama_memory_clear(self.lib.llama_get_memory(self.context), True)
        batch, row = self.batch, 0
        for number, text in enumerate(some):
            for position, token in enumerate(text):
                batch.token[row], batch.pos[row], batch.n_seq_id[row] = token, position, 1
                batch.seq_id[row][0], batch.logits[row] = number, True
                row += 1
        batch.n_tokens = row
        if self.lib.llama_decode(self.context, batch):
            raise SystemExit("llama_decode failed")
        pointers = [self.lib.llama_get_embeddings_seq(self.context, number) for number in range(len(some))]
        rows = [np.ctypeslib.as_array(pointer, (self.width,)).astype(np.float64) for pointer in pointers]
        return [row / np.linalg.norm(row) for row in rows]


class LastRow:
    """Takes the last hidden row of each text."""

    def pool(self, hidden: np.ndarray, mask: np.ndarray) -> np.ndarray:
        return hidden[np.arange(len(hidden)), mask.sum(1) - 1]


class OnnxRuntimeLast(LastRow, OnnxRuntime):
    def __init__(self, file: Path, folder: Path, option: str, threads: int) -> None:
        super().__init__(folder, "f32", threads)


class OpenVinoLast(LastRow, OpenVino):
    def __init__(self, file: Path, folder: Path, option: str, threads: int) -> None:
        super().__init__(folder, option, threads)


SIDES: dict[str, Any] = {
    "penstock": Penstock,
    "llama.cpp": LlamaCpp,
    "onnxruntime": OnnxRuntimeLast,
    "openvino": OpenVinoLast,
}


def export(file: Path, folder: Path) -> None:
    """Write the network with the file's values in float32 as ONNX."""
    import torch
    from transformers import Qwen3Config, Qwen3Model

    from penstock.checkpoint.folder import Checkpoint

    checkpoint = Checkpoint.open(file)
    config = Qwen3Config(**checkpoint.config.values, attn_implementation="eager", use_cache=False)
    model = Qwen3Model(config).eval()
    state = {name: torch.from_numpy(np.array(checkpoint.read(name), np.float32)) for name in checkpoint.tensors}
    model.load_state_dict({name.removeprefix("model."): value for name, value in state.items()})

    class Rows(torch.nn.Module):
        """The hidden rows; ``mask`` hides keys behind a text, which its own rows do not see."""

        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, input_ids: Any, attention_mask: Any) -> Any:
            length = input_ids.shape[1]
            causal = torch.triu(torch.full((length, length), -1e9), 1)
            mask = (causal + (attention_mask[:, None, :].float() - 1) * 1e9)[:, None]
            return self.model(input_ids=input_ids, attention_mask={"full_attention": mask}).last_hidden_state

    ids = torch.ones((2, 16), dtype=torch.int64)
    axes = {name: {0: "batch", 1: "length"} for name in ("input_ids", "attention_mask")}
    names = {"input_names": ["input_ids", "attention_mask"], "output_names": ["rows"]}
    torch.onnx.export(
        Rows(), (ids, ids), str(folder / "model.onnx"), dynamic_axes=axes, opset_version=17, dynamo=False, **names
    )


def serve(name: str, file: Path, folder: Path, option: str, threads: int) -> None:
    """Answer each line of standard input, "LENGTH COUNT OUT.npy", with the seconds and the tokens."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)  # what libraries print goes to standard error
    os.dup2(2, 1)
    program: Embedder = SIDES[name](file, folder, option, threads)
    program.embed(texts(64, BATCH))
    print(json.dumps({"ready": name}), file=answers)
    for line in sys.stdin:
        length, count, out = line.split()
        ids = texts(int(length), int(count))
        start = time.perf_counter()
        vectors = program.embed(ids)
        seconds = time.perf_counter() - start
        np.save(out, vectors)
        print(json.dumps({"seconds": seconds, "tokens": sum(map(len, ids))}), file=answers)


class Side(NamedTuple):
    """A process, and where it leaves the vectors of its last measure."""

    child: Child
    vectors: Path

    def measure(self, length: int, count: int) -> float:
        """Return tokens per second."""
        answer = self.child.ask(f"{length} {count} {self.vectors}")
        return float(answer["tokens"] / answer["seconds"])


def compare(args: argparse.Namespace, folder: Path, pythons: dict[str, str]) -> None:
    sides: dict[str, Side] = {}
    for name, python in pythons.items():
        option, errors = args.openvino_type, None
        if name == "llama.cpp":  # which logs each tensor
            option, errors = str(args.llama_cpp_tokens), subprocess.DEVNULL
        own = [name, str(args.file), str(folder), option, str(args.threads)]
        child = Child(name, [python, "-m", "benchmarks.embedding_pairs", str(args.file), "--side", *own], errors)
        child.answer()
        sides[name] = Side(child, folder / f"{name}.npy")
    print(f"{args.file.name}, {args.threads} threads, {args.texts} texts, {args.rounds} rounds")
    for mix, length in MIXES.items():
        rates: dict[str, list[float]] = {name: [] for name in sides}
        for number in range(args.rounds):
            for name in sides if number % 2 == 0 else reversed(sides):
                rates[name].append(sides[name].measure(length, args.texts))
        reference = np.load(sides["penstock"].vectors)
        for name, side in sides.items():
            ratios = sorted(ours / theirs for ours, theirs in zip(rates["penstock"], rates[name], strict=True))
            cosine = float((np.load(side.vectors) * reference).sum(1).mean())
            print(
                f"{mix:14} {name:12} {statistics.median(rates[name]):9.1f} tokens/s  ratio "
                f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})  cosine {cosine:.5f}  "
                f"load {os.getloadavg()[0]:.1f}",
                flush=True,
            )
    for side in sides.values():
        side.child.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    for name in ("llama-cpp", "onnxruntime", "openvino"):
        parser.add_argument(f"--{name}", metavar="PYTHON", help="default: not compared")
    parser.add_argument("--llama-cpp-tokens", type=int, default=512, help="tokens in a batch (default 512)")
    parser.add_argument("--openvino-type", choices=("f32", "bf16"), default="f32")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--texts", type=int, default=32)
    parser.add_argument("--side", nargs=5, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        name, file, folder, option, threads = args.side
        serve(name, Path(file), Path(folder), option, int(threads))
        return
    asked = {"llama.cpp": args.llama_cpp, "onnxruntime": args.onnxruntime, "openvino": args.openvino}
    pythons = {"penstock": sys.executable} | {name: python for name, python in asked.items() if python}
    with tempfile.TemporaryDirectory(prefix="penstock-") as place:
        if args.onnxruntime or args.openvino:
            export(args.file, Path(place))
        compare(args, Path(place), pythons)


if __name__ == "__main__":
    main()
