"""The functions of a servable.py: ``from penstock import servable``.

``model`` and ``language_model`` declare models, ``stage`` makes a Python function a step, ``method`` chains steps into
what clients call, and ``settings`` sets how the servable runs.  docs/guides/servables.md shows examples.
"""

from __future__ import annotations

from penstock.servables.api.declare import (
    InputError,
    Language,
    Model,
    Stage,
    folder,
    language_model,
    method,
    model,
    settings,
    stage,
    version,
)

__all__ = [
    "InputError",
    "Language",
    "Model",
    "Stage",
    "folder",
    "language_model",
    "method",
    "model",
    "settings",
    "stage",
    "version",
]
