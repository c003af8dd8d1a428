"""``penstock rm NAME``: remove a downloaded model from this machine."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.cli.options import add_parser_of
from penstock.cli.progress import format_bytes
from penstock.errors import FileAccessError, InvalidArgumentError

if TYPE_CHECKING:
    from penstock.hub.downloaded import Removal

__all__ = ["add_parser", "run"]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the subcommand."""
    parser = add_parser_of(
        subparsers,
        "rm",
        "Remove a downloaded model, the parts of an interrupted download, and the bundles that were made from it. "
        "Without @REVISION, all revisions are removed. Files that another revision uses stay.",
        "penstock rm smollm2-135m\npenstock rm Qwen/Qwen2.5-0.5B-Instruct@main --yes",
    )
    parser.add_argument(
        "model",
        metavar="ORG/NAME[@REVISION]",
        help="a downloaded model, as penstock list shows it, or a short name",
    )
    parser.add_argument("-y", "--yes", action="store_true", help="remove it without a question (default: ask)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Say what would go, ask, and remove it."""
    from penstock.cli.model_source import ask, can_ask
    from penstock.hub.downloaded import plan_removal
    from penstock.hub.names import parse_name

    removal = plan_removal(parse_name(args.model), whole="@" not in args.model)
    if not args.yes:
        if not can_ask():
            raise InvalidArgumentError(f"{args.model}: add --yes to remove it where no question can be answered")
        count = len(removal.revisions)
        what = "an incomplete download" if not count else "1 revision" if count == 1 else f"{count} revisions"
        if not ask(f"Remove {removal.name} ({what}, {format_bytes(removal.num_bytes)})?", default=False):
            raise FileAccessError(f"{args.model}: not removed")
    count, num_bytes = _remove_bundles(removal)
    removal.execute()
    bundles = (
        f", and {count} cached {'bundle' if count == 1 else 'bundles'}, {format_bytes(num_bytes)}" if count else ""
    )
    print(f"removed {removal.name}, {format_bytes(removal.num_bytes)}{bundles}")
    return 0


def _remove_bundles(removal: Removal) -> tuple[int, int]:
    """Remove the cached bundles that were made from the revisions; return their number and bytes."""
    from penstock.runtime.cache import Cache

    folders = {entry.path.resolve() for entry in removal.revisions}
    cache = Cache()
    removed = [entry for entry in cache.list() if Path(entry.source) in folders and cache.remove(entry.key)]
    return len(removed), sum(entry.num_bytes for entry in removed)
