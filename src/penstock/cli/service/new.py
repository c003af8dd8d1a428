"""``penstock new servable NAME``: a starting point that runs as it is."""

from __future__ import annotations

import argparse
import os
import shutil
from pathlib import Path

from penstock.errors import FileAccessError, InvalidArgumentError

__all__ = ["add_parser", "run"]

_SCRIPT = '''\
"""{name}: say here what it does.  docs/servables.md has everything that can stand in this file."""

from penstock import servable

# A network, run in processes of its own, from a file in the folder of each version ("1", "2", ...):
# network = servable.model("network.onnx", inputs={{"x": "FP32[4]"}}, outputs={{"y": "FP32[4]"}}, batch_size=32)


@servable.stage(outputs={{"y": "FP32[4]"}}, batch_size=32)
def double(x):
    """Called with a batch, [n, 4]; without batch_size with one instance at a time, [4]."""
    if (x < 0).any():
        raise servable.InputError("x must not be below 0")
    return x * 2


@servable.method(inputs={{"x": "FP32[4]"}}, outputs={{"y": "FP32[4]"}})
def predict(x):
    """What clients call.  It is run once, to see what it chains: stages and models, and nothing else."""
    return double(x)
'''

_README = """\
# {name}

`penstock serve {folder}` serves it, and this asks it:

    python -c "import penstock; print(penstock.Client().infer('{name}', {{'x': [[1.0, 2, 3, 4]]}})['y'])"

Files of models lie in `1`. A new version: copy its files into `2.tmp`, rename that to `2`, and
`penstock.Client(api_key=...).servables.load('{name}')` takes it up without a failed request.
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the subcommand."""
    parser = subparsers.add_parser("new", help="write the start of a servable: a network or Python as a service")
    kinds = parser.add_subparsers(dest="kind", metavar="KIND", required=True)
    one = kinds.add_parser("servable", help="a folder with servable.py and a version, which penstock serve serves")
    one.add_argument("name", metavar="NAME", help="letters, digits, _ and -, a letter first")
    one.add_argument("--into", type=Path, default=Path(), metavar="FOLDER", help="where NAME is written (.)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Write the folder; what is there already is left alone."""
    from penstock.servables.lifecycle.versions import NAME

    if NAME.fullmatch(args.name) is None:
        raise InvalidArgumentError(f"NAME must be letters, digits, _ and -, a letter first, not {args.name!r:.100}")
    into: Path = args.into
    folder = into / args.name
    made = into / f".{args.name}.{os.getpid()}.tmp"  # a service that looks meanwhile sees nothing half written
    try:
        into.mkdir(parents=True, exist_ok=True)
        if os.path.lexists(folder):
            raise FileAccessError(f"{folder} is there already, and is left as it is")
        (made / "1").mkdir(parents=True)
        (made / "servable.py").write_text(_SCRIPT.format(name=args.name))
        (made / "README.md").write_text(_README.format(name=args.name, folder=into))
        made.rename(folder)
    finally:
        shutil.rmtree(made, ignore_errors=True)
    print(f"wrote {folder}: servable.py and version 1; penstock serve {into} serves it")
    return 0
