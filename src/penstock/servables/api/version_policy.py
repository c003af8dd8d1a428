"""The versions of a servable that are served, and their labels."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Final

from penstock.config import is_integer
from penstock.errors import InvalidArgumentError

__all__ = ["NAME", "VERSION", "VersionPolicy", "WantedVersions"]

NAME: Final = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,127}")
"""Names of servables and of labels."""
VERSION: Final = re.compile(r"[1-9][0-9]{0,17}")
"""The number of a version."""


@dataclass(frozen=True)
class VersionPolicy:
    """The versions that are served: the newest ``latest`` versions, the versions in ``numbers``, or all."""

    latest: int = 0
    numbers: tuple[int, ...] = ()

    @classmethod
    def parse(cls, text: str) -> VersionPolicy:
        """Parse ``latest``, ``latest:2``, ``all`` or ``1,3``; raise InvalidArgumentError for anything else."""
        if text == "all":
            return cls()
        if text == "latest":
            return cls(latest=1)
        kind, _, number = text.partition(":")
        if kind == "latest" and VERSION.fullmatch(number):
            return cls(latest=int(number))
        numbers = [part.strip() for part in text.split(",")]
        if all(VERSION.fullmatch(part) for part in numbers):
            return cls(numbers=tuple(sorted({int(part) for part in numbers})))
        raise InvalidArgumentError(
            f'versions: expected "latest", "latest:2", "all" or numbers like "1,3", got {text!r:.100}',
            param="versions",
        )

    def choose(self, available: Collection[int]) -> set[int]:
        """Return the versions that the policy selects, including listed versions that are not available."""
        if self.numbers:
            return set(self.numbers)
        return set(sorted(available)[-self.latest :] if self.latest else available)

    def triton_form(self) -> dict[str, dict[str, object]]:
        """Return the policy in the form of Triton's model configuration (``version_policy``)."""
        if self.numbers:
            return {"specific": {"versions": [*self.numbers]}}
        return {"latest": {"num_versions": self.latest}} if self.latest else {"all": {}}

    def __str__(self) -> str:
        return ",".join(map(str, self.numbers)) or (f"latest:{self.latest}" if self.latest else "all")


@dataclass(frozen=True)
class WantedVersions:
    """The versions that an operator wants served: those of a policy, and those that labels point to.

    Raises InvalidArgumentError; its message starts with ``labels``.
    """

    policy: VersionPolicy = VersionPolicy(latest=1)
    labels: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for label, number in self.labels.items():
            if not isinstance(label, str) or NAME.fullmatch(label) is None:
                raise InvalidArgumentError(
                    "labels: a label must start with a letter, followed by letters, digits, _ and -, "
                    f"got {label!r:.100}",
                    param="labels",
                )
            if not is_integer(number, 1, 2**63 - 1):
                raise InvalidArgumentError(
                    f"labels: {label}: expected a version number, got {number!r:.100}", param="labels"
                )
