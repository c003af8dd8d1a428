"""The examples of docs/offline.md run as they stand, where PyTorch cannot be imported."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import environment
from tests.lite.demo import ROOT

EXAMPLES = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "offline.md").read_text(), re.DOTALL)


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_examples(number: int, tmp_path: Path) -> None:
    (tmp_path / "demo").symlink_to(ROOT / "demo")
    script = "import sys; sys.modules['torch'] = None\n" + EXAMPLES[number]
    command = [sys.executable, "-W", "error", "-c", script]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
