"""Options that several commands share, and how they become arguments."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING

from penstock.errors import InvalidArgumentError

if TYPE_CHECKING:
    from penstock.runtime.program import ProgramLimits

__all__ = [
    "add_cache_option", "add_limit_options", "add_model_options", "add_ops_option", "add_verify_option",
    "add_weights_option", "limits_of", "utf8_text",
]  # fmt: skip


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """MODEL and how it is opened."""
    parser.add_argument("model", metavar="MODEL", help="a .psm bundle or a checkpoint folder")
    parser.add_argument(
        "--scheme", help="f32, f16, bf16, w8a16, w8a8, w4a16 or w4a8; the checkpoint's own type unless given"
    )
    parser.add_argument("--threads", type=int, default=0, metavar="N", help="0: as many as allowed (default)")
    parser.add_argument("--network", metavar="FILE.py:CLASS", help="your own network script, for a folder")
    parser.add_argument("--no-cache", action="store_true", help="do not keep the bundle that a folder makes")
    add_verify_option(parser)
    add_ops_option(parser)


def add_verify_option(parser: argparse._ActionsContainer, default: str | None = "once") -> None:
    """When to verify a bundle's checksums; ``default`` None where a file may say it."""
    parser.add_argument(
        "--verify",
        choices=("once", "always", "never"),
        default=default,
        help="check a bundle's checksums: once (default; verified files are remembered in the cache folder), always, "
        "or never",
    )


def add_ops_option(parser: argparse.ArgumentParser) -> None:
    """Libraries with ops of the user's own, which ``main`` loads."""
    parser.add_argument(
        "--ops",
        action="append",
        default=[],
        metavar="LIB.so",
        help="a shared library with ops of your own (docs/custom-ops.md), whose code is run; once for each",
    )


def add_limit_options(parser: argparse.ArgumentParser) -> None:
    """What memory is planned for."""
    parser.add_argument(
        "--context-len", type=int, default=0, metavar="N", help="tokens of prompt and answer; 0: what fits (default)"
    )
    parser.add_argument(
        "--kv-cache",
        choices=("auto", "f32", "bf16", "int8"),
        default="auto",
        help="type of keys and values; auto (default): f32 under the scheme f32, else bf16",
    )


def add_cache_option(parser: argparse.ArgumentParser) -> None:
    """Whether requests share pages."""
    parser.add_argument("--no-prefix-cache", action="store_true", help="compute equal beginnings of prompts each time")


def add_weights_option(parser: argparse.ArgumentParser) -> None:
    """Where the weights lie."""
    parser.add_argument(
        "--weights",
        choices=("mmap", "huge"),
        default="mmap",
        help="mmap: use the file's own pages (default); huge: copy them into huge pages first",
    )


def utf8_text(data: str | bytes, name: str) -> str:
    """An argument or what was read as text, whatever the locale takes its bytes for."""
    try:
        return os.fsencode(data).decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidArgumentError(f"{name} is not UTF-8 text at byte {error.start}", param=name) from None


def limits_of(args: argparse.Namespace, *, max_requests: int, max_tokens: int = 512) -> ProgramLimits:
    """The limits that the options ask for."""
    from penstock.runtime.program import ProgramLimits

    return ProgramLimits(
        max_tokens=max_tokens,
        max_requests=max_requests,
        context_len=args.context_len,
        kv_layout=args.kv_cache,
        weights=getattr(args, "weights", "mmap"),  # not every command opens what it plans
    )
