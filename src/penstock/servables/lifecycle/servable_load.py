"""One load of a servable: new versions start beside those that run, and either all of them are used or none."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from penstock.errors import PenstockError
from penstock.logs import tell
from penstock.servables.api.version_policy import VersionPolicy, WantedVersions
from penstock.servables.lifecycle.loaded_version import LoadedVersion
from penstock.servables.lifecycle.open_version import OpenedVersion, VersionSource

if TYPE_CHECKING:
    from penstock.processes.supervision import SupervisionPolicy
    from penstock.servables.lifecycle.folder_scan import ServableFolder
    from penstock.servables.lifecycle.language_models import LanguageModels
    from penstock.servables.lifecycle.servable import Servable
    from penstock.servables.lifecycle.version_changes import VersionChanges

__all__ = ["ServableLoad"]

_FIELDS = {"policy", "labels"}
SLOW_S: Final = 10.0
"""Loads that take longer than this many seconds are logged."""


class ServableLoad:
    """One load.  ``new``: the versions that were loaded, with the fingerprints of their files.

    ``folder``: the scan of the servable's folder.  ``text``: its servable.py.
    """

    def __init__(self, servable: Servable, folder: ServableFolder, text: bytes, supervision: SupervisionPolicy) -> None:
        self.new: dict[int, tuple[LoadedVersion, str]] = {}
        self._servable, self._folder, self._text, self._supervision = servable, folder, text, supervision
        self._opened: dict[int, OpenedVersion] = {}

    async def wanted(self, requested: Mapping[str, Any]) -> WantedVersions:
        """Return what is requested; fields that are not come from servable.py, as the newest wanted version has it."""
        if requested.keys() == _FIELDS:  # servable.py is not needed
            return WantedVersions(**requested)
        versions, policy = self._folder.versions, requested.get("policy", VersionPolicy())
        chosen = policy.choose(versions) & versions.keys() or versions.keys()
        default = await self._wanted_by_script(max(chosen)) if chosen else WantedVersions()
        return replace(default, **requested)

    async def _wanted_by_script(self, number: int) -> WantedVersions:
        """Return the versions that servable.py asks for when this version imports it."""
        servable = self._servable
        if servable.fingerprints.get(number) == self._folder.versions[number]:
            return servable.versions[number].manifest.settings.wanted_versions()
        try:
            opened = self._opened[number] = await self._open(number)
        except PenstockError as error:
            self._note_failure(number, error)
            raise
        return opened.manifest.settings.wanted_versions()

    async def load(self, changes: VersionChanges, languages: LanguageModels | None) -> None:
        """Load the versions of a changes, the newest first; raise the first error."""
        for number in sorted(changes.load, reverse=True):
            try:
                opened = self._opened.pop(number, None) or await self._open(number)
                with _log_when_slow(self._servable.name, number, "starting processes and opening models"):
                    version = await LoadedVersion.load(opened, languages)
            except PenstockError as error:
                self._note_failure(number, error)
                raise
            self.new[number] = version, self._folder.versions[number]
        await self._close_opened()

    async def _open(self, number: int) -> OpenedVersion:
        servable, folder = self._servable, self._folder
        path = folder.version_path(number)
        source = VersionSource(servable.name, folder.script, self._text, str(number), path, servable.root)
        if number not in servable.versions:
            servable.states[number] = ("LOADING", "")
        with _log_when_slow(servable.name, number, "importing servable.py"):
            return await OpenedVersion.open(source, self._supervision)

    def _note_failure(self, number: int, error: PenstockError) -> None:
        servable = self._servable
        why = str(error).removeprefix(f"{servable.name}: ")
        tell("servable_failed", f"{servable.name} {number}: {why}", logging.WARNING, servable=servable.name)
        if number not in servable.versions:
            servable.states[number] = ("UNAVAILABLE", servable.public_message(error))

    def update_states(self) -> None:
        """Set the state of each version after the new ones were added to the servable."""
        servable, versions = self._servable, self._folder.versions
        for number in versions:
            is_ready = number in servable.versions
            servable.states[number] = (
                ("READY", "") if is_ready else ("UNAVAILABLE", "not selected by the version policy")
            )
        for number in [*servable.states]:
            if number not in versions and number not in servable.versions:
                del servable.states[number]

    async def _close_opened(self) -> None:
        """Stop processes that were started only to read the settings of servable.py."""
        for opened in self._opened.values():
            await opened.close()

    async def abort(self) -> None:
        """Stop everything that this load started."""
        await self._close_opened()
        servable = self._servable
        for version, _ in self.new.values():
            await version.stop()
        for number, (state, _) in servable.states.items():
            if state == "LOADING":
                servable.states[number] = ("UNAVAILABLE", "the load was aborted")


@contextmanager
def _log_when_slow(name: str, number: int, activity: str) -> Iterator[None]:
    """Log while the ``with`` block takes long: after SLOW_S seconds, and each time the duration has doubled."""
    loop = asyncio.get_running_loop()

    timer = loop.call_later(SLOW_S, lambda: log(SLOW_S))

    def log(seconds: float) -> None:
        nonlocal timer
        tell(
            "servable_loading", f"still loading {name} {number} after {seconds:g} s: {activity}",
            servable=name, version=number, seconds=seconds,
        )  # fmt: skip
        timer = loop.call_later(seconds, log, 2 * seconds)

    try:
        yield
    finally:
        timer.cancel()
