"""The modules, parameters and arrays of layers and families: those of PyTorch, or our own in a process without it.

``nn`` and ``torch`` are PyTorch's own where it is installed, so that a network is a PyTorch module.  In a process that
only captures built-in networks (``use_own_modules``), and where PyTorch is missing, they are those of
``penstock.symbolic``, which have what networks need.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from penstock.symbolic.choice import torch_is_wanted

__all__ = ["HAS_TORCH", "Tensor", "nn", "torch"]

HAS_TORCH: Final = torch_is_wanted()
"""True if networks of this process are PyTorch modules."""

if TYPE_CHECKING or HAS_TORCH:
    import torch
    from torch import Tensor, nn
else:
    from penstock.symbolic import arrays as torch
    from penstock.symbolic import modules as nn

    Tensor = torch.Array
