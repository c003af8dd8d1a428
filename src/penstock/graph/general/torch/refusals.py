"""Errors of ``torch.export`` in the words of penstock: what the module does, where, and what to change."""

from __future__ import annotations

import linecache
import re
import sysconfig
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import sympy
import torch

import penstock
from penstock.errors import UnsupportedError

__all__ = ["is_data_dependent", "missing_ops", "not_exported", "refusal"]

_NOT_OWN: Final = tuple(str(Path(str(package.__file__)).parent) for package in (torch, penstock, sympy))
_STANDARD: Final = sysconfig.get_path("stdlib")
_OF_VALUES: Final = re.compile(r"\baten\.(nonzero|masked_select|_?unique\w*|_local_scalar_dense|bincount)\.")
"""The ops whose results have as many elements as values say, or are numbers of Python."""
_ADVICE: Final = "capture the part before it, and compute what follows outside of the network"


def missing_ops(missing: Mapping[str, str], advice: str) -> UnsupportedError:
    """Return the error for operations without an op, by name with the place of the first call, and what to do."""
    items = "; ".join(f"{name} in {place}" for name, place in missing.items())
    sized = [name for name in missing if _OF_VALUES.search(name)]
    if not sized:
        return UnsupportedError(f"capture: there is no op for {items}{advice}", code="missing_op", param="module")
    return UnsupportedError(
        f"capture: there is no op for {items}{advice}; how much {sized[0]} gives depends on values: use torch.where "
        f"with three arguments, or {_ADVICE}",
        code="data_dependent",
        param="module",
    )


def not_exported(error: Exception) -> UnsupportedError:
    """Return the error for one of PyTorch that says nothing of sizes and values."""
    return UnsupportedError(
        f"capture: PyTorch cannot export the module{_place_of(error)}: {_text_of(error)[:400]}",
        code="not_exported",
        param="module",
    )


def refusal(error: Exception, names: Mapping[str, str]) -> UnsupportedError | None:
    """Return the error for one that is about sizes or values of tensors, None for another.

    ``names`` are those of free sizes by their symbols: PyTorch knows H in steps of 32 as ``32*H_32``.
    """
    text = _text_of(error)
    for own, name in names.items():
        text = re.sub(rf"(?:\b\d+\*)?\b{own}\b", name, text)
    fixed = re.search(r"Suggested fixes: (.*)$", text)
    if fixed:
        return _of_sizes(
            f"the module takes other sizes than those declared: {fixed[1][:200]}; give them in shapes and sizes"
        )
    violated = re.search(r"(?:Constraints violated|unexpectedly required) \((.*?)\)", text)
    if violated:
        return _of_sizes(f"the module fixes the size {violated[1]} to that of the example; leave it out of shapes")
    if "cannot be solved" in text:
        return _of_sizes(
            "a size inside the module is 1 with this example, which PyTorch takes to be fixed; give a larger example"
        )
    if is_data_dependent(error):
        return UnsupportedError(
            f"capture: the module branches on the value of a tensor, or makes a shape of one{_place_of(error)}; "
            f"{_ADVICE}",
            code="data_dependent",
            param="module",
        )
    return None


def is_data_dependent(error: Exception) -> bool:
    """Return True if a module cannot be exported because it needs the value of a tensor."""
    kind = type(error).__name__
    return "data-dependent" in str(error).lower() or "DataDependent" in kind or "DynamicOutputShape" in kind


def _of_sizes(text: str) -> UnsupportedError:
    return UnsupportedError(f"capture: {text}", param="shapes")


def _text_of(error: Exception) -> str:
    return " ".join(str(error).split()).split(" The error above occurred")[0]


def _place_of(error: Exception) -> str:
    """Return the last line of the module's own files that the error passed, with its text, or "" if there is none."""
    lines = [line for cause in _causes(error) for line in _own_lines(cause)]
    if not lines:
        return ""
    path, number = lines[-1]
    text = linecache.getline(path, number).strip()
    return f" at {Path(path).name}, line {number}" + (f" ({text})" if text else "")


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and those that it came from, the first one last."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _own_lines(error: BaseException) -> Iterator[tuple[str, int]]:
    """Yield the lines that an error passed outside of PyTorch and penstock, the innermost last."""
    entry = error.__traceback__
    while entry is not None:
        path = entry.tb_frame.f_code.co_filename
        is_standard = path.startswith(_STANDARD) and "site-packages" not in path
        if not is_standard and not path.startswith((*_NOT_OWN, "<")):
            yield path, entry.tb_lineno
        entry = entry.tb_next
