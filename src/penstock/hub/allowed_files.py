"""The files of a repository that are downloaded: weights as safetensors, configuration, tokenizer, chat template.

Code and pickled weights are never downloaded: opening them can run a stranger's code.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from penstock.checkpoint.gguf.file_name import split_names
from penstock.checkpoint.pooling.files import MODULE_FILE
from penstock.checkpoint.side_files import TEMPLATE_FILE
from penstock.checkpoint.tokenizer_files.names import TOKENIZER_INPUTS
from penstock.config import ConfigReader, show
from penstock.errors import InvalidArgumentError, InvalidFileError, UnsupportedError
from penstock.hub.remote import RemoteFile, RemoteModel, fetch_small

__all__ = ["INDEX", "SINGLE", "choose_files", "choose_gguf", "shards_of"]

SINGLE: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"
_SIDE_NAMES: Final = TOKENIZER_INPUTS
_SIDE_SUFFIXES: Final = (".json", ".jinja")
_PICKLED: Final = (".bin", ".pt", ".pth", ".pkl", ".ckpt")


def choose_files(model: RemoteModel) -> tuple[RemoteFile, ...]:
    """Return the files to download, the small ones first.  UnsupportedError for a repository without safetensors."""
    if model.find(SINGLE) is not None:
        weights = [SINGLE]
    elif model.find(INDEX) is not None:
        weights = shards_of(fetch_small(model, INDEX))
    else:
        raise _no_safetensors(model)
    if model.find("config.json") is None:
        raise UnsupportedError(f"{model.name}: expected a checkpoint with config.json, found none in the repository")
    for name in weights:
        if model.find(name) is None:
            raise InvalidFileError(f"{model.name}: {INDEX}: expected the file {show(name)} in the repository")
    has_modules = model.find("modules.json") is not None
    sides = [file for file in model.files if _is_side_file(file.name, has_modules)]
    chosen = set(weights)
    return (*sides, *(file for file in model.files if file.name in chosen))


def choose_gguf(model: RemoteModel, name: str) -> tuple[RemoteFile, ...]:
    """Return the GGUF file called ``name``, or all files of the split model that it is one of, the first one first.

    InvalidArgumentError lists the files that the repository has; InvalidFileError names a missing file of the model.
    """
    names = [file.name for file in model.files if file.name.lower().endswith(".gguf")]
    available = [own for own in names if _is_in_one_folder(own)]
    if name not in available:
        choice = f"one of {', '.join(sorted(available))}" if available else "none, because the repository has no GGUF"
        raise InvalidArgumentError(f"--gguf: expected {choice}, found {name!r:.200}", param="gguf")
    files = {file.name: file for file in model.files}
    parts = split_names(name)
    missing = next((part for part in parts if part not in files), None)
    if missing is not None:
        raise InvalidFileError(f"{model.name}: expected {show(missing)} beside {show(name)} in the repository")
    return tuple(files[part] for part in parts)


def shards_of(index: bytes) -> list[str]:
    """Return the files that the index of sharded weights names; InvalidFileError for a name that is no plain one."""
    section = ConfigReader.parse(index, INDEX).object("weight_map")
    names = sorted({str(name) for name in section.values.values()}) if section is not None else []
    wrong = next((name for name in names if not _is_plain(name) or not name.endswith(".safetensors")), None)
    if wrong is not None or not names:
        raise InvalidFileError(
            f"{INDEX}: weight_map: expected names of .safetensors files, found {show(wrong)}", param="weight_map"
        )
    return names


def _is_plain(name: str) -> bool:
    """Return True for the name of a file at the top of the repository."""
    return name.isprintable() and not name.startswith(".") and not any(char in name for char in "/\\:")


def _is_in_one_folder(name: str) -> bool:
    """Return True for the name of a file at the top of the repository, or in a folder there."""
    return len(parts := name.split("/")) <= 2 and all(map(_is_plain, parts))


def _is_side_file(name: str, has_modules: bool) -> bool:
    if TEMPLATE_FILE.fullmatch(name) or (has_modules and MODULE_FILE.fullmatch(name)):
        return True
    return _is_plain(name) and (name in _SIDE_NAMES or name.endswith(_SIDE_SUFFIXES))


def _no_safetensors(model: RemoteModel) -> UnsupportedError:
    names: Sequence[str] = [file.name for file in model.files]
    gguf = next((name for name in names if name.lower().endswith(".gguf")), None)
    if gguf is not None:
        return UnsupportedError(
            f"{model.name}: the repository has GGUF files and no safetensors. "
            f"`penstock pull {model.name} --gguf {gguf}` downloads one and prints its path, which MODEL may be."
        )
    pickled = next((name for name in names if name.endswith(_PICKLED)), None)
    if pickled is not None:
        return UnsupportedError(
            f"{model.name}: the weights are pickled ({pickled}), which can run code when they are opened. Penstock "
            f"does not download them. Use a repository with safetensors, or download {model.name} with another program "
            "and run `penstock convert FOLDER OUT`, which opens them in a child process without rights."
        )
    return UnsupportedError(f"{model.name}: expected {SINGLE} or {INDEX} in the repository, found neither")
