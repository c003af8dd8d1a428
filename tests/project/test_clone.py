"""What a newcomer types first, in a clone of the repository: ``make demo``, and the lines that install Penstock."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.documents import ROOT, blocks

SECONDS = 1700.0  # less than a long test may take


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The files that git tracks, as they are now."""
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False).stdout
    if not tracked:
        pytest.skip("the sources are not a git repository")
    root = tmp_path_factory.mktemp("clone")
    for name in tracked.strip("\0").split("\0"):
        if (ROOT / name).is_file():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, root / name)
    yield root
    shutil.rmtree(root)


def run(script: str, folder: Path) -> str:
    """Run shell lines as a user without settings of their own; return the output.

    Only the launcher of the compiler is the tests', which copies what another build of this run compiled.
    """
    kept = ("PATH", "LANG", "PIP_", "SSL_", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")
    kept += ("CMAKE_CXX_COMPILER_LAUNCHER", "PENSTOCK_TEST_OBJECTS", "CCACHE_")
    env = {name: value for name, value in os.environ.items() if name.upper().startswith(kept)}
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script], cwd=folder, env={**env, "HOME": str(folder / "home")},
        stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=SECONDS,
    )  # fmt: skip
    assert done.returncode == 0, f"{script}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.long
def test_make_demo_runs_in_a_clone(clone: Path) -> None:
    shown = run("make demo", clone)
    prompt = (clone / "demo" / "prompt.py").read_text()
    assert prompt in shown
    assert len(shown.partition(prompt)[2]) > 200
    assert "Next: source .venv/bin/activate" in shown


@pytest.mark.long
def test_the_install_lines_of_the_readme_run(clone: Path) -> None:
    """All but the download of PyTorch, which `make test` installs by the same extra."""
    (block,) = (
        block for block in blocks(clone / "README.md") if block.test.endswith("install_lines_of_the_readme_run")
    )
    lines = block.code.splitlines()
    assert [line.split("#")[0].strip() for line in lines if "[torch]" in line] == [
        "pip install '.[torch]' --extra-index-url https://download.pytorch.org/whl/cpu"
    ]
    shutil.rmtree(clone / ".venv", ignore_errors=True)
    script = "\n".join(line for line in lines if "[torch]" not in line)
    shown = run(
        f'{script}\ncd /\npenstock run "{clone}/demo/demo.psm" "def add(" --max-tokens 4\nwhich penstock-lite', clone
    )
    assert shown.splitlines()[-1] == str(clone / ".venv" / "bin" / "penstock-lite")
