"""Language models for servables, out of the service's own: those that are served, and those of a version's folder."""

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
    """``models`` are those that are served; ``make`` gives a backend under a name, which loads a bundle or a folder, by
    a scheme where that is said, as any other does, with a memory plan of its own, and is in no list.
    """

    def __init__(self, models: Models, make: Callable[[str, str | None], RemoteBackend]) -> None:
        self._models, self._make = models, make

    async def open(self, plan: LanguagePlan, source: Source) -> LanguageQueue:
        """As LanguageModels has it; raises what loading raised, InvalidFileError for a name that nobody serves."""
        if plan.served:
            return self._beside(plan.served, plan, source.name)
        path = await asyncio.to_thread(source.language_path, plan.path)
        backend = self._make(f"{source.name}/{source.version}/{plan.path}", plan.scheme)
        try:
            await backend.load(str(path))
        except (InvalidFileError, UnsupportedError) as error:  # which do not always say of what
            await to_its_end(backend.stop())
            told = "" if str(path) in str(error) else f"{path}: "
            raise type(error)(f"{told}{error}") from error
        except BaseException:
            await to_its_end(backend.stop())
            raise

        def find() -> Backend:
            return backend

        return LanguageQueue(plan.path.strip("./") or source.name, plan, find, backend.stop)

    def _beside(self, served: str, plan: LanguagePlan, servable: str) -> LanguageQueue:
        """What runs one that is served; while it is not any more, requests are told so: UnavailableError."""

        def find() -> Backend:
            try:
                return self._models.get(served)
            except NotFoundError:
                raise UnavailableError(f"{servable}: the language model {served!r} is not served now") from None

        try:
            find()
        except UnavailableError:
            there = ", ".join(one.name for one in self._models.list()) or "none"
            told = f"its servable.py asks for the language model {served!r}, which is not served here; served are"
            raise InvalidFileError(f"{servable}: {told}: {there}") from None
        return LanguageQueue(served, plan, find, _nothing)


async def _nothing() -> None:
    """Whoever serves it ends it."""
