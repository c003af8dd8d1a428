"""The models of a service, by name."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final

from penstock.errors import InvalidArgumentError, NotFoundError, UnavailableError
from penstock.logs import tell
from penstock.serving.workers.remote_model import RemoteBackend
from penstock.serving.workers.worker_config import ModelOptions
from penstock.serving.workers.worker_group import Launcher

if TYPE_CHECKING:
    from penstock.llm.backend import Models
    from penstock.serving.workers.worker_connection import WorkerConnection

    def _fits(models: RemoteModels) -> Models:
        return models


__all__ = ["RemoteModels", "check_name"]

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}")


def check_name(name: str) -> str:
    """A model's name as clients may use it; InvalidArgumentError."""
    if not _NAME.fullmatch(name) or ".." in name:
        raise InvalidArgumentError(
            f"a model's name has 1 to 128 letters, digits and . _ : / - and begins with a letter or a digit, "
            f"not {name!r:.140}"
        )
    return name


class RemoteModels:
    """The models of a service, by name."""

    def __init__(self, launcher: Launcher, options: ModelOptions | None = None, num_workers: int = 1) -> None:
        self.is_draining = False
        self.taken_by: Callable[[str], str] = lambda name: ""
        """What else has a name, as people call it; "" when nothing has."""
        self._launcher = launcher
        self._options = options or ModelOptions()
        self._num_workers = num_workers
        self._backends: dict[str, RemoteBackend] = {}

    def list(self) -> list[RemoteBackend]:
        """All of them, in the order of loading."""
        return [*self._backends.values()]

    def get(self, name: str) -> RemoteBackend:
        """The one of that name; NotFoundError."""
        backend = self._backends.get(name)
        if backend is None:
            raise NotFoundError(f"no model {name!r:.140} here; there are {', '.join(self._backends) or 'none'}")
        return backend

    def adopt(self, link: WorkerConnection) -> None:
        """A worker of another machine is ready: it shares the load of the model that it names."""
        self.get(link.model).adopt(link)

    async def load(self, model: str, name: str = "") -> RemoteBackend:
        """Load a model under a name; as Models has it."""
        try:
            name = check_name(name or Path(model).stem)
        except InvalidArgumentError as error:
            if name:
                raise
            raise InvalidArgumentError(f"{model}: {error}; give it a name of its own (NAME=PATH)") from None
        if self.is_draining:
            raise UnavailableError("the service is about to end", 5.0)
        if name in self._backends:
            advice = "update it, or give this one a name of its own (NAME=PATH)"
            raise InvalidArgumentError(f"the name {name!r} is taken: {advice}")
        if other := self.taken_by(name):
            raise InvalidArgumentError(f"the name {name!r} is taken by {other}: choose another one")
        backend = self._backends[name] = RemoteBackend(name, self._launcher, self._options, self._num_workers)
        try:
            await backend.load(model)
        except BaseException:
            del self._backends[name]
            raise
        return backend

    async def unload(self, name: str) -> None:
        """Drain a model and give its memory back."""
        backend = self.get(name)
        await backend.close()
        if self._backends.get(name) is backend:
            del self._backends[name]
        tell("model_unloaded", f"{name} is unloaded", model=name)

    async def update(self, name: str, model: str) -> RemoteBackend:
        """Switch to other weights; the file's checksums are looked at."""
        backend = self.get(name)
        await backend.load(model, verify="always" if Path(model).is_file() else "")
        return backend

    async def stop(self) -> None:
        """End all of them at once; what is open is lost."""
        self.is_draining = True
        await asyncio.gather(*(backend.stop() for backend in self.list()))

    async def close(self) -> None:
        """Drain all of them."""
        self.is_draining = True
        await asyncio.gather(*(backend.close() for backend in self.list()))
