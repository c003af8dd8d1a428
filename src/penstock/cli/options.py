"""Options that several commands share, and their conversion to arguments."""

from __future__ import annotations

import argparse
import os
import textwrap
from typing import TYPE_CHECKING, Any, Final

from penstock.cli.progress import ProgressLine
from penstock.errors import InvalidArgumentError

if TYPE_CHECKING:
    from penstock.llm.llm import LLM
    from penstock.runtime.program import ProgramLimits

__all__ = [
    "LIMIT_OPTIONS", "MODEL_OPTIONS", "SAMPLING_OPTIONS", "add_options", "add_parser_of", "limits_of", "open_llm",
    "spellings", "utf8_text",
]  # fmt: skip


def add_parser_of(
    subparsers: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    summary: str,
    description: str,
    examples: str,
) -> argparse.ArgumentParser:
    """Add the parser of a command: ``summary`` for the list of commands, ``examples`` one a line for its own help."""
    lines = "".join(f"\n  {line}" for line in examples.splitlines())
    return subparsers.add_parser(
        name,
        help=summary,
        description=textwrap.fill(description, 100),
        epilog=f"examples:{lines}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


_SHARED: Final[dict[str, dict[str, Any]]] = {
    "model": {
        "dest": "model",
        "metavar": "MODEL",
        "help": "a .psm bundle, a checkpoint folder, or ORG/NAME of a hub",
    },
    "local model": {
        "dest": "model",
        "metavar": "MODEL",
        "help": "a .psm bundle, a checkpoint folder, or ORG/NAME of a downloaded model",
    },
    "--yes": {
        "action": "store_true",
        "help": "download a model that is not on this machine without asking (default: ask)",
    },
    "--scheme": {
        "help": "store the weights of a checkpoint folder as f32, f16, bf16, w8a16, w8a8, w4a16 or w4a8 (default: the "
        "type in the checkpoint)",
    },
    "--threads": {
        "type": int,
        "default": 0,
        "metavar": "N",
        "help": "number of threads; 0 (default): all allowed cores",
    },
    "--network": {
        "metavar": "FILE.py:CLASS",
        "help": "your own network script for a checkpoint folder (default: the built-in network of its model_type)",
    },
    "--no-cache": {
        "action": "store_true",
        "help": "do not keep the bundle made from a checkpoint folder (default: keep it in the cache folder)",
    },
    "--verify": {
        "choices": ("once", "always", "never"),
        "default": "once",
        "help": "when to check a bundle's checksums: once (default; the cache folder remembers verified files), always "
        "or never",
    },
    "--ops": {  # main loads them
        "action": "append",
        "default": [],
        "metavar": "LIB.so",
        "help": "run your own ops from a shared library (docs/guides/custom-ops.md); may be repeated (default: none)",
    },
    "--context-len": {
        "type": int,
        "default": 0,
        "metavar": "N",
        "help": "plan memory for N tokens of prompt and answer per request; 0 (default): as many as fit",
    },
    "--kv-cache": {
        "choices": ("auto", "f32", "bf16", "int8"),
        "default": "auto",
        "help": "type of keys and values; auto (default): f32 with scheme f32, otherwise bf16",
    },
    "--no-prefix-cache": {
        "action": "store_true",
        "help": "compute equal beginnings of prompts each time (default: once, then reuse their pages)",
    },
    "--weights": {
        "choices": ("mmap", "huge"),
        "default": "mmap",
        "help": "mmap (default): map the file; huge: copy the weights into huge pages first",
    },
    "--max-requests": {"type": int, "default": 32, "metavar": "N", "help": "requests per step (default: 32)"},
    "--max-tokens": {
        "type": int,
        "metavar": "N",
        "help": "generate at most N tokens (default: the model's default, or 256)",
    },
    "--temperature": {
        "type": float,
        "metavar": "T",
        "help": "sampling temperature; 0 is greedy (default: the model's default, or 0)",
    },
    "--top-k": {
        "type": int,
        "metavar": "K",
        "help": "sample from the K likeliest tokens; 0 is all (default: the model's default, or 0)",
    },
    "--top-p": {
        "type": float,
        "metavar": "P",
        "help": "sample from the smallest set of tokens whose probability reaches P; 1 is all (default: the model's "
        "default, or 1)",
    },
    "--seed": {
        "type": int,
        "metavar": "S",
        "help": "seed of the sampling; the same seed gives the same text (default: random)",
    },
}
MODEL_OPTIONS: Final = ("model", "--scheme", "--threads", "--network", "--no-cache", "--verify", "--yes", "--ops")
"""MODEL and the options that say how to open it."""
LIMIT_OPTIONS: Final = ("--context-len", "--kv-cache")
"""The limits that memory is planned for."""
SAMPLING_OPTIONS: Final = ("--max-tokens", "--temperature", "--top-k", "--top-p", "--seed")


def add_options(parser: argparse._ActionsContainer, *names: str, with_underscores: bool = False) -> None:
    """Add options that several commands have; ``with_underscores`` also spells them with underscores."""
    for name in names:
        flags = () if name[0] != "-" else spellings(name) if with_underscores else (name,)
        parser.add_argument(*flags, **_SHARED[name])


def spellings(name: str) -> tuple[str, ...]:
    """Return an option with hyphens and with underscores; scripts for MindFormers use the latter."""
    return tuple(dict.fromkeys((name, "--" + name[2:].replace("-", "_"))))


def utf8_text(data: str | bytes, name: str) -> str:
    """Return an argument or input bytes as text, decoded as UTF-8 whatever the locale is.

    InvalidArgumentError begins with ``name``.
    """
    try:
        return os.fsencode(data).decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidArgumentError(f"{name} is not UTF-8 text at byte {error.start}", param=name) from None


def limits_of(args: argparse.Namespace, *, max_requests: int, max_tokens: int = 512) -> ProgramLimits:
    """Return the limits that the options ask for."""
    from penstock.runtime.program import ProgramLimits

    return ProgramLimits(
        max_tokens=max_tokens,
        max_requests=max_requests,
        context_len=args.context_len,
        kv_layout=args.kv_cache,
        weights=getattr(args, "weights", "mmap"),  # commands that only plan have no --weights
    )


def open_llm(args: argparse.Namespace, max_requests: int, mode: str = "graph") -> LLM:
    """Open the model that the options describe; show progress on standard error.

    The parser has MODEL_OPTIONS, LIMIT_OPTIONS and ``--no-prefix-cache``.
    """
    from penstock.cli.model_source import model_path
    from penstock.llm.llm import LLM

    path = model_path(args, args.model)
    with ProgressLine() as progress:
        return LLM(
            path,
            scheme=args.scheme,
            mode=mode,
            threads=args.threads,
            network=args.network,
            limits=limits_of(args, max_requests=max_requests, max_tokens=max(512, max_requests)),
            use_cache=not args.no_cache,
            progress=progress,
            prefix_cache=not args.no_prefix_cache,
            verify=args.verify,
        )
