"""A full disk, a kill or an interrupt leaves no half file; the child never outlives its parent."""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from penstock.errors import FileAccessError, InvalidFileError, UnsupportedError
from penstock.graph import export_child
from penstock.runtime.build import Progress, build_in_child, finish_child, prepare_child
from tests.support.errors import raises
from tests.support.invariant_checkpoints import write_checkpoint
from tests.support.slow_network import write_script
from tests.support.waiting import until

pytestmark = pytest.mark.usefixtures("cold_exports")

ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}


@pytest.mark.long
def test_a_network_script_may_print_and_progress_comes_through(tmp_path: Path) -> None:
    folder, seen = write_checkpoint(tmp_path / "model"), []
    network, _ = write_script(tmp_path, 0)
    report = build_in_child(folder, tmp_path / "out.psm", network=network, progress=seen.append)
    assert report["file_bytes"] == (tmp_path / "out.psm").stat().st_size
    assert seen[0] == Progress("capture")
    assert seen[-1].stage == "pack"
    assert seen[-1].done == seen[-1].total


def test_errors_of_the_child_come_back_as_they_were(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model")
    (folder / "model.safetensors").write_bytes(b"12345678")
    with raises(InvalidFileError, match=r"^model\.safetensors: "):
        build_in_child(folder, tmp_path / "out.psm")
    with raises(FileAccessError, param="out"):
        build_in_child(folder, tmp_path / "gone" / "out.psm")
    (tmp_path / "net.py").write_text("raise RuntimeError('a mistake in the script')")
    with pytest.raises(InvalidFileError, match=r"net\.py:1: RuntimeError: a mistake in the script$"):
        build_in_child(write_checkpoint(tmp_path / "other"), tmp_path / "out.psm", network=f"{tmp_path}/net.py:Net")
    assert not list(tmp_path.glob(".*"))


def test_a_child_that_died_before_gives_its_own_error(tmp_path: Path) -> None:
    """The line that it never read is not written again when its stream is closed."""
    folder = write_checkpoint(tmp_path / "model")
    (folder / "model.safetensors").write_bytes(b"12345678")
    with prepare_child(folder) as child:
        child.wait()
        with raises(InvalidFileError, match=r"^model\.safetensors: "):
            finish_child(child, folder, tmp_path / "out.psm")


def test_a_process_without_a_place_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["export_child", "model"])
    with pytest.raises(SystemExit, match="2"):
        export_child.main()


def test_without_torch_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UnsupportedError, match=rf"{re.escape(str(tmp_path))}: .* requires .*\S+\[torch\]"):
        build_in_child(tmp_path, tmp_path / "out.psm", network="net.py:Net")


PARENT = """
import sys
from penstock.runtime.build import build_in_child
try:
    build_in_child({folder!r}, {out!r}, network={network!r})
except KeyboardInterrupt:
    sys.exit(130)
"""


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL, signal.SIGTERM])
def test_the_child_ends_with_its_parent_and_leaves_no_file(tmp_path: Path, number: int) -> None:
    folder = write_checkpoint(tmp_path / "model")
    network, started = write_script(tmp_path, 600)  # longer than is waited for its end
    script = PARENT.format(folder=str(folder), out=str(tmp_path / "out.psm"), network=network)
    parent = subprocess.Popen([sys.executable, "-c", script], env=ENVIRONMENT)
    until(started.exists)
    children = psutil.Process(parent.pid).children(recursive=True)
    assert children
    parent.send_signal(number)
    assert parent.wait(600) == (130 if number == signal.SIGINT else -number)
    until(lambda: not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children))
    until(lambda: not list(tmp_path.glob(".*")))
    assert not (tmp_path / "out.psm").exists()


def test_a_killed_child_is_an_error_that_says_so(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model")
    network, started = write_script(tmp_path, 600)
    script = PARENT.format(folder=str(folder), out=str(tmp_path / "out.psm"), network=network)
    parent = subprocess.Popen([sys.executable, "-c", script], env=ENVIRONMENT, stderr=subprocess.PIPE, text=True)
    until(started.exists)
    for child in psutil.Process(parent.pid).children():
        child.kill()
    _, errors = parent.communicate(timeout=600)
    assert "killed by SIGKILL" in errors
    assert not list(tmp_path.glob(".*"))


@pytest.mark.long
def test_a_full_disk_leaves_no_file(tmp_path: Path) -> None:
    """A limit on file sizes stands in for the full disk: the write fails half way."""
    folder = write_checkpoint(tmp_path / "model")
    old = (tmp_path / "out.psm", b"what was there before")
    old[0].write_bytes(old[1])
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(FileAccessError, match=f"^{old[0]}: File too large$"):
            build_in_child(folder, tmp_path / "out.psm")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert old[0].read_bytes() == old[1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "out.psm"]


@pytest.mark.long
def test_the_parent_never_imports_torch(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model")
    script = PARENT.format(folder=str(folder), out=str(tmp_path / "out.psm"), network=None)
    script += "\nassert 'torch' not in sys.modules\n"
    subprocess.run([sys.executable, "-c", script], env=ENVIRONMENT, check=True)
    assert (tmp_path / "out.psm").exists()
