"""Find the safetensors files of a folder, and open them: one file, or the shards of an index.

The index says which files belong to the model.  As in transformers, each of these files is read whole: a tensor that
the index omits, or expects in another file, counts.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Final, NoReturn

from penstock.checkpoint.side_files import read_small_file
from penstock.checkpoint.tensor_file import MAX_TENSORS, TensorFile
from penstock.config import ConfigReader, show, show_tensors
from penstock.errors import InvalidFileError, UnsupportedError
from penstock.file_kinds import refuse_mindspore

__all__ = ["INDEX", "SINGLE", "open_shards", "refuse_other_formats", "shards_without_index", "weight_names"]

INDEX: Final = "model.safetensors.index.json"
SINGLE: Final = "model.safetensors"
_SHARD: Final = re.compile(r"model-(\d{5})-of-(\d{5})\.safetensors")
_SAFE_VERSION: Final = "use the safetensors version of the model"
_LOG: Final = logging.getLogger("penstock.checkpoint")


def refuse_other_formats(folder: Path) -> NoReturn:
    """Raise an error that names the weights in an unsupported format, and the alternative."""
    names = sorted(entry.name for entry in folder.iterdir())
    gguf = next((name for name in names if name.lower().endswith(".gguf")), None)
    if gguf is not None:
        raise UnsupportedError(
            f"{folder}: expected {SINGLE} or {INDEX}; to run a GGUF file, pass {folder / gguf}", param="folder"
        )
    for suffix, kind in ((".bin", "pickled PyTorch"), (".pt", "pickled PyTorch"),
                         (".pth", "pickled PyTorch"), (".h5", "Keras"), (".msgpack", "Flax"),
                         (".onnx", "ONNX")):  # fmt: skip
        foreign = next((name for name in names if name.endswith(suffix)), None)
        if foreign is not None:
            tool = "`penstock convert`" if suffix == ".bin" else "transformers' save_pretrained"
            message = f"{foreign}: {kind} weights are not supported; {_SAFE_VERSION}, or convert it with {tool}"
            raise UnsupportedError(message, param="folder")
    for name in names:
        refuse_mindspore(folder / name)
    raise InvalidFileError(f"{folder}: expected {SINGLE} or {INDEX}, got neither")


def open_shards(folder: Path) -> list[TensorFile]:
    """Open the files of a folder's weights.

    Raises InvalidFileError for a damaged or missing file, and UnsupportedError for weights in another format.
    """
    if (folder / SINGLE).exists():
        return [TensorFile(folder / SINGLE)]
    if not (folder / INDEX).exists():
        return [TensorFile(folder / name) for name in _names_without_index(folder)]
    weight_map = _read_index(folder)
    shards: list[TensorFile] = []
    for shard in sorted(set(weight_map.values())):
        if not (folder / shard).exists():
            raise InvalidFileError(
                f"{INDEX}: expected the file {show(shard)} in the folder, got none", param="weight_map"
            )
        shards.append(TensorFile(folder / shard))
    omitted = sorted({name for file in shards for name in file.tensors} - weight_map.keys())
    if omitted:
        _LOG.warning("penstock: %s: %s omits %s, which the files have", folder, INDEX, show_tensors(omitted))
    return shards


def weight_names(folder: Path) -> list[str]:
    """Return the names of the files that ``open_shards`` opens; raises what it raises."""
    if (folder / SINGLE).exists():
        return [SINGLE]
    return sorted(set(_read_index(folder).values())) if (folder / INDEX).exists() else _names_without_index(folder)


def shards_without_index(names: Iterable[str]) -> list[str]:
    """Return the names of all shards of a model without an index, which vLLM opens too, also of those not in ``names``.

    Empty if ``names`` has no shard, or shards of several models.
    """
    counts = {int(match[2]) for name in names if (match := _SHARD.fullmatch(name))}
    count = counts.pop() if len(counts) == 1 else 0
    return [f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]


def _names_without_index(folder: Path) -> list[str]:
    present = {path.name for path in folder.iterdir()}
    names = shards_without_index(present)
    missing = next((name for name in names if name not in present), None)
    if not names:
        refuse_other_formats(folder)
    if missing is not None:
        raise InvalidFileError(f"{folder}: expected {len(names)} files of weights, got no {missing}")
    return names


def _read_index(folder: Path) -> dict[str, str]:
    """Return the shard of each tensor; a shard is the plain name of a file in the folder."""
    reader = ConfigReader.parse(read_small_file(folder / INDEX, 64 << 20), INDEX)
    section = reader.object("weight_map")
    if section is None or not section.values:
        raise InvalidFileError(f"{INDEX}: weight_map: expected tensor names and files, got none", param="weight_map")
    if len(section.values) > MAX_TENSORS:
        raise InvalidFileError(
            f"{INDEX}: weight_map: expected at most {MAX_TENSORS} tensors, got {len(section.values)}",
            param="weight_map",
        )
    for name, shard in section.values.items():
        plain = isinstance(shard, str) and shard.endswith(".safetensors") and len(shard) <= 255
        if not plain or not shard.isprintable() or any(char in shard for char in "/\\:") or shard.startswith("."):
            raise InvalidFileError(
                f"{INDEX}: weight_map: {show(name)}: expected the name of a .safetensors file in the folder, "
                f"got {show(shard)}",
                param="weight_map",
            )
    return dict(section.values)
