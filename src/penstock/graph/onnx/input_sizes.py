"""The sizes of inputs: fixed numbers, and named sizes with ranges."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from penstock.errors import InvalidArgumentError, UnsupportedError
from penstock.graph.general.sizes import MAX_SIZE, SizeLike, symbol, symbols_of

__all__ = ["MAX_FREE_SIZE", "InputSizes", "SizeChoice"]

MAX_FREE_SIZE = 999_999_999
"""The largest size without a range; exporters write 10^9 and 2^31 - 1 for "to the end"."""

SizeChoice: TypeAlias = int | tuple[int, ...] | Sequence[int | None]
"""A fixed size, a range ``(min, max)`` or ``(min, max, multiple)``; for an input, one size for each axis."""


class InputSizes:
    """The sizes that a caller gives: keys are names of sizes, "INPUT/AXIS", or names of inputs."""

    def __init__(self, choices: Mapping[str, Any] | None) -> None:
        self._choices = dict(choices or {})
        self._used: set[str] = set()
        self._names: dict[str, str] = {}
        self.originals: dict[str, str] = {}  # of symbols: the name of the file, or INPUT/AXIS, that a choice has

    def shape(self, name: str, dims: Sequence[int | str | None]) -> tuple[SizeLike, ...]:
        """Return the shape of an input whose sizes the file gives as numbers, names or not at all."""
        whole = self._choices.get(name)
        if isinstance(whole, tuple | list) and name not in dims:
            self._used.add(name)
            if len(whole) != len(dims):
                raise InvalidArgumentError(
                    f"sizes[{name!r}]: expected {len(dims)} sizes, got {len(whole)}", param="sizes"
                )
        else:
            whole = [None] * len(dims)
        return tuple(self._size(name, axis, dim, whole[axis]) for axis, dim in enumerate(dims))

    def number(self, name: str) -> int | None:
        """Return the number that a caller fixes for an input of rank 0."""
        choice = self._choices.get(name)
        if not isinstance(choice, int):
            return None
        self._used.add(name)
        return int(choice)

    def expect_used(self, names: Sequence[str]) -> None:
        """Refuse choices that no input has.  ``names``: what may be named."""
        unknown = sorted(set(self._choices) - self._used)
        if unknown and unknown[0] in names:
            raise InvalidArgumentError(
                f"sizes: {unknown[0]}: expected the name of a size, got an input with dimensions; "
                f"use {unknown[0]}/AXIS, from {unknown[0]}/0",
                param="sizes",
            )
        if unknown:
            known = ", ".join([*sorted(self._names), *names])
            raise InvalidArgumentError(f"sizes: expected names among {known}; got {unknown[0]!r}", param="sizes")

    def _size(self, name: str, axis: int, dim: int | str | None, fixed: int | None) -> SizeLike:
        named = isinstance(dim, str) and any(letter.isalnum() for letter in dim)  # not "?", which any size may be
        original = str(dim) if named else f"{name}_{axis}"
        choice: Any = fixed
        for key in (f"{name}/{axis}", original):
            if key in self._choices:
                self._used.add(key)
                choice = self._choices[key] if choice is None else choice
        if isinstance(dim, int):
            if choice is not None and choice != dim:
                raise InvalidArgumentError(
                    f"sizes: axis {axis} of input {name} is {dim} in the file, got {choice}", param="sizes"
                )
            if dim > MAX_SIZE:
                raise UnsupportedError(
                    f"input {name}: expected sizes of at most {MAX_SIZE}, got {dim} on axis {axis}", param=name
                )
            return dim
        if isinstance(choice, int) and not isinstance(choice, bool):
            if not 1 <= choice < MAX_SIZE:
                least = "; (0, most) is a size that may be 0" if choice == 0 else ""
                raise InvalidArgumentError(
                    f"sizes[{original!r}]: expected 1 to {MAX_SIZE - 1}, got {choice}{least}", param="sizes"
                )
            return choice
        free = self._free(original, choice)
        self.originals.update((item.name, original if named else f"{name}/{axis}") for item in symbols_of(free))
        return free

    def _free(self, original: str, choice: Any) -> SizeLike:
        if choice is None:
            return symbol(self._identifier(original), 1, MAX_FREE_SIZE)
        valid = isinstance(choice, tuple | list) and len(choice) in (2, 3)
        if not valid or not all(isinstance(n, int) for n in choice) or not 0 <= choice[0] <= choice[1] < MAX_SIZE:
            raise InvalidArgumentError(
                f"sizes[{original!r}]: expected a number, (min, max) or (min, max, multiple), got {choice!r}",
                param="sizes",
            )
        least, most = choice[:2]
        multiple = choice[2] if len(choice) == 3 else 1
        if multiple < 1 or most // multiple < -(-least // multiple):
            raise InvalidArgumentError(
                f"sizes[{original!r}]: expected a range that holds a multiple of {multiple}, got {least} to {most}",
                param="sizes",
            )
        if multiple == 1:
            return symbol(self._identifier(original), least, most)
        return symbol(f"{self._identifier(original)}_{multiple}", -(-least // multiple), most // multiple) * multiple

    def _identifier(self, original: str) -> str:
        """Return a name that expressions can have; another for each name of the file."""
        if original not in self._names:
            plain = re.sub(r"\W+", "_", original, flags=re.ASCII).strip("_")[:40] or "size"
            plain = plain if not plain[0].isdigit() else f"d{plain}"
            if plain in ("max", "min"):
                plain += "_size"
            free, count = plain, 1
            while free in self._names.values():
                free, count = f"{plain}_{count + 1}", count + 1
            self._names[original] = free
        return self._names[original]
