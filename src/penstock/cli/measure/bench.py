"""``penstock bench MODEL``: measure speed, and compare each figure with the limit of the machine."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.cli.measure.bench_online import add_online_options, refuse_online_options, run_online
from penstock.cli.model_source import downloaded_path
from penstock.cli.options import add_model, add_options, add_parser_of, check_writable, numbers_of
from penstock.cli.progress import ProgressLine, format_bytes
from penstock.cli.stage_server import add_stage_options, stage_server
from penstock.errors import InvalidArgumentError

if TYPE_CHECKING:
    from penstock.bench.measure import Bench, Report
    from penstock.bench.step_costs import StepSeconds

__all__ = ["add_parser", "run"]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the subcommand."""
    parser = add_parser_of(
        subparsers,
        "bench",
        "Measure the speed of prefill and decode, and compare it with the limits of this machine. With --online, "
        "measure latencies of requests that arrive over time.",
        "penstock bench demo/demo.psm --prompt-tokens 128 --batch 1,4\n"
        "penstock bench demo/demo.psm --online --rate 50%,80% --svg latency.svg",
    )
    add_model(parser, parser, "local model")
    add_options(parser, "--scheme")
    parser.add_argument(
        "-p", "--prompt-tokens", type=int, metavar="N", help="tokens per prompt (default: 512, online 256)"
    )
    parser.add_argument("-n", "--new-tokens", type=int, metavar="N", help="tokens per answer (default: 128, online 64)")
    parser.add_argument("-b", "--batch", metavar="N,N...", help="batch sizes of decode (default: 1,8,32)")
    add_options(parser, "--threads", "--tp", "--pp", "--cp", "--network", "--weights", "--verify")
    parser.add_argument("--json", action="store_true", help="print one JSON object (default: a table)")
    parser.add_argument(
        "--costs",
        type=Path,
        metavar="FILE",
        help="measure the steps of a worker process, too, and write their seconds for penstock simulate; without "
        "--online (default: none)",
    )
    add_online_options(parser)
    add_stage_options(parser)
    add_options(parser, "--ops")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure and print the figures."""
    if args.costs is not None and (args.online or args.pp > 1 or args.cp > 1):
        raise InvalidArgumentError("--costs cannot be combined with --online, --pp or --cp", param="costs")
    if args.costs is not None:
        check_writable("costs", args.costs)
    if args.online:
        if args.batch is not None:
            raise InvalidArgumentError(
                "--batch cannot be combined with --online, where --rate decides how many requests run"
            )
        return run_online(args)
    refuse_online_options(args)
    from dataclasses import asdict

    from penstock.bench.measure import Bench, bench

    settings = Bench(
        downloaded_path(args.model),
        scheme=args.scheme,
        prompt_tokens=512 if args.prompt_tokens is None else args.prompt_tokens,
        new_tokens=128 if args.new_tokens is None else args.new_tokens,
        batches=numbers_of("batch", "1,8,32" if args.batch is None else args.batch),
        threads=args.threads,
        network=args.network,
        weights=args.weights,
        verify=args.verify,
        tensor_parallel_size=args.tp,
        pipeline_parallel_size=args.pp,
        context_parallel_size=args.cp,
        stage_server=stage_server(args),
    )
    with ProgressLine(ticks=False) as progress:
        report = bench(settings, progress)
        if args.costs is not None:
            report.steps = _measure_steps(settings, progress)
    if report.steps is not None:
        _write_costs(args, report, report.steps)
    print(json.dumps(asdict(report)) if args.json else _table(args.model, report))
    return 0


def _measure_steps(settings: Bench, progress: ProgressLine) -> StepSeconds:
    """Measure the steps of a worker, as those of a replica of ``penstock serve``."""
    from penstock.bench.measure import STEP_TOKENS
    from penstock.bench.step_costs import measure_steps
    from penstock.cli.measure.worker_steps import WorkerSteps
    from penstock.runtime.build import Progress

    with WorkerSteps(settings) as steps:
        return measure_steps(
            steps,
            settings.batches,
            settings.prompt_tokens,
            settings.new_tokens,
            STEP_TOKENS,
            lambda done, total: progress(Progress("measure", done, total, "figures", "steps of a worker")),
        )


def _write_costs(args: argparse.Namespace, report: Report, steps: StepSeconds) -> None:
    """Write what the simulator needs of a measurement."""
    from dataclasses import asdict

    from penstock.cluster.costs import StepCosts, write_costs

    costs = StepCosts(
        model=f"{Path(args.model).name} {report.scheme}",
        machine=f"{report.cpu_level}, {report.num_ranks} x {report.num_threads} threads",
        source=f"penstock bench, a worker, prompts of {report.prompt_tokens} tokens, {report.new_tokens} new tokens",
        **asdict(steps),
        tp=args.tp,
    )
    write_costs(costs, args.costs)


def _table(model: str, report: Report) -> str:
    from penstock.bench.open_model import describe_threads
    from penstock.bench.verdict import describe_bench
    from penstock.cli.measure.llama_bench import markdown_table

    threads = describe_threads(report.num_threads, report.num_ranks)
    read, ops = report.limits["read_bytes_per_s"], report.limits["ops_per_s"]
    peak = report.limits["prefill_peak"]
    lines = [
        f"{model}: {report.network}, {report.scheme}, {report.cpu_level} x {threads}",
        "",
        f"load             {report.load_s * 1e3:10,.1f} ms",
        f"first token      {report.first_token_s * 1e3:10,.1f} ms        prompt of {report.prompt_tokens} tokens",
        f"prefill          {report.prefill_tokens_per_s:10,.1f} tokens/s  "
        f"{report.share_of_limit['prefill']:4.0%} of the {peak} peak",
    ]
    if report.populate_s:
        lines.insert(3, f"copying weights  {report.populate_s * 1e3:10,.1f} ms")
    for batch, rate in report.decode_tokens_per_s.items():
        share = f"{report.share_of_limit['decode'][batch]:4.0%} of the {report.decode_bound[batch]} limit"
        reached = "from CPU caches" if batch in report.inconsistent else share
        lines.append(f"decode, batch {batch:<3}{rate:10,.1f} tokens/s  {reached}")
    is_wider = report.file_bytes_per_token < report.weight_bytes_per_token
    in_file = f"; {format_bytes(report.file_bytes_per_token)} in the file, which the limit counts" if is_wider else ""
    lines += [
        "",
        f"memory           {format_bytes(report.peak_rss_bytes):>10} peak",
        f"weights          {format_bytes(report.weight_bytes_per_token):>10} read per token at batch 1{in_file}",
        f"limits           read {read['lowest'] / 1e9:.1f} to {read['highest'] / 1e9:.1f} GB/s; "
        + ", ".join(f"{name} {value / 1e9:,.0f} GOP/s" for name, value in ops.items()),
        "",
        *describe_bench(report),
        "",
        *markdown_table(report),
    ]
    return "\n".join(lines)
