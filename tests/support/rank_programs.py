"""Programs of several ranks: processes that a launcher starts, or that are started by hand."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.command import environment

LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "PMI_RANK", "PMI_SIZE")


def mpiexec() -> str:
    """The launcher of the mpich wheel."""
    path = Path(sys.executable).with_name("mpiexec")
    if not path.exists():
        pytest.skip("MPICH is not installed: pip install 'penstock[mpi]'")
    return str(path)


def launched(launcher: str, world: int) -> list[str]:
    """The command that starts what follows as ``world`` ranks."""
    if launcher == "mpiexec":
        return [mpiexec(), "-n", str(world)]
    return [sys.executable, "-m", "penstock", "launch", "--nproc", str(world), "--no-prefix", "--"]


def run_ranks(launcher: str, world: int, *command: object, **extra: str) -> subprocess.CompletedProcess[str]:
    """Run a command as ranks under a launcher."""
    words = [*launched(launcher, world), *map(str, command)]
    return subprocess.run(words, capture_output=True, text=True, env=environment(**extra), timeout=300)


def start_by_hand(world: int, *command: object, **options: object) -> list[subprocess.Popen[str]]:
    """Start a process per rank without a launcher: {rank} becomes the rank."""
    return [
        subprocess.Popen(
            [str(word).replace("{rank}", str(rank)) for word in command],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(),
            **options,
        )
        for rank in range(world)
    ]


def ends_within(processes: Sequence[subprocess.Popen[str]], seconds: float) -> list[tuple[int, str]]:
    """Return the status and the errors of processes that must end in time."""
    deadline = time.monotonic() + seconds
    results = []
    for process in processes:
        try:
            _, err = process.communicate(timeout=max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            pytest.fail(f"a rank did not end within {seconds} s: {process.communicate()}")
        results.append((process.returncode, err))
    return results


MPI_COMM = """
import ctypes, json, os, sys, time
import numpy as np
from penstock.core.comm import MpiComm
from penstock.errors import PenstockError
from penstock.launch.environment import read_rank_environment
place = read_rank_environment()
comm = MpiComm(place.rank, place.world, 1 << 20, timeout_s=20.0, trusted_network=True)
struct, own, world = comm.struct, comm.rank, comm.world
def say(**values):
    os.write(1, (json.dumps(values) + "\\n").encode())
def check(status):
    from penstock.core.library import check
    check(status)
"""
MPI_FAULT = (
    MPI_COMM
    + """
check(struct.barrier(struct.self, 1))
say(pid=os.getpid(), rank=own)
FAULT
start = time.monotonic()
try:
    while True:
        check(struct.barrier(struct.self, 2))
except PenstockError as error:
    say(error=str(error), rank=own, seconds=time.monotonic() - start)
    time.sleep(0.5)  # for the others to say the same
    sys.exit(3)
"""
)
