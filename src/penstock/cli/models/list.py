"""``penstock list``: the models on this machine, or the short names of models to download."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from penstock.cli.options import add_parser_of
from penstock.cli.progress import format_bytes

if TYPE_CHECKING:
    from penstock.hub.downloaded import Downloaded
    from penstock.hub.memory_need import ModelShape

__all__ = ["add_parser", "run"]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the subcommand."""
    parser = add_parser_of(
        subparsers,
        "list",
        "List the models that were downloaded from a hub to this machine. Sends no request. (`penstock models` lists "
        "the models of a running service, and `penstock cache` the bundles made from checkpoint folders.)",
        "penstock list\npenstock list --available\npenstock list --json",
    )
    parser.add_argument(
        "--available",
        action="store_true",
        help="list the short names of well-known models, with size and memory (default: the downloaded models)",
    )
    parser.add_argument("--json", action="store_true", help="print a JSON array (default: text)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the table."""
    if args.available:
        _print_available(args.json)
        return 0
    from penstock.hub.downloaded import cache_folder, list_downloaded

    entries = list_downloaded()
    if args.json:
        print(json.dumps([_object(entry) for entry in entries]))
        return 0
    rows: list[tuple[str, ...]] = [("NAME", "COMMIT", "FAMILY", "SIZE", "LAST USED", "")]
    rows += [_row(entry) for entry in entries]
    if entries:
        print_table(rows, right=(3,))
    count = "1 model" if len(entries) == 1 else f"{len(entries)} models"
    total = sum(entry.num_bytes for entry in entries)
    print(f"{count}, {format_bytes(total)}, in {cache_folder()}")
    if not entries:
        print("To download one: penstock pull smollm2-135m (penstock list --available shows more)")
    return 0


def _row(entry: Downloaded) -> tuple[str, ...]:
    used = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.last_used))
    size = format_bytes(entry.num_bytes)
    note = problem_of(entry) or (f"GGUF: penstock show {entry.name} has the paths" if entry.state == "GGUF" else "")
    return (_shown_name(entry), entry.commit[:7], family_of(entry) or "-", size, used, note)


def _shown_name(entry: Downloaded) -> str:
    name = entry.name
    return name.repository if name.revision == entry.commit else str(name)


def family_of(entry: Downloaded) -> str:
    """Return the model_type of a downloaded model, of GGUF files the architecture; "" if it is not known."""
    if entry.state == "GGUF":
        from penstock.hub.gguf_files import gguf_models

        return next((model.architecture for model in gguf_models(entry) if model.architecture), "")
    config = entry.config()
    value = config.values.get("model_type") if config is not None else None
    return value if isinstance(value, str) and value.isprintable() else ""


def problem_of(entry: Downloaded) -> str:
    """Return why Penstock cannot run a downloaded model, or ""."""
    from penstock.models.families import built_in_families

    if entry.state == "incomplete":
        return "incomplete: pull it again"
    if entry.state == "GGUF":
        from penstock.hub.gguf_files import gguf_models

        problems = [model.problem for model in gguf_models(entry)]
        return problems[0] if all(problems) else ""
    if entry.state:
        return f"cannot run: {entry.state}"
    family = family_of(entry)
    return "" if family in built_in_families() else f"cannot run: no network for {family or 'this family'}"


def _object(entry: Downloaded) -> dict[str, object]:
    return {
        "name": entry.name.repository,
        "revision": entry.name.revision,
        "commit": entry.commit,
        "family": family_of(entry),
        "num_bytes": entry.num_bytes,
        "last_used": entry.last_used,
        "path": str(entry.path),
        "problem": problem_of(entry),
    }


def _print_available(as_json: bool) -> None:
    from penstock.hub.aliases import ALIASES
    from penstock.hub.memory_need import memory_need
    from penstock.runtime.machine import memory

    schemes = ("bf16", "w8a8", "w4a8")
    if as_json:
        objects = [
            {
                "name": name,
                "repository": row.repository,
                "family": row.family,
                "download_bytes": row.download_bytes,
                "memory_bytes": {scheme: memory_need(row.shape, scheme) for scheme in schemes},
                "fits": _fitting(row.shape, schemes),
            }
            for name, row in ALIASES.items()
        ]
        print(json.dumps(objects))
        return
    rows = [("NAME", "REPOSITORY", "FAMILY", "DOWNLOAD", *(f"MEMORY {scheme}" for scheme in schemes), "RUNS HERE")]
    for name, row in ALIASES.items():
        needs = [format_bytes(memory_need(row.shape, scheme)) for scheme in schemes]
        fitting = _fitting(row.shape, schemes)
        runs_here = "no" if not fitting else "yes" if fitting[0] == schemes[0] else f"--scheme {fitting[0]}"
        rows.append((name, row.repository, row.family, format_bytes(row.download_bytes), *needs, runs_here))
    print_table(rows, right=(3, 4, 5, 6))
    machine = memory()
    available = f" {format_bytes(machine.available)} are available here." if machine.total else ""
    print(f"Memory is for one request of 2,048 tokens.{available} Any other repository: penstock pull ORG/NAME")


def _fitting(shape: ModelShape, schemes: Sequence[str]) -> list[str]:
    """Return the schemes in which a model fits into the memory of this machine."""
    from penstock.hub.memory_need import memory_need
    from penstock.runtime.machine import memory

    machine = memory()
    return [scheme for scheme in schemes if not machine.total or memory_need(shape, scheme) <= machine.available]


def print_table(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> None:
    """Print rows in columns as wide as their texts; ``right``: the columns to align on the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        cells = [
            text.rjust(width) if column in right else text.ljust(width)
            for column, (text, width) in enumerate(zip(row, widths, strict=True))
        ]
        print("  ".join(cells).rstrip())
