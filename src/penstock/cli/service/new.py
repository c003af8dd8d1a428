"""``penstock new servable NAME``: write a servable that runs unchanged, as a starting point."""

from __future__ import annotations

import argparse
import os
import shutil
from pathlib import Path

from penstock.cli.options import add_parser_of
from penstock.errors import FileAccessError
from penstock.validation import refusal

__all__ = ["add_parser", "run"]

_SCRIPT = '''\
"""{name}: describe the servable here.  docs/guides/servables.md lists everything that this file may contain."""

from penstock import servable

# A network in its own processes, read from a file in the folder of each version ("1", "2", ...):
# network = servable.model("network.psm", batch_size=32)  # penstock export NETWORK.onnx network.psm, penstock.capture


@servable.stage(outputs={{"y": "FP32[4]"}}, batch_size=32)
def double(x):
    """Called with a batch [n, 4]; without batch_size, with one instance [4] at a time."""
    if (x < 0).any():
        raise servable.InputError("x must be 0 or more")
    return x * 2


@servable.method(inputs={{"x": "FP32[4]"}}, outputs={{"y": "FP32[4]"}})
def predict(x):
    """The method that clients call.  It may only call stages and models; it runs once, when the servable is loaded."""
    return double(x)
'''

_README = """\
# {name}

`penstock serve {folder}` serves it. To call it:

    python -c "import penstock; print(penstock.Client().infer('{name}', {{'x': [[1.0, 2, 3, 4]]}})['y'])"

The files of models are in `1`. To add a version, copy its files into `2.tmp`, rename that folder to `2`, and call
`penstock.Client(api_key=...).servables.load('{name}')`. No request fails meanwhile.
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the subcommand."""
    example = "penstock new servable score --into servables"
    parser = add_parser_of(
        subparsers,
        "new",
        "Write the first version of a servable, a network or Python code that penstock serve serves.",
        example,
    )
    kinds = parser.add_subparsers(dest="kind", metavar="KIND", required=True, help="what to write")
    summary = "write a folder with servable.py and version 1"
    servable = kinds.add_parser("servable", help=summary, description=summary, epilog=f"example: {example}")
    servable.add_argument("name", metavar="NAME", help="name of the servable: a letter, then letters, digits, _ and -")
    servable.add_argument(
        "--into", type=Path, default=Path(), metavar="FOLDER", help="folder to write NAME into (default: .)"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Write the folder; an existing one is not changed."""
    from penstock.servables.api.version_policy import NAME

    if NAME.fullmatch(args.name) is None:
        raise refusal("NAME", "a letter followed by letters, digits, _ and -", args.name)
    into: Path = args.into
    folder = into / args.name
    temporary = into / f".{args.name}.{os.getpid()}.tmp"  # so that a running service never sees an incomplete folder
    try:
        into.mkdir(parents=True, exist_ok=True)
        if os.path.lexists(folder):
            raise FileAccessError(f"{folder} exists already and was not changed")
        (temporary / "1").mkdir(parents=True)
        (temporary / "servable.py").write_text(_SCRIPT.format(name=args.name))
        (temporary / "README.md").write_text(_README.format(name=args.name, folder=into))
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    print(f"wrote {folder}: servable.py and version 1. Serve it with: penstock serve {into}")
    return 0
