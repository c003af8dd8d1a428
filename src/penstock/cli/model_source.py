"""Resolves MODEL on the command line to a path.  A model of a hub is downloaded when the user agrees."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.cli.progress import ProgressLine, format_bytes, format_seconds, printable
from penstock.errors import FileAccessError, InvalidArgumentError
from penstock.validation import nearest

if TYPE_CHECKING:
    from penstock.hub.download_estimate import DownloadEstimate
    from penstock.hub.memory_need import ModelShape

__all__ = ["ask", "can_ask", "describe_memory", "describe_plan", "download_model", "downloaded_path", "model_path"]


def model_path(args: argparse.Namespace, text: str) -> str:
    """Return the path that MODEL means.  A model of a hub that is not on this machine is downloaded, with consent.

    The parser has ``--yes``.  Raises InvalidArgumentError without ``--yes`` if there is no terminal to ask on, and
    otherwise the errors of ``estimate_download``, of its checks and of ``download``.
    """
    if text and Path(text).exists():  # without an import of what downloads
        return text
    from penstock.hub.names import parse_model

    name = parse_model(text)
    if name is None:
        return text
    from penstock.hub.downloaded import find_downloaded

    folder = find_downloaded(name)
    if folder is not None:
        return str(folder)
    from penstock.hub.transfer_errors import endpoint, is_offline

    missing = f"{text}: no such file or folder, and no complete model of that name is on this machine.{_near(text)}"
    if is_offline():
        raise FileAccessError(f"{missing} HF_HUB_OFFLINE is set, so it cannot be downloaded.")
    if not args.yes and not can_ask():
        raise InvalidArgumentError(
            f"{missing} To download it from {endpoint()}, run `penstock pull {text}` or add --yes.", param="model"
        )
    from penstock.hub.download_estimate import check_disk, check_family, check_memory, estimate_download

    if not args.yes:
        print(f"{name} is not on this machine.", file=sys.stderr)
    plan = estimate_download(name)
    scheme = getattr(args, "scheme", None)
    if getattr(args, "network", None) is None:
        check_family(plan)
    stored = plan.shape.dtype if plan.shape is not None else None
    check_disk(plan, scheme or stored)
    context_len, kv_cache = getattr(args, "context_len", 0), getattr(args, "kv_cache", "auto")
    check_memory(name, plan.shape, scheme or stored, context_len=context_len, kv_cache=kv_cache)
    print(describe_plan(plan), file=sys.stderr)
    if not args.yes and not ask("Download it?", default=True):
        raise FileAccessError(f"{name}: not downloaded")
    return str(download_model(plan))


def downloaded_path(text: str) -> str:
    """Return the path that MODEL means, for a command that downloads nothing."""
    if text and Path(text).exists():
        return text
    from penstock.hub.names import parse_model

    name = parse_model(text)
    if name is None:
        return text
    from penstock.hub.downloaded import find_downloaded

    folder = find_downloaded(name)
    if folder is None:
        raise FileAccessError(
            f"{text}: no such file or folder, and no complete model of that name is on this machine.{_near(text)} "
            f"`penstock pull {text}` downloads it."
        )
    return str(folder)


def _near(text: str) -> str:
    """Return the question whether a file or folder with a similar name was meant, or nothing."""
    folder = Path(text).parent
    try:
        near = nearest(Path(text).name, [entry.name for entry in folder.iterdir()])
    except OSError:
        return ""
    return f" Did you mean {folder / near}?" if near else ""


def ask(question: str, *, default: bool) -> bool:
    """Ask on the terminal; an empty line is ``default``, and the end of the input is no."""
    print(f"{question} {'[Y/n]' if default else '[y/N]'} ", end="", file=sys.stderr, flush=True)
    line = sys.stdin.readline()
    if not line:
        print(file=sys.stderr)
        return False
    return line.strip().lower() in ("y", "yes") or (default and not line.strip())


def can_ask() -> bool:
    """Return True if a person can read a question and answer it."""
    return sys.stdin.isatty() and sys.stderr.isatty()


def download_model(plan: DownloadEstimate) -> Path:
    """Download a plan with a progress line on standard error; return the folder of the snapshot."""
    from penstock.hub.download import download
    from penstock.runtime.build import Progress

    start, missing = time.monotonic(), plan.missing_bytes
    try:
        with ProgressLine() as line:

            def show(done: int, total: int) -> None:
                if missing:
                    line(Progress("download", done, total))

            path = download(plan, show)
    except BaseException:
        present_bytes = plan.total_bytes - plan.missing_bytes
        if present_bytes:
            share = f"{format_bytes(present_bytes)} of {format_bytes(plan.total_bytes)} are on this machine"
            print(f"The download stopped: {share}. The same command goes on from there.", file=sys.stderr)
        raise
    if missing:
        seconds = time.monotonic() - start
        print(f"downloaded {format_bytes(missing)} in {format_seconds(seconds)}", file=sys.stderr)
    return path


def describe_plan(plan: DownloadEstimate) -> str:
    """Describe a download in a few lines: size, memory, disk."""
    import shutil

    from penstock.hub.downloaded import cache_folder

    family = printable(plan.config.optional_str("model_type") or "unknown") if plan.config is not None else "GGUF"
    total, missing = plan.total_bytes, plan.missing_bytes
    count = "1 file" if len(plan.files) == 1 else f"{len(plan.files)} files"
    size = format_bytes(total) if missing == total else f"{format_bytes(missing)} of {format_bytes(total)}"
    lines = [f"{plan.model.name} ({family}), commit {plan.model.commit[:7]}: {size} to download, {count}"]
    if plan.num_by_etag:
        lines.append(f"  verify  by ETag, as the hub lists no digest ({plan.num_by_etag} of {count})")
    if plan.shape is not None:
        lines.append(f"  memory  {describe_memory(plan.shape)}")
    folder = next(path for path in (cache_folder(), *cache_folder().absolute().parents) if path.exists())
    lines.append(f"  disk    {format_bytes(shutil.disk_usage(folder).free)} free, in {cache_folder()}")
    return "\n".join(lines)


def describe_memory(shape: ModelShape) -> str:
    """Describe the memory that a model needs in its stored type and in two schemes, and what is available."""
    from penstock.hub.memory_need import memory_need
    from penstock.runtime.machine import memory

    needs = [f"{format_bytes(memory_need(shape, scheme))} in {scheme}" for scheme in (shape.dtype, "w8a8", "w4a8")]
    machine = memory()
    available = f"; {format_bytes(machine.available)} available" if machine.total else ""
    return f"about {', '.join(needs)}{available}"
