"""``penstock show NAME``: a downloaded model, its files, and the memory that it needs here."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cli.options import add_parser_of
from penstock.cli.progress import format_bytes
from penstock.errors import InvalidArgumentError, NotFoundError

if TYPE_CHECKING:
    from penstock.hub.downloaded import Downloaded

__all__ = ["add_parser", "run"]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the subcommand."""
    parser = add_parser_of(
        subparsers,
        "show",
        "Show a downloaded model: its files, its sizes, and the memory that it needs here. Sends no request. "
        "(`penstock inspect` shows the tensors of a folder, and the contents of a bundle.)",
        "penstock show smollm2-135m\npenstock show Qwen/Qwen2.5-0.5B-Instruct@main --json",
    )
    parser.add_argument(
        "model",
        metavar="ORG/NAME[@REVISION]",
        help="a downloaded model, as penstock list shows it, or a short name",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object (default: text)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the description of each revision."""
    from penstock.hub.downloaded import downloaded_revisions
    from penstock.hub.names import parse_name

    name = parse_name(args.model)
    entries = downloaded_revisions(name, whole="@" not in args.model)
    if not entries:
        if Path(args.model).exists():
            raise InvalidArgumentError(
                f"{args.model}: expected the name of a downloaded model, got a path; "
                f"`penstock inspect {args.model}` shows what it contains"
            )
        raise NotFoundError(
            f"{name}: not on this machine. `penstock pull {args.model} --dry-run` shows what a download would take."
        )
    if args.json:
        print(json.dumps([_object(entry) for entry in entries]))
        return 0
    print("\n\n".join(_text(entry) for entry in entries))
    return 0


def _object(entry: Downloaded) -> dict[str, Any]:
    from penstock.cli.models.list import family_of, problem_of
    from penstock.hub.memory_need import memory_need

    shape = entry.shape()
    schemes = () if shape is None else (shape.dtype, "w8a8", "w4a8")
    return {
        "name": entry.name.repository,
        "revision": entry.name.revision,
        "commit": entry.commit,
        "family": family_of(entry),
        "context_len": None if shape is None else shape.context_len,
        "num_parameters": None if shape is None else shape.num_parameters,
        "memory_bytes": {scheme: memory_need(shape, scheme) for scheme in schemes if shape is not None},
        "num_bytes": entry.num_bytes,
        "last_used": entry.last_used,
        "path": str(entry.path),
        "files": entry.files(),
        "problem": problem_of(entry),
    }


def _text(entry: Downloaded) -> str:
    from penstock.cli.model_source import describe_memory
    from penstock.cli.models.list import family_of, problem_of

    shape, problem = entry.shape(), problem_of(entry)
    context = f", context of {shape.context_len:,} tokens" if shape is not None else ""
    lines = [
        f"{entry.name}{f': {problem}' if problem else ''}",
        f"family      {family_of(entry) or 'not named'}{context}",
        f"commit      {entry.commit}",
        f"folder      {entry.path}",
        f"size        {format_bytes(entry.num_bytes)}",
        f"last used   {time.strftime('%Y-%m-%d %H:%M', time.localtime(entry.last_used))}",
    ]
    if shape is not None:
        lines.append(f"parameters  about {shape.num_parameters / 1e6:,.0f} million, stored as {shape.dtype}")
        lines.append(f"memory      {describe_memory(shape)}")
    lines.append("files")
    lines += [f"  {name:<36} {format_bytes(size):>10}" for name, size in entry.files().items()]
    if entry.state == "GGUF":
        from penstock.hub.gguf_files import gguf_models

        lines += ["GGUF models, which MODEL of penstock run may be"]
        for model in gguf_models(entry):
            lines.append(f"  {entry.path / model.name}{f' ({model.problem})' if model.problem else ''}")
    return "\n".join(lines)
