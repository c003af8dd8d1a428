"""Load a checkpoint folder as a PyTorch network with float weights, to inspect, measure or quantize it; and save it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from penstock.checkpoint.folder import Checkpoint
from penstock.checkpoint.gguf.element_types import q6_k_values
from penstock.checkpoint.side_files import write_side_files
from penstock.config import OWN_NAMES, ConfigReader, show
from penstock.core.native import QuantizedRows
from penstock.errors import InvalidArgumentError, InvalidFileError, UnsupportedError
from penstock.models.meta import construct_on_meta
from penstock.models.sources import as_network, check_tensors
from penstock.nn.embedding import Embedding
from penstock.quant.folder import new_folder
from penstock.quant.matrix import concatenate_rows, values_of
from penstock.quant.round_to_nearest import ExpertRows, as_array, expert_parts, stored_tensors
from penstock.quant.scheme import find_scheme
from penstock.quant.tensor_writer import TensorEntry, TensorWriter

__all__ = ["load_network", "read_quantized", "save_network"]

_TABLE_SCHEME = find_scheme("w8a8")
_BITS = {"f16": torch.float16, "bf16": torch.bfloat16}


def load_network(folder: Path | str, *, network: str | None = None) -> nn.Module:
    """Return the network of a checkpoint folder: every parameter has the checkpoint's own type, tied ones are shared.

    ``network`` is "file.py:Class".  The result keeps the folder's config and tokenizer files as ``side_files``, so that
    ``RoundToNearest.save`` can write a folder that loads again.  Raises UnsupportedError for a quantized folder, and
    InvalidFileError, which names the tensor, for a tensor that is missing, unused or of another shape.
    """
    checkpoint = Checkpoint.open(folder)
    if checkpoint.scheme is not None:
        raise UnsupportedError(
            f"{folder}: expected float weights, got a folder quantized as {checkpoint.scheme}", param="folder"
        )
    built = construct_on_meta(checkpoint.config, network).network
    checkpoint = as_network(checkpoint, built)
    parts = expert_parts(built)
    names = {name for name, _ in built.named_parameters() if name not in parts}
    names |= {part.name for own in parts.values() for part in own}
    extra = set(checkpoint.tensors) - names
    if extra:
        extra -= checkpoint.redundant_names(extra)
    if extra:
        raise InvalidFileError(
            f"{folder}: has tensor {show(min(extra))}, which the network does not read", param=min(extra)
        )
    loaded: dict[Tensor, nn.Parameter] = {}
    for path, module in built.named_modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter not in loaded:
                values = _read_parameter(checkpoint, f"{path}.{name}" if path else name, parameter, parts)
                loaded[parameter] = nn.Parameter(values, requires_grad=False)
            setattr(module, name, loaded[parameter])
    side_files = checkpoint.side_files()
    if checkpoint.config.foreign_quantization() is not None:  # a folder that is written from here has floats
        floats = {key: value for key, value in checkpoint.config.values.items() if key != "quantization_config"}
        side_files["config.json"] = (json.dumps(floats, indent=2) + "\n").encode()
    built.side_files = side_files  # type: ignore[assignment]
    return built


def _read_parameter(
    checkpoint: Checkpoint, name: str, parameter: Tensor, parts: Mapping[str, Sequence[ExpertRows]]
) -> Tensor:
    if name not in parts:
        return _read(checkpoint, name, tuple(parameter.shape))
    return torch.cat([_read(checkpoint, part.name, (part.num_rows, parameter.shape[1])) for part in parts[name]])


def _read(checkpoint: Checkpoint, name: str, shape: tuple[int, ...]) -> Tensor:
    info = checkpoint.tensors.get(name)
    if info is None:
        raise InvalidFileError(f"{checkpoint.folder}: lacks tensor {show(name)}, which the network reads", param=name)
    if tuple(info.shape) != shape:
        raise InvalidFileError(
            f"{info.file}: tensor {show(name)}: shape: expected {list(shape)}, got {list(info.shape)}",
            param=name,
        )
    if info.dtype != "f32" and info.dtype not in _BITS:
        raise UnsupportedError(
            f"{info.file}: tensor {show(name)}: dtype: expected F32, F16 or BF16, got {info.dtype.upper()}",
            param=name,
        )
    values = torch.from_numpy(np.array(checkpoint.read(name))).reshape(info.shape)
    return values if info.dtype == "f32" else values.view(_BITS[info.dtype])


def read_quantized(checkpoint: Checkpoint, network: nn.Module) -> dict[str, QuantizedRows | NDArray[np.uint8]]:
    """Return the integers of a quantized folder by the names of a network's parameters, and set all its other values.

    The network has float weights, as ``load_network`` returns them.  An output head in blocks and an embedding become
    floats of the same values; their blocks or integers are returned, too.  Raises InvalidFileError, which names the
    tensor, for a folder of another network.
    """
    checkpoint = as_network(checkpoint, network)
    check_tensors(checkpoint, network, str(checkpoint.folder))
    parts = expert_parts(network)
    rows: dict[str, QuantizedRows | NDArray[np.uint8]] = {}
    for name, parameter in network.named_parameters():
        own = parts.get(name, (ExpertRows(name, 0, parameter.shape[0]),))
        if checkpoint.block_scheme(own[0].name) is not None:
            rows[name] = blocks = np.array(checkpoint.read_blocks(own[0].name))
            parameter.data = torch.from_numpy(q6_k_values(blocks)).to(parameter.device)
            continue
        if not checkpoint.is_quantized(own[0].name):
            values = _read_parameter(checkpoint, name, parameter, parts)
            parameter.data = values.to(parameter.device)
            continue
        matrices = [checkpoint.read_quantized(part.name, parameter.shape[1]) for part in own]
        rows[name] = whole = concatenate_rows(matrices)
        if len(whole.q) != parameter.shape[0]:
            raise InvalidFileError(
                f"{checkpoint.folder}: tensor {show(name)}: shape: expected {list(parameter.shape)}, got "
                f"{list(whole.q.shape)}",
                param=name,
            )
        users = [layer for layer in network.modules() if layer._parameters.get("weight") is parameter]
        if all(isinstance(layer, Embedding) for layer in users):  # and none is the head, which takes the integers
            parameter.data = torch.from_numpy(values_of(whole, _TABLE_SCHEME)).to(parameter.device)
    return rows


def save_network(network: nn.Module, folder: Path | str, side_files: Mapping[str, bytes] | None = None) -> None:
    """Write a network, with its current weights, to a new checkpoint folder.

    ``side_files``: config.json and the files beside it; None for a network of ``load_network``, which has them.  A
    parameter that is shared is written once, under its first name, and a matrix of experts as one tensor for each.
    Raises InvalidArgumentError when ``folder`` exists, for a network without ``side_files``, and for quantized weights,
    which ``RoundToNearest.save`` writes.
    """
    side_files = getattr(network, "side_files", None) if side_files is None else dict(side_files)
    if not isinstance(side_files, dict) or "config.json" not in side_files:
        raise InvalidArgumentError(
            "network: expected a network from penstock.load_network, got one without config", param="network"
        )
    sides = dict(side_files)
    if callable(getattr(network, "tensor_sources", None)):  # the folder has the parameters, not what they came from
        config = ConfigReader.parse(sides["config.json"], "config.json")
        sides["config.json"] = (json.dumps(config.values | {OWN_NAMES: True}, indent=2) + "\n").encode()
    parameters = stored_tensors(network)
    for name, parameter in parameters.items():
        if not parameter.dtype.is_floating_point:
            raise InvalidArgumentError(
                f"network: {show(name)}: expected float values, got {parameter.dtype}; use RoundToNearest.save",
                param="network",
            )
    arrays = {name: as_array(parameter) for name, parameter in parameters.items()}
    with new_folder(Path(folder)) as temporary:
        write_side_files(temporary, sides)
        entries = [TensorEntry(name, kind.upper(), array.shape) for name, (array, kind) in arrays.items()]
        writer = TensorWriter(temporary / "model.safetensors", entries)
        for name, (array, _) in arrays.items():
            writer.add(name, array)
        writer.close()
