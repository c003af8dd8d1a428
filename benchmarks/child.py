"""A child process of a benchmark that answers each line of its standard input with a line of JSON."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from typing import IO, Any


class Child:
    """The process; its first answer says that it is ready.  ``stderr``: as of Popen."""

    def __init__(self, name: str, command: Sequence[str], stderr: IO[str] | int | None = None) -> None:
        self.name = name
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True
        )

    def answer(self) -> dict[str, Any]:
        """Return the next answer; SystemExit if the process has ended."""
        line = self.process.stdout.readline() if self.process.stdout else ""
        if not line:
            raise SystemExit(f"{self.name} ended with {self.process.wait()}")
        found: dict[str, Any] = json.loads(line)
        return found

    def ask(self, what: str) -> dict[str, Any]:
        """Send a line and return its answer."""
        if self.process.stdin:
            self.process.stdin.write(what + "\n")
            self.process.stdin.flush()
        return self.answer()

    def close(self) -> None:
        """Close its standard input, and wait until it ends."""
        if self.process.stdin:
            self.process.stdin.close()
        self.process.wait()
