"""Ranks in two network namespaces, over MPI: what two hosts are to them, with a link that can be cut."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.support.builds import run
from tests.support.command import DEMO, environment
from tests.support.rank_programs import MPI_FAULT, PREDICT, mpiexec, pattern

NUM_EXCHANGES = 24
"""The demo's six layers have four exchanges each."""
ADDRESSES = ("10.77.0.1", "10.77.0.2")
SLOW_LINK = Path(__file__).parents[1] / "support" / "slow_link.py"
# In the place of ssh: [-x] HOST COMMAND.
LAUNCHER = """#!/bin/sh
while [ "${1#-}" != "$1" ]; do shift; done
case "$1" in 10.77.0.1) place=NAME0;; *) place=NAME1;; esac
shift
exec ip netns exec $place sh -c "$*"
"""


class Hosts:
    """Two namespaces with a link between them, and the command that starts a rank in each.

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
        mpi = [mpiexec(), "-disable-auto-cleanup", "-launcher", "ssh", "-launcher-exec", str(self._launcher)]
        hosts = ["-localhost", ADDRESSES[0], "-hosts", ",".join(ADDRESSES), "-n", "2"]
        return ["ip", "netns", "exec", self.names[0], *mpi, *hosts, *map(str, words)]

    def sent_bytes(self) -> int:
        path = f"/sys/class/net/{self.names[0]}/statistics/tx_bytes"
        return int(run("ip", "netns", "exec", self.names[0], "cat", path))

    def cut(self) -> None:
        run("ip", "-n", self.names[1], "link", "set", self.names[1], "down")

    def stop_forwarding(self) -> None:
        """Hold back all packets: both ends keep their links, and get no sign."""
        assert self._bridge is not None
        self._bridge.send_signal(signal.SIGSTOP)

    def close(self) -> None:
        if self._bridge is not None:
            self._bridge.kill()
            self._bridge.communicate()
        for place in [*self.names, self._middle] if self._middle else self.names:
            subprocess.run(["ip", "netns", "del", place], check=False)


@pytest.fixture
def hosts(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Hosts]:
    """Two hosts; a parameter has the delay of their link in seconds and its bytes per second."""
    mpiexec()
    probe = subprocess.run(["unshare", "--net", "true"], capture_output=True, check=False)
    if probe.returncode != 0 or subprocess.run(["ip", "-V"], capture_output=True, check=False).returncode != 0:
        pytest.skip("network namespaces need root and iproute2: sudo apt-get install iproute2")
    places = Hosts(tmp_path, *getattr(request, "param", ()))
    try:
        yield places
    finally:
        places.close()


def test_the_bits_over_a_network_are_those_of_one_process(hosts: Hosts, demo_ranks: Path, tmp_path: Path) -> None:
    out, options = tmp_path / "{rank}.npz", "'batch_size': 2, 'context_len': 90"
    run(sys.executable, "-c", PREDICT, DEMO, tmp_path / "whole.npz", f"{{{options}}}")
    before = hosts.sent_bytes()
    mpi = f"{{{options}, 'transport': 'mpi', 'trusted_network': True}}"
    words = [sys.executable, "-c", PREDICT, pattern(demo_ranks), out, mpi]
    done = subprocess.run(hosts.command(*words), capture_output=True, text=True, env=environment(), timeout=120)
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        assert (tmp_path / f"{rank}.npz").read_bytes() == (tmp_path / "whole.npz").read_bytes()
    assert hosts.sent_bytes() - before > 1 << 20  # it went over the link
    shared = [*words[:-1], f"{{{options}}}"]
    done = subprocess.run(hosts.command(*shared), capture_output=True, text=True, env=environment(), timeout=120)
    assert "transport: expected 'mpi', because 1 of 2 ranks are on this host, found 'shared'" in done.stderr


def read_messages(process: subprocess.Popen[str], name: str, count: int) -> list[dict[str, Any]]:
    """Read the lines of ranks until ``count`` of them say ``name``."""
    messages: list[dict[str, Any]] = []
    assert process.stdout is not None
    while len(messages) < count:
        line = process.stdout.readline()
        assert line, "the ranks ended"
        message = json.loads(line)
        messages += [message] if name in message else []
    return messages


@pytest.mark.long
@pytest.mark.parametrize("hosts", [(0.005, 20_000_000)], indirect=True)
def test_the_bits_over_a_slow_network_are_the_same(hosts: Hosts, demo_ranks: Path, tmp_path: Path) -> None:
    out, options = tmp_path / "{rank}.npz", "'batch_size': 2, 'context_len': 90"
    run(sys.executable, "-c", PREDICT, DEMO, tmp_path / "whole.npz", f"{{{options}}}")
    mpi = f"{{{options}, 'transport': 'mpi', 'trusted_network': True}}"
    words = [sys.executable, "-c", PREDICT, pattern(demo_ranks), out, mpi]
    start = time.monotonic()
    done = subprocess.run(hosts.command(*words), capture_output=True, text=True, env=environment(), timeout=300)
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - start > 5 * NUM_EXCHANGES * 0.005  # the five steps of PREDICT
    for rank in (0, 1):
        assert (tmp_path / f"{rank}.npz").read_bytes() == (tmp_path / "whole.npz").read_bytes()


@pytest.mark.long
@pytest.mark.parametrize("hosts", [(0.001, 0)], indirect=True)
def test_a_network_that_stands_still_ends_both_halves(hosts: Hosts, tmp_path: Path) -> None:
    """As with a pulled cable, but the interfaces of both hosts stay up."""
    check_both_halves_end(hosts, hosts.stop_forwarding, tmp_path)


def test_a_cut_link_ends_both_halves(hosts: Hosts, tmp_path: Path) -> None:
    check_both_halves_end(hosts, hosts.cut, tmp_path)


def check_both_halves_end(hosts: Hosts, cut: Callable[[], None], tmp_path: Path) -> None:
    # mpiexec cannot reach the other half any more, so each rank writes what it got to a file.
    script = MPI_FAULT.replace("FAULT", "").replace(
        "    say(error", f"    open(f'{tmp_path}/{{own}}', 'w').write(str(error))\n    say(error"
    )
    command = hosts.command(sys.executable, "-c", script)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment())
    pids = [message["pid"] for message in read_messages(process, "pid", 2)]
    cut()
    deadline = time.monotonic() + 5.0
    try:
        while not all((tmp_path / str(rank)).exists() for rank in (0, 1)):
            assert time.monotonic() < deadline, "a rank did not notice"
            time.sleep(0.01)
        time.sleep(0.1)
        for rank in (0, 1):
            expected = f"ranks: the group was ended: rank {1 - rank} is lost: no heartbeat for 2000 ms"
            assert (tmp_path / str(rank)).read_text() == expected
    finally:
        for pid in [*pids, process.pid]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.communicate(timeout=30)
