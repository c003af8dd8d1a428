"""A ``penstock worker`` that joins a service over TLS."""

from __future__ import annotations

import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

from tests.support.command import environment
from tests.support.worker_processes import DEMO

TOKEN = "0123456789abcdef" * 3


@contextmanager
def joining_worker(
    port: int, folder: Path, ca: Path, *more: str, token: str = TOKEN, model: Path = DEMO, again: bool = False
):
    """Run the command; ``again``: it connects again after a connection has ended."""
    (folder / "token").write_text(token + "\n")
    (folder / "token").chmod(0o600)
    command = [
        sys.executable,
        "-m",
        "penstock",
        "worker",
        str(model),
        "--primary",
        f"localhost:{port}",
        "--threads",
        "1",
    ]
    command += ["--token-file", str(folder / "token"), "--ca-file", str(ca), *([] if again else ["--once"]), *more]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment())
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        process.stderr.close()
