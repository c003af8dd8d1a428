"""One load of a servable: what is new is started beside what runs, all of it or nothing."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from penstock.errors import PenstockError
from penstock.logs import tell
from penstock.servables.lifecycle.loaded_version import LoadedVersion
from penstock.servables.lifecycle.versions import Plan, Policy, ServableFolder, Wanted
from penstock.servables.process.open_version import OpenedVersion, Source

if TYPE_CHECKING:
    from penstock.processes.supervision import SupervisionPolicy
    from penstock.servables.api.declare import Settings
    from penstock.servables.lifecycle.language_models import LanguageModels
    from penstock.servables.lifecycle.repository import Servable

__all__ = ["Loading"]

_FIELDS = {"policy", "labels"}
SLOW_S: Final = 10.0
"""A load that takes longer is told to the log."""


class Loading:
    """One look at a servable's folder, and the ``new`` versions that are loaded, with the texts of their files."""

    def __init__(self, servable: Servable, found: ServableFolder, text: bytes, supervision: SupervisionPolicy) -> None:
        self.new: dict[int, tuple[LoadedVersion, str]] = {}
        self._servable, self._found, self._text, self._patience = servable, found, text, supervision
        self._opened: dict[int, OpenedVersion] = {}

    async def wanted(self, asked: Mapping[str, Any]) -> Wanted:
        """What is asked for, and other fields as servable.py has them for the newest of the versions asked for."""
        if asked.keys() == _FIELDS:  # nobody needs to know what servable.py says
            return Wanted(**asked)
        versions, policy = self._found.versions, asked.get("policy", Policy())
        chosen = policy.choose(versions) & versions.keys() or versions.keys()
        return replace(await self._settled(max(chosen)) if chosen else Wanted(), **asked)

    async def _settled(self, number: int) -> Wanted:
        """What servable.py itself asks for, as this version says."""
        servable = self._servable
        if servable.prints.get(number) == self._found.versions[number]:
            return _wanted_by(servable.versions[number].plan.settings)
        try:
            opening = self._opened[number] = await self._begin(number)
        except PenstockError as error:
            self._note_failed(number, error)
            raise
        return _wanted_by(opening.plan.settings)

    async def load(self, plan: Plan, languages: LanguageModels | None) -> None:
        """Load what a plan says, the newest first; raises the first error."""
        for number in sorted(plan.load, reverse=True):
            try:
                opening = self._opened.pop(number, None) or await self._begin(number)
                with _told_when_slow(self._servable.name, number, "its processes start, and its models are opened"):
                    version = await LoadedVersion.load(opening, languages)
            except PenstockError as error:
                self._note_failed(number, error)
                raise
            self.new[number] = version, self._found.versions[number]
        await self._close()

    async def _begin(self, number: int) -> OpenedVersion:
        servable, found = self._servable, self._found
        source = Source(servable.name, found.script, self._text, str(number), found.version_path(number), servable.root)
        if number not in servable.versions:
            servable.states[number] = ("LOADING", "")
        with _told_when_slow(servable.name, number, "its servable.py is being imported"):
            return await OpenedVersion.begin(source, self._patience)

    def _note_failed(self, number: int, error: PenstockError) -> None:
        servable = self._servable
        why = str(error).removeprefix(f"{servable.name}: ")
        tell("servable_failed", f"{servable.name} {number}: {why}", logging.WARNING, servable=servable.name)
        if number not in servable.versions:
            servable.states[number] = ("UNAVAILABLE", servable.told(error))

    def note_states(self) -> None:
        """What is to be said of each version once the new ones are in the servable."""
        servable, found = self._servable, self._found.versions
        for number in found:
            is_ready = number in servable.versions
            servable.states[number] = ("READY", "") if is_ready else ("UNAVAILABLE", "the policy has others")
        for number in [*servable.states]:
            if number not in found and number not in servable.versions:
                del servable.states[number]

    async def _close(self) -> None:
        """End processes that only told what the file says."""
        for one in self._opened.values():
            await one.close()

    async def give_up(self) -> None:
        """Leave nothing."""
        await self._close()
        servable = self._servable
        for version, _ in self.new.values():
            await version.stop()
        for number, (state, _) in servable.states.items():
            if state == "LOADING":
                servable.states[number] = ("UNAVAILABLE", "its loading was given up")


@contextmanager
def _told_when_slow(name: str, number: int, what: str) -> Iterator[None]:
    """A line of the log while what is inside goes on for long, and again each time that it has taken twice as long."""
    loop = asyncio.get_running_loop()

    timer = loop.call_later(SLOW_S, lambda: told(SLOW_S))

    def told(seconds: float) -> None:
        nonlocal timer
        tell(
            "servable_loading", f"still loading {name} {number}, {seconds:g} s: {what}",
            servable=name, version=number, seconds=seconds,
        )  # fmt: skip
        timer = loop.call_later(seconds, told, 2 * seconds)

    try:
        yield
    finally:
        timer.cancel()


def _wanted_by(settings: Settings) -> Wanted:
    return Wanted(Policy.parse(settings.versions), settings.labels)
