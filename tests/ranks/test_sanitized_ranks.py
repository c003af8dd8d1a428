"""Ranks as threads under ThreadSanitizer and AddressSanitizer: random batches, and groups that end in the middle."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.core.rank_layout import RankLayout
from tests.support.builds import build

BundleOf = Callable[[str, str], Path]
PartsOf = Callable[[Path, RankLayout | int], list[Path]]


SHORT_CONTEXT = {"part": [RankLayout(3), RankLayout(pp=2)], "twos": [RankLayout(2)]}
LONG_CONTEXT = {"part": [RankLayout(cp=3), RankLayout(2, 1, 2)], "twos": [RankLayout(cp=2)]}
"""``RankLayout(2, 1, 2)`` has the groups of two that ``twos`` have one by one."""


@pytest.mark.long
@pytest.mark.parametrize("layouts", ["part", pytest.param("twos", marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("build_of", ["thread_sanitized_build", "sanitized_build"])
def test_ranks_under_a_sanitizer(
    build_of: str,
    layouts: str,
    request: pytest.FixtureRequest,
    bundle_of: BundleOf,
    long_context_of: BundleOf,
    parts_of: PartsOf,
) -> None:
    folder = request.getfixturevalue(build_of)
    build(folder, "rank_check")
    whole = bundle_of("llama_head_dim", "w8a8")
    longer = long_context_of("llama_head_dim", "w8a8")
    cases = [(whole, layout) for layout in SHORT_CONTEXT[layouts]]
    cases += [(longer, layout) for layout in LONG_CONTEXT[layouts]]
    for path, layout in cases:
        options = ["--stages"] if layout.pp > 1 else []
        parts = parts_of(path, layout)
        command = [folder / "core" / "tools" / "rank_check", "24", path, *options, *parts]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ, timeout=1200)
        assert done.returncode == 0, done.stdout + done.stderr
