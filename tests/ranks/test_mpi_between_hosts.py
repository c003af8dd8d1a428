"""Ranks in two network namespaces, over MPI: what two hosts are to them, with a link that can be cut."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.support.builds import run
from tests.support.command import DEMO, environment
from tests.support.network_hosts import Hosts, hosts
from tests.support.rank_programs import MPI_FAULT, PREDICT, pattern
from tests.support.waiting import until

__all__ = ["hosts"]

pytestmark = pytest.mark.usefixtures("mpich")


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
    assert "transport: expected 'mpi', because 1 of 2 ranks are on this host" in done.stderr


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
    before = hosts.sent_bytes()
    done = subprocess.run(hosts.command(*words), capture_output=True, text=True, env=environment(), timeout=300)
    assert done.returncode == 0, done.stderr
    assert hosts.sent_bytes() - before > 1 << 20  # it went over the link
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
    path = f"{tmp_path}/{{own}}"
    write = f"    open(f'{path}.new', 'w').write(str(error)); os.rename(f'{path}.new', f'{path}')\n"
    script = MPI_FAULT.replace("FAULT", "").replace("    say(error", f"{write}    say(error")
    command = hosts.command(sys.executable, "-c", script)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment())
    pids = [message["pid"] for message in read_messages(process, "pid", 2)]
    cut()
    try:
        for rank in (0, 1):
            expected = f"ranks: the group was ended: rank {1 - rank} is lost: no heartbeat for 1700 ms"
            until((tmp_path / str(rank)).exists, f"the end of rank {rank}")
            assert (tmp_path / str(rank)).read_text() == expected
    finally:
        for pid in [*pids, process.pid]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.communicate(timeout=300)
