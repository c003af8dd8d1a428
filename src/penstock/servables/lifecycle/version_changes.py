"""Plan the way from the loaded versions to the wanted ones: which to load, when to switch, which to drain."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.api_errors import VersionNotFoundError
from penstock.errors import InvalidArgumentError, InvalidFileError, UnavailableError
from penstock.servables.api.version_policy import VERSION

if TYPE_CHECKING:
    from penstock.servables.api.version_policy import WantedVersions
    from penstock.servables.lifecycle.folder_scan import ServableFolder

__all__ = ["VersionChanges", "VersionSwitch", "check_versions_exist", "resolve_version", "version_changes_to"]


@dataclass(frozen=True)
class VersionSwitch:
    """The versions and labels that are served after the loads of a changes.

    The switch takes effect in one step; then ``drain`` are drained.

    ``labels_kept``: labels that stay where they were, because the version that they should move to does not exist.
    """

    ready: tuple[int, ...]
    labels: Mapping[str, int]
    drain: tuple[int, ...]
    labels_kept: tuple[str, ...]


@dataclass(frozen=True)
class VersionChanges:
    """The steps of a load: start ``load`` in fresh processes beside what runs, then ``switch()``, then drain.

    ``load``: versions that are new, or whose files changed since they were loaded.  ``loaded``: those that run now.
    ``chosen``: those that are wanted.  A wanted version without a folder keeps running if it is loaded.
    """

    load: tuple[int, ...]
    loaded: frozenset[int]
    chosen: frozenset[int]
    wanted_labels: Mapping[str, int]
    labels: Mapping[str, int]

    def switch(self) -> VersionSwitch:
        """Return what is served once everything in ``load`` is loaded.

        For each wanted version that does not exist, the newest version that ran before and is not wanted keeps running.
        """
        ready = (self.loaded & self.chosen) | set(self.load)
        unwanted = sorted(self.loaded - ready, reverse=True)
        num_kept = len(self.chosen - ready)
        labels, labels_kept = dict(self.wanted_labels), []
        for label, number in self.wanted_labels.items():
            if number in ready:
                continue
            labels_kept.append(label)
            del labels[label]
            previous = self.labels.get(label)
            if previous is not None and previous in self.loaded:
                labels[label] = previous
        ready |= set(unwanted[:num_kept]) | {number for number in labels.values() if number not in ready}
        return VersionSwitch(tuple(sorted(ready)), labels, tuple(sorted(self.loaded - ready)), tuple(labels_kept))


def version_changes_to(
    wanted: WantedVersions, folder: ServableFolder, loaded: Mapping[int, str], labels: Mapping[str, int] | None = None
) -> VersionChanges:
    """Plan the steps from what is loaded to what is wanted.

    ``loaded``: by number, the fingerprints that the running versions were loaded with.  ``labels``: the current labels.
    Raises InvalidFileError if none of the wanted versions exists; everything stays as it is then.
    """
    chosen = wanted.policy.choose(folder.versions) | set(wanted.labels.values())
    existing = chosen & set(folder.versions)
    if not existing:
        expected = f"versions {wanted.policy}" if folder.versions else "at least one version"
        refused = "".join(f"; {name}: {reason}" for name, reason in folder.refused.items())
        actual = ", ".join(map(str, folder.versions)) or "no version folder"
        raise InvalidFileError(f"{folder.path}: expected {expected}, got {actual}{refused}", param="versions")
    load = tuple(sorted(number for number in existing if loaded.get(number) != folder.versions[number]))
    return VersionChanges(load, frozenset(loaded), frozenset(chosen), dict(wanted.labels), dict(labels or {}))


def check_versions_exist(wanted: WantedVersions, folder: ServableFolder) -> None:
    """Raise InvalidArgumentError if a load asks, by number or label, for a version without a folder.

    Only load requests are checked: the settings of servable.py may name versions that do not exist yet.
    """
    missing = ({*wanted.policy.numbers} | {*wanted.labels.values()}) - set(folder.versions)
    if not missing:
        return
    number = min(missing)
    label = next((f"labels: {label}" for label, target in wanted.labels.items() if target == number), "")
    existing = ", ".join(map(str, folder.versions)) or "none"
    reason = f"; {number}: {folder.refused[str(number)]}" if str(number) in folder.refused else ""
    raise InvalidArgumentError(
        f"{label or f'versions {wanted.policy}'}: {folder.name} has no version {number}; it has {existing}{reason}",
        param="labels" if label else "versions",
    )


def resolve_version(
    servable: str, text: str, ready: Collection[int], labels: Mapping[str, int], known: Collection[int] = ()
) -> int:
    """Return the version that a request asks for: "" is the newest one that is ready, otherwise a number or a label.

    Raises UnavailableError for a version in ``known`` that is not ready, VersionNotFoundError for an unknown one.
    """
    if not text:
        if not ready:
            raise UnavailableError(f"{servable}: no version is ready")
        return max(ready)
    number = labels.get(text)
    if number is None and VERSION.fullmatch(text):
        number = int(text)
    if number is not None and number in ready:
        return number
    if number is not None and (number in known or text in labels):
        raise UnavailableError(f"{servable}: version {text} is not ready", param="model_version")
    names = ", ".join([*map(str, sorted(ready)), *sorted(labels)])
    raise VersionNotFoundError(f"{servable} has no version {text!r:.100}; it has {names or 'none'}")
