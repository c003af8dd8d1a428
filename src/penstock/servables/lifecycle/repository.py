"""The servables of a service: folders of the operator's, loaded, switched, drained and found by name."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from penstock.api_errors import without_folders
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
from penstock.servables.lifecycle.loaded_version import LoadedMethod, LoadedVersion, to_its_end
from penstock.servables.lifecycle.loading import Loading
from penstock.servables.lifecycle.versions import (
    SCRIPT,
    Plan,
    Policy,
    ServableFolder,
    Wanted,
    check_there,
    find_version,
    make_plan,
    scan,
    scan_servable,
)
from penstock.servables.process.open_version import read_script
from penstock.tensors import ModelState

if TYPE_CHECKING:
    from penstock.processes.supervision import SupervisionPolicy
    from penstock.servables.lifecycle.language_models import LanguageModels
    from penstock.tensors import Methods

    def _fits(servables: Servables) -> Methods:
        return servables


__all__ = ["Servable", "Servables", "holds_servables"]

_CONFIG: Final = ("versions", "labels")
_UNLOADING: Final = ("UNLOADING", "")


def _servable_of(name: str) -> str:
    """Of SERVABLE or SERVABLE.METHOD the servable's part."""
    return name.partition(".")[0]


def holds_servables(folder: Path) -> bool:
    """Whether a folder is one of servables, or a servable itself, rather than a checkpoint."""
    if not folder.is_dir() or (folder / "config.json").exists():
        return False
    return any((one / SCRIPT).is_file() for one in (folder, *folder.iterdir()))


class Servable:
    """One servable: the versions that run, labels, and what is to be said of each version."""

    def __init__(self, root: Path, name: str) -> None:
        self.root, self.name = root, name
        self.versions: dict[int, LoadedVersion] = {}
        self.prints: dict[int, str] = {}
        self.labels: dict[str, int] = {}
        self.policy = Policy(latest=1)
        self.states: dict[int, tuple[str, str]] = {}
        self.asked: dict[str, Any] = {}
        """Fields of ``Wanted`` that the operator asked for over the protocol, in place of what servable.py says."""
        self.changing = asyncio.Lock()

    def told(self, error: PenstockError) -> str:
        """An error as those who load over the network read it: paths are relative to the folder of servables."""
        return without_folders(str(error).replace(f"{self.root}/", ""))

    @property
    def ready(self) -> list[str]:
        """The numbers of versions that requests can ask for."""
        return [str(number) for number in sorted(self.versions)]

    def method(self, text: str, version: str) -> LoadedMethod:
        """A method by its name ("" for the default one) and version; NotFoundError, UnavailableError."""
        loaded = self.versions[find_version(self.name, version, self.versions, self.labels, self.states)]
        methods = loaded.methods
        name = text or loaded.plan.settings.default_method or (next(iter(methods)) if len(methods) == 1 else "")
        if name not in methods:
            names = ", ".join(f"{self.name}.{one}" for one in methods)
            raise NotFoundError(f"{self.name} has no method {text!r:.100}: ask for {names}")
        return methods[name]


class Servables:
    """Those of some folders.  ``languages`` opens their language models; without, none may have one.  ``others`` are
    the names of what else is served.
    """

    def __init__(
        self,
        supervision: SupervisionPolicy,
        languages: LanguageModels | None = None,
        others: Callable[[], Sequence[str]] = tuple,
    ) -> None:
        self._patience, self._languages, self._others = supervision, languages, others
        self._all: dict[str, Servable] = {}
        self._found: dict[tuple[str, str], LoadedMethod] = {}
        self._loads: set[asyncio.Task[None]] = set()
        self._draining: dict[asyncio.Task[None], LoadedVersion] = {}
        self._roots: list[Path] = []
        self._is_closed = False

    async def open(self, root: Path) -> None:
        """Serve what a folder holds, or the one servable that it is; raises what loading one raised."""
        refused: dict[str, str] = {}
        if (root / SCRIPT).is_file():
            found = {root.name: await asyncio.to_thread(scan_servable, root.parent, root.name)}
            root = root.parent
        else:
            found, refused = await asyncio.to_thread(scan, root)
        for name, reason in refused.items():
            tell("servable_refused", f"{root / name}: {reason}", logging.WARNING, servable=name)
        taken = [name for name in found if name in self._all]
        if taken:
            raise InvalidArgumentError(f"two folders have a servable {taken[0]}")
        for name in found:
            self._check_name(name)
        for name in found:
            self._all[name] = Servable(root, name)
        for name in found:
            await self._change(name, {})
        self._roots.append(root)

    def all(self) -> Sequence[Servable]:
        """Those that were seen, loaded or not."""
        return [*self._all.values()]

    def list(self) -> Sequence[LoadedMethod]:
        """Every method of every version that is ready."""
        return [
            method
            for one in self._all.values()
            for _, version in sorted(one.versions.items())
            for method in version.methods.values()
        ]

    def find(self, name: str, version: str = "") -> LoadedMethod | None:
        """As Methods has it."""
        found = self._found.get((name, version))
        if found is not None:
            return found
        servable_name, _, text = name.partition(".")
        servable = self._all.get(servable_name)
        if servable is None:
            return None
        if not servable.versions:
            raise UnavailableError(f"{servable_name} is not loaded")
        found = servable.method(text, version)
        self._check_open()
        if not version:  # who asked for whichever is the newest gets it, though it changes meanwhile
            found = found.floating(partial(self.find, name))
        self._found[name, version] = found
        return found

    def index(self) -> Sequence[ModelState]:
        """As Methods has it."""
        return [
            ModelState(one.name, str(number), state, reason)
            for one in self._all.values()
            for number, (state, reason) in sorted(one.states.items())
        ]

    async def load(self, name: str, config: Mapping[str, Any] | None = None) -> None:
        """As Methods has it; other loads and unloads of the same servable come one after the other.

        It is done whole or not at all: who asked for it may go, and the service may end, meanwhile.  Errors name files
        by their paths in the folder of servables; the log has the rest.
        """
        try:
            await self._change(name, _change_of(config or {}))
        except UnavailableError as error:
            raise UnavailableError(self._told(name, error), error.retry_after_s) from error
        except (FileAccessError, InvalidFileError, UnsupportedError) as error:
            raise type(error)(self._told(name, error)) from error

    def _told(self, name: str, error: PenstockError) -> str:
        servable = self._all.get(name)
        return str(error) if servable is None else servable.told(error)

    async def _change(self, name: str, change: Mapping[str, Any]) -> None:
        """Load with fields of what is wanted."""
        servable = self._all.get(name) or await self._seen(name)
        task = asyncio.ensure_future(self._load(servable, change))
        self._loads.add(task)
        task.add_done_callback(self._loads.discard)
        try:
            await asyncio.wait((task,))
        finally:
            task.cancel()
            await to_its_end(task)
        if task.cancelled():  # by the service's end
            raise _about_to_end()
        task.result()

    async def _seen(self, name: str) -> Servable:
        """A servable that came into a folder since it was looked at."""
        for root in self._roots:
            try:
                await asyncio.to_thread(scan_servable, root, name)
            except NotFoundError:
                continue
            self._check_name(name)
            return self._all.setdefault(name, Servable(root, name))
        raise NotFoundError(f"there is no servable {name!r:.140}; there are {', '.join(self._all) or 'none'}")

    def _check_name(self, name: str) -> None:
        """InvalidArgumentError when requests for something else could be for this servable or its methods."""
        for other in self._others():
            if _servable_of(other) == name:
                raise InvalidArgumentError(f"the servable {name} has a name that the model {other} takes: rename one")

    def taken_by(self, name: str) -> str:
        """The servable that requests for a name would be for; "" when there is none."""
        own = _servable_of(name)
        return f"the servable {own}" if own in self._all else ""

    def _check_open(self) -> None:
        if self._is_closed:
            raise _about_to_end()

    async def _load(self, servable: Servable, change: Mapping[str, Any]) -> None:
        """``change``: fields of what is wanted; the others stay as they were asked for, or as servable.py has them."""
        async with servable.changing:
            self._check_open()
            asked = {**servable.asked, **change}
            try:
                found = await asyncio.to_thread(scan_servable, servable.root, servable.name)
            except NotFoundError as error:  # the folder went: the servable is known, but cannot be loaded
                raise InvalidFileError(f"{servable.name}: {error}") from None
            _tell_refused(found)
            text = await asyncio.to_thread(read_script, found.script)
            loading = Loading(servable, found, text, self._patience)
            try:
                wanted = await loading.wanted(asked)
                if change:
                    check_there(wanted, found)
                plan = make_plan(wanted, found, servable.prints, servable.labels)
                await loading.load(plan, self._languages)
                self._check_open()
            except BaseException:
                await to_its_end(loading.give_up())
                raise
            servable.asked, servable.policy = asked, wanted.policy  # from here on nothing waits, so nothing can end it
            self._switch(servable, plan, loading)

    def _switch(self, servable: Servable, plan: Plan, loading: Loading) -> None:
        """From now on requests go to what is loaded; what is not wanted any more is drained."""
        switch = plan.switch()
        gone = [servable.versions[number] for number in loading.new if number in servable.versions]
        gone += [servable.versions.pop(number) for number in switch.drain]
        for number, (version, text) in loading.new.items():
            servable.versions[number], servable.prints[number] = version, text
            version.siblings, version.policy = lambda: servable.ready, lambda: servable.policy.told()
        servable.labels = dict(switch.labels)
        self._found.clear()
        for number in switch.drain:
            del servable.prints[number]
        loading.note_states()
        for version in gone:
            self._drain(servable, version)
        if loading.new or gone:
            tell(
                "servable_switched", f"{servable.name}: versions {', '.join(servable.ready)} are served",
                servable=servable.name, versions=servable.ready, labels=servable.labels,
            )  # fmt: skip
        for label in switch.labels_kept:
            told = f"{servable.name}: label {label} stays where it was: its version has no folder"
            tell("label_kept", told, logging.WARNING, servable=servable.name, label=label)

    def _drain(self, servable: Servable, version: LoadedVersion) -> asyncio.Task[None]:
        number = int(version.source.version)

        async def drain() -> None:
            await version.drain(self._patience.drain_s)
            if servable.states.get(number) == _UNLOADING and number not in servable.versions:
                servable.states[number] = ("UNAVAILABLE", "unloaded")

        if number not in servable.versions:
            servable.states[number] = _UNLOADING
        task = asyncio.ensure_future(drain())
        self._draining[task] = version
        task.add_done_callback(self._draining.pop)
        return task

    async def unload(self, name: str) -> None:
        """As Methods has it."""
        servable = self._all.get(name)
        if servable is None:
            raise NotFoundError(f"there is no servable {name!r:.140}; there are {', '.join(self._all) or 'none'}")
        async with servable.changing:
            if not servable.versions:
                raise NotFoundError(f"{name} is not loaded")
            versions, servable.versions = [*servable.versions.values()], {}
            servable.prints, servable.labels, servable.asked = {}, {}, {}
            self._found.clear()
            draining = [self._drain(servable, one) for one in versions]
            await asyncio.shield(asyncio.gather(*draining))
        tell("servable_unloaded", f"{name} is unloaded", servable=name)

    async def close(self) -> None:
        """Take no more changes, give up those that are not done, let open requests end, end all processes."""
        self._is_closed = True
        self._found.clear()
        await self._end_loads()
        for servable in self._all.values():
            for version in servable.versions.values():
                self._drain(servable, version)
        while self._draining:
            await asyncio.wait([*self._draining])

    async def stop(self) -> None:
        """End all processes at once; what is open is refused."""
        self._is_closed = True
        await self._end_loads()
        versions = [one for servable in self._all.values() for one in servable.versions.values()]
        await asyncio.gather(*(one.stop() for one in {*versions, *self._draining.values()}))
        while self._draining:
            await asyncio.wait([*self._draining])

    async def _end_loads(self) -> None:
        for task in self._loads:
            task.cancel()
        while self._loads:
            await asyncio.wait([*self._loads])


def _tell_refused(found: ServableFolder) -> None:
    """Say which entries of a servable's folder look like versions and are none."""
    for name, reason in found.refused.items():
        told = f"{found.path / name} is no version: {reason}"
        tell("version_refused", told, logging.WARNING, servable=found.name, version=name)


def _about_to_end() -> UnavailableError:
    return UnavailableError("the service is about to end", 5.0)


def _change_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of ``Wanted`` that an operator asks for over the protocol; InvalidArgumentError names the field."""
    unknown = [name for name in config if name not in _CONFIG]
    if unknown:
        raise InvalidArgumentError(f"config has {' and '.join(_CONFIG)}, not {unknown[0]!r:.100}")
    change: dict[str, Any] = {}
    if "versions" in config:
        versions = config["versions"]
        if not isinstance(versions, str):
            raise InvalidArgumentError(
                f'versions must be like "latest:2", "all" or "1,3", not {versions!r:.100}', param="versions"
            )
        change["policy"] = Policy.parse(versions)
    if "labels" in config:
        labels = change["labels"] = config["labels"]
        if not isinstance(labels, dict):
            raise InvalidArgumentError(f'labels must be like {{"stable": 1}}, not {labels!r:.100}', param="labels")
    Wanted(**change)  # refuses labels
    return change
