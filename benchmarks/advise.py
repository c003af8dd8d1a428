"""Compares what ``penstock advise`` expects with what ``penstock bench`` measures: the median of interleaved pairs.

    python benchmarks/advise.py demo/demo.psm [MODEL.psm...] [--pairs 5] [--scheme w8a8] [--prompt-tokens 128]

A pair is an expectation, from steps without weights, and a measurement of the bundle itself, in turns of which comes
first.  The median ratio of each figure should lie within 15 %: the first token of a prompt, and a decode step at batch
1 and 8.  Shorter prompts make pairs closer in time, for a machine that other processes use.  A checkpoint folder is
measured in ``--scheme``.  The exit status is 1 if a median lies outside.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from pathlib import Path

from penstock.bench.advise import Advise, advise
from penstock.bench.measure import Bench, bench
from penstock.errors import PenstockError
from penstock.runtime.open import bundle_of

BATCH, NEW, SECONDS = 8, 128, 4.0
TOLERANCE = 0.15


def expected(model: Path, scheme: str, prompt: int, threads: int) -> dict[str, float]:
    """Return the expected seconds of each figure."""
    sizes = {"concurrency": BATCH, "prompt_tokens": prompt, "new_tokens": NEW, "threads": threads}
    row = advise(Advise(model, schemes=(scheme,), seconds=SECONDS, **sizes)).rows[0]
    if row.first_token is None or row.token is None or row.token_alone is None:
        raise SystemExit(f"{model}: does not fit into the available memory")
    return {
        "first token": row.first_token.seconds,
        "decode, batch 1": row.token_alone.seconds,
        f"decode, batch {BATCH}": row.token.seconds,
    }


def measured(model: Path, prompt: int, threads: int) -> tuple[dict[str, float], str]:
    """Return the measured seconds of each figure, and the bandwidths beside them."""
    report = bench(Bench(model, prompt_tokens=prompt, new_tokens=NEW, batches=(1, BATCH), threads=threads))
    read = report.limits["read_bytes_per_s"]
    steps = {f"decode, batch {batch}": batch / rate for batch, rate in report.decode_tokens_per_s.items()}
    limits = f"{read['lowest'] / 1e9:.0f} to {read['highest'] / 1e9:.0f} GB/s"
    return {"first token": report.first_token_s} | steps, limits


def compare(model: Path, scheme: str, args: argparse.Namespace) -> bool:
    """Print the pairs of a bundle and their medians; return whether every median lies within the tolerance."""
    print(f"{args.name or model.name}, {scheme}")
    pairs = []
    for number in range(args.pairs):
        sizes = args.prompt_tokens, args.threads
        if number % 2:
            (truth, limits), guess = measured(model, *sizes), expected(model, scheme, *sizes)
        else:
            guess, (truth, limits) = expected(model, scheme, *sizes), measured(model, *sizes)
        pairs.append((guess, truth))
        cells = [f"{name} {guess[name] * 1e3:.2f} / {truth[name] * 1e3:.2f} ms" for name in guess]
        print(f"  {time.strftime('%H:%M:%S')} load {os.getloadavg()[0]:.1f}, {limits}: {', '.join(cells)}", flush=True)
    is_close = True
    for name in pairs[0][0]:
        ratios = sorted(guess[name] / truth[name] for guess, truth in pairs)
        median = statistics.median(ratios)
        is_close &= abs(median - 1) <= TOLERANCE
        mark = "" if abs(median - 1) <= TOLERANCE else "  outside"
        print(f"  {name:<18}expected / measured {median:.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f}){mark}")
    return is_close


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", type=Path, metavar="MODEL")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--scheme", default="w8a8", help="scheme of checkpoint folders (default: w8a8)")
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--threads", type=int, default=0)
    args = parser.parse_args()
    if args.pairs < 1:
        parser.error(f"--pairs: expected 1 or more, got {args.pairs}")
    is_close = True
    try:
        for model in args.models:
            args.name = str(model)
            if model.is_dir():
                with bundle_of(model, args.scheme) as bundle:
                    is_close &= compare(bundle, args.scheme, args)
            else:
                from penstock.graph.bundle import read_graph

                is_close &= compare(model, read_graph(model)[0].scheme, args)
    except PenstockError as error:
        raise SystemExit(str(error)) from None
    sys.exit(0 if is_close else 1)


if __name__ == "__main__":
    main()
