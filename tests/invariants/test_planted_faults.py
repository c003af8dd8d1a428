"""The invariance tests can fail: against a core with a fault planted in it, each of them does.  And a step that fails
in the native program ends its requests, not the process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.lite.core import Model

ROOT = Path(__file__).parents[2]
FAULTS = {
    "split_k": ("test_batch_matches_single", "test_chunked_matches_whole", "test_long_prompts_match"),
    "split_threads": ("test_threads_match", "test_long_prompts_match", "test_save_load_matches"),
    "level": ("test_levels_match",),
}


@pytest.fixture(scope="session")
def planted_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    build = tmp_path_factory.mktemp("planted")
    configure = ["cmake", "-S", str(ROOT), "-B", str(build), "-DPENSTOCK_PLANTED=ON", "-DCMAKE_BUILD_TYPE=Release"]
    subprocess.run(configure, check=True, capture_output=True)
    subprocess.run(["cmake", "--build", str(build), "-j2", "--target", "penstock"], check=True, capture_output=True)
    return build / "libpenstock.so"


@pytest.fixture(scope="session")
def run_planted(
    planted_library: Path, bundles: Path, model_of: Callable[[str], Model]
) -> Callable[[str | None, str], subprocess.CompletedProcess[str]]:
    """(fault or None, test) -> the finished run, with scheme f32, where splitting a sum changes bits; integer sums are
    exact in any order."""
    model_of("f32")
    base = os.environ | {
        "PENSTOCK_LIBRARY": str(planted_library),
        "PENSTOCK_TEST_BUNDLES": str(bundles),
        "PYTHONDONTWRITEBYTECODE": "1",
    }

    def run(fault: str | None, test: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", "--import-mode=importlib"]
        command += ["tests/invariants/test_same_in_any_company.py", "-k"]
        command += [f"{test} and kv_f32 and not f16 and not w8a and not w4a"]
        environment = base | ({"PENSTOCK_PLANT": fault} if fault else {})
        return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)

    return run


def test_without_a_fault_the_planted_library_passes(
    run_planted: Callable[[str | None, str], subprocess.CompletedProcess[str]],
) -> None:
    done = run_planted(None, "test_")
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(("fault", "test"), [(fault, test) for fault, tests in FAULTS.items() for test in tests])
def test_planted_fault_is_noticed(
    fault: str, test: str, run_planted: Callable[[str | None, str], subprocess.CompletedProcess[str]]
) -> None:
    done = run_planted(fault, test)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "AssertionError" in done.stdout


@pytest.fixture(scope="session")
def run_engine(planted_library: Path, bundles: Path, model_of: Callable[[str], Model]) -> Callable[[str | None], dict]:
    """fault or None -> what became of the requests of planted_engine.py."""
    model_of("f32")

    def run(fault: str | None) -> dict:
        environment = os.environ | {"PENSTOCK_LIBRARY": str(planted_library), "PYTHONPATH": str(ROOT)}
        environment |= {"PENSTOCK_PLANT": fault} if fault else {}
        command = [sys.executable, "-m", "tests.invariants.planted_engine", str(bundles / "f32.psm")]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("step_fails", "InternalError: planted: a step of 13 tokens"),
        ("not_a_number", "InternalError: the model's logits are not finite"),
    ],
)
def test_a_step_that_fails_in_the_native_program_ends_its_requests_alone(
    fault: str, message: str, run_engine: Callable[[str | None], dict]
) -> None:
    sound, found = run_engine(None), run_engine(fault)
    assert sound["errors"] == [None] * 3
    assert sound["made"] == [6] * 3
    assert [error[: len(message)] for error in found["errors"]] == [message] * 3
    assert found["made"] == [1, 1, 0]
    assert (sound["named_pages"], found["named_pages"]) == (1, 0)  # what failed is not shared again
    assert found["waiting"] == sound["waiting"]
    assert found["later"] == sound["later"]
    assert len(found["later"]) == 6
    assert found["held_pages"] == 0
