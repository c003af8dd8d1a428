"""``penstock serve`` as a process, and requests to it."""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path


@contextmanager
def serving(
    *args: object, cwd: Path, program: Sequence[str] = ("-X", "importtime", "-m", "penstock", "serve")
) -> Iterator[tuple[subprocess.Popen[str], str, str]]:
    """A service on a free port: its process, its address, and all that it said when it was ready."""
    command = [sys.executable, *program, *map(str, args), "--port", "0"]
    environment = os.environ | {"TMPDIR": str(cwd)}
    with (cwd / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, cwd=cwd, env=environment)
    try:
        assert process.stdout is not None
        said = ""
        while "  try: " not in said:
            line = process.stdout.readline()
            assert line, (cwd / "log").read_text()
            said += line
        yield process, said.split()[4], said
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def connection(url: str) -> http.client.HTTPConnection:
    return http.client.HTTPConnection(url.removeprefix("http://"), timeout=600)


def ask(url: str, path: str, body: dict[str, object] | None = None):
    with closing(connection(url)) as link:
        data = None if body is None else json.dumps(body)
        link.request("POST" if body else "GET", path, data, {"Content-Type": "application/json"})
        answer = link.getresponse()
        assert answer.status == 200, answer.read()
        return json.load(answer)
