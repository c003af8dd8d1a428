"""SIGHUP: keys and certificates are read again, and nothing ends."""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import signal
import ssl
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import psutil

from tests.support.command import DEMO
from tests.support.http_service import until
from tests.support.serve_command import serving

OLD, NEW, ADMIN = "an-old-key-of-24-letters", "a-new-key-of-24-letters!", "a-key-of-an-administrator"


def write_key(path: Path, key: str) -> None:
    path.write_text(key + "\n")
    path.chmod(0o600)


def ask(port: int, key: str, context: ssl.SSLContext) -> int:
    with closing(http.client.HTTPSConnection("127.0.0.1", port, timeout=60, context=context)) as connection:
        connection.request("GET", "/v1/models", headers={"Authorization": f"Bearer {key}"})
        return connection.getresponse().status


def events(log: Path) -> Callable[[str], list[dict[str, str]]]:
    """The lines of the log that are about one event."""

    def find(event: str) -> list[dict[str, str]]:
        lines = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
        return [line for line in lines if line.get("event") == event]

    return find


def test_sighup_rereads_keys_and_certificate(tmp_path: Path, certificate: tuple[Path, Path], other_certificate) -> None:
    keys, admin_keys = tmp_path / "keys", tmp_path / "admin"
    write_key(keys, OLD)
    write_key(admin_keys, ADMIN)
    pem, key = (Path(shutil.copy(one, tmp_path / one.name)) for one in certificate)
    options = ("--api-key-file", keys, "--admin-key-file", admin_keys, "--tls-certificate", pem, "--tls-key", key)
    args = (DEMO, *options, "--grpc-port", "0")
    with serving(*args, cwd=tmp_path, program=("-m", "penstock", "serve")) as (process, url, said):
        port = int(url.rpartition(":")[2])
        grpc = re.search(r"v2\) at \S+:(\d+) with TLS\n", said)
        assert grpc is not None
        find = events(tmp_path / "log")
        trusting = ssl.create_default_context(cafile=str(pem))
        assert (ask(port, OLD, trusting), ask(port, NEW, trusting)) == (200, 401)
        workers = [child.pid for child in psutil.Process(process.pid).children()]

        write_key(keys, NEW)
        for one, place in zip(other_certificate, (pem, key), strict=True):
            shutil.copy(one, place)
        process.send_signal(signal.SIGHUP)
        for pid in workers:
            os.kill(pid, signal.SIGHUP)
        until(lambda: len(find("reloaded")) == 3)
        now = ssl.create_default_context(cafile=str(pem))
        assert (ask(port, OLD, now), ask(port, NEW, now), ask(port, ADMIN, now)) == (401, 200, 200)
        fresh = [
            ssl.PEM_cert_to_DER_cert(ssl.get_server_certificate(("127.0.0.1", one))) for one in (port, int(grpc[1]))
        ]
        assert fresh == 2 * [ssl.PEM_cert_to_DER_cert(pem.read_text())]

        keys.write_text("short\n")
        admin_keys.unlink()
        key.write_text("no key")
        process.send_signal(signal.SIGHUP)
        until(lambda: len(find("reload_failed")) == 3)
        assert [line["level"] for line in find("reload_failed")] == 3 * ["error"]
        assert (ask(port, NEW, now), ask(port, ADMIN, now)) == (200, 200)
        assert not any(secret in (tmp_path / "log").read_text() for secret in (OLD, NEW, ADMIN))
        time.sleep(0.5)
        assert process.poll() is None
        assert [child.pid for child in psutil.Process(process.pid).children()] == workers


def test_sighup_during_the_start_is_ignored() -> None:
    script = (
        "import signal, penstock.serving.service as service\n"
        "async def run(settings): return int(signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN)\n"
        "service.run_service = run\n"
        "from penstock.cli.main import main\n"
        f"raise SystemExit(main(['serve', {str(DEMO)!r}]))\n"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
