"""``penstock pull ORG/NAME``: download a model from a Hugging Face hub."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.cli.options import add_parser_of

if TYPE_CHECKING:
    from penstock.config import ConfigReader

__all__ = ["add_parser", "run"]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the subcommand."""
    parser = add_parser_of(
        subparsers,
        "pull",
        "Download a model from a Hugging Face hub: safetensors, JSON, tokenizer and chat template, never code or "
        "pickled weights. A download that was interrupted goes on where it stopped. Prints the folder. HF_ENDPOINT, "
        "HF_TOKEN, HF_HOME and HF_HUB_OFFLINE work as in other programs that use huggingface_hub.",
        "penstock pull smollm2-135m\n"
        "penstock pull Qwen/Qwen2.5-0.5B-Instruct@main --dry-run\n"
        "penstock pull Qwen/Qwen2.5-0.5B-Instruct-GGUF --gguf qwen2.5-0.5b-instruct-q8_0.gguf",
    )
    parser.add_argument(
        "model",
        metavar="ORG/NAME[@REVISION]",
        help="a repository, or a short name of penstock list --available; REVISION: a branch, a tag or a commit",
    )
    parser.add_argument(
        "--gguf",
        metavar="FILE",
        help="download only this GGUF file, with the others that its model is split into (default: the safetensors)",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="show what would be downloaded and stop (default: download)"
    )
    parser.add_argument(
        "--force",
        action="store_true",
        help="download a model that this machine or this version cannot run (default: refuse)",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Check, download, and print the folder or the GGUF file on standard output."""
    from penstock.cli.model_source import describe_plan, download_model
    from penstock.hub.download_estimate import check_disk, check_family, check_memory, estimate_download, estimate_gguf
    from penstock.hub.names import parse_name

    name = parse_name(args.model)
    plan = estimate_download(name) if args.gguf is None else estimate_gguf(name, args.gguf)
    if args.dry_run or plan.missing_bytes:
        print(describe_plan(plan), file=sys.stderr)
    if not args.force:
        check_family(plan)
        check_memory(name, plan.shape, None)
    check_disk(plan)
    if args.dry_run:
        return 0
    is_new = bool(plan.missing_bytes)
    path = download_model(plan)
    if args.gguf is not None:
        first = path / plan.files[0].name
        print(first)
        print(f'To use it: penstock run {first} "Once upon a time"', file=sys.stderr)
        return 0
    if not is_new:
        print(f"{name} is up to date (commit {plan.model.commit[:7]})", file=sys.stderr)
    print(path)
    if plan.shape is not None:
        use = _use(args.model, path, plan.config)
        print(f"To use it: penstock {use}, or penstock serve {args.model}", file=sys.stderr)
    return 0


def _use(model: str, path: Path, config: ConfigReader | None) -> str:
    """Return the command that shows what a model is for, by its files."""
    from penstock.models.families import family_modules

    names = None if config is None else config.text_list("architectures")
    if any(name.endswith("ForSequenceClassification") for name in names or ()):
        return f'rerank {model} FILE --query "Where is the cat?"'
    if any(name.endswith("ForTokenClassification") for name in names or ()):
        return f'run {model} "Once upon a time in New York"'
    family = "" if config is None else config.optional_str("model_type") or ""
    if (path / "modules.json").exists() or "models.encoders" in family_modules().get(family, ""):
        return f"embed {model} FILE"
    has_template = (path / "chat_template.jinja").exists() or b"chat_template" in _tokenizer_config(path)
    return f"chat {model}" if has_template else f'run {model} "Once upon a time"'


def _tokenizer_config(folder: Path) -> bytes:
    path = folder / "tokenizer_config.json"
    return path.read_bytes() if path.exists() else b""
