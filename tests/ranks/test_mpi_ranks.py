"""Ranks over MPI: real processes under the mpiexec of the mpich wheel."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from penstock.core.comm import MpiComm
from penstock.errors import InvalidArgumentError, UnsupportedError
from penstock.lite.settings import read_config
from tests.support.builds import run
from tests.support.command import environment
from tests.support.errors import raises
from tests.support.marks import mostly_long
from tests.support.rank_processes import left_in_shared_memory
from tests.support.rank_programs import (
    EXAMPLE,
    MPI_COMM,
    MPI_FAULT,
    PREDICT,
    SHARED_FILES,
    expected_lines,
    mpiexec,
    pattern,
    run_ranks,
)

MPI = "'transport': 'mpi', 'trusted_network': True"

pytestmark = pytest.mark.usefixtures("mpich")


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    path = tmp_path / "config_file.ini"
    path.write_text("[model]\ntransport = mpi\ntrusted_network = true\n")
    return path


def test_the_example_over_mpi(demo_ranks: Path, config_file: Path) -> None:
    before = set(os.listdir(SHARED_FILES))
    command = [sys.executable, EXAMPLE / "main.py", "--model_path", pattern(demo_ranks), "--config_file", config_file]
    done = run_ranks("mpiexec", 2, *command)
    assert (done.returncode, done.stderr) == (0, "")
    assert [done.stdout.count(line) for line in expected_lines()] == [2, 2]
    assert not left_in_shared_memory(before)


@pytest.mark.parametrize("world", mostly_long([2, 3], 3))
@pytest.mark.parametrize("scheme", ["w8a8", "f32"])
def test_the_bits_over_mpi_are_those_of_one_process(
    world: int,
    scheme: str,
    bundle_of: Callable[[str, str], Path],
    parts_of: Callable[[Path, int], list[Path]],
    tmp_path: Path,
) -> None:
    whole = bundle_of("llama", scheme)
    parts = parts_of(whole, world)
    options = "'batch_size': 2, 'context_len': 90, 'logits': 'all', 'max_tokens': 16"
    run(sys.executable, "-c", PREDICT, whole, tmp_path / "whole.npz", f"{{{options}}}")
    source = str(parts[0].with_name("{rank}.psm"))
    out = tmp_path / "{rank}.npz"
    done = run_ranks("mpiexec", world, sys.executable, "-c", PREDICT, source, out, f"{{{options}, {MPI}}}")
    assert done.returncode == 0, done.stderr
    whole_bytes = (tmp_path / "whole.npz").read_bytes()
    for rank in range(world):
        assert (tmp_path / f"{rank}.npz").read_bytes() == whole_bytes


EXCHANGES = (
    MPI_COMM
    + """
for tag in range(200):
    sizes = [(tag * 7919 * (r + 1)) % 50_000 if tag % 3 else 0 for r in range(world)]
    data = [bytes((tag + r + i) % 251 for i in range(251)) * (n // 251 + 1) for r, n in enumerate(sizes)]
    ctypes.memmove(struct.part(struct.self), data[own], sizes[own])
    parts = (ctypes.c_void_p * world)()
    check(struct.all_gather(struct.self, tag, (ctypes.c_int64 * world)(*sizes), parts))
    assert [ctypes.string_at(parts[r], n) for r, n in enumerate(sizes)] == [d[:n] for d, n in zip(data, sizes)]
    root = tag % world
    if own == root:
        ctypes.memmove(struct.part(struct.self), data[own], sizes[own])
    found = ctypes.c_void_p()
    pointer = ctypes.cast(ctypes.byref(found), type(parts._type_ and ctypes.pointer(found)))
    check(struct.broadcast(struct.self, tag, root, sizes[root], 1, pointer))
    assert ctypes.string_at(found, sizes[root]) == data[root][: sizes[root]]
    check(struct.barrier(struct.self, tag))
rows = np.random.default_rng(1).random((1 << 20) + 1)  # several messages, the last a short one
for source in range(1, world):
    if own == 0:
        check(struct.send(struct.self, source, rows.ctypes.data, rows.nbytes))
    if own == source:
        other = np.empty_like(rows)
        check(struct.recv(struct.self, 0, other.ctypes.data, other.nbytes))
        assert np.array_equal(other, rows)
times = sorted(comm.probe(16384, 200))
say(median_us=times[100] / 1000)
comm.close()
"""
)


def test_exchanges(capfd: pytest.CaptureFixture[str]) -> None:
    for world in (1, 2, 3):
        done = run_ranks("mpiexec", world, sys.executable, "-c", EXCHANGES)
        assert (done.returncode, done.stderr) == (0, ""), done.stderr
        assert done.stdout.count("median_us") == world


def run_faulty(fault: str, world: int = 2) -> str:
    """Run ranks of which one fails; return the error that rank 0 gets.

    Without Hydra's own clean-up, so that it is ours that ends the ranks.
    """
    script = MPI_FAULT.replace("FAULT", fault)
    command = [mpiexec(), "-disable-auto-cleanup", "-n", str(world), sys.executable, "-c", script]
    env = environment(PYTHONUNBUFFERED="")  # ranks write whole lines
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)
    error: dict[str, Any] = {}
    pids = []
    assert process.stdout is not None
    for line in process.stdout:
        message = json.loads(line)
        pids += [message["pid"]] if "pid" in message else []
        if "error" in message and message["rank"] == 0:
            error = message
            break
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.communicate(timeout=300)
    return str(error["error"])


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ("if own == 1: os._exit(0)", "rank 1 ended"),
        ("if own == 1: comm.close(); time.sleep(4)", "rank 1 ended"),
        ("if own == 1: comm.abort('rank 1: a fault of the program')", "rank 1: a fault of the program"),
        ("if own == 1: struct.barrier(struct.self, 7)", "ranks (0 and 1|1 and 0) do not run the same step: exchange"),
        (f"if own == 1: os.kill(os.getpid(), {int(signal.SIGSTOP)})", "rank 1 is lost: no heartbeat for 1700 ms"),
    ],
)
def test_a_rank_that_fails_ends_the_group(fault: str, expected: str) -> None:
    before = set(os.listdir(SHARED_FILES))
    error = run_faulty(fault)
    assert re.search(f"the group was ended: {expected}", error)  # by the rank that sees it first
    assert not left_in_shared_memory(before)


LATE = """
import os, sys, time
from pathlib import Path
from penstock import lite
from penstock.errors import PenstockError
from penstock.launch.environment import read_rank_environment
rank, folder = read_rank_environment().rank, Path(sys.argv[2])
def wait_for(name):
    while not (folder / name).exists():
        time.sleep(0.02)
if rank:
    wait_for("given up" if sys.argv[3] == "comes" else "never")
options = {"transport": "mpi", "trusted_network": True, "join_timeout_s": 2}
try:
    lite.Model().build_from_file(sys.argv[1].replace("{rank}", str(rank)), lite.ModelType.PENSTOCK, config=options)
except PenstockError as error:
    print(rank, error.code, error, flush=True)
    (folder / ("answered" if rank else "given up")).touch()
    if sys.argv[3] == "comes":
        wait_for("answered")
    sys.exit(3)
"""


@pytest.mark.long
@pytest.mark.parametrize("what", ["never", "comes"])
def test_ranks_over_mpi_wait_no_longer_than_asked(what: str, demo_ranks: Path, tmp_path: Path) -> None:
    """A rank that never comes, and one that comes when the other has given up but still runs."""
    before = set(os.listdir(SHARED_FILES))
    done = run_ranks("mpiexec", 2, sys.executable, "-c", LATE, pattern(demo_ranks), tmp_path, what)
    reason = "ranks: not all of 2 ranks joined over MPI within 2 s"
    assert f"0 unavailable {reason}\n" in done.stdout
    assert (f"1 unavailable ranks: the group was ended: {reason}\n" in done.stdout) == (what == "comes")
    assert done.returncode == 3
    assert not left_in_shared_memory(before)


def test_mpi_is_refused_where_it_should_be(monkeypatch: pytest.MonkeyPatch) -> None:
    with raises(InvalidArgumentError, param="trusted_network"):
        MpiComm(0, 1, 4096, trusted_network=False)
    with raises(InvalidArgumentError, param="transport"):
        read_config({"transport": "carrier pigeon"})
    monkeypatch.setenv("PENSTOCK_MPI_LIBRARY", "/nowhere/libmpi_abi.so")
    with raises(UnsupportedError, param="ranks", match=r"no MPI library: pip install 'penstock\[mpi\]'"):
        MpiComm(0, 1, 4096, trusted_network=True)
