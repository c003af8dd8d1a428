"""Programs of several ranks: processes that a launcher starts, or that are started by hand."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from penstock import lite
from tests.support.command import DEMO, environment
from tests.system_packages import skip_reason

EXAMPLE = Path(__file__).parents[2] / "examples" / "distributed"
SHARED_FILES = "/dev/shm"  # noqa: S108

PREDICT = """
import sys
import numpy as np
from penstock import lite
pattern, out, options = sys.argv[1], sys.argv[2], eval(sys.argv[3])
rng = np.random.default_rng(3)
def ask(model, rows, reset):
    width = max(map(len, rows))
    ids = np.zeros((len(rows), width), np.int32)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = row
    lens = np.array([len(row) for row in rows], np.int32)
    inputs = [lite.Tensor(a, name=n) for n, a in (("token_ids", ids), ("num_tokens", lens), ("reset", reset))]
    model.resize(model.get_inputs(), [ids.shape, lens.shape, lens.shape])
    return [output.get_data_to_numpy() for output in model.predict(inputs)]
context = lite.Context()
with lite.Model() as model:
    path = pattern.replace("{rank}", str(context.cpu.rank_id))
    model.build_from_file(path, lite.ModelType.PENSTOCK, context, options)
    results = []
    for lens, first in (((37, 5), True), ((1, 1), False), ((20, 1), False), ((0, 9), True), ((70, 70), True)):
        rows = [rng.integers(0, model.get_model_info("vocab_size"), n).tolist() for n in lens]
        results += ask(model, rows, np.full(len(rows), int(first), np.int32))
np.savez(out.replace("{rank}", str(context.cpu.rank_id)), *results)
"""


def pattern(folder: Path) -> str:
    return str(folder / "rank_{rank}.psm")


def expected_lines() -> list[str]:
    """What the example prints, from one process with the whole bundle."""
    with lite.Model() as model:
        model.build_from_file(DEMO, lite.ModelType.PENSTOCK)
        inputs = model.get_inputs()
        for tensor in inputs:
            tensor.set_data_from_numpy(np.ones(tensor.shape, np.int32))
        (output,) = model.predict(inputs)
        values = output.get_data_to_numpy().flatten()[:10]
    name = f"tensor's name is:logits data size is:{output.data_size} tensor elements num is:{output.element_num}"
    return [name, "output data is: " + " ".join(map(str, values))]


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
    if launcher == "mpirun.openmpi":
        if reason := skip_reason("mpirun.openmpi"):
            pytest.skip(reason)
        return ["mpirun.openmpi", "--allow-run-as-root", "--oversubscribe", "-n", str(world)]
    return [sys.executable, "-m", "penstock", "launch", "--nproc", str(world), "--no-prefix", "--"]


def run_ranks(launcher: str, world: int, *command: object, **extra: str) -> subprocess.CompletedProcess[str]:
    """Run a command as ranks under a launcher."""
    words = [*launched(launcher, world), *map(str, command)]
    env = environment(PYTHONUNBUFFERED="", **extra)  # mpiexec mixes what ranks write in pieces
    return subprocess.run(words, capture_output=True, text=True, env=env, timeout=300)


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


def ends_of(processes: Sequence[subprocess.Popen[str]]) -> list[tuple[int, str]]:
    """Return the status and the errors of processes that must end."""
    results = []
    for process in processes:
        try:
            _, err = process.communicate(timeout=120)
        except subprocess.TimeoutExpired:
            process.kill()
            pytest.fail(f"a rank did not end: {process.communicate()}")
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
try:
    while True:
        check(struct.barrier(struct.self, 2))
except PenstockError as error:
    say(error=str(error), rank=own)
    time.sleep(0.5)  # for the others to say the same
    sys.exit(3)
"""
)
