"""The files of a repository that are downloaded: weights as safetensors, configuration, tokenizer, chat template.

Code and pickled weights are never downloaded: opening them can run a stranger's code.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from penstock.checkpoint.gguf.file_name import split_names
from penstock.checkpoint.pooling.files import MODULE_FILE
from penstock.checkpoint.side_files import TEMPLATE_FILE, first_module_folder, parse_modules
from penstock.checkpoint.stored.shards import INDEX, SINGLE, shards_without_index
from penstock.checkpoint.tokenizer_files.names import TOKENIZER_INPUTS
from penstock.config import ConfigReader, show
from penstock.errors import InvalidArgumentError, InvalidFileError, UnsupportedError
from penstock.hub.remote import fetch_small
from penstock.hub.remote_model import RemoteFile, RemoteModel

__all__ = ["choose_files", "choose_gguf", "find_home", "shards_of"]

MAX_FILES: Final = 2000
"""Limit on the files of one download; the largest models have some hundred shards."""
_SIDE_NAMES: Final = TOKENIZER_INPUTS
_SIDE_SUFFIXES: Final = (".json", ".jinja", ".tiktoken")
_PICKLED: Final = (".bin", ".pt", ".pth", ".pkl", ".ckpt")


def find_home(model: RemoteModel) -> str:
    """Return where config.json lies: "", or the folder of the first module of sentence-transformers with a slash.

    ``model_folder`` says the same about a folder on this machine.
    """
    if model.find("config.json") is not None or model.find("modules.json") is None:
        return ""
    place = first_module_folder(parse_modules(fetch_small(model, "modules.json")))
    return f"{place}/" if place and model.find(f"{place}/config.json") is not None else ""


def choose_files(model: RemoteModel, home: str = "") -> tuple[RemoteFile, ...]:
    """Return the files to download, the small ones first; ``home`` is what ``find_home`` returns.

    Raises UnsupportedError for a repository without safetensors, and InvalidFileError for one that lacks a file of its
    weights, or has more than ``MAX_FILES`` to download.
    """
    weights = _weights_of(model, home)
    if model.find(f"{home}config.json") is None:
        raise UnsupportedError(f"{model.name}: expected a checkpoint with config.json, got none in the repository")
    missing = next((name for name in weights if model.find(name) is None), None)
    if missing is not None:
        raise InvalidFileError(
            f"{model.name}: expected the file {show(missing)} in the repository, got none", param="siblings"
        )
    has_modules, chosen = model.find("modules.json") is not None, set(weights)
    sides = [file for file in model.files if file.name not in chosen and _is_side_file(file.name, home, has_modules)]
    if len(sides) + len(weights) > MAX_FILES:
        raise InvalidFileError(
            f"{model.name}: siblings: expected at most {MAX_FILES} files to download, got {len(sides)} small ones and "
            f"{len(weights)} of weights. Nothing was downloaded. Download the folder with another program and pass its "
            "path.",
            param="siblings",
            code="too_many_files",
        )
    return (*sides, *(file for file in model.files if file.name in chosen))


def _weights_of(model: RemoteModel, home: str) -> list[str]:
    """Return the files of the weights, as ``open_shards`` finds them in a folder."""
    if model.find(f"{home}{SINGLE}") is not None:
        return [f"{home}{SINGLE}"]
    if model.find(f"{home}{INDEX}") is not None:
        names = shards_of(fetch_small(model, f"{home}{INDEX}"))
    else:
        names = shards_without_index(file.name.removeprefix(home) for file in model.files if file.name.startswith(home))
    if not names:
        raise _no_safetensors(model)
    return [f"{home}{name}" for name in names]


def choose_gguf(model: RemoteModel, name: str) -> tuple[RemoteFile, ...]:
    """Return the GGUF file called ``name``, or all files of the split model that it is one of, the first one first.

    InvalidArgumentError lists the files that the repository has; InvalidFileError names a missing file of the model.
    """
    names = [file.name for file in model.files if file.name.lower().endswith(".gguf")]
    available = [own for own in names if _is_in_one_folder(own)]
    if name not in available:
        choice = f"one of {', '.join(sorted(available))}" if available else "none, because the repository has no GGUF"
        raise InvalidArgumentError(f"--gguf: expected {choice}, got {name!r:.200}", param="gguf")
    files = {file.name: file for file in model.files}
    parts = split_names(name)
    missing = next((part for part in parts if part not in files), None)
    if missing is not None:
        raise InvalidFileError(
            f"{model.name}: expected {show(missing)} beside {show(name)} in the repository", param="siblings"
        )
    return tuple(files[part] for part in parts)


def shards_of(index: bytes) -> list[str]:
    """Return the files that the index of sharded weights names; InvalidFileError for a name that is no plain one."""
    section = ConfigReader.parse(index, INDEX).object("weight_map")
    names = sorted({str(name) for name in section.values.values()}) if section is not None else []
    wrong = next((name for name in names if not _is_plain(name) or not name.endswith(".safetensors")), None)
    if wrong is not None or not names:
        raise InvalidFileError(
            f"{INDEX}: weight_map: expected names of .safetensors files, got {show(wrong)}", param="weight_map"
        )
    return names


def _is_plain(name: str) -> bool:
    """Return True for the name of a file at the top of the repository."""
    return name.isprintable() and not name.startswith(".") and not any(char in name for char in "/\\:")


def _is_in_one_folder(name: str) -> bool:
    """Return True for the name of a file at the top of the repository, or in a folder there."""
    return len(parts := name.split("/")) <= 2 and all(map(_is_plain, parts))


def _is_side_file(name: str, home: str, has_modules: bool) -> bool:
    own = name.removeprefix(home)
    if TEMPLATE_FILE.fullmatch(own) or (has_modules and MODULE_FILE.fullmatch(name)):
        return True
    return _is_plain(own) and (own in _SIDE_NAMES or own.endswith(_SIDE_SUFFIXES))


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
    return UnsupportedError(f"{model.name}: expected {SINGLE} or {INDEX} in the repository, got neither")
