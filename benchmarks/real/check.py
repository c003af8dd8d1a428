"""Checks real, published models beside the programs that people run them with, and prints a table.

    python -m benchmarks.real.check FOLDER [--llama-cpp PYTHON] [--model NAME] [--threads 2] [--rounds 3] [--no-speed]

FOLDER keeps the models (``models.py`` says which, and assembles those that are missing).  all-MiniLM-L6-v2 is compared
with transformers.  The GGUF files are compared with llama.cpp, if PYTHON is an interpreter with llama-cpp-python, and
with ik_llama.cpp (``--ik-llama-cpp PYTHON``, of one with ik-llama-cpp-python): the ids of prompts, greedy answers, and
the divergence (KL) of each from the file's values in float32 over 400 positions of texts in three languages and code.
Speeds are taken in turn, Penstock first in every other round; memory is the peak of the process that measures speed.
The first run makes the bundle, a start finds it in the cache.  The exit status is 1 if ids differ, or a divergence or a
vector is further away than it may be.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks import gguf_pairs
from benchmarks.child import Child
from benchmarks.real.models import MODELS, RealModel, assemble
from benchmarks.real.texts import PROMPTS, SENTENCES, TEXTS
from penstock.core.native import Context, probe_bandwidth

POSITIONS = 100
"""Of each text, of which there are four."""
ANSWER_TOKENS = 32
MOST_DIVERGENCE = 0.01
MOST_DIFFERENCE = 1e-5
MEASURES = {"prefill 512": "prefill, 512 tokens", "decode 1 32": "batch 1", "decode 8 8": "batch 8"}

Row = list[str]


@contextlib.contextmanager
def side_of(python: str, name: str, file: Path, threads: int, scheme: str = "") -> Iterator[Child]:
    """Yield a process of ``sides.py`` that is ready."""
    command = [python, "-m", "benchmarks.real.sides", name, str(file), str(threads), *([scheme] if scheme else [])]
    child = Child(name, command, subprocess.DEVNULL)
    child.answer()
    try:
        yield child
    finally:
        child.close()


def ask(child: Child, what: str, **values: Any) -> Any:
    return child.ask(json.dumps({"do": what, **values}))


def results_of(python: str, name: str, file: Path, threads: int, out: Path) -> dict[str, Any]:
    """Return ids and answers of a side; its logits go to a file."""
    with side_of(python, name, file, threads) as child:
        ids = ask(child, "ids", texts=[*PROMPTS.values(), *TEXTS.values()])["ids"]
        answers = [ask(child, "greedy", ids=own, num_tokens=ANSWER_TOKENS) for own in ids[: len(PROMPTS)]]
        texts = [own[:POSITIONS] for own in ids[len(PROMPTS) :]]
        ask(child, "logits", ids=texts, out=str(out))
    return {"ids": ids, "answers": answers, "texts": texts}


def log_probabilities(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    wide = logits.astype(np.float64)
    return wide - np.logaddexp.reduce(wide, axis=-1, keepdims=True)


def divergence(exact: Path, other: Path) -> tuple[float, float]:
    """Return the mean and the largest KL of the rows of two files of logits, a row at a time."""
    values = []
    for row, own in zip(np.load(exact, mmap_mode="r"), np.load(other, mmap_mode="r"), strict=True):
        expected = log_probabilities(row)
        values.append(float((np.exp(expected) * (expected - log_probabilities(own))).sum()))
    return statistics.mean(values), max(values)


def equal_tokens(first: list[int], second: list[int]) -> int:
    """Return how many tokens are equal before the first that differs."""
    return next((at for at, pair in enumerate(zip(first, second, strict=True)) if pair[0] != pair[1]), len(first))


def compare(file: Path, args: argparse.Namespace, folder: Path) -> tuple[list[Row], bool]:
    """Return the rows of what all compute, and whether ids and divergence are as they should be."""
    own = results_of(sys.executable, "penstock", file, args.threads, folder / "penstock.npy")
    with side_of(sys.executable, "penstock", file, args.threads, "f32") as child:
        ask(child, "logits", ids=own["texts"], out=str(folder / "exact.npy"))
    sides = {"penstock": own}
    for name, python in args.peers.items():
        sides[name] = results_of(python, name, file, args.threads, folder / f"{name}.npy")
    found = [divergence(folder / "exact.npy", folder / f"{name}.npy") for name in sides]
    num_positions = sum(len(ids) for ids in own["texts"])
    rows = [
        [f"KL to float32, mean of {num_positions}", *(f"{mean:.4f}" for mean, _ in found)],
        ["KL, largest", *(f"{largest:.4f}" for _, largest in found)],
    ]
    equal = [[ids == own["ids"][at] for at, ids in enumerate(side["ids"])] for side in sides.values()]
    rows.append(["texts with Penstock's ids", *(f"{sum(same)} of {len(same)}" for same in equal)])
    for at, (name, prompt) in enumerate(PROMPTS.items()):
        answers = [side["answers"][at] for side in sides.values()]
        print(f"{name}: {prompt!r} -> {answers[0]['text']!r}", flush=True)
        lengths = [equal_tokens(answers[0]["ids"], answer["ids"]) for answer in answers]
        rows.append([f"equal greedy tokens, {name}", *(f"{length} of {ANSWER_TOKENS}" for length in lengths)])
    return rows, found[0][0] < MOST_DIVERGENCE and all(map(all, equal))


def start_of(python: str, name: str, file: Path, threads: int) -> float:
    """Return the seconds from the start of a side's process to its first token."""
    begin = time.perf_counter()
    with side_of(python, name, file, threads) as child:
        ask(child, "greedy", ids=[1, 2, 3], num_tokens=1)
        return time.perf_counter() - begin


def speeds(file: Path, args: argparse.Namespace) -> list[Row]:
    """Return the rows of speed, memory and start."""
    first, _ = gguf_pairs.start_s(file)
    starts = [statistics.median(gguf_pairs.start_s(file)[0] for _ in range(args.rounds))]
    starts += [start_of(python, name, file, args.threads) for name, python in args.peers.items()]
    pythons = {"penstock": sys.executable, **args.peers}
    sides = [gguf_pairs.Side(python, name, file, args.threads, 1) for name, python in pythons.items()]
    rows = []
    for what, label in MEASURES.items():
        seconds: list[list[float]] = [[] for _ in sides]
        for number in range(args.rounds):
            for at in range(len(sides)) if number % 2 == 0 else reversed(range(len(sides))):
                seconds[at].append(sides[at].measure(what)[0])
        rates = [[int(what.split()[1]) / value for value in own] for own in seconds]
        cells = [f"{statistics.median(own):,.1f} ({min(own):,.1f} to {max(own):,.1f})" for own in rates]
        rows.append([f"{label}, tokens/s", *cells])
    peaks = [side.ask("memory")["peak_rss_bytes"] / file.stat().st_size for side in sides]
    for side in sides:
        side.close()
    rows.append(["peak memory, times the file", *(f"{peak:.2f}" for peak in peaks)])
    rows.append(["first run, s", f"{first:.2f}", *("" for _ in args.peers)])
    return [*rows, ["start, s", *(f"{seconds:.2f}" for seconds in starts)]]


def check_gguf(model: RealModel, args: argparse.Namespace) -> bool:
    file = assemble(model, args.folder)
    with tempfile.TemporaryDirectory(dir=args.folder, prefix="run-") as temporary:
        os.environ["PENSTOCK_CACHE_DIR"] = str(Path(temporary) / "bundles")
        rows = [] if args.no_speed else speeds(file, args)  # before the comparison, which would make the bundle
        compared, is_right = compare(file, args, Path(temporary))
    head = [f"{model.name}, {file.stat().st_size:,} bytes", "Penstock", *args.peers]
    print(f"\n| {' | '.join(head)} |\n|{'---|' * len(head)}")
    for row in [*compared, *rows]:
        print(f"| {' | '.join(row)} |")
    print(flush=True)
    return is_right


def check_encoder(model: RealModel, args: argparse.Namespace) -> bool:
    """Compare the vectors of a sentence encoder with those of transformers."""
    import torch
    import transformers

    import penstock

    folder = assemble(model, args.folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    network = transformers.AutoModel.from_pretrained(folder)
    furthest = 0.0
    with penstock.LLM(folder, threads=args.threads) as llm, torch.no_grad():
        for text in SENTENCES:
            hidden = network(**tokenizer(text, return_tensors="pt", truncation=True)).last_hidden_state[0].mean(dim=0)
            expected = torch.nn.functional.normalize(hidden, dim=0).numpy()
            furthest = max(furthest, float(np.abs(llm.embed(text).vector - expected).max()))
    print(f"{model.name}: {len(SENTENCES)} texts, at most {furthest:.1e} from transformers\n", flush=True)
    return furthest < MOST_DIFFERENCE


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    has_own = importlib.util.find_spec("llama_cpp") is not None
    parser.add_argument("--llama-cpp", metavar="PYTHON", default=sys.executable if has_own else None)
    parser.add_argument("--ik-llama-cpp", metavar="PYTHON")
    parser.add_argument("--model", action="append", choices=[model.name for model in MODELS], help="default: all")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-speed", action="store_true", help="compare only (default: measure speed, too)")
    args = parser.parse_args()
    peers = {"llama.cpp": args.llama_cpp, "ik_llama.cpp": args.ik_llama_cpp}
    args.peers = {name: python for name, python in peers.items() if python}
    args.folder.mkdir(parents=True, exist_ok=True)
    context = Context(num_threads=args.threads)
    print(f"{args.threads} threads, {context.cpu_level}, memory reads {probe_bandwidth(context) / 1e9:.1f} GB/s")
    if not args.llama_cpp:
        print("llama.cpp: not installed; --llama-cpp PYTHON names an interpreter with llama-cpp-python")
    results = {
        model.name: check_gguf(model, args) if model.file else check_encoder(model, args)
        for model in MODELS
        if not args.model or model.name in args.model
    }
    wrong = [name for name, is_right in results.items() if not is_right]
    print(f"not as expected: {', '.join(wrong)}" if wrong else "all as expected")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
