"""``penstock plan MODEL --tp N``: how a model is divided over ranks, what each needs, and how fast they may be."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.cli.model_source import downloaded_path
from penstock.cli.options import add_options, add_parser_of
from penstock.cli.progress import format_bytes
from penstock.config import check_number
from penstock.core.rank_layout import RankLayout
from penstock.errors import InvalidArgumentError

if TYPE_CHECKING:
    from penstock.bench.rank_layout import LinkProbe, Prediction, RankMemory
    from penstock.graph.ir import Graph
    from penstock.sharding.strategy import Strategy

__all__ = ["add_parser", "run"]

WORLDS = (1, 2, 4)


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the subcommand."""
    parser = add_parser_of(
        subparsers,
        "plan",
        "Say which part of each parameter each rank has, how much memory each rank needs, and how long a token may "
        "take with 1, 2 and 4 ranks on this host, from its memory bandwidth and the latency of exchanges, which are "
        "measured now. --out writes the strategy of a checkpoint folder, which `penstock shard` reads.",
        "penstock plan demo/demo.psm --tp 2\npenstock plan my-model --tp 2 --pp 2 --out strategy.json\n"
        "penstock plan my-model --tp 4 --scheme w8a8 --json\npenstock plan my-model --cp 2",
    )
    add_options(parser, "local model")
    parser.add_argument("--tp", type=int, default=1, metavar="N", help="ranks of tensor parallelism (default: 1)")
    parser.add_argument("--pp", type=int, default=1, metavar="N", help="stages of a pipeline (default: 1)")
    parser.add_argument("--cp", type=int, default=1, metavar="N", help="ranks that divide each context (default: 1)")
    parser.add_argument("--out", metavar="FILE", help="write the strategy to FILE (default: none)")
    parser.add_argument("--no-probe", action="store_true", help="predict no times (default: measure this machine)")
    parser.add_argument(
        "--link-us", type=float, metavar="US", help="microseconds of an exchange between ranks (default: measured here)"
    )
    parser.add_argument(
        "--link-gbps", type=float, metavar="G", help="gigabits per second between ranks (default: measured here)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object (default: text)")
    add_options(parser, "--scheme", "--network", "--context-len", "--kv-cache")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Plan; print a table for each question."""
    from penstock.bench.rank_layout import RankParts, model_graph, predict
    from penstock.graph.rank_bundle import repeated_kv_bytes

    layout = RankLayout(args.tp, args.pp, args.cp)
    _check_link(args)
    path = Path(downloaded_path(args.model))
    if args.out is not None or _has_strategy(path):
        graph, strategy = _make_strategy(path, layout, args)
    else:
        graph, strategy = model_graph(path, args.scheme, args.network), None
    parts = RankParts(graph)
    memory = parts.memory(layout, context_len=args.context_len, kv_cache=_kv_cache(path, args.kv_cache))
    layouts = list(dict.fromkeys([*map(RankLayout, sorted({*WORLDS, args.tp})), layout]))
    predictions = [] if args.no_probe else predict(parts, layouts, links=_links(args, layouts))
    repeated = repeated_kv_bytes(graph, parts.graphs(layout), layout, [rank.kv_bytes for rank in memory])
    if args.out is not None and strategy is not None:
        strategy.write(Path(args.out))
    if args.json:
        report = _report(args, strategy, graph, memory, predictions)
        print(json.dumps({**report, "repeated_kv_bytes": repeated}))
        return 0
    print(_title(args.model, strategy, graph))
    _print_tables(memory, predictions)
    if args.out is not None and strategy is not None:
        print(f"{args.out}: strategy {strategy.checksum[:16]}")
    if repeated:
        print(f"Key-value heads are repeated on ranks, which costs {format_bytes(repeated)} of keys and values.")
    return 0


def _kv_cache(path: Path, kv_cache: str) -> str:
    """Return the type of keys and values, which "auto" takes from a folder that has one."""
    from penstock.runtime.stored_kv import stored_kv_layout

    config = path / "config.json"
    if kv_cache != "auto" or not config.is_file():
        return kv_cache
    return stored_kv_layout(config.read_bytes()) or kv_cache


def _has_strategy(path: Path) -> bool:
    """Return True for a folder that ``penstock shard`` cuts: of safetensors that no other tool quantized."""
    from penstock.checkpoint.folder import Checkpoint
    from penstock.sharding.folder import is_sharded

    if not path.is_dir() or is_sharded(path):
        return path.is_dir()
    return Checkpoint.open(path).config.foreign_quantization() is None


def _make_strategy(path: Path, layout: RankLayout, args: argparse.Namespace) -> tuple[Graph, Strategy]:
    from penstock.graph.strategy import capture_model, make_strategy
    from penstock.sharding.source import open_whole

    captured = capture_model(open_whole(path), args.scheme, args.network)
    return captured.graph, make_strategy(captured, layout)


def _check_link(args: argparse.Namespace) -> None:
    for name, most in (("link_us", 1e7), ("link_gbps", 1e6)):
        if (value := getattr(args, name)) is None:
            continue
        if args.no_probe:
            option = f"--{name.replace('_', '-')}"
            raise InvalidArgumentError(f"{option}: expected none with --no-probe, which predicts no times", param=name)
        check_number(name, value, most)


def _links(args: argparse.Namespace, layouts: list[RankLayout]) -> dict[int, LinkProbe]:
    """Return the links by number of ranks that the options describe."""
    from penstock.bench.rank_layout import LinkProbe

    if args.link_us is None and args.link_gbps is None:
        return {}
    fixed_s = None if args.link_us is None else args.link_us / 1e6
    byte_s = None if args.link_gbps is None else 8e-9 / args.link_gbps
    return {world: LinkProbe(max(2, world), fixed_s, byte_s) for world in {layout.stage_ranks for layout in layouts}}


def _title(model: str, strategy: Strategy | None, graph: Graph) -> str:
    if strategy is None:
        return f"{model}: {graph.network}, {graph.scheme}, {len(graph.weights)} weights"
    cuts = Counter(own.cut for own in strategy.parameters.values())
    counts = ", ".join(f"{count} {_CUTS[cut]}" for cut, count in cuts.items())
    return f"{model}: {strategy.model_type}, {graph.scheme}, {len(strategy.parameters)} parameters: {counts}"


def _print_tables(memory: list[RankMemory], predictions: list[Prediction]) -> None:
    print(f"{'rank':>4}  {'weights':>9}  {'keys, values':>12}  {'the rest':>9}  {'total':>9}")
    for rank in memory:
        sizes = (rank.weight_bytes, rank.kv_bytes, rank.rest_bytes, rank.total_bytes)
        weights, kv, other, total = map(format_bytes, sizes)
        print(f"{rank.rank:>4}  {weights:>9}  {kv:>12}  {other:>9}  {total:>9}")
    if predictions:
        print(f"\n{'tp':>4}  {'pp':>4}  {'cp':>4}  {'threads':>7}  {'ms/token':>9}  {'memory':>8}  {'exchanges':>9}")
    for row in predictions:
        layout = row.layout
        line = f"{layout.tp:>4}  {layout.pp:>4}  {layout.cp:>4}  {row.threads:>7}  {row.token_ms:9.2f}"
        line += f"  {row.memory_ms:8.2f}  {row.exchange_ms:9.2f}"
        if row.num_exchanges:
            line += f"  ({row.num_exchanges} of {1e3 * row.exchange_ms / row.num_exchanges:.1f} us)"
        if row.layout.pp > 1:
            line += f"  {row.pipelined_ms:.2f} ms between tokens of {row.layout.pp} requests"
        print(line)
    if predictions:
        print(f"      memory read at {format_bytes(int(predictions[0].read_bytes_per_s))}/s")


_CUTS = {
    "rows": "cut by rows", "columns": "cut by columns", "replicated": "on every rank", "owner": "on one rank",
    "same": "equal to another",
}  # fmt: skip


def _report(
    args: argparse.Namespace,
    strategy: Strategy | None,
    graph: Graph,
    memory: list[RankMemory],
    predictions: list[Prediction],
) -> dict[str, object]:
    return {
        "model": args.model,
        "model_type": graph.network if strategy is None else strategy.model_type,
        "scheme": graph.scheme,
        "tp": args.tp,
        "pp": args.pp,
        "cp": args.cp,
        "strategy_sha256": None if strategy is None else strategy.checksum,
        "ranks": [{**dataclasses.asdict(rank), "total_bytes": rank.total_bytes} for rank in memory],
        "predictions": [_prediction(row) for row in predictions],
    }


def _prediction(row: Prediction) -> dict[str, object]:
    values = dataclasses.asdict(row)
    return {**values.pop("layout"), **values, "token_ms": row.token_ms}
