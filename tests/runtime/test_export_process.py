"""An export in a copy of its process gives the same bundle as one in a new interpreter, and ends as that does."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from penstock.runtime import export_process
from penstock.runtime.build import build_in_child
from tests.support.invariant_checkpoints import write_checkpoint
from tests.support.waiting import until

pytestmark = pytest.mark.usefixtures("cold_exports")

ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
SCRIPT = """
import sys
from penstock.runtime.export_process import allow_copies
allow_copies()
print("before", end=" ")
from penstock.runtime.build import finish_child, prepare_child
with prepare_child(sys.argv[1]) as child:
    print(type(child).__name__, child.pid, flush=True)
    sys.stdin.readline()
    finish_child(child, sys.argv[1], sys.argv[2])
"""
DEMO = Path(__file__).parents[2] / "demo" / "model"
FIRST_RUN = """
import resource, sys, tempfile
from penstock.runtime import cache, export_process
class Noted(export_process._Copy):
    def __init__(self, arguments):
        super().__init__(arguments)
        print("exported in a copy", file=sys.stderr)
export_process._Copy = Noted
if sys.argv[1] == "True":  # a limit on the size of files stands in for the full disk
    from penstock.runtime import build
    tempfile.tempdir = "/absent"
    real, limits = build.build_in_child, resource.getrlimit(resource.RLIMIT_FSIZE)
    def fill(source, out, **how):
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
        try:
            return real(source, out, **how)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    def note(source, out, **how):
        print("made in", out, file=sys.stderr)
        return real(source, out, **how)
    cache.build_in_child, build.build_in_child = fill, note
sys.argv = ["penstock", *sys.argv[2:]]
from penstock.cli.main import main
raise SystemExit(main())
"""


@contextmanager
def exporting(folder: Path, out: Path) -> Iterator[tuple[subprocess.Popen[str], psutil.Process]]:
    """Yield a process and its copy, which waits for a line of the process's input to write the bundle."""
    command = [sys.executable, "-c", SCRIPT, str(folder), str(out)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=ENVIRONMENT, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as parent:
        assert parent.stdout is not None
        before, kind, pid = parent.stdout.readline().split()
        assert (before, kind) == ("before", "_Copy")
        yield parent, psutil.Process(int(pid))


def has_ended(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_a_copy_makes_the_bundle_of_a_new_interpreter(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model")
    with exporting(folder, tmp_path / "copy.psm") as (parent, _):
        output, errors = parent.communicate("\n")
    assert (parent.returncode, output, errors) == (0, "", "")
    build_in_child(folder, tmp_path / "new.psm")
    assert (tmp_path / "copy.psm").read_bytes() == (tmp_path / "new.psm").read_bytes()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL, signal.SIGTERM])
def test_a_copy_ends_with_its_original(number: int, tmp_path: Path) -> None:
    with exporting(write_checkpoint(tmp_path / "model"), tmp_path / "out.psm") as (parent, copy):
        parent.send_signal(number)
        parent.communicate()
        until(lambda: has_ended(copy))
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_killed_copy_is_an_error_that_says_so(tmp_path: Path) -> None:
    with exporting(write_checkpoint(tmp_path / "model"), tmp_path / "out.psm") as (parent, copy):
        copy.kill()
        _, errors = parent.communicate("\n")
    assert "killed by SIGKILL" in errors
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_an_error_in_a_copy_comes_back_as_it_was(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model")
    (folder / "model.safetensors").write_bytes(b"12345678")
    with exporting(folder, tmp_path / "out.psm") as (parent, _):
        _, errors = parent.communicate("\n")
    assert "penstock.errors.InvalidFileError: model.safetensors: " in errors


@contextmanager
def first_run(cache: Path, *, is_full: bool = False) -> Iterator[subprocess.Popen[str]]:
    """Yield a run of the demo model by the command, which notes its copies; ``is_full``: the disk is."""
    command = [
        sys.executable,
        "-c",
        FIRST_RUN,
        str(is_full),
        "run",
        str(DEMO),
        "Hi",
        "--max-tokens",
        "2",
        "--temperature",
        "0",
    ]
    environment = ENVIRONMENT | {"PENSTOCK_CACHE_DIR": str(cache)}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True) as process:
        yield process


def test_two_first_runs_at_once_pack_once(tmp_path: Path) -> None:
    """One waits for the lock of the other, and opens what the copy of that one made."""
    with first_run(tmp_path) as one, first_run(tmp_path) as other:
        results = [process.communicate() for process in (one, other)]
    assert [one.returncode, other.returncode] == [0, 0], results
    assert results[0][0] == results[1][0]
    assert sorted(errors.count("exported in a copy") for _, errors in results) == [0, 1]
    assert len(list(tmp_path.glob("*.psm"))) == 1


def test_a_full_disk_runs_from_memory_with_a_warning(tmp_path: Path) -> None:
    """The write of a copy fails half way; another copy writes to memory, of which nothing is left."""
    with first_run(tmp_path / "cache") as process:
        text, _ = process.communicate()
    with first_run(tmp_path / "full", is_full=True) as process:
        result, errors = process.communicate()
    assert (process.returncode, result) == (0, text), errors
    assert "PENSTOCK_CACHE_DIR" in errors
    assert errors.count("exported in a copy") == 2
    assert not [path for path in (tmp_path / "full").iterdir() if path.suffix in (".psm", ".partial", ".json")]
    (made,) = re.findall("made in (/dev/shm/.*)", errors)
    assert not Path(made).parent.exists()


@pytest.mark.parametrize("reason", ["allowed", "thread", "torch", "script"])
def test_only_a_process_without_other_work_is_copied(reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread may hold a lock that the copy would wait for, and PyTorch has threads of its own."""
    made: list[str] = []
    monkeypatch.setattr(export_process, "_Copy", lambda _: made.append("copy"))
    monkeypatch.setattr(export_process, "new_interpreter", lambda _: made.append("new"))
    monkeypatch.setattr(export_process, "_allowed", [])
    monkeypatch.setattr(export_process, "_known_threads", [])
    for name in [name for name in sys.modules if name == "torch"]:
        monkeypatch.delitem(sys.modules, name)
    stop = threading.Event()
    other = threading.Thread(target=stop.wait)
    try:
        if reason != "allowed":
            export_process.allow_copies()
        export_process.start_export([], is_own_code=True)
        if reason == "thread":
            other.start()
        elif reason == "torch":
            monkeypatch.setitem(sys.modules, "torch", export_process)
        export_process.start_export([], is_own_code=reason != "script")
    finally:
        stop.set()
    assert made == ["new" if reason == "allowed" else "copy", "new"]
