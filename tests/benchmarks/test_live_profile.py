"""benchmarks/live_profile.py: turns with and without a recorder alternate, each with a new recorder."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "benchmarks"))

import live_profile  # noqa: E402


def test_turns_with_a_recorder_record_some_of_their_steps() -> None:
    program, engine = live_profile.open_steps(str(ROOT / "demo" / "demo.psm"), 1, 2, live_profile.PROMPT_LEN + 4)
    pairs = live_profile.run_pairs(program, engine, 2, 3, 2)
    program.close()
    assert len(pairs) == 2
    for plain, recorded in pairs:
        assert len(plain.times) == len(recorded.times) == 3
        assert plain.num_recorded == 0 < recorded.num_recorded <= 3
