"""``client.servables``: describe, load and unload servables."""

from __future__ import annotations

from collections.abc import Coroutine, Mapping
from typing import Any, Protocol, TypeVar

from penstock.client.calls import Answer, ClientCall
from penstock.client.oip_calls import (
    MetadataCall,
    ReadyCall,
    RepositoryChange,
    RepositoryIndex,
    StatisticsCall,
    model_name,
    version_of,
)
from penstock.errors import ServiceError

__all__ = ["AsyncServables", "Servables"]

_T = TypeVar("_T")


class _Send(Protocol):
    def __call__(self, call: ClientCall[_T]) -> _T: ...


class _AsyncSend(Protocol):
    def __call__(self, call: ClientCall[_T]) -> Coroutine[Any, Any, _T]: ...


def _load(servable: str, versions: str, labels: Mapping[str, int] | None) -> RepositoryChange:
    config: dict[str, Any] = {"versions": versions} if versions else {}
    if labels is not None:
        config["labels"] = dict(labels)
    return RepositoryChange("load", servable, config)


def _not_ready(error: ServiceError) -> bool:
    if error.status == 503:
        return False
    raise error


class Servables:
    """The servables of a service.  Language models have all of these methods except load and unload."""

    def __init__(self, send: _Send) -> None:
        self._send = send

    def index(self) -> list[Answer]:
        """Return ``name``, ``version``, ``state`` and ``reason`` of every version, ready or not."""
        return self._send(RepositoryIndex())

    def metadata(self, servable: str, *, method: str = "", version: str | int = "") -> Answer:
        """Return the versions, and the name, datatype and shape of each input and output."""
        return self._send(MetadataCall(model_name(servable, method), version_of(version)))

    def is_ready(self, servable: str, *, method: str = "", version: str | int = "") -> bool:
        """Return True if a new request would be accepted."""
        try:
            return self._send(ReadyCall(model_name(servable, method), version_of(version)))
        except ServiceError as error:
            return _not_ready(error)

    def statistics(self, servable: str = "", *, method: str = "", version: str | int = "") -> list[Answer]:
        """Return the counts and times of one servable, or of all if it has no name."""
        return self._send(StatisticsCall(model_name(servable, method), version_of(version)))

    def load(self, servable: str, *, versions: str = "", labels: Mapping[str, int] | None = None) -> None:
        """Load a servable, or scan its folder again.  Requires an admin key.

        ``versions`` and ``labels`` replace the version policy and the labels; without them, these stay as they are.
        """
        self._send(_load(servable, versions, labels))

    def unload(self, servable: str) -> None:
        """Refuse new requests and unload the servable when those that run have ended.  Requires an admin key."""
        self._send(RepositoryChange("unload", servable))


class AsyncServables:
    """The methods of Servables as coroutines."""

    def __init__(self, send: _AsyncSend) -> None:
        self._send = send

    async def index(self) -> list[Answer]:
        """See Servables.index."""
        return await self._send(RepositoryIndex())

    async def metadata(self, servable: str, *, method: str = "", version: str | int = "") -> Answer:
        """See Servables.metadata."""
        return await self._send(MetadataCall(model_name(servable, method), version_of(version)))

    async def is_ready(self, servable: str, *, method: str = "", version: str | int = "") -> bool:
        """See Servables.is_ready."""
        try:
            return await self._send(ReadyCall(model_name(servable, method), version_of(version)))
        except ServiceError as error:
            return _not_ready(error)

    async def statistics(self, servable: str = "", *, method: str = "", version: str | int = "") -> list[Answer]:
        """See Servables.statistics."""
        return await self._send(StatisticsCall(model_name(servable, method), version_of(version)))

    async def load(self, servable: str, *, versions: str = "", labels: Mapping[str, int] | None = None) -> None:
        """See Servables.load."""
        await self._send(_load(servable, versions, labels))

    async def unload(self, servable: str) -> None:
        """See Servables.unload."""
        await self._send(RepositoryChange("unload", servable))
