"""``penstock new servable NAME``: write a template of a servable that runs as it is."""

from __future__ import annotations

import argparse
import os
import shutil
from pathlib import Path

from penstock.errors import FileAccessError, InvalidArgumentError

__all__ = ["add_parser", "run"]

_SCRIPT = '''\
"""{name}: describe here what it does.  docs/servables.md documents everything that this file may contain."""

from penstock import servable

# A network that runs in separate processes, from a file in the folder of each version ("1", "2", ...):
# network = servable.model("network.onnx", inputs={{"x": "FP32[4]"}}, outputs={{"y": "FP32[4]"}}, batch_size=32)


@servable.stage(outputs={{"y": "FP32[4]"}}, batch_size=32)
def double(x):
    """Called with a batch, [n, 4].  Without batch_size it would be called with one instance at a time, [4]."""
    if (x < 0).any():
        raise servable.InputError("x must not be negative")
    return x * 2


@servable.method(inputs={{"x": "FP32[4]"}}, outputs={{"y": "FP32[4]"}})
def predict(x):
    """What clients call.  It runs once, to record the stages and models that it calls."""
    return double(x)
'''

_README = """\
# {name}

Serve it with `penstock serve {folder}`, and send it a request:

    python -c "import penstock; print(penstock.Client().infer('{name}', {{'x': [[1.0, 2, 3, 4]]}})['y'])"

Model files belong in `1`. To add a version, copy its files to `2.tmp` and rename that to `2`. Then
`penstock.Client(api_key=...).servables.load('{name}')` switches to it without failing a request.
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the subcommand."""
    parser = subparsers.add_parser("new", help="write a template of a servable: a network or Python code as a service")
    kinds = parser.add_subparsers(dest="kind", metavar="KIND", required=True)
    servable = kinds.add_parser(
        "servable",
        help="a folder with servable.py and one version, for penstock serve",
        description="Write a servable that runs as it is.  Example: penstock new servable mine --into servables",
    )
    servable.add_argument("name", metavar="NAME", help="name of the servable: a letter, then letters, digits, _ and -")
    servable.add_argument(
        "--into",
        type=Path,
        default=Path(),
        metavar="FOLDER",
        help="folder to write NAME into (default: the current folder)",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Write the folder.  Raises FileAccessError if it exists already."""
    from penstock.servables.api.version_policy import NAME

    if NAME.fullmatch(args.name) is None:
        raise InvalidArgumentError(f"NAME: expected a letter, then letters, digits, _ and -, got {args.name!r:.100}")
    into: Path = args.into
    folder = into / args.name
    made = into / f".{args.name}.{os.getpid()}.tmp"  # a running service must not see an incomplete folder
    try:
        into.mkdir(parents=True, exist_ok=True)
        if os.path.lexists(folder):
            raise FileAccessError(f"{folder} exists already; it was not changed")
        (made / "1").mkdir(parents=True)
        (made / "servable.py").write_text(_SCRIPT.format(name=args.name))
        (made / "README.md").write_text(_README.format(name=args.name, folder=into))
        made.rename(folder)
    finally:
        shutil.rmtree(made, ignore_errors=True)
    print(f"Wrote {folder} with servable.py and version 1.  Serve it with: penstock serve {into}")
    return 0
