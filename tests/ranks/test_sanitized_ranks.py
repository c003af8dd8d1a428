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


@pytest.mark.long
@pytest.mark.parametrize("build_of", ["thread_sanitized_build", "sanitized_build"])
def test_ranks_under_a_sanitizer(
    build_of: str,
    request: pytest.FixtureRequest,
    bundle_of: BundleOf,
    long_context_of: BundleOf,
    parts_of: PartsOf,
) -> None:
    folder = request.getfixturevalue(build_of)
    build(folder, "rank_check")
    whole = bundle_of("llama_head_dim", "w8a8")
    longer = long_context_of("llama_head_dim", "w8a8")
    cases = [(whole, RankLayout(2)), (whole, RankLayout(3)), (whole, RankLayout(pp=2))]
    cases += [(longer, RankLayout(cp=2)), (longer, RankLayout(cp=3)), (longer, RankLayout(2, 1, 2))]
    for path, layout in cases:
        options = ["--stages"] if layout.pp > 1 else []
        parts = parts_of(path, layout)
        command = [folder / "core" / "tools" / "rank_check", "24", path, *options, *parts]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ, timeout=1200)
        assert done.returncode == 0, done.stdout + done.stderr
