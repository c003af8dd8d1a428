"""``penstock cache list|clear``: list or remove the bundles made from checkpoint folders."""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING

from penstock.cli.options import add_parser_of
from penstock.cli.progress import format_bytes, printable

if TYPE_CHECKING:
    from penstock.runtime.cache import Cache

__all__ = ["add_parser", "run"]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the subcommand."""
    parser = add_parser_of(
        subparsers,
        "cache",
        "List or remove the bundles made from checkpoint folders and GGUF files. PENSTOCK_CACHE_DIR sets the folder "
        "that holds them. (`penstock list` lists downloaded models, and `penstock models` the models of a running "
        "service.)",
        "penstock cache list\npenstock cache clear",
    )
    parser.add_argument(
        "action",
        metavar="list|clear",
        choices=("list", "clear"),
        help="list: print the bundles; clear: remove all of them",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """List the bundles in the cache, or remove them."""
    from penstock.runtime.cache import Cache

    cache = Cache()
    if args.action == "clear":
        count, num_bytes = cache.clear()
        print(f"removed {count} {_plural('bundle', count)}, {format_bytes(num_bytes)}, from {cache.folder}")
        return 0
    _print_list(cache)
    return 0


def _print_list(cache: Cache) -> None:
    entries = cache.list()
    for entry in entries:
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.last_used))
        size = format_bytes(entry.num_bytes)
        print(f"{entry.key[:12]}  {entry.scheme:<6} {size:>9}  {used}  {printable(str(entry.source))}")
    total = sum(entry.num_bytes for entry in entries)
    limit = format_bytes(cache.max_bytes)
    print(f"{len(entries)} {_plural('bundle', len(entries))}, {format_bytes(total)} of {limit}, in {cache.folder}")


def _plural(word: str, count: int) -> str:
    return word if count == 1 else f"{word}s"
