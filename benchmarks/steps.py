"""Shows where the steps of a bundle spend their time: time, waiting and share by kind of op, median of several steps.

    python benchmarks/steps.py BUNDLE [--threads 2] [--context 128] [--cases b1 b8 b32 p512] [--steps 30]

``b8`` is a decode step of 8 requests after ``--context`` tokens each; ``p512`` is a prefill of 512 tokens.  Each column
is the mean over the threads; keys and values are bf16.  "lost" is the time that a thread waited for others before
phases of that kind.
"""

from __future__ import annotations

import argparse
import re
import statistics
from pathlib import Path

import numpy as np

from penstock.core import spans
from penstock.core.native import ALL_THREADS, Context, CoreProgram, Model, ProgramOptions, StepBatch, probe_bandwidth
from penstock.runtime.program import pages_for


def make_batch(case: str, context: int, groups: int) -> StepBatch:
    """Return a decode step of N requests ("bN"), or a prefill of one request of N tokens ("pN")."""
    if not re.fullmatch("[bp][1-9][0-9]{0,5}", case) or context < 0:
        raise SystemExit(f"{case} after {context}: expected bN or pN, such as b8 and p512, after 0 tokens or more")
    size = int(case[1:])
    requests, tokens, first = (size, 1, context) if case[0] == "b" else (1, size, 0)
    pages = pages_for(first + tokens)
    tables = np.arange(requests * pages, dtype=np.int32).reshape(1, requests, pages)
    positions = np.tile(np.arange(first, first + tokens, dtype=np.int32), requests)
    starts = np.arange(requests + 1, dtype=np.int32) * tokens
    rows = starts[1:] - 1
    ids = np.arange(requests * tokens, dtype=np.int32) % 1000
    return StepBatch(ids, positions, starts, np.repeat(tables, groups, 0), rows)


def table(nodes: list[spans.NodeInfo], runs: list[np.ndarray], threads: int) -> list[str]:
    """Return the lines of a table: milliseconds per step of each (op, phase), and of the wait before it."""
    names = [f"{node.op} {'|'.join(n.rpartition('.')[2] for n in node.name.split('|'))[-24:]}" for node in nodes]
    busy: dict[str, list[float]] = {}
    lost: dict[str, list[float]] = {}
    for number, run in enumerate(runs):
        for span in run[1:]:
            name = names[span["node"]] + (f" .{span['phase']}" if span["phase"] else "")
            for sums, since, to in ((busy, "begin_ns", "end_ns"), (lost, "arrive_ns", "begin_ns")):
                row = sums.setdefault(name, [0.0] * len(runs))
                row[number] += (span[to] - span[since]) / 1e6 / threads
    whole = statistics.median((run[0]["end_ns"] - run[0]["begin_ns"]) / 1e6 for run in runs)
    lines = [f"{'':44s} {'ms':>8s} {'share':>6s} {'lost':>7s}"]
    for name, row in sorted(busy.items(), key=lambda item: -sum(item[1])):
        time, waited = statistics.median(row), statistics.median(lost[name])
        lines.append(f"{name:44s} {time:8.3f} {time / whole:6.1%} {waited:7.3f}")
    worked = sum(statistics.median(row) for row in busy.values())
    waits = sum(statistics.median(row) for row in lost.values())
    lines.append(f"{'all':44s} {worked:8.3f} {worked / whole:6.1%} {waits:7.3f}   of a step of {whole:.3f} ms")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--cases", nargs="+", default=["b1", "b8", "b32", "p512"])
    parser.add_argument("--brief", action="store_true", help="one line per case, without spans (default: a table)")
    args = parser.parse_args()
    model, context = Model.open(args.bundle), Context(num_threads=args.threads)
    nodes, info = spans.node_infos(model), model.info
    for case in args.cases:
        batch = make_batch(case, args.context, info.num_page_groups)
        tokens, requests = len(batch.token_ids), len(batch.request_starts) - 1
        options = ProgramOptions(
            max_tokens=tokens,
            max_requests=requests,
            max_rows=requests,
            num_pages=int(batch.page_tables.max()) + 1,
            kv_layout=2,  # bf16, the default of every scheme but f32
            flags=ALL_THREADS,
        )
        program = CoreProgram(model, context, options)
        steps = args.steps if case[0] == "b" else max(3, args.steps // 10)
        spans.set_profiling(program, True)
        for _ in range(2):
            program.run(batch)
        before = probe_bandwidth(context)
        runs = []
        for _ in range(steps):
            program.run(batch)
            runs.append(spans.last_spans(program))
        after = probe_bandwidth(context)
        times = [(run[0]["end_ns"] - run[0]["begin_ns"]) / 1e9 for run in runs]
        median = statistics.median(times)
        rate = info.weight_bytes_per_token / median / 1e9
        print(
            f"{args.bundle.name} {case}: {median * 1e3:.3f} ms a step ({min(times) * 1e3:.3f} to "
            f"{max(times) * 1e3:.3f}), {tokens / median:.1f} tokens/s, reads {rate:.1f} GB/s of weights; "
            f"probed {before / 1e9:.1f} and {after / 1e9:.1f} GB/s"
        )
        if not args.brief:
            print("\n".join(table(nodes, runs, args.threads)), "\n")
        program.close()


if __name__ == "__main__":
    main()
