"""The base class of layers and networks."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

__all__ = ["Module"]


class Module(nn.Module):
    """``torch.nn.Module``, typed to return a tensor when called."""

    __call__: Callable[..., Tensor]
