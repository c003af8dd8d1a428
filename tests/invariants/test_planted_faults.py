"""The invariance tests can fail: against a core with a fault planted in it, each of them does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FAULTS = {
    "split_k": ("test_batch_matches_single", "test_chunked_matches_whole", "test_long_prompts_match"),
    "split_threads": ("test_threads_match", "test_long_prompts_match"),
    "level": ("test_levels_match",),
}


@pytest.fixture(scope="session")
def planted_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    build = tmp_path_factory.mktemp("planted")
    configure = ["cmake", "-S", str(ROOT), "-B", str(build), "-DPENSTOCK_PLANTED=ON", "-DCMAKE_BUILD_TYPE=Release"]
    subprocess.run(configure, check=True, capture_output=True)
    subprocess.run(["cmake", "--build", str(build), "-j2", "--target", "penstock"], check=True, capture_output=True)
    return build / "libpenstock.so"


@pytest.mark.parametrize(("fault", "test"), [(fault, test) for fault, tests in FAULTS.items() for test in tests])
def test_planted_fault_is_noticed(fault: str, test: str, planted_library: Path) -> None:
    """In float schemes, where splitting a sum changes bits; integer sums are exact in any order."""
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", "--no-header", "--import-mode=importlib"]
    command += [f"tests/invariants/test_same_in_any_company.py::{test}", "-k", "f32 and KvLayout.F32"]
    environment = os.environ | {"PENSTOCK_LIBRARY": str(planted_library), "PYTHONDONTWRITEBYTECODE": "1"}

    def run(plant: str | None) -> subprocess.CompletedProcess[str]:
        planted = environment | ({"PENSTOCK_PLANT": plant} if plant else {})
        return subprocess.run(command, cwd=ROOT, env=planted, capture_output=True, text=True, check=False)

    assert run(None).returncode == 0, "the same library without a fault passes"
    planted = run(fault)
    assert planted.returncode == 1, planted.stdout + planted.stderr
    assert "AssertionError" in planted.stdout
