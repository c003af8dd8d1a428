"""``penstock serve`` as a process of a benchmark, and the resources that it and its workers hold."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil


@dataclass(frozen=True)
class Held:
    """The resources of processes: resident bytes, open descriptors, threads; ``num`` is the number of processes."""

    num: int = 0
    num_bytes: int = 0
    num_files: int = 0
    num_threads: int = 0

    def __str__(self) -> str:
        return f"{self.num_bytes / 1e6:.1f} MB, {self.num_files} descriptors, {self.num_threads} threads"


def held_by(processes: list[psutil.Process]) -> Held:
    """Return the sum over processes; those that end meanwhile are skipped."""
    rows = []
    for one in processes:
        try:
            rows.append((one.memory_info().rss, one.num_fds(), one.num_threads()))
        except psutil.NoSuchProcess:
            continue
    sums = [sum(column) for column in zip(*rows, strict=True)] or [0, 0, 0]
    return Held(len(rows), *sums)


class Service:
    """A running service.  ``url`` excludes "/v1"; ``grpc_address`` is empty without ``--grpc-port``."""

    def __init__(self, process: subprocess.Popen[str], url: str, grpc_address: str = "") -> None:
        self.process, self.url, self.grpc_address = process, url, grpc_address
        self._primary = psutil.Process(process.pid)

    def workers(self) -> list[psutil.Process]:
        """Return its processes except the primary."""
        return self._primary.children(recursive=True)

    def held(self) -> tuple[Held, Held]:
        """Return the resources of the primary, and of all workers together."""
        return held_by([self._primary]), held_by(self.workers())

    def stop(self) -> str:
        """Send SIGTERM; return what is wrong with its exit, or ""."""
        workers = self.workers()
        self.process.terminate()
        try:
            status = self.process.wait(60)
        except subprocess.TimeoutExpired:
            return "it did not end in 60 s"
        left = [one.pid for one in workers if one.is_running()]
        return f"it ended with {status}, {len(left)} workers left" if status or left else ""


@contextmanager
def penstock_serve(
    *arguments: object, folder: Path | None = None, program: Sequence[str] = ("-m", "penstock")
) -> Iterator[Service]:
    """Start the command with these arguments on a free port; temporary files go to ``folder``.

    ``program``: the arguments of Python that run Penstock's command line.
    """
    command = [sys.executable, *program, "serve", *map(str, arguments), "--port", "0", "--log", "warning"]
    environment = os.environ | ({"TMPDIR": str(folder)} if folder is not None else {})
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        found = _said(process, r"https?://\S+")
        address = _said(process, r"(?<=Protocol v2\) at )[^\s,]+") if "--grpc-port" in arguments else ""
        yield Service(process, found, address)
    finally:
        if process.poll() is None:
            process.terminate()
        try:
            process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()


def _said(process: subprocess.Popen[str], pattern: str) -> str:
    """Return the next match on the standard output of the service."""
    for line in process.stdout or ():
        if found := re.search(pattern, line):
            return found[0]
    raise SystemExit("the service did not start")
