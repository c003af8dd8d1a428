"""A checkpoint folder as a PyTorch network with float weights: to look at, to measure, to quantize."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from penstock.config import show
from penstock.errors import InvalidFileError, UnsupportedError
from penstock.models.checkpoint import Checkpoint
from penstock.models.meta import construct_on_meta

__all__ = ["load_network"]

_BITS = {"f16": torch.float16, "bf16": torch.bfloat16}


def load_network(folder: Path | str, *, network: str | None = None) -> nn.Module:
    """The network of a checkpoint folder, every parameter in the checkpoint's own type, tied ones shared.

    ``network`` is "file.py:Class".  The result remembers the folder's config and tokenizer files as
    ``side_files``, so that ``RoundToNearest.save`` can write a folder that loads again.  Raises UnsupportedError for a
    quantized folder and InvalidFileError for missing, left-over or misshapen tensors, by name.
    """
    checkpoint = Checkpoint.open(folder)
    if checkpoint.scheme is not None:
        raise UnsupportedError(f"{folder}: expected float weights, found a folder quantized as {checkpoint.scheme}")
    built = construct_on_meta(checkpoint.config, network).network
    names = {name for name, _ in built.named_parameters()}
    extra = set(checkpoint.tensors) - names
    if extra:
        extra -= checkpoint.redundant_names()
    if extra:
        raise InvalidFileError(f"{folder}: has tensor {show(min(extra))}, which the network does not read")
    loaded: dict[Tensor, nn.Parameter] = {}
    for path, module in built.named_modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter not in loaded:
                values = _read(checkpoint, f"{path}.{name}" if path else name, parameter)
                loaded[parameter] = nn.Parameter(values, requires_grad=False)
            setattr(module, name, loaded[parameter])
    built.side_files = checkpoint.side_files()  # type: ignore[assignment]
    return built


def _read(checkpoint: Checkpoint, name: str, parameter: Tensor) -> Tensor:
    info = checkpoint.tensors.get(name)
    if info is None:
        raise InvalidFileError(f"{checkpoint.folder}: lacks tensor {show(name)}, which the network reads")
    if tuple(info.shape) != tuple(parameter.shape):
        raise InvalidFileError(
            f"{info.file}: tensor {show(name)}: shape: expected {list(parameter.shape)}, found {list(info.shape)}"
        )
    if info.dtype != "f32" and info.dtype not in _BITS:
        raise UnsupportedError(
            f"{info.file}: tensor {show(name)}: dtype: expected F32, F16 or BF16, found {info.dtype}"
        )
    values = torch.from_numpy(np.array(checkpoint.read(name))).reshape(info.shape)
    return values if info.dtype == "f32" else values.view(_BITS[info.dtype])
