"""Each family under the name ``penstock.models.<model_type>``, whichever folder its file is in."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Final

from penstock.models.families import family_modules

if TYPE_CHECKING:
    from importlib.abc import Loader, MetaPathFinder

    class _FinderAndLoader(MetaPathFinder, Loader):
        """The interfaces, for the type checker."""
else:  # importlib.abc imports importlib.resources and tempfile, which a start need not wait for
    _FinderAndLoader = object

__all__ = ["PACKAGE", "add_finder", "importable_names"]

PACKAGE: Final = "penstock.models"


def importable_names() -> dict[str, str]:
    """Return the module of each name: a model_type, also with "_" for "-"."""
    modules = family_modules()
    return modules | {name.replace("-", "_"): module for name, module in modules.items()}


class _Finder(_FinderAndLoader):
    """Finds the modules of families under the names that do not depend on their folders.

    Both names give one module, so a class of a network exists once.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of ``penstock.models.<model_type>``, and None for another name."""
        package, _, name = fullname.rpartition(".")
        if package != PACKAGE or name not in importable_names():
            return None
        return ModuleSpec(fullname, self, origin=importable_names()[name])

    def create_module(self, spec: ModuleSpec) -> None:
        """Return None: the import system makes the empty module that ``exec_module`` replaces."""

    def exec_module(self, module: ModuleType) -> None:
        """Put the module of the family in place of ``module``, which the import system then takes."""
        name = module.__name__
        sys.modules[name] = importlib.import_module(importable_names()[name.rpartition(".")[2]])


def add_finder() -> None:
    """Add the finder behind those of Python, so that it is asked only about modules that have no file."""
    if not any(type(finder).__name__ == _Finder.__name__ for finder in sys.meta_path):
        sys.meta_path.append(_Finder())
