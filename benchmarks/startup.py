"""Measures the time to the first token of complete ``penstock run`` processes, and of opening a bundle.

    python benchmarks/startup.py BUNDLE [--prompt-tokens 16] [--runs 9]

The page cache is warm: one run before the others does not count.  Python's bytecode is compiled, as in an installation,
into a folder that is removed at the end, whatever PYTHONDONTWRITEBYTECODE says.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from penstock.core.native import Model
from penstock.text.tokenizer import Tokenizer


def prompt_of(bundle: Path, num_tokens: int) -> str:
    """Return code of about that many tokens, cut by the tokenizer of the bundle."""
    with Model.open(bundle) as model:
        tokenizer = Tokenizer({"tokenizer.json": bytes(model.segment("tokenizer.json") or b"")})
    return tokenizer.decode(tokenizer.encode(Path(__file__).read_text())[:num_tokens])


def first_token_s(bundle: Path, prompt: str, bytecode: str) -> float:
    """Return the seconds from starting the process to the first byte on its standard output."""
    command = [
        sys.executable,
        "-m",
        "penstock",
        "run",
        str(bundle),
        prompt,
        "--max-tokens",
        "2",
        "--temperature",
        "0",
    ]
    env = os.environ | {"PYTHONPYCACHEPREFIX": bytecode, "PYTHONDONTWRITEBYTECODE": ""}
    start = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=env) as process:
        if process.stdout is None or not process.stdout.read(1):
            raise SystemExit(f"{command} printed nothing")
        elapsed = time.perf_counter() - start
        process.stdout.read()
    return elapsed


def open_s(bundle: Path) -> float:
    start = time.perf_counter()
    model = Model.open(bundle)
    elapsed = time.perf_counter() - start
    model.close()
    return elapsed


def row(name: str, values: list[float]) -> None:
    median, least, most = (1e3 * figure for figure in (statistics.median(values), min(values), max(values)))
    print(f"{name:<34} median {median:8.1f} ms   min {least:8.1f}   max {most:8.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--prompt-tokens", type=int, default=16)
    parser.add_argument("--runs", type=int, default=9)
    args = parser.parse_args()
    prompt = prompt_of(args.bundle, args.prompt_tokens)
    row("opening the bundle", [open_s(args.bundle) for _ in range(args.runs)])
    with tempfile.TemporaryDirectory(prefix="penstock-") as bytecode:
        first_token_s(args.bundle, prompt, bytecode)
        found = [first_token_s(args.bundle, prompt, bytecode) for _ in range(args.runs)]
    row("process start to first token", found)


if __name__ == "__main__":
    main()
