"""``client.servables``: what is known of servables, and changing them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from penstock.client.inference import Change, Index, OfModel, OipCall, version_of
from penstock.errors import ServiceError

__all__ = ["AsyncServables", "Servables"]

Answer = dict[str, Any]


def _load(servable: str, versions: str, labels: Mapping[str, int] | None) -> Change:
    config: dict[str, Any] = {"versions": versions} if versions else {}
    if labels is not None:
        config["labels"] = dict(labels)
    return Change("load", servable, config)


def _not_ready(error: ServiceError) -> bool:
    if error.status == 503:
        return False
    raise error


class Servables:
    """The servables of a service, of a Client; language models, too, but for load and unload."""

    def __init__(self, ask: Callable[[OipCall], Any]) -> None:
        self._ask = ask

    def index(self) -> list[Answer]:
        """``name``, ``version``, ``state`` and ``reason`` of every version, ready or not."""
        found: list[Answer] = self._ask(Index())
        return found

    def metadata(self, servable: str, *, method: str = "", version: str | int = "") -> Answer:
        """Its versions, and name, datatype and shape of its inputs and outputs."""
        found: Answer = self._ask(OfModel("metadata", servable, method, version_of(version)))
        return found

    def is_ready(self, servable: str, *, method: str = "", version: str | int = "") -> bool:
        """Whether a request that comes now would be taken."""
        try:
            return bool(self._ask(OfModel("ready", servable, method, version_of(version))))
        except ServiceError as error:
            return _not_ready(error)

    def statistics(self, servable: str = "", *, method: str = "", version: str | int = "") -> list[Answer]:
        """Counts and times of one, or of all."""
        found: list[Answer] = self._ask(OfModel("stats", servable, method, version_of(version)))
        return found

    def load(self, servable: str, *, versions: str = "", labels: Mapping[str, int] | None = None) -> None:
        """Load it, or look at its folder again, with another policy or other labels if they are given; needs an admin's
        key.
        """
        self._ask(_load(servable, versions, labels))

    def unload(self, servable: str) -> None:
        """Take no more requests and let those that run end; needs an admin's key."""
        self._ask(Change("unload", servable))


class AsyncServables:
    """The servables of a service, of an AsyncClient."""

    def __init__(self, ask: Callable[[OipCall], Awaitable[Any]]) -> None:
        self._ask = ask

    async def index(self) -> list[Answer]:
        """``name``, ``version``, ``state`` and ``reason`` of every version, ready or not."""
        found: list[Answer] = await self._ask(Index())
        return found

    async def metadata(self, servable: str, *, method: str = "", version: str | int = "") -> Answer:
        """Its versions, and name, datatype and shape of its inputs and outputs."""
        found: Answer = await self._ask(OfModel("metadata", servable, method, version_of(version)))
        return found

    async def is_ready(self, servable: str, *, method: str = "", version: str | int = "") -> bool:
        """Whether a request that comes now would be taken."""
        try:
            return bool(await self._ask(OfModel("ready", servable, method, version_of(version))))
        except ServiceError as error:
            return _not_ready(error)

    async def statistics(self, servable: str = "", *, method: str = "", version: str | int = "") -> list[Answer]:
        """Counts and times of one, or of all."""
        found: list[Answer] = await self._ask(OfModel("stats", servable, method, version_of(version)))
        return found

    async def load(self, servable: str, *, versions: str = "", labels: Mapping[str, int] | None = None) -> None:
        """Load it, or look at its folder again, with another policy or other labels if they are given; needs an admin's
        key.
        """
        await self._ask(_load(servable, versions, labels))

    async def unload(self, servable: str) -> None:
        """Take no more requests and let those that run end; needs an admin's key."""
        await self._ask(Change("unload", servable))
