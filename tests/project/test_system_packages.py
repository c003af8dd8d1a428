"""The README's test command brings the system packages that tests need, or the summary says how to."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import system_packages
from tests.system_packages import AARCH64, BROWSER, PACKAGES, skip_reason

ROOT = Path(__file__).parents[2]


def test_a_skip_names_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert skip_reason("flatc") == "flatc not found; run: sudo apt-get install flatbuffers-compiler"
    both = "flatc, curl not found; run: sudo apt-get install flatbuffers-compiler curl"
    assert skip_reason("flatc", "curl") == both
    (tmp_path / "flatc").touch(0o700)
    assert skip_reason("flatc") == ""
    assert skip_reason("flatc", "curl") == "curl not found; run: sudo apt-get install curl"


def test_tests_ask_for_known_programs() -> None:
    known = {**PACKAGES, **AARCH64, **BROWSER}
    for path in sorted((ROOT / "tests").rglob("*.py")):
        text = path.read_text()
        asked = re.findall(r'"([^"]+)"', " ".join(re.findall(r"skip_reason\(([^)]*)\)", text)))
        assert path == Path(__file__) or set(asked) <= set(known), path
        assert path == Path(__file__) or not re.search(r"skipif\(shutil\.which", text), f"{path}: use skip_reason"


@pytest.mark.parametrize(("is_root", "has_apt"), [(False, True), (True, False), (True, True)])
def test_packages_that_cannot_be_installed_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], is_root: bool, has_apt: bool
) -> None:
    """Also where installing fails; the command goes on, and the tests in question are skipped."""
    tried: list[list[str]] = []

    def refuse(packages: list[str]) -> bool:
        tried.append(packages)
        return False

    monkeypatch.setattr(os, "geteuid", lambda: 0 if is_root else 1000)
    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/apt-get" if has_apt and name == "apt-get" else None)
    monkeypatch.setattr(system_packages, "install", refuse)
    monkeypatch.setattr(sys, "argv", ["system_packages.py"])
    system_packages.main()
    said = capsys.readouterr().out.splitlines()[-1]
    assert said.startswith("Some tests will be skipped. To run them: sudo apt-get install flatbuffers-compiler ")
    assert len(tried) == (is_root and has_apt)


@pytest.mark.skipif(shutil.which("make") is None, reason="no make")
def test_the_test_command_installs_before_it_tests() -> None:
    done = subprocess.run(["make", "--dry-run", "test"], cwd=ROOT, capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    install = next(i for i, line in enumerate(lines) if line.endswith("tests/system_packages.py"))
    assert install < next(i for i, line in enumerate(lines) if "/pytest " in line)
    ci = [line for line in (ROOT / ".ci" / "run").read_text().splitlines() if line and not line.startswith("#")]
    assert ci[:2] == ["set -euo pipefail", 'cd "$(dirname "$0")/.."']
    assert [line for line in ci[2:] if not line.startswith(("mkdir ", "export ", "python="))] == [
        "make test",
        "make test-all",
    ]
