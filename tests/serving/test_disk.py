"""A full disk: the service writes nothing but its log, and goes on when that cannot be written."""

from __future__ import annotations

import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.command import DEMO
from tests.support.serve_command import ask

BODY = {"prompt": "def add(a, b):", "max_tokens": 4}


def no_bytes() -> None:
    """From now on no file takes a byte, in this process and those that it starts; pipes and sockets do."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))


@contextmanager
def serving(folder: Path, **how: Any) -> Iterator[tuple[subprocess.Popen[str], str]]:
    command = [sys.executable, "-m", "penstock", "serve", str(DEMO), "--port", "0", "--threads", "1"]
    command += ["--grpc-port", "0", "--admin-socket", str(folder / "admin.sock")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=folder, **how) as process:
        try:
            assert process.stdout is not None
            yield process, process.stdout.readline().split()[4]
        finally:
            process.kill()


def test_nothing_is_written_to_a_disk(tmp_path: Path) -> None:
    """Starting, answering, replacing a worker and the end of it, where no file can be written to."""
    with serving(tmp_path, preexec_fn=no_bytes, stderr=subprocess.PIPE) as (process, url):
        assert ask(url, "/v1/completions", BODY)["usage"]["completion_tokens"] == 4
        command = [sys.executable, "-m", "penstock", "models", "--admin-socket", str(tmp_path / "admin.sock")]
        subprocess.run([*command, "update", f"demo={DEMO}"], check=True, stdout=subprocess.DEVNULL)
        assert ask(url, "/v1/completions", BODY)["system_fingerprint"] == "v2"
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate()
        assert process.returncode == 0, log
    assert '"path": "/v1/completions"' in log
    assert [*tmp_path.iterdir()] == []


def test_the_service_survives_a_log_that_cannot_be_written(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with log.open("w") as full, serving(tmp_path, preexec_fn=no_bytes, stderr=full) as (process, url):
        for _ in range(2):
            assert ask(url, "/v1/completions", BODY)["usage"]["completion_tokens"] == 4
        process.send_signal(signal.SIGTERM)
        process.communicate()
        assert process.returncode in (0, 120)  # Python's own, for what it could not write: it came to its end
    assert log.read_bytes() == b""
