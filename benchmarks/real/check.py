"""Checks real, published models beside the programs that people run them with, and prints a table.

    python -m benchmarks.real.check FOLDER [--llama-cpp PYTHON] [--model NAME] [--threads 2] [--rounds 3] [--no-speed]

FOLDER keeps the models (``models.py`` says which, and assembles those that are missing).  all-MiniLM-L6-v2 is compared
with transformers.  The GGUF files are compared with llama.cpp, if PYTHON is an interpreter with llama-cpp-python: the
ids of prompts, greedy answers, and the divergence (KL) of both from the file's values in float32 over 400 positions of
texts in three languages and code.  Speeds are taken in turn, Penstock first in every other round; memory is the peak
of the process that measures speed.  The first run makes the bundle, a start finds it in the cache.  The exit status is
1 if ids differ, or a divergence or a vector is further away than it may be.
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

Row = tuple[str, str, str]


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


def results_of(python: str, name: str, file: Path, threads: int, out: Path) -> tuple[dict[str, Any], float]:
    """Return ids, answers and the file of logits of a side, and the seconds from its start to a first token."""
    begin = time.perf_counter()
    with side_of(python, name, file, threads) as child:
        ask(child, "greedy", ids=[1, 2, 3], num_tokens=1)
        seconds = time.perf_counter() - begin
        ids = ask(child, "ids", texts=[*PROMPTS.values(), *TEXTS.values()])["ids"]
        answers = [ask(child, "greedy", ids=own, num_tokens=ANSWER_TOKENS) for own in ids[: len(PROMPTS)]]
        texts = [own[:POSITIONS] for own in ids[len(PROMPTS) :]]
        ask(child, "logits", ids=texts, out=str(out))
    return {"ids": ids, "answers": answers, "texts": texts}, seconds


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
    """Return the rows of what both compute, and whether it is as it should be."""
    own, _ = results_of(sys.executable, "penstock", file, args.threads, folder / "own.npy")
    with side_of(sys.executable, "penstock", file, args.threads, "f32") as child:
        ask(child, "logits", ids=own["texts"], out=str(folder / "exact.npy"))
    mean, largest = divergence(folder / "exact.npy", folder / "own.npy")
    positions = sum(len(ids) for ids in own["texts"])
    theirs: dict[str, Any] | None = None
    kl, is_right = ["", ""], mean < MOST_DIVERGENCE
    if args.llama_cpp:
        theirs, _ = results_of(args.llama_cpp, "llama.cpp", file, args.threads, folder / "theirs.npy")
        kl = [f"{value:.4f}" for value in divergence(folder / "exact.npy", folder / "theirs.npy")]
        is_right &= theirs["ids"] == own["ids"]
    rows = [
        (f"KL to f32, mean of {positions} positions", f"{mean:.4f}", kl[0]),
        ("KL, largest", f"{largest:.4f}", kl[1]),
    ]
    if theirs is not None:
        num_equal = sum(a == b for a, b in zip(own["ids"], theirs["ids"], strict=True))
        rows.append(("texts with equal ids", f"{num_equal} of {len(own['ids'])}", ""))
    for at, (name, prompt) in enumerate(PROMPTS.items()):
        answer = own["answers"][at]
        print(f"{name}: {prompt!r} -> {answer['text']!r}", flush=True)
        if theirs is not None:
            num_equal = equal_tokens(answer["ids"], theirs["answers"][at]["ids"])
            rows.append((f"greedy, {name}", f"{num_equal} of {ANSWER_TOKENS} tokens equal", ""))
    return rows, is_right


def speeds(file: Path, args: argparse.Namespace) -> list[Row]:
    """Return the rows of speed, memory and start."""
    first, _ = gguf_pairs.start_s(file)
    again = statistics.median(gguf_pairs.start_s(file)[0] for _ in range(args.rounds))
    sides = [gguf_pairs.Side(sys.executable, "penstock", file, args.threads, 1)]
    their_start = ""
    if args.llama_cpp:
        begin = time.perf_counter()
        with side_of(args.llama_cpp, "llama.cpp", file, args.threads) as child:
            ask(child, "greedy", ids=[1, 2, 3], num_tokens=1)
            their_start = f"{time.perf_counter() - begin:.2f} s"
        sides.append(gguf_pairs.Side(args.llama_cpp, "llama.cpp", file, args.threads, 1))
    rows = []
    for what, label in MEASURES.items():
        seconds: list[list[float]] = [[] for _ in sides]
        for number in range(args.rounds):
            for at in range(len(sides)) if number % 2 == 0 else reversed(range(len(sides))):
                seconds[at].append(sides[at].measure(what)[0])
        rates = [[int(what.split()[1]) / value for value in own] for own in seconds]
        cells = [f"{statistics.median(own):,.1f} ({min(own):,.1f} to {max(own):,.1f})" for own in rates]
        rows.append((f"{label}, tokens/s", cells[0], cells[1] if len(cells) > 1 else ""))
    peaks = [side.ask("memory")["peak_rss_bytes"] / file.stat().st_size for side in sides]
    rows.append(("peak memory, of the file", *(f"{peak:.2f}" for peak in peaks), *([] if len(peaks) > 1 else [""])))
    for side in sides:
        side.close()
    return [*rows, ("first run, to the first byte", f"{first:.2f} s", ""), ("start", f"{again:.2f} s", their_start)]


def check_gguf(model: RealModel, args: argparse.Namespace) -> bool:
    file = assemble(model, args.folder)
    with tempfile.TemporaryDirectory(dir=args.folder, prefix="run-") as temporary:
        os.environ["PENSTOCK_CACHE_DIR"] = str(Path(temporary) / "bundles")
        rows = [] if args.no_speed else speeds(file, args)  # before the comparison, which makes the bundle
        compared, is_right = compare(file, args, Path(temporary))
    print(f"\n| {model.name}, {file.stat().st_size:,} bytes | Penstock | llama.cpp |\n|---|---|---|")
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
    parser.add_argument("--model", action="append", choices=[model.name for model in MODELS], help="default: all")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-speed", action="store_true", help="compare only (default: measure speed, too)")
    args = parser.parse_args()
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
