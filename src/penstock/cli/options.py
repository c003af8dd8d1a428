"""Options that several commands share, and their conversion to arguments."""

from __future__ import annotations

import argparse
import os
import textwrap
from typing import TYPE_CHECKING, Final

from penstock.errors import InvalidArgumentError

if TYPE_CHECKING:
    from penstock.runtime.program import ProgramLimits

__all__ = [
    "add_cache_option", "add_kv_cache_option", "add_limit_options", "add_model_options", "add_network_option",
    "add_ops_option", "add_parser_of", "add_sampling_option", "add_scheme_option", "add_threads_option",
    "add_verify_option", "add_weights_option", "add_yes_option", "limits_of", "utf8_text",
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


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Add MODEL and the options that say how to open it."""
    parser.add_argument("model", metavar="MODEL", help="a .psm bundle, a checkpoint folder, or ORG/NAME of a hub")
    add_scheme_option(parser)
    add_threads_option(parser)
    add_network_option(parser)
    parser.add_argument(
        "--no-cache",
        action="store_true",
        help="do not keep the bundle made from a checkpoint folder (default: keep it in the cache folder)",
    )
    add_verify_option(parser)
    add_yes_option(parser)
    add_ops_option(parser)


def add_yes_option(parser: argparse._ActionsContainer) -> None:
    """Add the consent to a download."""
    parser.add_argument(
        "--yes",
        action="store_true",
        help="download a model that is not on this machine without a question (default: ask)",
    )


def add_scheme_option(parser: argparse._ActionsContainer) -> None:
    """Add the number format of the weights."""
    parser.add_argument(
        "--scheme",
        help="store the weights of a checkpoint folder as f32, f16, bf16, w8a16, w8a8, w4a16 or w4a8 (default: the "
        "type in the checkpoint)",
    )


def add_threads_option(parser: argparse._ActionsContainer) -> None:
    """Add the number of threads."""
    parser.add_argument(
        "--threads", type=int, default=0, metavar="N", help="number of threads; 0 (default): all allowed cores"
    )


def add_network_option(parser: argparse._ActionsContainer) -> None:
    """Add the script that defines a network."""
    parser.add_argument(
        "--network",
        metavar="FILE.py:CLASS",
        help="your own network script for a checkpoint folder (default: the built-in network of its model_type)",
    )


_SAMPLING: Final[dict[str, tuple[type, str, str]]] = {
    "max_tokens": (int, "N", "generate at most N tokens (default: the model's default, or 256)"),
    "temperature": (float, "T", "sampling temperature; 0 is greedy (default: the model's default, or 0)"),
    "top_k": (int, "K", "sample from the K likeliest tokens; 0 is all (default: the model's default, or 0)"),
    "top_p": (
        float,
        "P",
        "sample from the smallest set of tokens whose probability reaches P; 1 is all (default: the model's default, "
        "or 1)",
    ),
    "seed": (int, "S", "seed of the sampling; the same seed gives the same text (default: random)"),
}


def add_sampling_option(parser: argparse._ActionsContainer, name: str, *, with_underscores: bool = False) -> None:
    """Add the option of a sampling field; ``with_underscores`` also spells it with underscores."""
    kind, metavar, text = _SAMPLING[name]
    spellings = {f"--{name.replace('_', '-')}": None, **({f"--{name}": None} if with_underscores else {})}
    parser.add_argument(*spellings, type=kind, metavar=metavar, help=text)


def add_verify_option(parser: argparse._ActionsContainer, default: str | None = "once") -> None:
    """Add the choice of when to verify a bundle's checksums; ``default`` None leaves it to a file."""
    parser.add_argument(
        "--verify",
        choices=("once", "always", "never"),
        default=default,
        help="when to check a bundle's checksums: once (default; the cache folder remembers verified files), always "
        "or never",
    )


def add_ops_option(parser: argparse.ArgumentParser) -> None:
    """Add the libraries with the user's own ops, which ``main`` loads."""
    parser.add_argument(
        "--ops",
        action="append",
        default=[],
        metavar="LIB.so",
        help="run your own ops from a shared library (docs/custom-ops.md); may be repeated (default: none)",
    )


def add_limit_options(parser: argparse.ArgumentParser) -> None:
    """Add the limits that memory is planned for."""
    parser.add_argument(
        "--context-len",
        type=int,
        default=0,
        metavar="N",
        help="plan memory for N tokens of prompt and answer per request; 0 (default): as many as fit",
    )
    add_kv_cache_option(parser)


def add_kv_cache_option(parser: argparse._ActionsContainer) -> None:
    """Add the number format of keys and values."""
    parser.add_argument(
        "--kv-cache",
        choices=("auto", "f32", "bf16", "int8"),
        default="auto",
        help="type of keys and values; auto (default): f32 with scheme f32, otherwise bf16",
    )


def add_cache_option(parser: argparse.ArgumentParser) -> None:
    """Add the choice of whether requests share pages."""
    parser.add_argument(
        "--no-prefix-cache",
        action="store_true",
        help="compute equal beginnings of prompts each time (default: once, then reuse their pages)",
    )


def add_weights_option(parser: argparse.ArgumentParser) -> None:
    """Add the choice of where the weights are kept in memory."""
    parser.add_argument(
        "--weights",
        choices=("mmap", "huge"),
        default="mmap",
        help="mmap (default): map the file; huge: copy the weights into huge pages first",
    )


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
