"""The floating-point environment of the caller changes no result, and is the caller's again after each call."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from penstock.core.native import Context, CoreProgram, Model
from tests.core.under_float_control import PROMPT, quiet_values
from tests.support.core_steps import OPTIONS, batch, sampling
from tests.support.tiny_graph import tiny_graph, write_bundle

HERE = Path(__file__).parent
# MXCSR on x86-64, FPCR on AArch64, whose processors need not be able to trap.
CONTROLS = (
    {"flush": 0x9FC0, "downward": 0x3F80, "upward": 0x5F80, "to_zero": 0x7F80, "unmasked": 0x0000, "flags_set": 0x1FBF,
     "unmasked_flush": 0x8040}
    if platform.machine() == "x86_64"
    else {"flush": 1 << 24, "downward": 2 << 22, "upward": 1 << 22, "to_zero": 3 << 22, "default_nan": 1 << 25}
)  # fmt: skip


@pytest.fixture(scope="module")
def register(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library that reads and writes the control register."""
    path = tmp_path_factory.mktemp("register") / "float_control.so"
    include = HERE.parents[1] / "core" / "include"
    source = str(HERE / "float_control.c")
    subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-I", str(include), source, "-o", str(path)], check=True)
    return path


def checksum(folder: Path, register: Path, control: str) -> str:
    """Of all that the core computes under ``control``; in a process of its own, as a trap ends it."""
    command = [sys.executable, str(HERE / "under_float_control.py"), str(folder), str(register), control]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, f"{control}: exit status {done.returncode}\n{done.stderr[-2000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory, register: Path) -> str:
    return checksum(tmp_path_factory.mktemp("default"), register, "default")


@pytest.mark.parametrize("control", CONTROLS)
def test_callers_float_environment_changes_no_bit(control: str, wanted: str, register: Path, tmp_path: Path) -> None:
    assert checksum(tmp_path, register, hex(CONTROLS[control])) == wanted


def test_pytorch_may_flush_denormals(tmp_path: Path) -> None:
    """Set after the threads were started, as two threads would disagree then."""
    torch = pytest.importorskip("torch")
    path = write_bundle(tmp_path / "quiet.psm", tiny_graph(), values=quiet_values("f32"))
    found = []
    with Context(2) as context, Model.open(path) as model, CoreProgram(model, context, OPTIONS) as program:
        for flush in (False, True, True, False):
            assert torch.set_flush_denormal(flush)
            try:
                sampled = program.step(batch([(0, PROMPT, (1,))]), sampling(len(PROMPT)))
                found.append((sampled.ids.tolist(), program.logits().view(np.int32).tolist()))
            finally:
                torch.set_flush_denormal(False)
    assert all(one == found[0] for one in found)
    assert len(set(found[0][0])) > 1
