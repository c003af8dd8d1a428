"""The servables of a service: loaded from folders of the operator, switched, drained and found by name."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from penstock.errors import (
    FileAccessError,
    InvalidArgumentError,
    InvalidFileError,
    NotFoundError,
    PenstockError,
    UnavailableError,
    UnsupportedError,
)
from penstock.logs import tell
from penstock.servables.api.version_policy import VersionPolicy, WantedVersions
from penstock.servables.lifecycle.folder_scan import SCRIPT, ServableFolder, scan_folder, scan_servable
from penstock.servables.lifecycle.loaded_version import LoadedMethod, LoadedVersion, wait_until_done
from penstock.servables.lifecycle.open_version import read_script
from penstock.servables.lifecycle.servable import Servable
from penstock.servables.lifecycle.servable_load import ServableLoad
from penstock.servables.lifecycle.version_changes import VersionChanges, check_versions_exist, version_changes_to
from penstock.tensors import ModelState

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.processes.supervision import SupervisionPolicy
    from penstock.servables.lifecycle.language_models import LanguageModels
    from penstock.tensors import Methods

    def _fits(servables: ServableRepository) -> Methods:
        return servables


__all__ = ["ServableRepository"]

_CONFIG: Final = ("versions", "labels")
_UNLOADING: Final = ("UNLOADING", "")


def _servable_of(name: str) -> str:
    """Return the servable's part of SERVABLE or SERVABLE.METHOD."""
    return name.partition(".")[0]


class ServableRepository:
    """The servables of some folders.

    ``languages`` opens their language models; without it no servable may have one.
    ``others`` returns the names of the other models that the service serves.
    """

    def __init__(
        self,
        supervision: SupervisionPolicy,
        languages: LanguageModels | None = None,
        others: Callable[[], Sequence[str]] = tuple,
    ) -> None:
        self._supervision, self._languages, self._others = supervision, languages, others
        self.on_loaded: Callable[[LoadedVersion], None] = lambda version: None
        """Called with each version that requests use from then on."""
        self._servables: dict[str, Servable] = {}
        self._methods: dict[tuple[str, str], LoadedMethod] = {}  # by name and version as requests have them
        self._loads: set[asyncio.Task[None]] = set()
        self._draining: dict[asyncio.Task[None], LoadedVersion] = {}
        self._roots: list[Path] = []
        self._is_closed = False

    async def open(self, root: Path) -> None:
        """Serve the servables of a folder, or the single servable that the folder is.  Raises the first load error."""
        refused: dict[str, str] = {}
        if (root / SCRIPT).is_file():
            folders = {root.name: await asyncio.to_thread(scan_servable, root.parent, root.name)}
            root = root.parent
        else:
            folders, refused = await asyncio.to_thread(scan_folder, root)
        for name, reason in refused.items():
            tell("servable_refused", f"{root / name}: {reason}", logging.WARNING, servable=name)
        duplicates = [name for name in folders if name in self._servables]
        if duplicates:
            raise InvalidArgumentError(f"two folders contain a servable {duplicates[0]}", param="root")
        for name in folders:
            self._check_name(name)
        for name in folders:
            self._servables[name] = Servable(root, name)
        for name in folders:
            await self._change(name, {})
        self._roots.append(root)

    def all(self) -> Sequence[Servable]:
        """Return all known servables, loaded or not."""
        return [*self._servables.values()]

    def list(self) -> Sequence[LoadedMethod]:
        """Return every method of every version that is ready."""
        return [
            method
            for servable in self._servables.values()
            for _, version in sorted(servable.versions.items())
            for method in version.methods.values()
        ]

    def find(self, name: str, version: str = "") -> LoadedMethod | None:
        """See Methods."""
        method = self._methods.get((name, version))
        if method is not None:
            return method
        servable_name, _, method_name = name.partition(".")
        servable = self._servables.get(servable_name)
        if servable is None:
            return None
        if not servable.versions:
            raise UnavailableError(f"{servable_name} is not loaded")
        method = servable.method(method_name, version)
        self._check_open()
        if not version:  # the request gets the newest version, even if that changes before it runs
            method = method.following_newest(partial(self.find, name))
        self._methods[name, version] = method
        return method

    def index(self) -> Sequence[ModelState]:
        """See Methods."""
        return [
            ModelState(servable.name, str(number), state, reason)
            for servable in self._servables.values()
            for number, (state, reason) in sorted(servable.states.items())
        ]

    async def load(self, name: str, config: Mapping[str, Any] | None = None) -> None:
        """See Methods.  Loads and unloads of the same servable run one after the other.

        The load takes effect completely or not at all, even if the caller is cancelled or the service stops meanwhile.
        Errors name files relative to the folder of servables; the log has the full paths.
        """
        try:
            await self._change(name, _parse_config(config or {}))
        except (FileAccessError, InvalidFileError, UnavailableError, UnsupportedError) as error:
            raise error.with_message(self._public_message(name, error)) from error

    def _public_message(self, name: str, error: PenstockError) -> str:
        servable = self._servables.get(name)
        return str(error) if servable is None else servable.public_message(error)

    async def _change(self, name: str, change: Mapping[str, Any]) -> None:
        """Load a servable; ``change`` has fields of WantedVersions."""
        servable = self._servables.get(name) or await self._discover(name)
        task = asyncio.ensure_future(self._load(servable, change))
        self._loads.add(task)
        task.add_done_callback(self._loads.discard)
        try:
            await asyncio.wait((task,))
        finally:
            task.cancel()
            await wait_until_done(task)
        if task.cancelled():  # the service is stopping
            raise _stopping_error()
        task.result()

    async def _discover(self, name: str) -> Servable:
        """Find a servable that appeared in a folder after the last scan."""
        for root in self._roots:
            try:
                await asyncio.to_thread(scan_servable, root, name)
            except NotFoundError:
                continue
            self._check_name(name)
            return self._servables.setdefault(name, Servable(root, name))
        raise self._unknown_error(name)

    def _unknown_error(self, name: str) -> NotFoundError:
        names = ", ".join(self._servables) or "none"
        return NotFoundError(f"unknown servable {name!r:.140}; the servables are: {names}")

    def _check_name(self, name: str) -> None:
        """Raise InvalidArgumentError if another model's name could mean this servable or one of its methods."""
        for other in self._others():
            if _servable_of(other) == name:
                raise InvalidArgumentError(
                    f"the name of the servable {name} conflicts with the model {other}; rename one of them",
                    param="name",
                )

    def taken_by(self, name: str) -> str:
        """Return the servable that would get requests for a name, as text; "" if there is none."""
        servable = _servable_of(name)
        return f"the servable {servable}" if servable in self._servables else ""

    def _check_open(self) -> None:
        if self._is_closed:
            raise _stopping_error()

    async def _load(self, servable: Servable, change: Mapping[str, Any]) -> None:
        """Load with ``change``; fields that it does not name stay as requested before, or as servable.py has them."""
        async with servable.changing:
            self._check_open()
            requested = {**servable.requested, **change}
            try:
                folder = await asyncio.to_thread(scan_servable, servable.root, servable.name)
            except NotFoundError as error:  # the folder was removed: the servable is known, but cannot be loaded
                raise InvalidFileError(f"{servable.name}: {error}") from None
            _log_refused(folder)
            text = await asyncio.to_thread(read_script, folder.script)
            load = ServableLoad(servable, folder, text, self._supervision)
            try:
                wanted = await load.wanted(requested)
                if change:
                    check_versions_exist(wanted, folder)
                changes = version_changes_to(wanted, folder, servable.fingerprints, servable.labels)
                await load.load(changes, self._languages)
                self._check_open()
            except BaseException:
                await wait_until_done(load.abort())
                raise
            # From here on nothing awaits, so the switch cannot be cancelled halfway.
            servable.requested, servable.policy = requested, wanted.policy
            self._switch(servable, changes, load)

    def _switch(self, servable: Servable, changes: VersionChanges, load: ServableLoad) -> None:
        """Send requests to the new versions from now on, and drain those that are no longer wanted."""
        switch = changes.switch()
        replaced = [servable.versions[number] for number in load.new if number in servable.versions]
        replaced += [servable.versions.pop(number) for number in switch.drain]
        for number, (version, fingerprint) in load.new.items():
            servable.versions[number], servable.fingerprints[number] = version, fingerprint
            version.ready_versions = lambda: servable.ready
            version.policy = lambda: servable.policy.triton_form()
            self.on_loaded(version)
        servable.labels = dict(switch.labels)
        self._methods.clear()
        for number in switch.drain:
            del servable.fingerprints[number]
        load.update_states()
        for version in replaced:
            self._drain(servable, version)
        if load.new or replaced:
            tell(
                "servable_switched", f"{servable.name}: now serving versions {', '.join(servable.ready)}",
                servable=servable.name, versions=servable.ready, labels=servable.labels,
            )  # fmt: skip
        for label in switch.labels_kept:
            message = f"{servable.name}: label {label} was not moved: its new version has no folder"
            tell("label_kept", message, logging.WARNING, servable=servable.name, label=label)

    def _drain(self, servable: Servable, version: LoadedVersion) -> asyncio.Task[None]:
        number = int(version.source.version)

        async def drain() -> None:
            await version.drain(self._supervision.drain_s)
            if servable.states.get(number) == _UNLOADING and number not in servable.versions:
                servable.states[number] = ("UNAVAILABLE", "unloaded")

        if number not in servable.versions:
            servable.states[number] = _UNLOADING
        task = asyncio.ensure_future(drain())
        self._draining[task] = version
        task.add_done_callback(self._draining.pop)
        return task

    async def unload(self, name: str) -> None:
        """See Methods."""
        servable = self._servables.get(name)
        if servable is None:
            raise self._unknown_error(name)
        async with servable.changing:
            if not servable.versions:
                raise NotFoundError(f"{name} is not loaded")
            versions, servable.versions = [*servable.versions.values()], {}
            servable.fingerprints, servable.labels, servable.requested = {}, {}, {}
            self._methods.clear()
            draining = [self._drain(servable, version) for version in versions]
            await asyncio.shield(asyncio.gather(*draining))
        tell("servable_unloaded", f"{name} is unloaded", servable=name)

    async def close(self) -> None:
        """Refuse further changes, abort loads, let open requests end, and stop all processes."""
        self._is_closed = True
        self._methods.clear()
        await self._cancel_loads()
        for servable in self._servables.values():
            for version in servable.versions.values():
                self._drain(servable, version)
        while self._draining:
            await asyncio.wait([*self._draining])

    async def stop(self) -> None:
        """Stop all processes at once; open requests are refused."""
        self._is_closed = True
        await self._cancel_loads()
        versions = [version for servable in self._servables.values() for version in servable.versions.values()]
        await asyncio.gather(*(version.stop() for version in {*versions, *self._draining.values()}))
        while self._draining:
            await asyncio.wait([*self._draining])

    async def _cancel_loads(self) -> None:
        for task in self._loads:
            task.cancel()
        while self._loads:
            await asyncio.wait([*self._loads])


def _log_refused(folder: ServableFolder) -> None:
    """Log entries of a servable's folder that look like versions but are not valid."""
    for name, reason in folder.refused.items():
        message = f"{folder.path / name} is not a version: {reason}"
        tell("version_refused", message, logging.WARNING, servable=folder.name, version=name)


def _stopping_error() -> UnavailableError:
    return UnavailableError("the service is stopping", 5.0)


def _parse_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of WantedVersions that a load request sets; InvalidArgumentError names the field."""
    unknown = [name for name in config if name not in _CONFIG]
    if unknown:
        raise InvalidArgumentError(
            f"config: unknown field {unknown[0]!r:.100}; expected {' or '.join(_CONFIG)}", param="config"
        )
    change: dict[str, Any] = {}
    if "versions" in config:
        versions = config["versions"]
        if not isinstance(versions, str):
            raise InvalidArgumentError(
                f'versions: expected a string like "latest:2", "all" or "1,3", got {versions!r:.100}', param="versions"
            )
        change["policy"] = VersionPolicy.parse(versions)
    if "labels" in config:
        labels = change["labels"] = config["labels"]
        if not isinstance(labels, dict):
            raise InvalidArgumentError(
                f'labels: expected a mapping like {{"stable": 1}}, got {labels!r:.100}', param="labels"
            )
    WantedVersions(**change)  # checks the labels
    return change
