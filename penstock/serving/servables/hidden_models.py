"""Language models for servables, out of the service's own: those that are served, and those of a version's folder."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from penstock.serving.remote import RemoteBackend
from penstock.serving.servables.language import LanguageQueue

if TYPE_CHECKING:
    from penstock.serving.backend import Backend, Models
    from penstock.serving.servables.language import LanguageModels
    from penstock.serving.servables.opening import Source
    from penstock.serving.servables.plan import LanguagePlan

    def _fits(models: HiddenModels) -> LanguageModels:
        return models


__all__ = ["HiddenModels"]


class HiddenModels:
    """``models`` are those that are served; ``make`` gives a backend under a name, which loads a bundle as any other
    does, with a memory plan of its own, and is in no list.
    """

    def __init__(self, models: Models, make: Callable[[str], RemoteBackend]) -> None:
        self._models, self._make = models, make

    async def open(self, plan: LanguagePlan, source: Source) -> LanguageQueue:
        """As LanguageModels has it; raises what loading raised, NotFoundError for a name that nobody serves."""
        if plan.served:
            self._models.get(plan.served)
            return LanguageQueue(plan.served, plan.sampling, lambda: self._models.get(plan.served), _nothing)
        backend = self._make(f"{source.name}/{source.version}/{plan.path}")
        try:
            await backend.load(str(source.path(plan.path)))
        except BaseException:
            await backend.stop()
            raise

        def find() -> Backend:
            return backend

        return LanguageQueue(plan.path, plan.sampling, find, backend.stop)


async def _nothing() -> None:
    """Whoever serves it ends it."""
