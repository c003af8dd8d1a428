"""PyTorch's own samples of its operations give what PyTorch computes, or are refused."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

CHECK = Path(__file__).with_name("opinfo_check.py")


@pytest.mark.exhaustive
def test_samples_of_operations_are_equal_or_refused() -> None:
    done = subprocess.run([sys.executable, str(CHECK), "2"], capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    outcomes = [json.loads(line) for line in done.stdout.splitlines()]
    assert [item for item in outcomes if item[1] not in ("equal", "refused")] == []
    assert Counter(outcome for _, outcome, _ in outcomes)["equal"] >= 45
