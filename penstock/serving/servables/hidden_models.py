"""Language models for servables, out of the service's own: those that are served, and those of a version's folder."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from penstock.errors import InvalidFileError, UnsupportedError
from penstock.serving.remote import RemoteBackend
from penstock.serving.servables.language import LanguageQueue
from penstock.serving.servables.loaded import to_its_end

if TYPE_CHECKING:
    from penstock.serving.backend import Backend, Models
    from penstock.serving.servables.language import LanguageModels
    from penstock.serving.servables.opening import Source
    from penstock.serving.servables.plan import LanguagePlan

    def _fits(models: HiddenModels) -> LanguageModels:
        return models


__all__ = ["HiddenModels"]


class HiddenModels:
    """``models`` are those that are served; ``make`` gives a backend under a name, which loads a bundle or a folder, by
    a scheme where that is said, as any other does, with a memory plan of its own, and is in no list.
    """

    def __init__(self, models: Models, make: Callable[[str, str | None], RemoteBackend]) -> None:
        self._models, self._make = models, make

    async def open(self, plan: LanguagePlan, source: Source) -> LanguageQueue:
        """As LanguageModels has it; raises what loading raised, NotFoundError for a name that nobody serves."""
        if plan.served:
            self._models.get(plan.served)
            return LanguageQueue(plan.served, plan, lambda: self._models.get(plan.served), _nothing)
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


async def _nothing() -> None:
    """Whoever serves it ends it."""
