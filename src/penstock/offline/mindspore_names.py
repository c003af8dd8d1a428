"""Names of MindSpore's files in a configuration file, and the bundles that stand in their place."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

__all__ = ["with_bundles"]

_MODEL_TYPES: Final = ("mindir", "mindir_lite")
_BUNDLES: Final = ("prefill_model_path", "increment_model_path")
_LOG: Final = logging.getLogger("penstock.offline")


def with_bundles(path: Path, infer: Mapping[str, Any]) -> dict[str, Any]:
    """Return the section ``infer`` with X.psm for a path X.mindir, and with ``model_type`` "penstock" for MindIR.

    An export writes the bundle under that name, and a pipeline opens it.  A line in the log says so.
    """
    section, changes = dict(infer), []
    for name in _BUNDLES:
        value = section.get(name)
        if isinstance(value, str) and value.endswith(".mindir"):
            section[name] = value.removesuffix(".mindir") + ".psm"
            changes.append(f"{name} is {section[name]}")
    if section.get("model_type") in _MODEL_TYPES:
        section["model_type"] = "penstock"
        changes.append("model_type is penstock")
    if changes:
        _LOG.warning("%s: infer: bundles take the place of MindIR files: %s", path, ", ".join(changes))
    return section
