"""The tensors and the config of a quantized folder, and the atomic creation of folders."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from penstock.core.layouts import BLOCKS
from penstock.core.native import QuantizedRows
from penstock.errors import FileAccessError, InvalidArgumentError, PenstockError
from penstock.file_kinds import PARTIAL_SUFFIX
from penstock.quant.matrix import group_shape, stored_values
from penstock.quant.mixed_schemes import mixed_config, other_schemes
from penstock.quant.scheme import Scheme
from penstock.quant.tensor_writer import TensorEntry, TensorWriter

__all__ = [
    "QUANTIZED_VERSION", "ROTATION_KEY", "add_quantized", "check_folder_name", "check_new_folder", "new_folder",
    "private_folder", "quantized_config", "quantized_entries",
]  # fmt: skip

QUANTIZED_VERSION: Final = 2
ROTATION_KEY: Final = "penstock_rotation"
"""The entry of config.json that a folder of rotated floats has, until it is quantized."""
_RANDOM_CHARS: Final = 8  # that tempfile puts into a name
_GRACE_SECONDS: Final = 5.0
_WRITERS: Final = {
    ".psm": "`penstock export FOLDER OUT.psm`", ".gguf": "`penstock convert FOLDER OUT.gguf`",
    ".json": "`penstock plan FOLDER --out OUT.json`",
}  # fmt: skip
_FILE_SUFFIXES: Final = (
    *_WRITERS, ".bin", ".ckpt", ".ggml", ".gz", ".h5", ".mindir", ".npz", ".onnx", ".pb", ".pt", ".pth", ".safetensors",
    ".tar", ".tflite", ".tgz", ".yaml", ".yml", ".zip",
)  # fmt: skip
"""Endings of files of weights and of archives, which a folder never has by intention."""


def quantized_entries(name: str, scheme: Scheme, rows: int, cols: int) -> list[TensorEntry]:
    """Return the tensors that store a quantized weight: values, scales and, for 4 bit, steps and offsets.

    Blocks have all of these in one tensor, uint8 [rows, bytes of a row].
    """
    if scheme.in_blocks:
        block = BLOCKS[scheme.layout]
        return [TensorEntry(name, "U8", (rows, cols // block.block_len * block.block_bytes))]
    scale = TensorEntry(f"{name}_scale", "F32", (rows,))
    if scheme.weight_bits == 8:
        return [TensorEntry(name, "I8", (rows, cols)), scale]
    groups = TensorEntry(f"{name}_groups", "I8", group_shape(rows, cols))
    return [TensorEntry(name, "U8", (rows, -(-cols // 2))), scale, groups]


def add_quantized(writer: TensorWriter, name: str, scheme: Scheme, rows: QuantizedRows) -> None:
    """Write rows of a quantized weight to the tensors of ``quantized_entries``."""
    writer.add(name, stored_values(scheme, rows.q))
    writer.add(f"{name}_scale", rows.scales)
    if rows.groups is not None:
        writer.add(f"{name}_groups", rows.groups)


def quantized_config(
    config: dict[str, Any],
    scheme: str,
    dtype: str,
    recipe: Mapping[str, Any] | None = None,
    kv_cache: str | None = None,
    *,
    is_mixed: bool = False,
    schemes: Mapping[str, str] | None = None,
) -> bytes:
    """Return config.json of the quantized folder: the original's with a ``quantization_config``.

    ``recipe``: the method that chose the integers, and its calibration data; a rotation of the source is added.
    ``kv_cache``: the type of keys and values that "auto" means for this folder; None is that of the scheme.
    ``is_mixed``: some linears keep their floats, or an embedding that is not the head does not.  ``schemes``: those of
    the quantized tensors, by name; None where each has the one that follows from its name.
    """
    section = {"quant_method": "penstock", "version": QUANTIZED_VERSION, "scheme": scheme, "dtype": dtype}
    rotation = {"rotate": config[ROTATION_KEY]} if ROTATION_KEY in config else {}
    section |= {"recipe": {"method": "rtn"} | dict(recipe or {}) | rotation} if recipe or rotation else {}
    section |= {"kv_cache": kv_cache} if kv_cache else {}
    values = {name: value for name, value in config.items() if name != ROTATION_KEY} | {"quantization_config": section}
    others = other_schemes(scheme, schemes or {})
    has_table = is_mixed or bool(others)
    return (json.dumps(mixed_config(values, scheme, others) if has_table else values, indent=2) + "\n").encode()


@contextlib.contextmanager
def private_folder(final: Path) -> Iterator[Path]:
    """Make a temporary folder beside ``final`` and remove it, with its contents, at the end of the block.

    The folder is locked during the block.  A killed process leaves an unlocked one, which the next call for the same
    ``final`` removes.
    """
    _remove_abandoned(final)
    try:
        folder = Path(tempfile.mkdtemp(prefix=f".{final.name}.", suffix=PARTIAL_SUFFIX, dir=final.parent))
    except OSError as error:
        raise FileAccessError(f"{final.parent}: {error.strerror}") from None
    try:
        with _locked(folder):
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    """Lock a folder for the block; yields False if that failed.  Some file systems do not support such locks."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
        else:
            yield True
    finally:
        os.close(descriptor)


def _remove_abandoned(final: Path) -> None:
    prefix, size = f".{final.name}.", len(f".{final.name}.") + _RANDOM_CHARS + len(PARTIAL_SUFFIX)
    with contextlib.suppress(OSError):
        for path in final.parent.iterdir():
            if not (path.name.startswith(prefix) and path.name.endswith(PARTIAL_SUFFIX) and len(path.name) == size):
                continue
            with contextlib.suppress(OSError):  # locked or already removed
                if time.time() - path.stat().st_mtime < _GRACE_SECONDS:
                    continue  # just created, perhaps before its lock is taken
                with _locked(path) as is_abandoned:
                    if is_abandoned:
                        shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def new_folder(final: Path) -> Iterator[Path]:
    """Make a folder that is renamed to ``final`` when the block succeeds, and removed when it raises."""
    check_new_folder(final)
    with private_folder(final) as temporary:
        try:
            yield temporary
            temporary.chmod(0o755)
            check_new_folder(final)
            os.rename(temporary, final)
        except PenstockError:
            raise
        except OSError as error:
            raise FileAccessError(f"{final}: {error.strerror}") from None


def check_folder_name(final: Path) -> None:
    """Refuse the name of a file for a folder to write, such as model.ckpt; InvalidArgumentError names ``out``."""
    suffix = final.suffix.lower()
    if suffix in _FILE_SUFFIXES:
        command = _WRITERS.get(suffix)
        hint = f"{command} writes such a file" if command else f"files that end in {suffix} cannot be written"
        raise InvalidArgumentError(
            f"out: expected the name of a folder, got {str(final)!r:.200}, the name of a file; {hint}", param="out"
        )


def check_new_folder(final: Path) -> None:
    """Refuse a folder that exists, and the name of a file; InvalidArgumentError."""
    check_folder_name(final)
    if final.exists() or final.is_symlink():
        raise InvalidArgumentError(f"{final}: expected a new folder, but it already exists", param="out")
