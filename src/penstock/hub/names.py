"""The name of a model: ORG/NAME, ORG/NAME@REVISION or a short name.  An existing path is never such a name."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from penstock.errors import InvalidArgumentError
from penstock.hub.aliases import ALIASES

__all__ = ["DEFAULT_REVISION", "ModelName", "parse_model", "parse_name"]

DEFAULT_REVISION: Final = "main"
_PART: Final = r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9_-])?"
_REPOSITORY: Final = re.compile(f"{_PART}/{_PART}")
_REVISION: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,199}")
_PATH_STARTS: Final = (".", "/", "~")
_FILE_SUFFIXES: Final = (
    ".psm", ".gguf", ".safetensors", ".bin", ".pt", ".pth", ".onnx", ".json", ".yaml", ".yml", ".mindir",
)  # fmt: skip


@dataclass(frozen=True)
class ModelName:
    """A repository ("ORG/NAME") of a hub, and a revision: a branch, a tag or a commit."""

    repository: str
    revision: str = DEFAULT_REVISION

    def __str__(self) -> str:
        """Return the name as a user writes it."""
        is_default = self.revision == DEFAULT_REVISION
        return self.repository if is_default else f"{self.repository}@{self.revision}"

    @property
    def short(self) -> str:
        """The name without its organization."""
        return self.repository.rpartition("/")[2]


def parse_name(text: str) -> ModelName:
    """Return the model that ORG/NAME[@REVISION] or a short name means; InvalidArgumentError for another text."""
    name, at, revision = text.partition("@")
    if name in ALIASES:
        name = ALIASES[name].repository
    if not _REPOSITORY.fullmatch(name) or "--" in name or ".." in name:
        raise InvalidArgumentError(f"{text}: expected ORG/NAME of a repository{_suggestion(name)}", param="model")
    if at and (not _REVISION.fullmatch(revision) or ".." in revision):
        raise InvalidArgumentError(f"{text}: expected a branch, a tag or a commit after @", param="model")
    return ModelName(name, revision if at else DEFAULT_REVISION)


def parse_model(text: str) -> ModelName | None:
    """Return the model of a hub that MODEL means, or None if it is a path.

    A text is a path if it exists, begins with ".", "/" or "~", or ends as a model file does.  InvalidArgumentError for
    a text that is neither a path nor a name.
    """
    if not text or text.startswith(_PATH_STARTS) or text.lower().endswith(_FILE_SUFFIXES) or Path(text).exists():
        return None
    try:
        return parse_name(text)
    except InvalidArgumentError:
        if text.count("/") > 1:
            return None
        raise InvalidArgumentError(
            f"{text}: no such file or folder. Expected the path of a .psm bundle or a checkpoint folder, or ORG/NAME "
            f"of a repository{_suggestion(text)}",
            param="model",
        ) from None


def _suggestion(text: str) -> str:
    close = difflib.get_close_matches(text.lower(), ALIASES, n=1, cutoff=0.6)
    if close:
        return f". Did you mean {close[0]}? `penstock list --available` shows the short names."
    return " or a short name of `penstock list --available`"
