"""The models of a service by name; each runs in workers."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from penstock.errors import InvalidArgumentError, NotFoundError, UnavailableError
from penstock.logs import tell
from penstock.serving.workers.remote_model import RemoteBackend
from penstock.serving.workers.worker_config import WorkerModelOptions
from penstock.serving.workers.worker_connection import WorkerConnection, reset_worker_numbers
from penstock.serving.workers.worker_group import Launcher
from penstock.serving.workers.worker_roles import NO_ROLES, WorkerRoles

if TYPE_CHECKING:
    from penstock.cluster.autoscale import ScalePolicy
    from penstock.llm.backend import Models, ProfileSettings

    def _fits(models: RemoteModels) -> Models:
        return models


__all__ = ["RemoteModels", "check_name"]

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}")


def check_name(name: str) -> str:
    """Return ``name`` if it is a valid model name; InvalidArgumentError."""
    if not _NAME.fullmatch(name) or ".." in name:
        raise InvalidArgumentError(
            "model name: expected 1 to 128 letters, digits and . _ : / -, beginning with a letter or digit and without "
            f"'..', got {name!r:.140}",
            param="name",
        )
    return name


class RemoteModels:
    """The models of a service, by name."""

    def __init__(
        self,
        launcher: Launcher,
        options: WorkerModelOptions | None = None,
        num_workers: int = 1,
        networks: Mapping[str, str] | None = None,
        route_policy: str = "prefix",
        scale: ScalePolicy | None = None,
        roles: WorkerRoles = NO_ROLES,
    ) -> None:
        self._roles = roles
        self.is_draining = False
        self.taken_by: Callable[[str], str] = lambda name: ""
        """Returns the kind of another object that has a name, such as a servable; "" if the name is free."""
        self._launcher = launcher
        self._options = options or WorkerModelOptions()
        self._num_workers = num_workers
        self._networks = networks or {}
        self._route_policy, self._scale = route_policy, scale
        self._backends: dict[str, RemoteBackend] = {}

    def list(self) -> list[RemoteBackend]:
        """Return all models in the order of loading."""
        return [*self._backends.values()]

    def get(self, name: str) -> RemoteBackend:
        """Return the model of a name; NotFoundError."""
        backend = self._backends.get(name)
        if backend is None:
            raise NotFoundError(
                f"There is no model {name!r:.140}. Available models: {', '.join(self._backends) or 'none'}"
            )
        return backend

    def adopt(self, connection: WorkerConnection) -> None:
        """Let a worker of another machine that is ready share the load of the model that it names."""
        self.get(connection.model).adopt(connection)

    async def load(self, model: str, name: str = "") -> RemoteBackend:
        """Load a model under a name; see ``Models.load``."""
        try:
            name = check_name(name or Path(model).stem)
        except InvalidArgumentError as error:
            if name:
                raise
            raise InvalidArgumentError(f"{model}: {error}. Pass NAME=PATH to give it a name") from None
        if self.is_draining:
            raise UnavailableError("The service is shutting down.", 5.0)
        if name in self._backends:
            raise InvalidArgumentError(
                f"the name {name!r} is taken. Update that model, or pass NAME=PATH to load this one under another name",
                param="name",
            )
        if other := self.taken_by(name):
            raise InvalidArgumentError(f"the name {name!r} is taken by {other}. Choose another one", param="name")
        reset_worker_numbers(name)
        options = replace(self._options, network=self._networks.get(name, self._networks.get("")))
        backend = self._backends[name] = RemoteBackend(
            name, self._launcher, options, self._num_workers, self._route_policy, self._scale, self._roles
        )
        try:
            await backend.load(model)
        except BaseException:
            del self._backends[name]
            raise
        return backend

    async def unload(self, name: str) -> None:
        """Drain a model and release its memory."""
        backend = self.get(name)
        await backend.close()
        if self._backends.get(name) is backend:
            del self._backends[name]
        tell("model_unloaded", f"Unloaded the model {name}.", model=name)

    async def update(self, name: str, model: str) -> RemoteBackend:
        """Switch a model to other weights after verifying the checksums of their bundle."""
        backend = self.get(name)
        await backend.load(model, verify="always" if Path(model).is_file() else "")
        return backend

    async def drain_worker(self, name: str, worker: str, *, replaces: bool = False) -> RemoteBackend:
        """Drain one worker of a model and end it; see ``Models.drain_worker``."""
        backend = self.get(name)
        await backend.drain_worker(worker, replaces=replaces)
        return backend

    async def profile(self, name: str, settings: ProfileSettings, worker: str = "") -> tuple[str, bytes]:
        """Record steps of a model; see ``Models.profile``."""
        return await self.get(name).profile(settings, worker)

    async def stop(self) -> None:
        """End all models at once and lose their open requests."""
        self.is_draining = True
        await asyncio.gather(*(backend.stop() for backend in self.list()))

    async def close(self) -> None:
        """Drain all models."""
        self.is_draining = True
        await asyncio.gather(*(backend.close() for backend in self.list()))
