"""Finds the attributes that a module assigns while it is exported, which PyTorch puts back without a word.

One that is read before is a state that the module keeps from call to call, and that no bundle keeps.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import nn

from penstock.errors import UnsupportedError

__all__ = ["assigned_attributes", "changed_attributes", "refuse_states"]

_CHANGED: Final = threading.RLock()  # held while nn.Module has the function of this module


@contextmanager
def assigned_attributes(module: nn.Module) -> Iterator[set[str]]:
    """Give the names of the attributes of a module and its parts that are assigned while the context lasts."""
    names = {id(part): f"{name}." if name else "" for name, part in module.named_modules()}
    assigned: set[str] = set()
    with _CHANGED:
        assign = nn.Module.__setattr__

        def recorded(part: nn.Module, name: str, value: Any) -> None:
            if id(part) in names:
                assigned.add(names[id(part)] + name)
            assign(part, name, value)

        nn.Module.__setattr__ = recorded  # type: ignore[method-assign, assignment]
        try:
            yield assigned
        finally:
            nn.Module.__setattr__ = assign  # type: ignore[method-assign]


def refuse_states(names: Collection[str]) -> None:
    """Refuse a module that keeps a state in attributes of these names."""
    for name in sorted(names):
        raise UnsupportedError(
            f"capture: the module changes its attribute {name} while it runs, which a bundle cannot keep", param=name
        )


def changed_attributes(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], names: set[str]) -> set[str]:
    """Return those of the names of tensors whose values differ after a call; ``x = x.to(device)`` changes none."""
    if not names:
        return set()
    before = {name: (value := _attribute(module, name), value.clone()) for name in names}
    attributes = {part: dict(vars(part)) for part in module.modules()}
    try:
        with torch.no_grad():
            module(*args, **kwargs)
        return {name for name, (value, copy) in before.items() if not _is_same(_attribute(module, name), value, copy)}
    finally:
        for part, values in attributes.items():
            vars(part).update(values)


def _attribute(module: nn.Module, name: str) -> Any:
    path, _, attribute = name.rpartition(".")
    return getattr(module.get_submodule(path), attribute)


def _is_same(after: Any, before: torch.Tensor, copy: torch.Tensor) -> bool:
    if after is before:
        return True
    return isinstance(after, torch.Tensor) and after.dtype == copy.dtype and torch.equal(after.to(copy.device), copy)
