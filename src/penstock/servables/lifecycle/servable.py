"""The state of one servable: its running versions, its labels, and what is reported of each version."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from penstock.api_errors import without_folders
from penstock.errors import NotFoundError
from penstock.servables.api.version_policy import VersionPolicy
from penstock.servables.lifecycle.version_changes import resolve_version

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.errors import PenstockError
    from penstock.servables.lifecycle.loaded_version import LoadedMethod, LoadedVersion

__all__ = ["Servable"]


class Servable:
    """One servable of a folder ``root``.

    ``versions``: the running versions by number.  ``fingerprints``: those of the files that they were loaded from.
    ``states``: by version, the state and its reason.
    ``requested``: fields of ``WantedVersions`` that load requests set; they override servable.py.
    ``changing``: held while the servable is loaded or unloaded.
    """

    def __init__(self, root: Path, name: str) -> None:
        self.root, self.name = root, name
        self.versions: dict[int, LoadedVersion] = {}
        self.fingerprints: dict[int, str] = {}
        self.labels: dict[str, int] = {}
        self.policy = VersionPolicy(latest=1)
        self.states: dict[int, tuple[str, str]] = {}
        self.requested: dict[str, Any] = {}
        self.changing = asyncio.Lock()

    def public_message(self, error: PenstockError) -> str:
        """Return an error's message for clients: paths are relative to the folder of servables."""
        return without_folders(str(error).replace(f"{self.root}/", ""))

    @property
    def ready(self) -> list[str]:
        """The numbers of the versions that requests can ask for."""
        return [str(number) for number in sorted(self.versions)]

    def method(self, name: str, version: str) -> LoadedMethod:
        """Return a method by name ("" for the default one) and version.  Raises NotFoundError, UnavailableError."""
        loaded = self.versions[resolve_version(self.name, version, self.versions, self.labels, self.states)]
        methods = loaded.methods
        name_or_default = (
            name or loaded.manifest.settings.default_method or (next(iter(methods)) if len(methods) == 1 else "")
        )
        if name_or_default not in methods:
            names = ", ".join(f"{self.name}.{method}" for method in methods)
            raise NotFoundError(f"{self.name} has no method {name!r:.100}; its methods are {names}")
        return methods[name_or_default]
