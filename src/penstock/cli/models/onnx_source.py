"""ONNX files as arguments of commands: their options, and the network that they hold."""

from __future__ import annotations

import argparse
import runpy
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.errors import FileAccessError, InvalidArgumentError

if TYPE_CHECKING:
    from penstock.networks.network import CapturedNetwork

__all__ = ["add_onnx_options", "is_onnx_file", "read_onnx_file"]


def add_onnx_options(parser: argparse._ActionsContainer) -> None:
    """Declare the options of ONNX files."""
    parser.add_argument(
        "--size",
        action="append",
        default=[],
        metavar="NAME=N|MIN:MAX[:MULTIPLE]",
        help="of an ONNX file: fix a size that it leaves open, or limit it; NAME is the file's, or INPUT/AXIS; repeat "
        "for more (default: from 1)",
    )
    parser.add_argument(
        "--custom-ops",
        metavar="FILE.py",
        help="of an ONNX file: a script that declares ops of other domains with penstock.custom_op; a dict CUSTOM_OPS "
        "in it names those that are called otherwise (docs/guides/networks.md; default: none)",
    )


def is_onnx_file(path: str) -> bool:
    """Return True for the name of an ONNX file."""
    return path.lower().endswith(".onnx")


def read_onnx_file(path: str, args: argparse.Namespace) -> CapturedNetwork:
    """Return the network of a file, with the sizes and the custom ops of the options."""
    from penstock.networks.network import read_network

    sizes: dict[str, int | tuple[int, ...]] = {}
    for name, size in map(_size, args.size):
        if name in sizes:
            raise InvalidArgumentError(f"--size: expected one size for {name}, got two", param="size")
        sizes[name] = size
    custom_ops = None if args.custom_ops is None else _declared_ops(Path(args.custom_ops))
    return read_network(path, sizes=sizes, custom_ops=custom_ops)


def _size(text: str) -> tuple[str, int | tuple[int, ...]]:
    """Return the name and the number or the range of a --size."""
    name, equals, numbers = text.rpartition("=")
    parts = numbers.split(":")
    if not equals or not name or len(parts) > 3 or not all(part.isdecimal() for part in parts):
        raise InvalidArgumentError(f"--size: expected NAME=N or NAME=MIN:MAX[:MULTIPLE], got {text!r}", param="size")
    values = tuple(int(part) for part in parts)
    return name, values[0] if len(values) == 1 else values


def _declared_ops(script: Path) -> dict[str, str]:
    """Run a script that declares custom ops; return its CUSTOM_OPS: the op for each operator of another name."""
    from penstock.models.network_script import script_errors

    if script.suffix != ".py" or not script.is_file():
        raise FileAccessError(f"--custom-ops: expected a file FILE.py, got {script}", param="custom_ops")
    with script_errors(script):
        names = runpy.run_path(str(script)).get("CUSTOM_OPS", {})
    if not isinstance(names, dict) or not all(isinstance(text, str) for item in names.items() for text in item):
        raise InvalidArgumentError(
            f'{script}: CUSTOM_OPS: expected a dict such as {{"domain::Name": "owner::op"}}, got {names!r:.80}',
            param="custom_ops",
        )
    return names
