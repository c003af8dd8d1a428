"""Bundles in plain Python, without PyTorch and without an engine: a Context, a Model, Tensors in, Tensors out.

    from penstock import lite

    model = lite.Model()
    model.build_from_file("demo/demo.psm", lite.ModelType.PENSTOCK, lite.Context())
    inputs = model.get_inputs()
    outputs = model.predict(inputs)

The names are those of MindSpore Lite; docs/guides/offline.md has examples.  Each is loaded at its first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.core.library import load_ops
    from penstock.lite.device import Context
    from penstock.lite.group import ModelGroup
    from penstock.lite.model import Model
    from penstock.lite.open_model import ModelType
    from penstock.lite.runner import ModelParallelRunner
    from penstock.lite.tensor import DataType, Tensor

__all__ = ["Context", "DataType", "Model", "ModelGroup", "ModelParallelRunner", "ModelType", "Tensor", "load_ops"]

_HOMES = {
    "Context": "penstock.lite.device",
    "DataType": "penstock.lite.tensor",
    "Model": "penstock.lite.model",
    "ModelGroup": "penstock.lite.group",
    "ModelParallelRunner": "penstock.lite.runner",
    "ModelType": "penstock.lite.open_model",
    "Tensor": "penstock.lite.tensor",
    "load_ops": "penstock.core.library",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'penstock.lite' has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value
