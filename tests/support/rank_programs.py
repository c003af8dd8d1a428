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
