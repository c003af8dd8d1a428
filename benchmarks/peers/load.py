"""Give Penstock and its peers the same traces of requests, and write one table.

    python benchmarks/peers/load.py build/peers [--system "penstock w4a8" ...] [--measure mixed] [--rounds 1]

Resumable like run.py: what is in the file of results is not taken again.  Nothing else should run on the machine.
`README.md` beside this file says what is measured and how.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import traces
from install import install
from jobs import Job, Results, Rounds, missing, plan
from load_table import AT_ONCE, OFFLINE, SHARES, pictures, report
from processes import Bench, run_job
from run import header_of, measured_with
from systems import PENSTOCK, SHAPES, SYSTEMS, find_system

SCRIPTS = {
    PENSTOCK: "load_penstock.py",
    "llama.cpp": "load_llamacpp.py",
    "openvino": "load_openvino.py",
    "vllm": "load_vllm.py",
}
DEFAULT = (
    "penstock w4a8",
    "openvino int4",
    "llama.cpp Q4_0",
    "penstock w8a8",
    "openvino int8",
    "llama.cpp Q8_0",
    "vllm w8a8",
)
UNCACHED = "shared:uncached"
"""Penstock without its prefix cache."""


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="environments, models, traces and results lie here")
    parser.add_argument("--shape", choices=SHAPES, default="348m")
    parser.add_argument("--system", action="append", help=f"may be repeated; {', '.join(DEFAULT)} unless named")
    parser.add_argument("--measure", choices=(*OFFLINE, *SHARES), action="append", help="all unless named")
    parser.add_argument("--rounds", type=int, default=1, metavar="N", help="rounds of everything (1)")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument(
        "--kv-cache", choices=("f32", "bf16", "int8", "int4"), help="Penstock's; its default unless given"
    )
    parser.add_argument("--weights", choices=("mmap", "huge"), help="Penstock's; its default unless given")
    parser.add_argument(
        "--interface", choices=("engine", "async"), help="Penstock's: the engine's loop (default), or AsyncLLM"
    )
    parser.add_argument("--results", type=Path, help="the file (FOLDER/results-load.jsonl)")
    args = parser.parse_args()
    for name in args.system or DEFAULT:
        if find_system(name).peer not in SCRIPTS:
            parser.error(f"--system: expected one of {', '.join(SCRIPTS)} with a precision, got {name!r}")
    return args


def capacity_of(results: Results, shape: str, precision: str) -> float:
    """Return the requests per second of the best peer when all are due at once; measured once and kept."""
    key = f"{shape} {precision}"
    kept: dict[str, float] = results.header.get("capacity", {})
    if key not in kept:
        found: dict[str, list[float]] = {}
        for row in results.rows:
            system = find_system(row["system"])
            compared = (row["shape"], row["measure"], system.precision) == (shape, AT_ONCE, precision)
            if compared and system.peer != PENSTOCK and "error" not in row:
                found.setdefault(system.name, []).append(row["requests_per_s"])
        if not found:
            raise SystemExit(f"{key}: rates are shares of the best peer's capacity: measure {AT_ONCE} of a peer first")
        kept = kept | {key: max(statistics.median(rates) for rates in found.values())}
        results.note("capacity", kept)
    return kept[key]


def write_traces(folder: Path, results: Results, shape: str, precision: str, measures: list[str]) -> Path:
    """Write the traces of these measures as files; return their folder."""
    place = folder / "traces" / f"{shape}-{precision.replace(' ', '')}"
    for measure in measures:
        name = measure.partition(":")[0]
        if name in SHARES:
            requests = traces.mixed(SHARES[name] * capacity_of(results, shape, precision))
        else:
            requests = traces.mixed() if name == AT_ONCE else traces.shared()
        traces.write(place / f"{name}.jsonl", requests)
    return place


def jobs_left(args: argparse.Namespace, results: Results, measures: tuple[str, ...]) -> list[Job]:
    systems = [system for system in SYSTEMS if system.name in (args.system or DEFAULT)]
    wanted = [measure for measure in measures if measure in (args.measure or measures)]
    jobs = plan([args.shape], systems, wanted, Rounds(args.rounds, args.rounds, args.rounds))
    own = [
        replace(job, measures=tuple(m for m in job.measures if m != UNCACHED or job.system.peer == PENSTOCK))
        for job in jobs
    ]
    return [job for job in missing(own, results.done()) if job.measures]


def say(job: Job, row: dict[str, Any]) -> None:
    figure = row.get("error") or (
        f"{row['seconds']:.1f} s, {row['tokens_per_s']:.0f} new tokens/s, p99 to the first token "
        f"{row['first_token_s']['99']:.2f} s, between tokens {1e3 * row['between_tokens_s']['99']:.0f} ms, "
        f"read {row['probe_before'] / 1e9:.0f} and {row['probe_after'] / 1e9:.0f} GB/s"
    )
    print(f"{job.shape} {job.system.name} {row['measure']} #{job.round + 1}: {figure}", flush=True)


def main() -> None:
    args = parse()
    chosen = {"kv-cache": args.kv_cache, "weights": args.weights, "interface": args.interface}
    folder = args.folder.resolve()
    bench = Bench(folder, args.threads, {name: value for name, value in chosen.items() if value}, SCRIPTS)
    systems = [find_system(name) for name in args.system or DEFAULT]
    results = Results.read(args.results or folder / "results-load.jsonl")
    results.check(measured_with(bench))  # rather now than after everything was converted
    install(folder, list(dict.fromkeys(system.peer for system in systems if system.peer != PENSTOCK)))
    results.begin(header_of(bench, systems, [args.shape]))
    begun = time.monotonic()
    for phase in (OFFLINE, tuple(SHARES)):  # rates are known once every peer ran all at once
        for job in jobs_left(args, results, phase):
            place = write_traces(folder, results, job.shape, job.system.precision, list(job.measures))
            print(f"[{time.monotonic() - begun:.0f} s]", end=" ", flush=True)
            here = replace(bench, shared={"traces": str(place)})
            run_job(here, job, lambda row, job=job: (results.add(row), say(job, row)))
    text = report(results)
    out = results.path.with_suffix(".md")
    out.write_text(text)
    for key, picture in pictures(results).items():
        results.path.with_name(f"{results.path.stem}-{key.replace(' ', '-')}.svg").write_text(picture)
    print(text)
    print(f"written to {out}", file=sys.stderr)


if __name__ == "__main__":
    main()
