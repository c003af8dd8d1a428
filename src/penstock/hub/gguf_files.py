"""The GGUF files of a downloaded repository: which models they are, and what each is."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.checkpoint.gguf.architectures.table import find_architecture
from penstock.checkpoint.gguf.file_name import split_names
from penstock.checkpoint.gguf.metadata import Metadata
from penstock.checkpoint.gguf.weights import GgufFile
from penstock.errors import PenstockError
from penstock.hub.downloaded import Downloaded

__all__ = ["GgufModel", "gguf_models"]


@dataclass(frozen=True)
class GgufModel:
    """A model: the name of its first file, its architecture ("" if unknown), and why it cannot run, or ""."""

    name: str
    architecture: str
    problem: str


def gguf_models(entry: Downloaded) -> list[GgufModel]:
    """Return the models of the GGUF files of a snapshot, by name; split files are one model."""
    names = [name for name in entry.files() if name.lower().endswith(".gguf")]
    return [_describe(entry, first, set(names)) for first in sorted({split_names(name)[0] for name in names})]


def _describe(entry: Downloaded, first: str, names: set[str]) -> GgufModel:
    if not names.issuperset(split_names(first)):
        return GgufModel(first, "", "incomplete: pull it again")
    architecture = ""
    try:
        metadata = Metadata(GgufFile(entry.path / first).header.metadata, first)
        text = metadata.text("general.architecture")
        architecture = text if text.isprintable() else ""
        find_architecture(metadata)
    except PenstockError:
        reason = f"no network for {architecture}" if architecture else "a damaged GGUF file"
        return GgufModel(first, architecture, f"cannot run: {reason}")
    return GgufModel(first, architecture, "")
