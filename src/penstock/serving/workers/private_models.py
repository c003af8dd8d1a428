"""Language models that servables use: served ones, and ones that only a version of a servable has."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from penstock.errors import InvalidFileError, NotFoundError, UnavailableError, UnsupportedError
from penstock.servables.lifecycle.language_models import LanguageQueue
from penstock.servables.lifecycle.loaded_version import to_its_end
from penstock.serving.workers.remote_model import RemoteBackend

if TYPE_CHECKING:
    from penstock.llm.backend import Backend, Models
    from penstock.servables.api.plan import LanguagePlan
    from penstock.servables.lifecycle.language_models import LanguageModels
    from penstock.servables.process.open_version import Source

    def _fits(models: PrivateModels) -> LanguageModels:
        return models


__all__ = ["PrivateModels"]


class PrivateModels:
    """Opens the language models of servables.

    ``models`` are the served ones.  ``make`` returns a backend for a name and an optional scheme.  That backend loads a
    bundle or folder with a memory plan of its own and is not listed among the served models.
    """

    def __init__(self, models: Models, make: Callable[[str, str | None], RemoteBackend]) -> None:
        self._models, self._make = models, make

    async def open(self, plan: LanguagePlan, source: Source) -> LanguageQueue:
        """See ``LanguageModels.open``; raises the error of loading, InvalidFileError if no such model is served."""
        if plan.served:
            return self._beside(plan.served, plan, source.name)
        path = await asyncio.to_thread(source.language_path, plan.path)
        backend = self._make(f"{source.name}/{source.version}/{plan.path}", plan.scheme)
        try:
            await backend.load(str(path))
        except (InvalidFileError, UnsupportedError) as error:  # whose messages may lack the path
            await to_its_end(backend.stop())
            prefix = "" if str(path) in str(error) else f"{path}: "
            raise type(error)(f"{prefix}{error}") from error
        except BaseException:
            await to_its_end(backend.stop())
            raise

        def find() -> Backend:
            return backend

        return LanguageQueue(plan.path.strip("./") or source.name, plan, find, backend.stop)

    def _beside(self, served: str, plan: LanguagePlan, servable: str) -> LanguageQueue:
        """Return the queue of a served model.  Its requests fail with UnavailableError once the model is unloaded."""

        def find() -> Backend:
            try:
                return self._models.get(served)
            except NotFoundError:
                raise UnavailableError(f"{servable}: the language model {served!r} is no longer served") from None

        try:
            find()
        except UnavailableError:
            names = ", ".join(model.name for model in self._models.list()) or "none"
            problem = f"servable.py asks for the language model {served!r}, which is not served here"
            raise InvalidFileError(f"{servable}: {problem}. Served models: {names}") from None
        return LanguageQueue(served, plan, find, _do_nothing)


async def _do_nothing() -> None:
    """Do nothing: the service ends a served model."""
