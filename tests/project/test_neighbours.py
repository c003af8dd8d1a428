"""The package works beside packages that users have, installed before it or after it, and with the ends of its ranges.

Each case installs into an environment of its own, from PyPI; without PyPI it is skipped.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

import penstock
from penstock.version import __version__
from tests.support.command import DEMO, ROOT

CHECK = ROOT / "tests" / "support" / "neighbours_check.py"
NEIGHBOURS = {
    "tritonclient[grpc]": "tritonclient.grpc",
    "grpcio-health-checking": "grpc_health",
    "onnx": "onnx",
    "ray": "ray",
    "openvino": "openvino",
    "transformers": "transformers",
}
"""What is installed, and what is imported.  Some of them cap protobuf, and some need a new one."""
RANGED = ("numpy", "msgspec", "httpx", "huggingface_hub", "protobuf", "grpcio")
"""Dependencies that are tested at the lowest and at the newest release that their range allows."""
_LIMIT_S = 1500

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]


def dependencies() -> list[str]:
    found: list[str] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    return found


def lowest(names: tuple[str, ...]) -> list[str]:
    """Requirements of the lowest releases that the ranges of these dependencies allow."""
    ranges = {re.split(r"[<>=]", one)[0]: one for one in dependencies()}
    return [f"{name}=={re.search(r'>=([0-9.]+)', ranges[name])[1]}" for name in names]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of the installed package, with the dependencies of pyproject.toml; nothing is built."""
    path = tmp_path_factory.mktemp("wheel") / f"penstock-{__version__}-py3-none-any.whl"
    folder, info = Path(penstock.__file__).parent, f"penstock-{__version__}.dist-info"
    files = {f"penstock/{one.relative_to(folder)}": one.read_bytes() for one in folder.rglob("*") if one.is_file()}
    needed = "".join(f"Requires-Dist: {one}\n" for one in dependencies())
    files[f"{info}/METADATA"] = f"Metadata-Version: 2.1\nName: penstock\nVersion: {__version__}\n{needed}".encode()
    files[f"{info}/WHEEL"] = b"Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    files[f"{info}/entry_points.txt"] = b"[console_scripts]\npenstock = penstock.cli.main:main\n"
    record = "".join(
        f"{name},sha256={base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b'=').decode()},{len(data)}\n"
        for name, data in files.items()
    )
    files[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n".encode()
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in files.items():
            if "__pycache__" not in name:
                archive.writestr(name, data)
    return path


class Environment:
    """An environment of Python of its own."""

    def __init__(self, folder: Path) -> None:
        venv.create(folder, symlinks=True)
        self.python = folder / "bin" / "python"

    def install(self, *requirements: str | Path) -> None:
        self._pip("install", "--quiet", "--no-compile", "--only-binary", ":all:", *map(str, requirements))

    def check(self) -> None:
        """Every package has what it asks for."""
        self._pip("check")

    def _pip(self, *arguments: str) -> None:
        pip = [sys.executable, "-m", "pip", "--python", str(self.python), "--disable-pip-version-check"]
        done = subprocess.run([*pip, *arguments], capture_output=True, text=True, timeout=_LIMIT_S)
        assert done.returncode == 0, f"pip {' '.join(arguments)}\n{done.stdout}{done.stderr}"

    def start_everything(self, *neighbours: str) -> dict[str, str]:
        """Run the check with the packages of this environment and return the versions that it prints."""
        command = [self.python, "-P", CHECK, DEMO, *neighbours]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, cwd=self.python.parent)
        assert done.returncode == 0, done.stdout + done.stderr
        versions: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
        return versions


@pytest.fixture(scope="module")
def missing(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The reason to skip: "" if PyPI answers."""
    asked = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-cache-dir", "--retries", "0"]
    asked += ["--timeout", "10", "--dest", str(tmp_path_factory.mktemp("download")), "msgspec"]
    try:
        done = subprocess.run(asked, capture_output=True, timeout=120)
    except subprocess.TimeoutExpired:
        return "PyPI does not answer"
    return "" if done.returncode == 0 else "PyPI cannot be reached"


@pytest.fixture
def environment(missing: str, tmp_path: Path) -> Environment:
    if missing:
        pytest.skip(f"test_neighbours: {missing}")
    return Environment(tmp_path / "environment")


@pytest.mark.parametrize("order", [pytest.param("before", marks=pytest.mark.exhaustive), "after"])
def test_it_runs_beside_other_packages(order: str, wheel: Path, environment: Environment) -> None:
    """Whichever comes last, pip chooses releases that suit all, protobuf's too; which ones depends on the index."""
    installs: list[list[str | Path]] = [[*NEIGHBOURS], [wheel]]
    for requirements in installs if order == "before" else reversed(installs):
        environment.install(*requirements)
    environment.check()
    versions = environment.start_everything(*NEIGHBOURS.values())
    assert versions["protobuf"]


@pytest.mark.parametrize("end", ["lowest", "newest"])
def test_it_runs_at_both_ends_of_its_ranges(end: str, wheel: Path, environment: Environment) -> None:
    ends = lowest(RANGED) if end == "lowest" else ["--upgrade"]
    environment.install(wheel, *ends)
    environment.check()
    versions = environment.start_everything()
    for wanted in ends if end == "lowest" else ():
        name, _, release = wanted.partition("==")
        assert f"{versions[name]}.".startswith(f"{release}."), name
