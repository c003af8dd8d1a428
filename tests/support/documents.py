"""The blocks of code in documents, and a runner that runs those of a page in their order."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import httpx

from tests.support.command import ROOT, environment
from tests.support.ports import free_port
from tests.support.waiting import until

SECONDS = 600.0
_BLOCK = re.compile(
    r"(?:^<!-- (?P<mark>[^\n]*?) -->\n)?^```(?P<language>\w*)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL
)
_MARKS = ("long", "service")
_NOT_RUN = "not run: "
_TESTED_BY = "tested by: "
_SHELL_OR_PYTHON = ("sh", "bash", "console", "python")
_DRIVER = """
import json, sys, traceback
names = {"__name__": "__main__"}
answers = sys.stdout
sys.stdout = sys.stderr
for line in sys.stdin:
    failure = ""
    try:
        exec(compile(json.loads(line), "<document>", "exec"), names)
    except BaseException:
        failure = traceback.format_exc()
    print(json.dumps(failure), file=answers, flush=True)
"""


@dataclass(frozen=True)
class Block:
    """A block of a page.  ``mark``: what the comment in the line above it says, or ""."""

    language: str
    code: str
    line: int
    mark: str = ""

    @property
    def is_runnable(self) -> bool:
        """True if it is a block of shell or Python that the test of its page runs."""
        return self.language in _SHELL_OR_PYTHON and not self.reason and not self.test

    @property
    def is_code(self) -> bool:
        """True if a reader may run it."""
        return self.language in _SHELL_OR_PYTHON or self.code.startswith("$ ")

    @property
    def reason(self) -> str:
        """Why no test runs it, or ""."""
        return self.mark.removeprefix(_NOT_RUN) if self.mark.startswith(_NOT_RUN) else ""

    @property
    def test(self) -> str:
        """The test that runs its commands, FILE::NAME, or ""."""
        return self.mark.removeprefix(_TESTED_BY) if self.mark.startswith(_TESTED_BY) else ""

    @property
    def is_long(self) -> bool:
        """True if only the long tests run it."""
        return self.mark == "long"


def blocks(document: Path) -> list[Block]:
    """Return the blocks of a document; ValueError for an unknown mark."""
    text = document.read_text()
    found = []
    for match in _BLOCK.finditer(text):
        mark = match["mark"] or ""
        line = text[: match.start("code")].count("\n") + 1
        if mark and mark not in _MARKS and not mark.startswith((_NOT_RUN, _TESTED_BY)):
            raise ValueError(f"{document.name}:{line}: unknown mark {mark!r}")
        found.append(Block(match["language"], match["code"], line, mark))
    return found


def commands(document: Path) -> list[list[str]]:
    """Return the lines of a document's shell blocks that call penstock, split into words."""
    shown = []
    for block in blocks(document):
        if block.language in ("sh", "console"):
            lines = (line.lstrip("$ ") for line in block.code.replace("\\\n", " ").splitlines())
            shown += [shlex.split(line, comments=True) for line in lines if re.match(r"(\S*/)?penstock \S", line)]
    return shown


def inline_commands(document: Path) -> list[tuple[str, list[str]]]:
    """Return the subcommand and the options of each `penstock ...` within a sentence or a table."""
    sentences = _BLOCK.sub("", document.read_text())
    shown = re.findall(r"`penstock ([a-z][\w-]*)([^`]*)`", sentences)
    return [(command, re.findall(r"(?<!\S)(--?[a-zA-Z][\w-]*)", rest)) for command, rest in shown]


class Runner:
    """Run the blocks of a page in a folder: Python in one process, a service beside the blocks that follow it.

    The folder has links to ``demo``, ``examples`` and the sources, as a clone has.  The ports 8000, 8001 and
    29400 are replaced by free ones.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ports = {port: str(free_port()) for port in ("8000", "8001", "29400")}
        for name in ("demo", "examples", "core", "src", "CMakeLists.txt", "pyproject.toml"):
            (folder / name).symlink_to(ROOT / name)
        programs = folder / ".programs"
        programs.mkdir()
        for name, words in {"penstock": "-m penstock", "python": ""}.items():
            (programs / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {words} "$@"\n')
            (programs / name).chmod(0o755)
        self.environment = environment(
            HOME=str(folder),
            PATH=f"{programs}{os.pathsep}{os.environ['PATH']}",
        )
        self.python: subprocess.Popen[str] | None = None
        self.service: subprocess.Popen[bytes] | None = None

    def run(self, block: Block) -> None:
        """Run a block; AssertionError has the output of one that failed."""
        code = re.sub(r"\b(800[01]|29400)\b", lambda match: self.ports[match[0]], block.code)
        if block.mark == "service":
            self._serve(code)
        elif block.language == "python":
            self._python(code)
        else:
            self._shell(code)

    def close(self) -> None:
        """End what runs."""
        self._stop_service()
        if self.python is not None:
            self.python.communicate(timeout=SECONDS)

    def _shell(self, code: str) -> None:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", code], cwd=self.folder, env=self.environment, stdin=subprocess.DEVNULL,
            capture_output=True, text=True, check=False, timeout=SECONDS,
        )  # fmt: skip
        assert done.returncode == 0, f"{code}\n{done.stdout}\n{done.stderr}"

    def _python(self, code: str) -> None:
        if self.python is None:
            with (self.folder / "python.txt").open("w") as printed:
                self.python = subprocess.Popen(
                    [sys.executable, "-c", _DRIVER], cwd=self.folder, env=self.environment, text=True,
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=printed,
                )  # fmt: skip
        assert self.python.stdin is not None
        assert self.python.stdout is not None
        print(json.dumps(code), file=self.python.stdin, flush=True)
        failure = json.loads(self.python.stdout.readline())
        assert not failure, f"{code}\n{failure}"

    def _serve(self, code: str) -> None:
        self._stop_service()
        *before, last = code.replace("\\\n", " ").strip().splitlines()
        assert last.startswith("penstock serve "), last
        port = "" if "--port" in last else f" --port {self.ports['8000']}"
        log = self.folder / "service.txt"
        script = "\n".join([*before, f"exec {last}{port}"])
        with log.open("w") as printed:
            self.service = subprocess.Popen(
                ["bash", "-euo", "pipefail", "-c", script], cwd=self.folder, env=self.environment,
                stdin=subprocess.DEVNULL, stdout=printed, stderr=subprocess.STDOUT,
            )  # fmt: skip
        scheme = "https" if "--tls-certificate" in last else "http"
        url = f"{scheme}://127.0.0.1:{self.ports['8000']}/v2/health/ready"
        until(lambda: _answers(url) or self.service.poll() is not None, log.read_text, pause_s=0.1)
        assert self.service.poll() is None, f"{code}\n{log.read_text()}"

    def _stop_service(self) -> None:
        if self.service is not None:
            self.service.terminate()
            self.service.wait(SECONDS)
            self.service = None


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, verify=False, timeout=10).status_code == 200  # noqa: S501 - a service of this machine
    except httpx.HTTPError:
        return False
