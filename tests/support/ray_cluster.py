"""A cluster of Ray on this machine: nodes started by ``penstock node``, which reach each other by 127.0.0.1."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import psutil

from penstock.cluster.placement.ray_setup import check_ray
from penstock.errors import UnavailableError
from tests.support.command import environment
from tests.support.ports import NUM_WORKERS, WORKER, free_port

ADDRESS = "127.0.0.1"
"""The one address for which Ray listens on no other."""
_RAY_STARTS = 10
"""Ray gives its agent 15 s to start, which no setting changes: too little on a machine with a load of 15."""
_END_S = 120.0
_FIRST_PORT, _PORTS_OF_NODE = 12_000, 200
_PORTS = [*range(_FIRST_PORT, 24_000, _PORTS_OF_NODE)][WORKER::NUM_WORKERS]
"""The first ports of nodes, below the ports of ``tests.support.ports``; no other worker of the tests has them."""
_START = os.getpid() % 5 * 3  # of two runs at once
_RANGES = itertools.cycle([*_PORTS[_START:], *_PORTS[:_START]])
_taken: dict[int, int] = {}
"""The ranges of living nodes, by process."""


def skip_reason() -> str:
    """Why tests with a cluster are skipped, with the command that changes it; "" if Ray is there."""
    try:
        check_ray()
        import cryptography  # noqa: F401
    except UnavailableError as error:
        return str(error)
    except ImportError:
        return "cryptography not found; run: pip install cryptography"
    return ""


def unused_range() -> int:
    """Return the first of 200 ports that no node of this process has."""
    return next(port for port in _RANGES if port not in _taken.values())


class RayCluster:
    """The processes of ``penstock node`` for a head and other nodes."""

    def __init__(self, num_cpus: int = 1) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="psray-"))  # sockets in it have long names
        self.token_file = self.folder / "token"
        self.token_file.write_text("0123456789abcdef" * 4 + "\n")
        self.token_file.chmod(0o600)
        self._port = free_port()
        self.address = f"{ADDRESS}:{self._port}"
        self.nodes: list[subprocess.Popen[str]] = []
        try:
            self.start_head(num_cpus)
        except BaseException:
            self.close()
            raise

    def start_head(self, num_cpus: int = 1) -> None:
        """Start the head, or another one in its place."""
        self.nodes.insert(0, self._start("--address", ADDRESS, "--port", str(self._port), "--cpus", str(num_cpus)))

    def join(self, num_cpus: int = 1, *options: str) -> subprocess.Popen[str]:
        """Start one more node."""
        self.nodes.append(self._start("--join", self.address, "--address", ADDRESS, "--cpus", str(num_cpus), *options))
        return self.nodes[-1]

    def _start(self, *options: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "penstock", "node", "--token-file", str(self.token_file), *options]
        command += ["--temp-folder", str(self.folder)]
        num_starts = 0
        for _ in _PORTS:
            port = unused_range()
            process = subprocess.Popen(
                [*command, "--first-port", str(port)],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=environment(),
            )
            if "is a node of the cluster" in process.stdout.readline():
                _taken[process.pid] = port
                return process
            said = process.communicate()[1]
            if "--first-port" in said:  # a node of another run of the tests has one of these ports
                continue
            num_starts += 1
            if num_starts == _RAY_STARTS or "timed out during startup" not in said:  # Ray's limit, on a busy machine
                break
        raise AssertionError(said)

    def cut(self, node: subprocess.Popen[str]) -> None:
        """End a node as a loss of its power would: every process at once."""
        itself = psutil.Process(node.pid)
        for process in [itself, *itself.children(recursive=True)]:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        node.wait()
        self._close(node)

    def close(self) -> None:
        """Stop the nodes, the head last; no process may be left."""
        for node in [*reversed(self.nodes)]:
            if node.poll() is None:
                node.send_signal(signal.SIGTERM)
                node.wait()
            self._close(node)
        own = [process for process in psutil.process_iter(["cmdline"]) if self._is_own(process)]
        # A worker of Ray that a node began just before it was cut ends when it finds that the node is gone.
        left = psutil.wait_procs(own, timeout=_END_S)[1]
        assert not left, f"processes are left: {[process.info['cmdline'] for process in left]}"
        subprocess.run(["rm", "-rf", str(self.folder)], check=True)

    def _is_own(self, process: psutil.Process) -> bool:
        words = " ".join(process.info["cmdline"] or [])
        return str(self.folder) in words and process.pid != os.getpid()

    def _close(self, node: subprocess.Popen[str]) -> None:
        self.nodes.remove(node)
        del _taken[node.pid]
        node.stdout.close()
        node.stderr.close()
