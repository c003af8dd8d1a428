"""Takes whole numbers that a module keeps as tensors, such as the strides of EnCodec's convolutions, for numbers.

``torch.export`` does not know the value of a tensor.  A pad or a size that is computed of such a number is then the
value of a tensor, which no graph has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from penstock.graph.general.torch.assigned import assigned_attributes, refuse_states

__all__ = ["has_size_numbers", "size_numbers"]


class _SizeNumber:
    """A number without dimensions, ``numerator / divisor``, made of whole numbers and of free sizes.

    It has the methods of a tensor that formulas of sizes call.
    """

    def __init__(self, numerator: Any, divisor: int = 1, *, is_float: bool = False) -> None:
        self.numerator, self.divisor, self.is_float = numerator, divisor, is_float

    def __repr__(self) -> str:
        return f"{self.numerator}/{self.divisor}"

    def item(self) -> Any:
        """Return the number as one of Python, or as PyTorch's free number."""
        if self.divisor == 1:
            return self.numerator * 1.0 if self.is_float else self.numerator
        return self.numerator / self.divisor

    def to(self, dtype: torch.dtype) -> _SizeNumber:
        """Return the number as a tensor's would be converted; a quotient is rounded before."""
        if dtype.is_floating_point:
            return _SizeNumber(self.numerator, self.divisor, is_float=True)
        if self.divisor != 1:
            raise TypeError("expected a number that is rounded")
        return _SizeNumber(self.numerator)

    def long(self) -> _SizeNumber:
        """Return the number as int64."""
        return self.to(torch.int64)

    def floor(self) -> _SizeNumber:
        """Return the number rounded down."""
        return _SizeNumber(self.numerator // self.divisor, is_float=self.is_float)

    def ceil(self) -> _SizeNumber:
        """Return the number rounded up."""
        return _SizeNumber((self.numerator + self.divisor - 1) // self.divisor, is_float=self.is_float)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Round, or give another function of PyTorch the plain number."""
        return _call(func, args, kwargs or {})

    def __int__(self) -> int:
        return int(self.item())

    def __index__(self) -> int:
        return int(self.to(torch.int64).numerator)

    def __float__(self) -> float:
        return float(self.item())

    def __bool__(self) -> bool:
        return bool(self.numerator != 0)

    def __neg__(self) -> _SizeNumber:
        return _SizeNumber(-self.numerator, self.divisor, is_float=self.is_float)

    def __add__(self, other: Any) -> Any:
        b = _as_number(other)
        if b is None:
            return NotImplemented
        total = self.numerator * b.divisor + b.numerator * self.divisor
        return _SizeNumber(total, self.divisor * b.divisor, is_float=self.is_float or b.is_float)

    def __sub__(self, other: Any) -> Any:
        b = _as_number(other)
        return NotImplemented if b is None else self + -b

    def __rsub__(self, other: Any) -> Any:
        return -self + other

    def __mul__(self, other: Any) -> Any:
        b = _as_number(other)
        if b is None:
            return NotImplemented
        is_float = self.is_float or b.is_float
        return _SizeNumber(self.numerator * b.numerator, self.divisor * b.divisor, is_float=is_float)

    def __truediv__(self, other: Any) -> Any:
        b = _as_divisor(other)
        return NotImplemented if b is None else _SizeNumber(self.numerator, self.divisor * b, is_float=True)

    def __rtruediv__(self, other: Any) -> Any:
        a = _as_number(other)
        return NotImplemented if a is None else a / self

    def __floordiv__(self, other: Any) -> Any:
        b = _as_divisor(other)
        return NotImplemented if b is None else _SizeNumber(self.numerator, self.divisor * b, is_float=False).floor()

    def __rfloordiv__(self, other: Any) -> Any:
        a = _as_number(other)
        return NotImplemented if a is None else a // self

    def __mod__(self, other: Any) -> Any:
        quotient = self // other
        return NotImplemented if quotient is NotImplemented else self - quotient * other

    def __rmod__(self, other: Any) -> Any:
        a = _as_number(other)
        return NotImplemented if a is None else a % self

    def __lt__(self, other: Any) -> Any:
        return _compared(self, other, lambda difference: difference < 0)

    def __le__(self, other: Any) -> Any:
        return _compared(self, other, lambda difference: difference <= 0)

    def __gt__(self, other: Any) -> Any:
        return _compared(self, other, lambda difference: difference > 0)

    def __ge__(self, other: Any) -> Any:
        return _compared(self, other, lambda difference: difference >= 0)

    def __eq__(self, other: object) -> Any:
        return _compared(self, other, lambda difference: difference == 0)

    __hash__ = None  # type: ignore[assignment]
    __radd__ = __add__
    __rmul__ = __mul__


_ROUNDED: Final[dict[Any, Callable[[_SizeNumber], _SizeNumber]]] = {
    torch.ceil: _SizeNumber.ceil,
    torch.floor: _SizeNumber.floor,
}


class _PlainNumbers(TorchFunctionMode):
    """Gives PyTorch's functions plain numbers, also in sequences and slices, which its classes do not look into."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call the function."""
        return _call(func, args, kwargs or {})


@contextmanager
def size_numbers(module: nn.Module) -> Iterator[None]:
    """Make integers without dimensions numbers while the context lasts, if no checkpoint has them.

    These are attributes, and buffers that are not saved.  Others are left, as counters are.  Raises UnsupportedError if
    the module assigns one of them.
    """
    numbers = _tensors_of(module)
    buffers = {part: dict(part._buffers) for part in numbers}
    try:
        for part, tensors in numbers.items():
            for name, tensor in tensors.items():
                delattr(part, name)
                vars(part)[name] = _SizeNumber(int(tensor))
        with assigned_attributes(module) as assigned, _PlainNumbers():
            yield
        paths = {part: f"{path}." if path else "" for path, part in module.named_modules()}
        refuse_states(assigned & {paths[part] + name for part, tensors in numbers.items() for name in tensors})
    finally:
        for part, tensors in numbers.items():
            for name, tensor in tensors.items():
                del vars(part)[name]
                if name in buffers[part]:
                    part.register_buffer(name, tensor, persistent=False)
                else:
                    vars(part)[name] = tensor
            part._buffers.clear()
            part._buffers.update(buffers[part])


def has_size_numbers(module: nn.Module) -> bool:
    """Return True if ``size_numbers`` changes a module."""
    return bool(_tensors_of(module))


def _tensors_of(module: nn.Module) -> dict[nn.Module, dict[str, torch.Tensor]]:
    by_module: dict[nn.Module, dict[str, torch.Tensor]] = {}
    for part in module.modules():
        saved = nn.Module.state_dict(part, keep_vars=True)  # a class may have its own, with other arguments
        tensors = {name: buffer for name, buffer in part.named_buffers(recurse=False) if name not in saved} | vars(part)
        numbers = {name: tensor for name, tensor in tensors.items() if _is_number(tensor)}
        if numbers:
            by_module[part] = numbers
    return by_module


def _is_number(value: Any) -> bool:
    if not isinstance(value, torch.Tensor) or value.dim() or value.is_meta or value.dtype == torch.bool:
        return False
    return not (value.is_floating_point() or value.is_complex())


def _call(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if func in _ROUNDED and args and isinstance(args[0], _SizeNumber):
        return _ROUNDED[func](args[0])
    args, kwargs = pytree.tree_map(_plain, (args, kwargs))
    return func(*args, **kwargs)


def _plain(value: Any) -> Any:
    if isinstance(value, slice):
        return slice(_plain(value.start), _plain(value.stop), _plain(value.step))
    return value.item() if isinstance(value, _SizeNumber) else value


def _as_number(value: Any) -> _SizeNumber | None:
    if isinstance(value, _SizeNumber):
        return value
    return _SizeNumber(value) if isinstance(value, (int, torch.SymInt)) else None


def _as_divisor(value: Any) -> int | None:
    """Return a constant whole number above 0, or None for another value."""
    number = _as_number(value)
    if number is None or number.divisor != 1 or not isinstance(number.numerator, int) or number.numerator < 1:
        return None
    return number.numerator


def _compared(a: _SizeNumber, b: Any, holds: Callable[[Any], Any]) -> Any:
    number = _as_number(b)
    return NotImplemented if number is None else holds((a - number).numerator)
