"""The export process of ``runtime.build``: one JSON object per line on stdout, all other output on stderr."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import json
import logging
import os
import shutil
import sys
import threading
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NoReturn

from penstock import env
from penstock.errors import InternalError, PenstockError
from penstock.graph.export import export_bundle
from penstock.symbolic.choice import use_own_modules

__all__ = ["main"]


_SWITCH_SECONDS: Final = 0.0002
"""A thread makes the tokenizer while others pack and write, which need the interpreter often and briefly."""
_LATE_LOGGERS: Final = ("penstock.generation", "penstock.head", "penstock.tokenizer_files")
"""The loggers of what is read after a checkpoint is opened; the parent process opens it too, for its key."""
_OPENING_LOGGERS: Final = ("penstock.checkpoint", "penstock.config")
"""The loggers of what the parent process has read too.  It keeps their warnings for starts that read nothing."""


class _Warnings(logging.Handler):
    """Keep the warnings for the parent, which logs them."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the text of a record, once."""
        text = record.getMessage()
        self.texts += [] if text in self.texts else [text]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m penstock.graph.export_child")
    parser.add_argument("source")
    parser.add_argument("out", nargs="?", help="with --child a line of stdin, a JSON string, which may come late")
    parser.add_argument("--scheme")
    parser.add_argument("--network")
    parser.add_argument("--tail")
    parser.add_argument("--rank", type=int)
    parser.add_argument("--without-weights", action="store_true")
    parser.add_argument("--child", action="store_true", help="exit when stdin closes, and remove OUT's folder")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Export as the command line requests; return the exit status."""
    parser = _parser()
    args = parser.parse_args(argv)
    if args.out is None and not args.child:
        parser.error("OUT is required without --child")
    env.enter_export_child()
    sys.setswitchinterval(_SWITCH_SECONDS)
    if args.network is None:
        use_own_modules()
        gc.disable()  # a vocabulary has too many objects to look for cycles in, and a short process need not
    place = _Place(args.out)
    if args.child:
        watched = os.dup(0)
        with open(os.devnull, "rb") as null:
            os.dup2(null.fileno(), 0)  # a network script that reads stdin gets its end instead of blocking
        threading.Thread(target=_end_with_parent, args=(watched, place), daemon=True).start()
    # A network script may print: its output goes to stderr, so that stdout has only messages.
    messages = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)

    def send(**message: Any) -> None:
        try:
            messages.write(json.dumps(message) + "\n")
        except OSError:  # the parent exited
            if not args.child:
                raise
            _leave(place)

    warnings, opening = _Warnings(), _Warnings()
    for handler, names in ((warnings, _LATE_LOGGERS), (opening, _OPENING_LOGGERS)):
        for name in names:
            logging.getLogger(name).addHandler(handler)
    try:
        report = export_bundle(
            args.source,
            place.wait,
            scheme=args.scheme,
            network=args.network,
            tail=args.tail,
            rank=args.rank,
            without_weights=args.without_weights,
            progress=lambda stage, done, total: send(stage=stage, done=done, total=total),
        )
    except PenstockError as error:
        cause = "" if error.__cause__ is None else "".join(traceback.format_exception(error))
        send(error=type(error).__name__, message=str(error), param=error.param, traceback=cause)
        status = 1
    else:
        send(report=dataclasses.asdict(report), warnings=warnings.texts, opening_warnings=opening.texts)
        status = 0
    if args.child:  # skip PyTorch's shutdown: it takes a second, in which no thread would watch the parent
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status


class _Place:
    """The place where the bundle is written, as soon as it is known."""

    def __init__(self, out: str | None) -> None:
        self.out = None if out is None else Path(out)
        self.known = threading.Event()
        if out is not None:
            self.known.set()

    def wait(self) -> Path:
        """Return the place, which the parent may name late."""
        self.known.wait()
        if self.out is None:
            raise InternalError("expected the name of the file on stdin, got none")
        return self.out


def _end_with_parent(watched: int, place: _Place) -> None:
    """Read the place of the bundle; exit when the parent dies, which closes the other end of ``watched``."""
    with contextlib.suppress(OSError), os.fdopen(watched, encoding="utf-8") as lines:
        for line in lines:
            place.out = Path(json.loads(line))
            place.known.set()
    _leave(place)


def _leave(place: _Place) -> NoReturn:
    folder = Path() if place.out is None else place.out.parent
    if folder.name.endswith(".partial"):
        for _ in range(100):  # repeat: the other thread may be creating a file
            shutil.rmtree(folder, ignore_errors=True)
            if not folder.exists():
                break
    os._exit(1)


if __name__ == "__main__":
    raise SystemExit(main())
