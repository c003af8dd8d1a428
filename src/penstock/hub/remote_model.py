"""The types of a repository on a hub: its commit and its files."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from penstock.hub.names import ModelName

__all__ = ["RemoteFile", "RemoteModel"]


@dataclass(frozen=True)
class RemoteFile:
    """A file of a repository.

    ``digest`` is its SHA-256 (64 digits) or its Git object id (40), and its blob's name.  ``by_etag``: the listing has
    none, so it is the ETag of the file, which may also be its SHA-1 (40) or its MD5 (32).
    """

    name: str
    num_bytes: int
    digest: str
    by_etag: bool = False

    @property
    def digest_source(self) -> str:
        """The place that the digest comes from, as errors name it."""
        return "the ETag in the hub's response" if self.by_etag else "the digest in the hub's listing"


@dataclass(frozen=True)
class RemoteModel:
    """A repository at the commit that its revision means now.

    ``files`` have a ``digest`` of "" or a size of -1 where the listing gives none.
    """

    name: ModelName
    commit: str
    files: tuple[RemoteFile, ...]

    @cached_property
    def _by_name(self) -> dict[str, RemoteFile]:
        return {file.name: file for file in self.files}

    def find(self, name: str) -> RemoteFile | None:
        """Return the file called ``name``, or None."""
        return self._by_name.get(name)
