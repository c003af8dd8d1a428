"""The base class of layers and networks."""

from __future__ import annotations

from typing import Any

from penstock.nn.base import Tensor, nn
from penstock.symbolic.tensor import active_trace

__all__ = ["Module"]


class Module(nn.Module):
    """``torch.nn.Module``, whose call is typed to return a tensor and is recorded when the network is traced."""

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        trace = active_trace.get()
        y: Tensor = super().__call__(*args, **kwargs) if trace is None else trace.call_module(self, args, kwargs)
        return y
