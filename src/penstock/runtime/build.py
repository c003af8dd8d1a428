"""Build a bundle from a checkpoint in a child process, so that the serving process never loads PyTorch.

The child reports its progress as one JSON object per line.  An error in the child is raised here with its own class.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

from penstock import errors
from penstock.errors import FileAccessError, InternalError, PenstockError, UnsupportedError
from penstock.extras import install_command
from penstock.models.network_script import refuse_nested_export
from penstock.runtime.export_process import ExportProcess, start_export

__all__ = [
    "Progress",
    "ProgressCallback",
    "build_in_child",
    "finish_child",
    "prepare_child",
    "sync",
    "tell_rounding",
    "tell_warnings",
]

_LOG: Final = logging.getLogger("penstock.build")
_TAIL_LINES: Final = 20
_JOIN_SECONDS: Final = 5.0


class _ChildTracebackError(Exception):
    """The traceback of an error in the child, as the cause of the error that is raised here."""


@dataclass(frozen=True)
class Progress:
    """The progress of long work.

    ``stage``: what is done; in a build "first" (of a bundle that the cache keeps), "capture", "pack", "write" or "wait"
    (for another process that builds the same bundle).  ``done`` and ``total`` count ``unit``; ``total`` 0 is unknown.
    ``note``: more figures, for reading.  ``rank``: the rank for whose part the work is done, or None.
    """

    stage: str
    done: int = 0
    total: int = 0
    unit: str = "bytes"
    note: str = ""
    rank: int | None = None


ProgressCallback = Callable[[Progress], None]


@contextlib.contextmanager
def prepare_child(source: Path | str, *, scheme: str | None = None, network: str | None = None,
                  tail: str | None = None, rank: int | None = None,
                  kind: str = "durable") -> Iterator[ExportProcess]:  # fmt: skip
    """Start the child of ``build_in_child``, which reads the source and waits for the name of its file.

    At the end of the block a child that still runs is killed.
    """
    refuse_nested_export()
    if network is not None and importlib.util.find_spec("torch") is None:
        raise UnsupportedError(
            f"{source}: a network of your own requires PyTorch, which is not installed. "
            f"Run `{install_command('torch')}`, or use a .psm bundle.",
            param="network",
        )
    command = ["--child"]
    command += [] if scheme is None else ["--scheme", scheme]
    command += [] if network is None else ["--network", network]
    command += [] if tail is None else ["--tail", tail]
    command += [] if rank is None else ["--rank", str(rank)]
    command += ["--without-weights"] if kind == "without-weights" else []
    command += ["--", os.fspath(source)]
    child = start_export(command, is_own_code=network is None)
    try:
        yield child
    finally:
        _end(child)


def build_in_child(
    source: Path | str,
    out: Path | str,
    *,
    scheme: str | None = None,
    network: str | None = None,
    tail: str | None = None,
    rank: int | None = None,
    kind: str = "durable",
    progress: ProgressCallback | None = None,
) -> dict[str, Any]:
    """Export ``source`` to the bundle ``out`` in a child process; return the child's report.

    It also has ``warnings``, which are logged here, and ``opening_warnings``, which are logged when a source is opened.
    ``network`` is "file.py:Class" or None; ``tail`` and ``rank`` as in ``export_bundle``.  ``kind`` "durable": the file
    is on the disk when it has its name; "cached": the system writes it later, so that a program can open it at once
    from memory; "without-weights": as in ``export_bundle``, and as a cached one.  Raises
    the PenstockError that the child raised, UnsupportedError for a ``network`` without PyTorch or when this process is
    itself an export, and InternalError with the last lines of the child's stderr when the child died.  An interrupt
    kills the child and every process that it started within a second, and leaves no file behind.
    """
    how: Any = {"scheme": scheme, "network": network, "tail": tail, "rank": rank, "kind": kind}
    with prepare_child(source, **how) as child:
        return finish_child(child, source, out, rank=rank, kind=kind, progress=progress)


def finish_child(
    child: ExportProcess,
    source: Path | str,
    out: Path | str,
    *,
    rank: int | None = None,
    kind: str = "durable",
    progress: ProgressCallback | None = None,
) -> dict[str, Any]:
    """Let the child of ``prepare_child`` write ``out``; as ``build_in_child``."""
    from penstock.quant.folder import private_folder  # imported here: a bundle of the cache is opened without a build

    final = Path(out)
    if final.is_dir() or not final.parent.is_dir():
        raise FileAccessError(f"{final}: expected a file name in an existing folder", param="out")
    with private_folder(final) as folder:
        stderr_lines: deque[str] = deque(maxlen=_TAIL_LINES)
        reader = threading.Thread(target=_keep_tail, args=(child.stderr, stderr_lines), daemon=True)
        reader.start()
        if child.stdin is not None:
            with contextlib.suppress(OSError):  # the child died; its status says why
                child.stdin.write(json.dumps(str(folder / final.name)) + "\n")
                child.stdin.flush()
        last = _follow(child, progress, rank)
        code = child.wait()
        reader.join(timeout=_JOIN_SECONDS)
        if code != 0 or "report" not in last:
            raise _failure(last, code, list(stderr_lines), (str(folder / final.name), str(final)))
        try:
            if kind == "durable":
                sync(folder / final.name)
            os.replace(folder / final.name, final)
            if kind == "durable":
                sync(final.parent)
        except OSError as error:
            raise FileAccessError(f"{final}: {error.strerror}") from None
    report: dict[str, Any] = last["report"]
    kinds = {kind: last.get(kind, []) for kind in ("warnings", "opening_warnings")}
    tell_warnings(kinds["warnings"])
    tell_rounding(os.fspath(source), report.get("rounding_note", ""))
    return {**report, **kinds}


def sync(path: Path) -> None:
    """Wait until a file or a folder is on the disk; an OSError says why it is not."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def tell_warnings(texts: Iterable[str]) -> None:
    """Log the warnings of an export."""
    for text in texts:
        _LOG.warning("%s", text)


def tell_rounding(source: str, note: str) -> None:
    """Log how much weights that another tool quantized were rounded; ``note`` is that of ``ExportReport``."""
    if note:
        _LOG.warning("penstock: %s: %s", source, note)


def _end(child: ExportProcess) -> None:
    """Kill a child that still runs, with the processes that it started, and close its streams.

    The child watches its stdin, a pipe from this process: when this process dies, the child reads its end and exits.
    """
    if child.poll() is None:
        try:
            os.killpg(child.pid, signal.SIGKILL)
        except ProcessLookupError:  # a copy of this process that has no session yet, or a process that has ended
            with contextlib.suppress(ProcessLookupError):
                os.kill(child.pid, signal.SIGKILL)
        child.wait()
    for stream in (child.stdin, child.stdout, child.stderr):
        if stream is not None:
            with contextlib.suppress(OSError):  # a line that a dead child did not read
                stream.close()


def _keep_tail(stream: IO[str] | None, tail: deque[str]) -> None:
    if stream is not None:
        with contextlib.suppress(ValueError):  # the stream was closed during the read, because the child was killed
            tail.extend(line.rstrip() for line in stream)


def _follow(child: ExportProcess, progress: ProgressCallback | None, rank: int | None) -> dict[str, Any]:
    """Forward the child's progress with the rank; return its report or its error."""
    last: dict[str, Any] = {}
    for line in child.stdout or ():
        try:
            message = json.loads(line)
        except ValueError:
            continue  # printed by a user's network script
        if not isinstance(message, dict):
            continue
        if "stage" in message:
            if progress is not None:
                done, total = int(message.get("done", 0)), int(message.get("total", 0))
                progress(Progress(str(message["stage"]), done, total, rank=rank))
        elif "report" in message or "error" in message:
            last = message
    return last


def _failure(last: dict[str, Any], code: int, tail: list[str], names: tuple[str, str]) -> PenstockError:
    """Return the child's error.  ``names`` are the file's temporary and final names; the message gets the final one."""
    kind = getattr(errors, str(last.get("error")), None)
    if isinstance(kind, type) and issubclass(kind, PenstockError):
        error = kind(str(last.get("message")).replace(*names), param=last.get("param"))
        if last.get("traceback"):
            error.__cause__ = _ChildTracebackError(f"\n\n{last['traceback']}")
        return error
    if code < 0:
        from penstock.processes.supervision import signal_name

        reason = f"was killed by {signal_name(-code)}"
        if code == -signal.SIGKILL:
            reason += " (out of memory?)"
        if code == -signal.SIGBUS:
            reason += " (did a file of the checkpoint shrink?)"
    else:
        reason = f"exited with status {code}"
    return InternalError("\n".join([f"The export process {reason}. Its last output:", *tail]))
