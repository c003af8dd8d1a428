"""What a servable is written with: ``from penstock import servable`` in NAME/servable.py.

``model`` and ``language_model`` declare what runs, ``stage`` makes a Python function a step, ``method`` chains steps
into what clients call, ``settings`` says how it all runs.  docs/servables.md shows them at work.
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
