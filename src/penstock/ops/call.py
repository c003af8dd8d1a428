"""The ops as functions that networks call, ``ops.<name>``: PyTorch's, or written down while a network is traced."""

from __future__ import annotations

from functools import cached_property
from typing import Any, Final

from penstock.ops.table import OPS
from penstock.symbolic.tensor import active_trace

__all__ = ["ops"]


class _Op:
    """One op of the table."""

    def __init__(self, name: str) -> None:
        self.name = name

    @cached_property
    def eager(self) -> Any:
        """The op of PyTorch, which is imported when it first runs."""
        from penstock.ops.eager import ops as eager_ops

        return getattr(eager_ops, self.name)

    def __call__(self, *args: Any, **attrs: Any) -> Any:
        trace = active_trace.get()
        return self.eager(*args, **attrs) if trace is None else trace.call_op(self.name, args, attrs)


class _Ops:
    """Every op of the table as an attribute."""

    def __init__(self) -> None:
        for op in OPS:
            setattr(self, op.name, _Op(op.name))


ops: Final[Any] = _Ops()
