"""Steps allocate nothing: all memory is there when a program is made."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
NUM_TOKENS = 80  # several pages of keys and values


def counted(command: Callable[..., str], installed: Path, folder: Path, *flags: str) -> Path:
    (library,) = installed.glob("lib*/**/libpenstock.a")
    sources = [ROOT / "examples" / "c" / "generate.c", HERE / "count_allocations.c"]
    words = ["-D_GNU_SOURCE", "-Wl,--wrap=ps_program_step", *flags, "-I", installed / "include", *sources, library]
    command("cc", *words, "-lpthread", "-lm", "-ldl", "-o", folder / "counted")
    return folder / "counted"


def allocations(program: Path, bundle: Path) -> int:
    words = [program, bundle, "def add(a, b):\n    return", str(NUM_TOKENS), "0.9", "1"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    found = re.search(r"(\d+) steps, (\d+) allocations", done.stderr)
    assert found, done.stderr
    assert int(found[1]) >= NUM_TOKENS // 2
    return int(found[2])


@pytest.mark.parametrize("scheme", ["f32", "w8a8", "w4a8"])
def test_steps_do_not_allocate(scheme: str, installed: Path, bundles, command, tmp_path: Path) -> None:
    """Prompt and decoding, in all threads."""
    assert allocations(counted(command, installed, tmp_path), bundles[scheme]) == 0


def test_an_allocation_would_be_seen(installed: Path, bundles, command, tmp_path: Path) -> None:
    assert allocations(counted(command, installed, tmp_path, "-DPLANTED"), bundles["w8a8"]) >= NUM_TOKENS // 2
