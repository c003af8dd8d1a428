"""Two network namespaces: what two hosts are to the processes in them, with a link that can be cut."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.builds import run
from tests.support.rank_programs import mpiexec

ADDRESSES = ("10.77.0.1", "10.77.0.2")
SLOW_LINK = Path(__file__).with_name("slow_link.py")
# In the place of ssh: [-x] HOST COMMAND.
LAUNCHER = """#!/bin/sh
while [ "${1#-}" != "$1" ]; do shift; done
case "$1" in 10.77.0.1) place=NAME0;; *) place=NAME1;; esac
shift
exec ip netns exec $place sh -c "$*"
"""


class Hosts:
    """Two namespaces with a link between them.

    With a delay or a limit on its speed the link goes over a third namespace, where a process forwards the packets.
    """

    def __init__(self, folder: Path, delay_s: float = 0.0, bytes_per_s: int = 0) -> None:
        name = f"ps{os.getpid()}x"
        self._bridge: subprocess.Popen[str] | None = None
        self._middle = f"{name}m" if delay_s or bytes_per_s else ""
        self.names = [f"{name}{i}" for i in (0, 1)]
        self._launcher = folder / "launcher.sh"
        self._launcher.write_text(LAUNCHER.replace("NAME", name))
        self._launcher.chmod(0o755)
        first, second = self.names
        for place in self.names:
            run("ip", "netns", "add", place)
        if self._middle:
            self._bridge = self._bridged(delay_s, bytes_per_s)
        else:
            run("ip", "link", "add", first, "netns", first, "type", "veth", "peer", "name", second, "netns", second)
        for place, address in zip(self.names, ADDRESSES, strict=True):
            run("ip", "-n", place, "addr", "add", f"{address}/24", "dev", place)
            for link in ("lo", place):
                run("ip", "-n", place, "link", "set", link, "up")
        for place in self.names:  # libfabric takes the loopback as long as another interface is not ready
            while "tentative" in run("ip", "-n", place, "addr"):
                time.sleep(0.05)

    def _bridged(self, delay_s: float, bytes_per_s: int) -> subprocess.Popen[str]:
        middle = self._middle
        run("ip", "netns", "add", middle)
        for own in self.names:
            far = f"{own}f"
            run("ip", "link", "add", own, "netns", own, "type", "veth", "peer", "name", far, "netns", middle)
            run("ip", "-n", middle, "link", "set", far, "up")
        ends = [f"{own}f" for own in self.names]
        words = [sys.executable, str(SLOW_LINK), *ends, str(delay_s), str(bytes_per_s)]
        bridge = subprocess.Popen(["ip", "netns", "exec", middle, *words], stdout=subprocess.PIPE, text=True)
        assert bridge.stdout is not None
        assert bridge.stdout.readline() == "ready\n"
        return bridge

    def command(self, *words: object) -> list[str]:
        """The command that starts a rank of MPI on each host."""
        mpi = [mpiexec(), "-disable-auto-cleanup", "-launcher", "ssh", "-launcher-exec", str(self._launcher)]
        hosts = ["-localhost", ADDRESSES[0], "-hosts", ",".join(ADDRESSES), "-n", "2"]
        return [*self.inside(0), *mpi, *hosts, *map(str, words)]

    def inside(self, number: int) -> list[str]:
        """The words before a command that runs on a host."""
        return ["ip", "netns", "exec", self.names[number]]

    def sent_bytes(self) -> int:
        path = f"/sys/class/net/{self.names[0]}/statistics/tx_bytes"
        return int(run(*self.inside(0), "cat", path))

    def cut(self) -> None:
        run("ip", "-n", self.names[1], "link", "set", self.names[1], "down")

    def heal(self) -> None:
        run("ip", "-n", self.names[1], "link", "set", self.names[1], "up")

    def stop_forwarding(self) -> None:
        """Hold back all packets: both ends keep their links, and get no sign."""
        assert self._bridge is not None
        self._bridge.send_signal(signal.SIGSTOP)

    def forward_again(self) -> None:
        assert self._bridge is not None
        self._bridge.send_signal(signal.SIGCONT)

    def close(self) -> None:
        if self._bridge is not None:
            self._bridge.kill()
            self._bridge.communicate()
        for place in [*self.names, self._middle] if self._middle else self.names:
            subprocess.run(["ip", "netns", "del", place], check=False)


@pytest.fixture
def hosts(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Hosts]:
    """Two hosts; a parameter has the delay of their link in seconds and its bytes per second."""
    probe = subprocess.run(["unshare", "--net", "true"], capture_output=True, check=False)
    if probe.returncode != 0 or subprocess.run(["ip", "-V"], capture_output=True, check=False).returncode != 0:
        pytest.skip("network namespaces need root and iproute2: sudo apt-get install iproute2")
    places = Hosts(tmp_path, *getattr(request, "param", ()))
    try:
        yield places
    finally:
        places.close()
