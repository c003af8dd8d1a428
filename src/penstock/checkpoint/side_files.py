"""The files beside the weights, of a folder or out of a bundle."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from penstock.checkpoint.folder import SIDE_FILES, read_small_file
from penstock.errors import FileAccessError, InvalidArgumentError

__all__ = ["read_side_files"]


def read_side_files(path: Path, names: Sequence[str] = SIDE_FILES) -> dict[str, bytes]:
    """Files of a folder or segments of a bundle by name, those that exist.

    A folder's ``tokenizer.model`` is converted (the extra ``penstock[sentencepiece]``) when ``tokenizer.json`` is asked
    for and not there; that of a bundle comes with its compiled form.  FileAccessError when there is no such path,
    InvalidArgumentError for one of the files itself.
    """
    if path.is_dir():
        found = {name: read_small_file(path / name) for name in names if (path / name).exists()}
        if "tokenizer.json" in names and "tokenizer.json" not in found and (path / "tokenizer.model").exists():
            from penstock.checkpoint.tokenizer_convert import convert_tokenizer

            found["tokenizer.json"] = convert_tokenizer(path)
        return found
    if not path.exists():
        raise FileAccessError(f"{path}: no such file or folder")
    if path.name in SIDE_FILES or path.name == "tokenizer.model":
        raise InvalidArgumentError(f"{path}: give the folder that holds it, or a .psm bundle")
    from penstock.core import native
    from penstock.core.tokenizer import TOKENIZER_SEGMENT

    if "tokenizer.json" in names:
        names = [*names, TOKENIZER_SEGMENT]
    with native.Model.open(path) as model:
        return {name: bytes(data) for name in names if (data := model.segment(name)) is not None}
