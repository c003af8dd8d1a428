"""Pickled PyTorch weights (``.bin``), turned into safetensors by a confined child process.

A pickle can run code when it is opened, so this process never opens one.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Final

from penstock.checkpoint.folder import Checkpoint
from penstock.checkpoint.side_files import model_folder, read_small_file
from penstock.checkpoint.stored.shards import INDEX, SINGLE, shards_without_index
from penstock.checkpoint.tensor_file import TensorFile, open_regular
from penstock.config import ConfigReader, show
from penstock.env import child_environment
from penstock.errors import FileAccessError, InvalidFileError
from penstock.processes.supervision import signal_name

__all__ = ["is_pickled", "open_pickled", "unpickle"]

_PICKLED: Final = "pytorch_model.bin"
_INDEX: Final = "pytorch_model.bin.index.json"
_SECONDS: Final = 600.0
_BYTES_PER_SECOND: Final = 5_000_000


def is_pickled(folder: Path) -> bool:
    """Return True for a folder that has its weights only as pickles."""
    if not folder.is_dir():
        return False
    names = {path.name for path in model_folder(folder).iterdir()}
    return bool(names & {_PICKLED, _INDEX}) and not (names & {SINGLE, INDEX} or shards_without_index(names))


def open_pickled(folder: Path, temporary: Path) -> Checkpoint:
    """Return the checkpoint of a folder with pickled weights; its safetensors lie in ``temporary``.

    Raises InvalidFileError, which names the file, for one with anything but tensors.
    """
    home = model_folder(folder)
    config = ConfigReader.parse(read_small_file(home / "config.json"), "config.json")
    files = []
    for name in _names(home):
        out = temporary / Path(name).with_suffix(".safetensors").name
        unpickle(home / name, out)
        files.append(TensorFile(out))
    seen: set[str] = set()
    for file in files:
        twice = next((name for name in file.tensors if name in seen), None)
        if twice is not None:
            raise InvalidFileError(f"{folder}: tensor {show(twice)} is in two files")
        seen |= set(file.tensors)
    return Checkpoint(folder, config, files)


def _names(folder: Path) -> list[str]:
    if (folder / _PICKLED).exists():
        return [_PICKLED]
    reader = ConfigReader.parse(read_small_file(folder / _INDEX, 64 << 20), _INDEX)
    section = reader.object("weight_map")
    names = {value for value in section.values.values() if isinstance(value, str)} if section is not None else set()
    wrong = next((name for name in names if "/" in name or name.startswith(".") or not name.endswith(".bin")), None)
    if wrong is not None or not names:
        raise InvalidFileError(
            f"{_INDEX}: weight_map: expected names of .bin files, got {show(wrong)}", param="weight_map"
        )
    return sorted(names)


def unpickle(path: Path, out: Path) -> None:
    """Write the tensors of a pickled file to a new safetensors file, in a confined child process."""
    source = open_regular(path)
    with open(source, "rb") as stream, out.open("xb") as result:
        seconds = _SECONDS + path.stat().st_size / _BYTES_PER_SECOND
        descriptors = (stream.fileno(), result.fileno())
        command = [sys.executable, "-P", "-m", "penstock.checkpoint.pickle_child", *map(str, descriptors)]
        try:
            child = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                env=child_environment(),
                pass_fds=descriptors,
                start_new_session=True,
                timeout=seconds,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise InvalidFileError(f"{path.name}: reading the pickle took more than {seconds:.0f} s") from None
        except OSError as error:
            raise FileAccessError(f"{path.name}: {error.strerror}") from None
    if child.returncode:
        lines = child.stderr.decode(errors="replace").strip().splitlines()
        reason = lines[-1][:300] if lines else "no message"
        if child.returncode < 0:
            reason = f"the process that reads it was killed by {signal_name(-child.returncode)}"
        raise InvalidFileError(f"{path.name}: {reason}")
