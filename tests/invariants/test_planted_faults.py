"""The invariance tests can fail: against a core with a fault planted in it, each of them does.  And a step that fails
in the native program ends its requests, not the process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from xml.etree import ElementTree

import pytest

from penstock.core.native import Model, cpu_levels
from tests.support.builds import build, configured

pytestmark = pytest.mark.long  # they build a library of their own
ROOT = Path(__file__).parents[2]
TESTS = "tests/invariants/test_same_in_any_company.py"
# (fault, the test that must notice it, scheme, KV format): each kind of linear (float, bf16, integer with weights and
# activations of either width) and each format of pages
FAULTS = [
    ("split_k", "test_batch_matches_single", "f32", "f32"),
    ("split_k", "test_batch_matches_single", "bf16", "bf16"),
    ("split_k", "test_batch_matches_single", "w8a16", "int8"),
    ("split_k", "test_batch_matches_single", "w4a8", "int8"),
    ("split_k", "test_chunked_matches_whole", "f32", "f32"),
    ("split_k", "test_chunked_matches_whole", "f16", "int8"),
    ("split_k", "test_chunked_matches_whole", "w8a8", "bf16"),
    ("split_k", "test_chunked_matches_whole", "w4a16", "int8"),
    ("split_k", "test_long_prompts_match", "f32", "f32"),
    ("split_k", "test_long_prompts_match", "w4a8", "int8"),
    ("split_threads", "test_threads_match", "f32", "f32"),
    ("split_threads", "test_threads_match", "bf16", "bf16"),
    ("split_threads", "test_threads_match", "w8a8", "bf16"),
    ("split_threads", "test_threads_match", "w4a16", "int8"),
    ("split_threads", "test_long_prompts_match", "f32", "f32"),
    ("split_threads", "test_save_load_matches", "f32", "f32"),
    ("split_threads", "test_save_load_matches", "w8a16", "int8"),
    ("split_threads", "test_save_load_matches", "w4a8", "int8"),
    ("level", "test_levels_match", "f32", "f32"),
    ("level", "test_levels_match", "bf16", "bf16"),
    ("level", "test_levels_match", "w8a16", "int8"),
    ("level", "test_levels_match", "w4a8", "int8"),
    ("kv", "test_batch_matches_single", "f32", "f32"),
    ("kv", "test_batch_matches_single", "w4a8", "int8"),
    ("kv", "test_chunked_matches_whole", "w8a8", "bf16"),
    ("kv", "test_chunked_matches_whole", "w4a16", "int8"),
    ("kv", "test_long_prompts_match", "w4a8", "int8"),
    ("kv", "test_batch_matches_single", "w8a8", "int4"),
]
SOUND = [("f32", "f32"), ("w4a8", "int8")]
Outcomes = dict[str, str]  # name of a test, with its parameters -> what it failed with; empty: it passed


@pytest.fixture(scope="session")
def planted_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The core with the faults, and the levels that this machine runs."""
    levels = ";".join(level for level, is_runnable in cpu_levels() if is_runnable)
    folder = configured(tmp_path_factory, "planted", "-DPENSTOCK_PLANTED=ON", f"-DPENSTOCK_LEVELS={levels}")
    build(folder, "penstock")
    return folder / "libpenstock.so"


def of_formats(names: Iterable[str], test: str, scheme: str, kv: str) -> list[str]:
    """Those of a test with such formats: one for each level, where it has levels."""
    ends = f"[{scheme}-kv_{kv}]", f"-{scheme}-kv_{kv}]"
    return [name for name in names if name.startswith(test) and name.endswith(ends)]


@pytest.fixture(scope="session")
def run_planted(
    planted_library: Path, bundles: Path, model_of: Callable[[str], Model], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str | None], Outcomes]:
    """fault, or None -> what became of its tests in FAULTS or, without one, of every test with the formats in SOUND."""
    base = os.environ | {
        "PENSTOCK_LIBRARY": str(planted_library),
        "PENSTOCK_TEST_BUNDLES": str(bundles),
        "PYTHONDONTWRITEBYTECODE": "1",
    }

    @cache
    def run(fault: str | None) -> Outcomes:
        wanted = [case[1:] for case in FAULTS if case[0] == fault] or [("test_", *formats) for formats in SOUND]
        for _, scheme, _ in wanted:
            model_of(scheme)
        report = tmp_path_factory.mktemp("report") / "outcomes.xml"
        chosen = [f"{test} and ([{scheme}-kv_{kv}] or -{scheme}-kv_{kv}])" for test, scheme, kv in wanted]
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--import-mode=importlib", "--tb=line"]
        command += [TESTS, "-k", " or ".join(f"({each})" for each in chosen), f"--junitxml={report}"]
        environment = base | ({"PENSTOCK_PLANT": fault} if fault else {})
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode in (0, 1), done.stdout + done.stderr  # all passed, or some failed
        cases = ElementTree.parse(report).iter("testcase")  # noqa: S314 - what pytest wrote just now
        return {case.get("name", ""): _failure(case) for case in cases}

    return run


def _failure(case: ElementTree.Element) -> str:
    return "".join(part.get("message") or part.tag for part in case)


@pytest.mark.parametrize(("scheme", "kv"), SOUND)
def test_without_a_fault_the_planted_library_passes(
    scheme: str, kv: str, run_planted: Callable[[str | None], Outcomes]
) -> None:
    outcomes = run_planted(None)
    names = of_formats(outcomes, "test_", scheme, kv)
    assert {name.partition("[")[0] for name in names} >= {test for _, test, _, _ in FAULTS}
    failures = {name: outcomes[name] for name in names if outcomes[name]}
    assert not failures


@pytest.mark.parametrize(
    ("fault", "test", "scheme", "kv"),
    FAULTS,
)
def test_planted_fault_is_noticed(
    fault: str, test: str, scheme: str, kv: str, run_planted: Callable[[str | None], Outcomes]
) -> None:
    outcomes = run_planted(fault)
    names = of_formats(outcomes, test, scheme, kv)
    assert names
    missed = [name for name in names if not outcomes[name].startswith(("AssertionError", "assert "))]
    assert not missed, [outcomes[name] for name in missed]


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
        ("not_a_number", "InternalError: The model's logits are not finite"),
    ],
)
def test_a_failed_native_step_ends_only_its_own_requests(
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
