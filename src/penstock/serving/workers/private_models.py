"""Language models for servables: models that the service serves, and private models from a version's folder."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from penstock.errors import InvalidFileError, NotFoundError, UnavailableError, UnsupportedError
from penstock.servables.lifecycle.language_models import LanguageQueue
from penstock.servables.lifecycle.loaded_version import wait_until_done
from penstock.serving.workers.remote_model import RemoteBackend

if TYPE_CHECKING:
    from penstock.llm.backend import Backend, Models
    from penstock.servables.api.manifest import LanguageManifest
    from penstock.servables.lifecycle.language_models import LanguageModels
    from penstock.servables.lifecycle.open_version import VersionSource

    def _fits(models: PrivateModels) -> LanguageModels:
        return models


__all__ = ["PrivateModels"]


class PrivateModels:
    """Opens language models for servables.

    ``models``: the models that the service serves.
    ``make``: returns a new backend for a name and a quantization scheme (or None).  The backend has its own memory plan
    and is not listed among the models of the service.
    """

    def __init__(self, models: Models, make: Callable[[str, str | None], RemoteBackend]) -> None:
        self._models, self._make = models, make

    async def open(self, plan: LanguageManifest, source: VersionSource) -> LanguageQueue:
        """See LanguageModels.  Raises the error of the load; InvalidFileError if the service serves no such model."""
        if plan.served:
            return self._open_served(plan.served, plan, source.name)
        path = await asyncio.to_thread(source.check_language_model, plan.path)
        backend = self._make(f"{source.name}/{source.version}/{plan.path}", plan.scheme)
        try:
            await backend.load(str(path))
        except (InvalidFileError, UnsupportedError) as error:  # the message may lack the path
            await wait_until_done(backend.stop())
            prefix = "" if str(path) in str(error) else f"{path}: "
            raise type(error)(f"{prefix}{error}") from error
        except BaseException:
            await wait_until_done(backend.stop())
            raise

        def find() -> Backend:
            return backend

        return LanguageQueue(plan.path.strip("./") or source.name, plan, find, backend.stop)

    def _open_served(self, served: str, plan: LanguageManifest, servable: str) -> LanguageQueue:
        """Open a model that the service serves.  Requests get UnavailableError while it is not served."""

        def find() -> Backend:
            try:
                return self._models.get(served)
            except NotFoundError:
                raise UnavailableError(
                    f"{servable}: the language model {served!r} is not served at the moment"
                ) from None

        try:
            find()
        except UnavailableError:
            names = ", ".join(model.name for model in self._models.list()) or "none"
            raise InvalidFileError(
                f"{servable}: servable.py uses the language model {served!r}, which this service does not serve; "
                f"it serves: {names}"
            ) from None
        return LanguageQueue(served, plan, find, _keep_running)


async def _keep_running() -> None:
    """Leave a served model running when a version that uses it is stopped."""
