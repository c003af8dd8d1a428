"""The choice of this process to use PyTorch for networks or not."""

from __future__ import annotations

import importlib.util

__all__ = ["torch_is_wanted", "use_own_modules"]

_own: list[bool] = []


def use_own_modules() -> None:
    """Let this process capture without importing PyTorch: call it before the first import of ``penstock.nn``."""
    _own.append(True)


def torch_is_wanted() -> bool:
    """Return True if PyTorch is installed and ``use_own_modules`` was not called."""
    return not _own and importlib.util.find_spec("torch") is not None
