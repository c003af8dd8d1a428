"""What is installed: one small library that needs nothing, one Python-independent wheel."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zlib
from importlib.metadata import distribution
from pathlib import Path

import pytest

import penstock
from penstock.core import native

MAX_LIBRARY_BYTES = 2_500_000  # with every instruction level; tests/devices/test_small.py has one level
MAX_WHEEL_BYTES = 10_000_000


def library() -> Path:
    return Path(native.library_file())


def test_the_library_of_all_levels_is_under_its_limit(tmp_path: Path) -> None:
    stripped = tmp_path / "libpenstock.so"
    shutil.copy(library(), stripped)
    subprocess.run(["strip", "--strip-unneeded", str(stripped)], check=True)
    assert stripped.stat().st_size < MAX_LIBRARY_BYTES


def test_library_needs_only_the_c_library() -> None:
    dynamic = subprocess.run(["readelf", "-d", str(library())], capture_output=True, text=True, check=True).stdout
    needed = {line.split("[")[1].rstrip("]") for line in dynamic.splitlines() if "(NEEDED)" in line}
    assert needed <= {"libc.so.6", "libm.so.6", "libpthread.so.0", "ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"}


def test_library_exports_only_the_c_abi() -> None:
    symbols = subprocess.run(["nm", "-D", "--defined-only", str(library())], capture_output=True, text=True, check=True)
    names = [line.split()[-1] for line in symbols.stdout.splitlines()]
    assert names
    assert all(name.startswith("ps_") for name in names), [n for n in names if not n.startswith("ps_")]


def test_wheel_is_under_ten_megabytes() -> None:
    """The installed files, compressed as in a wheel."""
    files = [Path(str(file.locate())) for file in distribution("penstock").files or [] if file.suffix != ".pyc"]
    sizes = [len(zlib.compress(path.read_bytes())) for path in files if path.is_file()]
    assert 0 < sum(sizes) < MAX_WHEEL_BYTES


def test_wheel_is_bound_to_no_python_version() -> None:
    wheel = distribution("penstock").read_text("WHEEL") or ""
    assert "Tag: py3-none-" in wheel


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A source tree: the package's Python files without the native core, and a pyproject.toml."""
    root = tmp_path_factory.mktemp("clone")
    ignored = shutil.ignore_patterns("*.so", "__pycache__")
    shutil.copytree(Path(penstock.__file__).parent, root / "src" / "penstock", ignore=ignored)
    (root / "pyproject.toml").touch()
    return root


def started_in(clone: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Python started in the clone with these environment variables."""
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONSAFEPATH", "PYTHONPATH")}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=clone, env=env | variables, capture_output=True, text=True, check=False)


def test_python_in_a_clone_imports_the_installed_package(clone: Path) -> None:
    done = started_in(clone, "-c", "import penstock; print(penstock.__file__)")
    assert done.returncode == 0, done.stderr
    assert not Path(done.stdout.strip()).is_relative_to(clone)


def test_a_source_tree_says_that_it_has_no_library(clone: Path) -> None:
    done = started_in(clone, "-m", "penstock", "inspect", __file__, PYTHONPATH=str(clone / "src"))
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"penstock: {clone} is a source tree without the native core. Run `pip install {clone}`")
    script = f"import penstock; penstock.LLM({__file__!r})"
    lines = started_in(clone, "-c", script, PYTHONPATH=str(clone / "src")).stderr.splitlines()
    assert lines[-1].startswith(f"penstock.errors.UnsupportedError: {clone} is a source tree")
    assert sum(line.startswith("Traceback") for line in lines) == 1


def test_an_editable_install_loads_the_library_that_it_built(clone: Path, tmp_path: Path) -> None:
    """Python comes from the source tree, the library from among the installed packages."""
    record = tmp_path / "penstock-0.1.0.dist-info"
    record.mkdir()
    (record / "METADATA").write_text("Metadata-Version: 2.1\nName: penstock\nVersion: 0.1.0\n")
    (tmp_path / "penstock" / "core").mkdir(parents=True)
    (tmp_path / "penstock" / "core" / "libpenstock.so").symlink_to(library())
    script = "from penstock.core import native; print(native.library_file(), native.version())"
    for is_editable, status in ((True, 0), (False, 1)):
        origin = {"url": clone.as_uri(), "dir_info": {"editable": is_editable}}
        (record / "direct_url.json").write_text(json.dumps(origin))
        done = started_in(clone, "-c", script, PYTHONPATH=f"{clone / 'src'}{os.pathsep}{tmp_path}")
        assert done.returncode == status, done.stderr
        assert is_editable == done.stdout.startswith(str(tmp_path))


def test_the_wheel_brings_penstock_lite() -> None:
    """``pip install`` puts the program without Python beside the Python that it installs for."""
    program = Path(sys.executable).with_name("penstock-lite")
    done = subprocess.run([program, "--help"], capture_output=True, text=True, check=False)
    assert "--max-tokens" in done.stdout + done.stderr
