"""What is half made lies beside its final name, and goes."""

from __future__ import annotations

import os
import time
from pathlib import Path

from penstock.errors import FileAccessError
from penstock.quant.folder import new_folder, private_folder
from tests.support.errors import raises


def leave(folder: Path, name: str, seconds: float) -> Path:
    """What a killed process leaves: a folder with a file, ``seconds`` ago."""
    path = folder / name
    path.mkdir()
    (path / "half").write_bytes(b"x")
    os.utime(path, (time.time() - seconds,) * 2)
    return path


def test_the_next_writer_removes_files_of_a_killed_one(tmp_path: Path) -> None:
    gone = leave(tmp_path, ".out.psm.abcdefgh.partial", 100)
    young = leave(tmp_path, ".out.psm.ABCDEFGH.partial", 0)
    others = [leave(tmp_path, name, 100) for name in (".other.psm.abcdefgh.partial", ".out.psm.x.abcdefgh.partial")]
    with private_folder(tmp_path / "out.psm") as folder:
        (folder / "file").write_bytes(b"x")
        os.utime(folder, (0, 0))
        with private_folder(tmp_path / "out.psm"):  # another process at the same time
            assert (folder / "file").exists()
        assert not gone.exists()
    assert sorted(tmp_path.iterdir()) == sorted([young, *others])


def test_a_folder_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    with new_folder(tmp_path / "a") as folder:
        (folder / "file").write_bytes(b"x")
        assert not (tmp_path / "a").exists()
    with raises(FileAccessError, match=f"{tmp_path}/b: "), new_folder(tmp_path / "b"):
        raise OSError(28, "No space left on device")
    assert [path.name for path in tmp_path.rglob("*")] == ["a", "file"]
