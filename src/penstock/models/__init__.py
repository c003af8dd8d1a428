"""The model families, one file per model_type, and the registry that finds them.  Knows neither graph nor runtime.

``from penstock.models import llama`` gives the module of a model_type, with ``Network`` and ``Config``, whichever
folder its file is in; so does ``import penstock.models.llama``.  A module is imported when it is first used.
``__init__.pyi`` has the names for type checkers.
"""

from __future__ import annotations

from typing import Any

from penstock.models.import_aliases import PACKAGE, add_finder, importable_names

add_finder()


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name in importable_names():
        return import_module(f"{PACKAGE}.{name}")
    from penstock.validation import missing_attribute

    raise missing_attribute(f"module {PACKAGE!r}", name, importable_names(), {})


def __dir__() -> list[str]:
    return sorted({*globals(), *importable_names()})
