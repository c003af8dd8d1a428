"""Makes the tables and pictures of what replicas and policies do to the traces of ``simulated_traces.py``.

    python -m benchmarks.replicas [short ample large] [--policies prefix,least-loaded,round-robin] [--svg FOLDER]

For each trace it prints a table in Markdown with a row for each number of replicas and policy, the time that each
simulation took and the memory of this process, and writes ``FOLDER/replicas-TRACE.svg``.  ``short`` and ``ample`` have
20,000 requests, and from half to twice the replicas that they are for.  ``large`` has a million requests and 1,000
replicas; with the policy ``prefix`` only it is one simulation, whose goal is ten minutes.  The costs are those of
``penstock simulate`` without ``--costs``.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import time
from pathlib import Path

from benchmarks.simulated_traces import TRACES, requests
from penstock.bench.charts.latency_chart import draw_policies
from penstock.cli.progress import format_seconds
from penstock.cluster.replica import ReplicaLimits
from penstock.cluster.routing import POLICIES
from penstock.cluster.simulate import Simulation, SimulationReport, simulate
from penstock.cluster.trace import parse_trace

NUM_REQUESTS = {"short": 20_000, "ample": 20_000, "large": 1_000_000}
FACTORS = {"short": (0.5, 0.75, 1.0, 1.5, 2.0), "ample": (0.5, 0.75, 1.0, 1.5, 2.0), "large": (1.0,)}
HEAD = (
    "| replicas | policy | first token, s: p50 | p90 | p99 | per token, ms: p50 | p99 | cached | busy | busiest "
    "| took |\n"
    "|---|---|---|---|---|---|---|---|---|---|---|"
)


def row(report: SimulationReport, seconds: float) -> str:
    """Return a line of the table."""
    first, token = report.ttft, report.tpot
    return (
        f"| {report.replicas:,} | {report.policy} | {first['p50']:.3f} | {first['p90']:.3f} | {first['p99']:.3f} "
        f"| {1000 * token['p50']:.1f} | {1000 * token['p99']:.1f} | {report.hit_rate:.0%} | {report.utilisation:.0%} "
        f"| {report.load_imbalance:+.0%} | {format_seconds(seconds)} |"
    )


def compare(name: str, num_requests: int, policies: list[str], folder: Path | None) -> None:
    """Print the table of a trace, and write its picture."""
    shape, reports = TRACES[name], []
    print(f"\n{name}: {num_requests:,} requests, {shape.rate:g} per second, {shape.pages:,} pages a replica\n\n{HEAD}")
    for factor in FACTORS[name]:
        for policy in policies:
            limits = ReplicaLimits(num_pages=shape.pages)
            settings = Simulation(round(factor * shape.replicas), policy, limits=limits)
            start = time.perf_counter()
            lines = (json.dumps(one) for one in requests(shape, num_requests))
            reports.append(simulate(parse_trace(lines, name), settings))
            print(row(reports[-1], time.perf_counter() - start), flush=True)
    if folder is not None:
        title = (
            f"{name}: {shape.num_prefixes:,} beginnings of {shape.prefix_tokens:,} tokens, {shape.rate:g} requests/s"
        )
        (folder / f"replicas-{name}.svg").write_text(draw_policies(reports, title))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="*", default=["short", "ample"], help="default: short ample")
    parser.add_argument("--policies", default=",".join(POLICIES), help=f"default: {','.join(POLICIES)}")
    parser.add_argument("--requests", type=int, help="default: 20000, of large 1000000")
    parser.add_argument("--svg", type=Path, metavar="FOLDER", help="folder of the pictures (default: none)")
    args = parser.parse_args()
    for name in args.traces:
        if name not in TRACES:
            parser.error(f"traces: expected {', '.join(TRACES)}, got {name}")
        compare(name, args.requests or NUM_REQUESTS[name], args.policies.split(","), args.svg)
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"\n{most:,.0f} MiB at most, load {os.getloadavg()[0]:.1f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
