"""The files beside the weights: read from a checkpoint folder, or from the segments of a bundle."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from penstock.checkpoint.generation import ADDITIONAL_TEMPLATES, MAX_TEMPLATES, read_chat_templates
from penstock.checkpoint.pooling.head import POOLING_FILE
from penstock.checkpoint.tensor_file import open_regular
from penstock.checkpoint.tokenizer_files.names import TOKENIZER_INPUTS
from penstock.config import ConfigReader, parse_json, show
from penstock.errors import FileAccessError, InvalidArgumentError, InvalidFileError
from penstock.file_kinds import is_gguf

__all__ = [
    "MODULE_FOLDER",
    "SIDE_FILES",
    "TEMPLATE_FILE",
    "first_module_folder",
    "model_folder",
    "parse_modules",
    "read_folder_files",
    "read_modules",
    "read_side_files",
    "read_small_file",
    "template_files",
    "write_side_files",
]

SIDE_FILES: Final = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "chat_template.json",
    ADDITIONAL_TEMPLATES,
    POOLING_FILE,
)
TEMPLATE_FILE: Final = re.compile(r"additional_chat_templates/(\w[\w. -]{0,127})\.jinja", re.ASCII)
"""The names of the files of further chat templates."""
MAX_SIDE_BYTES: Final = 256 << 20
_MAX_MODULES_BYTES: Final = 1 << 20
MODULE_FOLDER: Final = re.compile(r"[0-9]{1,2}_[A-Za-z0-9_-]{1,32}")
"""The names of the folders of modules of sentence-transformers, such as 1_Pooling."""


def read_small_file(path: Path, max_bytes: int = MAX_SIDE_BYTES) -> bytes:
    """Return the bytes of a regular file; InvalidFileError for one of more than ``max_bytes``."""
    descriptor = open_regular(path)
    with os.fdopen(descriptor, "rb") as stream:
        size = min(os.fstat(descriptor).st_size, max_bytes)
        data = stream.read(size + 1)  # not all of max_bytes, as much memory as read() is asked for is allocated
        if len(data) > size:  # the file grows
            data += stream.read(max_bytes + 1 - len(data))
    if len(data) > max_bytes:
        raise InvalidFileError(f"{path.name}: expected at most {max_bytes} bytes, got more", param="path")
    return data


def read_modules(folder: Path) -> list[ConfigReader]:
    """Return the modules that modules.json of sentence-transformers lists; none without the file."""
    path = folder / "modules.json"
    return parse_modules(read_small_file(path, _MAX_MODULES_BYTES)) if path.exists() else []


def parse_modules(data: bytes) -> list[ConfigReader]:
    """Return the modules in the bytes of a modules.json; InvalidFileError for anything but a list of objects."""
    listed = parse_json(data, "modules.json", max_bytes=_MAX_MODULES_BYTES, lenient=True)
    if not isinstance(listed, list) or not all(isinstance(module, dict) for module in listed):
        raise InvalidFileError("modules.json: expected a list of objects", param="modules.json")
    return [ConfigReader(values, f"modules.json: {index}") for index, values in enumerate(listed)]


def model_folder(folder: Path) -> Path:
    """Return the folder with config.json: a checkpoint folder itself, or that of its first module.

    modules.json of sentence-transformers may give the model a folder of its own, such as 0_Transformer.
    """
    modules = [] if (folder / "config.json").exists() else read_modules(folder)
    own = folder / first_module_folder(modules)
    return own if (own / "config.json").exists() else folder


def first_module_folder(modules: Sequence[ConfigReader]) -> str:
    """Return the name of the folder of the first module; "" if it has none, or one with a name of another form."""
    place = modules[0].values.get("path") if modules else None
    return place if isinstance(place, str) and MODULE_FOLDER.fullmatch(place) else ""


def read_folder_files(folder: Path, names: Sequence[str] = SIDE_FILES) -> dict[str, bytes]:
    """Return the files of a checkpoint folder that exist, by name and in the order of ``names``.

    When ``tokenizer.json`` is asked for, it is made of the other files of the folder if it is missing, and has the
    tokens of the files beside it; ``complete_tokenizer`` says which files change.  Some SentencePiece models need the
    extra ``penstock[sentencepiece]``; without the extra, UnsupportedError.  The files of additional_chat_templates/
    become one.
    """
    folder = model_folder(folder)

    def read(name: str) -> bytes | None:
        return read_small_file(folder / name) if (folder / name).exists() else None

    files = {name: data for name in names if (data := read(name)) is not None}
    if ADDITIONAL_TEMPLATES in names and (templates := template_files(folder)):
        files[ADDITIONAL_TEMPLATES] = _joined_templates(folder, templates)
    if "tokenizer.json" in names:
        from penstock.checkpoint.tokenizer_files.complete import complete_tokenizer

        files |= complete_tokenizer(files, read, folder)
    return {name: files[name] for name in names if name in files}


def template_files(folder: Path) -> list[str]:
    """Return the names of the files of further chat templates in a folder, as ``TEMPLATE_FILE`` matches them."""
    paths = (folder / "additional_chat_templates").glob("*.jinja")
    return sorted(name for path in paths if TEMPLATE_FILE.fullmatch(name := path.relative_to(folder).as_posix()))


def _joined_templates(folder: Path, names: Sequence[str]) -> bytes:
    """Return the templates in the files by their names, as one JSON object.  A byte that is no UTF-8 is replaced."""
    if len(names) > MAX_TEMPLATES:
        raise InvalidFileError(
            f"additional_chat_templates: expected at most {MAX_TEMPLATES} files, got {len(names)}",
            param="additional_chat_templates",
        )
    texts = {name: read_small_file(folder / name).decode(errors="replace") for name in names}
    return json.dumps({Path(name).stem: text for name, text in texts.items()}, ensure_ascii=False).encode()


def write_side_files(
    folder: Path, files: Mapping[str, bytes], write: Callable[[Path, bytes], object] = Path.write_bytes
) -> None:
    """Write the files of ``read_folder_files`` into a folder, the further chat templates as files of their own.

    Those of modules of sentence-transformers have a folder in their names.  ``write`` writes one file.
    """
    for name, data in files.items():
        if name != ADDITIONAL_TEMPLATES:
            (folder / name).parent.mkdir(exist_ok=True)
            write(folder / name, data)
            continue
        for template, text in read_chat_templates({name: data}).items():
            path = f"additional_chat_templates/{template}.jinja"
            if TEMPLATE_FILE.fullmatch(path) is None:
                raise InvalidFileError(f"{name}: expected names of letters and digits, got {show(template)}")
            (folder / path).parent.mkdir(exist_ok=True)
            write(folder / path, text.encode())


def read_side_files(path: Path, names: Sequence[str] = SIDE_FILES) -> dict[str, bytes]:
    """Return the files of a folder or a GGUF file, or the segments of a bundle, that exist, by name.

    A bundle's ``tokenizer.json`` comes with its compiled form.  Raises FileAccessError when ``path`` does not exist,
    InvalidArgumentError when it is one of the files itself, and what ``read_folder_files`` raises.
    """
    if path.is_dir():
        return read_folder_files(path, names)
    if is_gguf(path):
        from penstock.checkpoint.gguf.checkpoint import open_gguf

        made = open_gguf(path).side_files.make()
        return {name: made[name] for name in names if name in made}
    if not path.exists():
        raise FileAccessError(f"{path}: no such file or folder")
    if path.name in (*SIDE_FILES, *TOKENIZER_INPUTS):
        raise InvalidArgumentError(
            f"{path}: expected a folder or a .psm bundle; pass the folder that holds this file", param="path"
        )
    from penstock.core import native
    from penstock.core.tokenizer import TOKENIZER_SEGMENT

    if "tokenizer.json" in names:
        names = [*names, TOKENIZER_SEGMENT]
    with native.Model.open(path) as model:
        return {name: bytes(data) for name in names if (data := model.segment(name)) is not None}
