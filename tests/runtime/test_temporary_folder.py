"""Temporary folders: those of killed processes are removed by the next one, those of living ones are not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.runtime import temporary_folder as module
from penstock.runtime.temporary_folder import temporary_folder

_OWNER = """
import sys
from penstock.runtime.temporary_folder import temporary_folder
with temporary_folder() as folder:
    open(f"{folder}/calibrated.psm", "w").close()
    print(folder, flush=True)
    sys.stdin.read()
"""


def test_a_killed_process_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_GRACE_SECONDS", -1e9)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", _OWNER]
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        path = Path(process.stdout.readline().strip())
        with temporary_folder() as own:
            assert (path / "calibrated.psm").exists()
            assert sorted(entry.name for entry in tmp_path.iterdir()) == sorted([path.name, Path(own).name])
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert path.exists()
    with temporary_folder() as own:
        assert [entry.name for entry in tmp_path.iterdir()] == [Path(own).name]
    assert list(tmp_path.iterdir()) == []
