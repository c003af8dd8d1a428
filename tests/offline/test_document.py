"""The examples of docs/guides/offline.md run as they stand, where PyTorch cannot be imported."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.command import environment
from tests.support.documents import blocks
from tests.support.lite_demo import ROOT

PAGE = ROOT / "docs" / "guides" / "offline.md"
EXAMPLES = [block.code for block in blocks(PAGE) if block.language == "python" and not block.is_long]


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_examples(number: int, tmp_path: Path) -> None:
    (tmp_path / "demo").symlink_to(ROOT / "demo")
    script = "import sys; sys.modules['torch'] = None\n" + EXAMPLES[number]
    command = [sys.executable, "-W", "error", "-c", script]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_yaml_file_that_the_page_shows_is_one(tmp_path: Path) -> None:
    from penstock.offline.export_config import read_export_config

    (text,) = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (tmp_path / "export.yaml").write_text(text)
    config = read_export_config(tmp_path / "export.yaml")
    assert (config.checkpoint, config.scheme, config.tail) == (Path("/path/of/checkpoint"), "w8a8", None)
    assert config.increment == tmp_path / "demo_inc_graph.psm"
