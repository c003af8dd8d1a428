"""Round to nearest: quantization without calibration data.

    network = penstock.load_network("model")
    algorithm = RoundToNearest(RoundToNearestConfig(scheme="w4a8"))
    algorithm.apply(network)     # weights on the grid of the scheme, still floats: inspect or measure them
    algorithm.convert(network)   # the kernels read integers
    algorithm.save("model-w4a8")

Layers are recognised by their class names and attributes, because ``penstock.nn`` is above this package.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from penstock.config import ConfigReader
from penstock.core import native
from penstock.core.native import QuantizedRows
from penstock.errors import InvalidArgumentError, InvalidFileError
from penstock.ops.reference import shape_packed
from penstock.quant.folder import add_quantized, new_folder, quantized_config, quantized_entries
from penstock.quant.matrix import concatenate_rows, quantize_rows, values_of
from penstock.quant.mixed_schemes import HEAD_BLOCKS
from penstock.quant.ptq_config import PTQConfig, check_blacklist, is_listed
from penstock.quant.scheme import Scheme, find_scheme, quantizing_scheme
from penstock.quant.tensor_writer import TensorEntry, TensorWriter

__all__ = ["ExpertRows", "RoundToNearest", "RoundToNearestConfig", "as_array", "expert_parts", "stored_tensors"]

_LINEARS: Final = ("Linear", "ExpertLinear", "HeadLinear")
_DTYPES: Final = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}


@dataclass(frozen=True)
class RoundToNearestConfig:
    """The configuration: ``scheme`` is w8a16, w8a8, w4a16, w4a8, w8a8_h32 or w4a8_h32."""

    scheme: str

    def __post_init__(self) -> None:
        """Refuse a scheme that does not quantize."""
        quantizing_scheme(self.scheme)


@dataclass(frozen=True)
class _Quantized:
    scheme: Scheme
    layers: tuple[Any, ...]
    rows: QuantizedRows | NDArray[np.uint8]
    """The integers, or the blocks of an output head, [rows, bytes of a row]."""


class ExpertRows(NamedTuple):
    """The rows of a parameter that one tensor of a folder has."""

    name: str
    row_start: int
    num_rows: int


def expert_parts(network: nn.Module) -> dict[str, tuple[ExpertRows, ...]]:
    """Return the tensors of each parameter that a folder does not store under its own name: the matrices of experts."""
    parts: dict[str, tuple[ExpertRows, ...]] = {}
    for path, layer in network.named_modules():
        declare = getattr(layer, "weight_parts", None)
        name = f"{path}.weight" if path else "weight"
        own = tuple(ExpertRows(*part) for part in declare(path)) if callable(declare) else ()
        if own and own[0].name != name:
            parts[name] = own
    return parts


def stored_tensors(network: nn.Module, *, without: Collection[str] = ()) -> dict[str, torch.Tensor]:
    """Return the tensors of a folder by name, except those of the parameters ``without``."""
    parts = expert_parts(network)
    tensors: dict[str, torch.Tensor] = {}
    for name, parameter in network.named_parameters():
        if name in without:
            continue
        for part in parts.get(name, ()):
            tensors[part.name] = parameter.detach()[part.row_start : part.row_start + part.num_rows]
        if name not in parts:
            tensors[name] = parameter
    return tensors


def _shape(entry: _Quantized) -> tuple[int, int]:
    """Return the numbers of rows and columns of a matrix."""
    return entry.layers[0].rows, entry.layers[0].cols


def _is_a(layer: nn.Module, kind: str) -> bool:
    return any(base.__name__ == kind for base in type(layer).__mro__)


def as_array(tensor: torch.Tensor) -> tuple[NDArray[Any], str]:
    """Return a tensor's values (f16 and bf16 as their bits) for the packer, and the name of its element type."""
    tensor = tensor.detach().cpu().contiguous()
    dtype = _DTYPES.get(tensor.dtype)
    if dtype is None:
        raise InvalidArgumentError(f"weight: expected float32, float16 or bfloat16, got {tensor.dtype}", param="weight")
    return (tensor if dtype == "f32" else tensor.view(torch.uint16)).numpy(), dtype


class RoundToNearest:
    """Quantizes the linear layers of a network.

    The output head gets the scheme's ``head``.  An embedding is quantized only when it is tied to the output head.
    A PTQConfig may have an ``opname_blacklist`` and a ``kvcache_dtype``; one with another method, or a rotation, is for
    ``PTQ``, which rotates before it calls ``apply``.
    """

    def __init__(self, config: RoundToNearestConfig | PTQConfig) -> None:
        self.config = config
        self.recipe: Mapping[str, Any] | None = None
        """The method and its calibration data, which ``save`` writes into config.json; None for this method."""
        self._blacklist: tuple[str, ...] = ()
        self._kv_cache: str | None = None
        if isinstance(config, PTQConfig):
            self._blacklist, self._kv_cache = tuple(config.opname_blacklist), config.kvcache_dtype
        self._keeps_floats = False
        self._network: nn.Module | None = None
        self._quantized: dict[str, _Quantized] = {}

    def apply(self, network: nn.Module) -> nn.Module:
        """Round every linear weight to the grid of its scheme, in place; the network still computes in floats.

        Raises InvalidArgumentError when the network has no linear layer with float weights.
        """
        if isinstance(self.config, PTQConfig) and self.config.steps != ("rtn",):
            raise InvalidArgumentError(
                f"config: expected a PTQConfig that rounds to nearest, got {self.config.method}; use penstock.PTQ",
                param="config",
            )
        for name in ("rotate", "head", "exportable"):
            if isinstance(self.config, PTQConfig) and name in self.config.algo_args:
                raise InvalidArgumentError(
                    f"algo_args.{name}: expected none for RoundToNearest, which has no {name}; use penstock.PTQ",
                    param=f"algo_args.{name}",
                )
        return self.round(network)

    def round(self, network: nn.Module) -> nn.Module:
        """Do what ``apply`` does with a network that ``PTQ`` has prepared as its configuration says."""
        self._quantized = {}
        with native.Context() as context:
            for name, scheme, layers in self._linears(network):
                array, dtype = as_array(layers[0].weight)
                rows = concatenate_rows(list(quantize_rows(context, scheme, array, dtype)))
                self._round(name, scheme, layers, rows)
        self._network = network
        return network

    def take(
        self,
        network: nn.Module,
        rows: Mapping[str, QuantizedRows | NDArray[np.uint8]],
        schemes: Mapping[str, str] | None = None,
    ) -> nn.Module:
        """Set every linear weight to integers that another method chose, as ``apply`` does with its own.

        ``rows``: by the name of the parameter; a matrix of experts has the rows of all.  A layer without any keeps its
        floats.  The blocks of an output head are those of its parameter, which has their values.  ``schemes``: of the
        tensors of a folder that has several.
        """
        parts = expert_parts(network)
        self._quantized = {}
        for name, scheme, layers in self._linears(network):
            if name in rows:
                own = (schemes or {}).get(parts[name][0].name if name in parts else name, scheme.name)
                found = rows[name]
                if isinstance(found, QuantizedRows):
                    self._round(name, find_scheme(own), layers, found)
                else:
                    self._quantized[name] = _Quantized(find_scheme(HEAD_BLOCKS), tuple(layers), found)
        self._network = network
        return network

    def _linears(self, network: nn.Module) -> list[tuple[str, Scheme, list[Any]]]:
        """Return the name, the scheme and the layers of each matrix to quantize; those that are tied share one."""
        body = find_scheme(self.config.scheme)
        shared: dict[int, tuple[str, list[Any]]] = {}
        for path, layer in network.named_modules():
            if hasattr(layer, "set_packed") and isinstance(layer._parameters.get("weight"), nn.Parameter):
                shared.setdefault(id(layer.weight), (f"{path}.weight" if path else "weight", []))[1].append(layer)
        linears = []
        for name, layers in shared.values():
            if any(_is_a(layer, kind) for layer in layers for kind in _LINEARS) and not _is_a(layers[0], "Router"):
                head = any(_is_a(layer, "LMHead") for layer in layers)
                linears.append((name, find_scheme(body.head) if head else body, layers))
        if not linears:
            raise InvalidArgumentError("network: expected linear layers with float weights, got none", param="network")
        parts = expert_parts(network)
        stored = {name: [part.name for part in parts.get(name, (ExpertRows(name, 0, 0),))] for name, _, _ in linears}
        check_blacklist([part for names in stored.values() for part in names], self._blacklist)
        kept = {name for name, names in stored.items() if is_listed(names[0], self._blacklist)}
        self._keeps_floats = bool(kept)
        return [linear for linear in linears if linear[0] not in kept]

    def _round(self, name: str, scheme: Scheme, layers: list[Any], rows: QuantizedRows) -> None:
        weight = layers[0].weight
        self._quantized[name] = _Quantized(scheme, tuple(layers), rows)
        rounded = torch.from_numpy(values_of(rows, scheme))
        parameter = nn.Parameter(rounded.to(weight.device), requires_grad=False)
        for layer in layers:
            layer.weight = parameter

    def convert(self, network: nn.Module) -> nn.Module:
        """Replace the weights by packed integers, in place.  ``network`` is the one that ``apply`` rounded."""
        self._check_applied(network)
        with native.Context() as context:
            for entry in self._quantized.values():
                rows, cols = _shape(entry)
                layout = entry.scheme.layout
                packed = np.zeros(native.layout_bytes(layout, rows, cols), np.uint8)
                if isinstance(entry.rows, QuantizedRows):
                    native.pack_quantized(context, layout, rows, cols, 0, rows, entry.rows, packed)
                else:
                    native.pack_blocks(context, layout, rows, cols, 0, rows, entry.rows, packed)
                tensor = shape_packed(torch.from_numpy(packed), layout, rows)
                for layer in entry.layers:
                    layer.set_packed(tensor, entry.scheme.name)
        return network

    def _check_applied(self, network: nn.Module) -> None:
        if self._network is None or network is not self._network:
            raise InvalidArgumentError("network: expected the network that apply was called with", param="network")

    def save(self, path: Path | str, side_files: Mapping[str, bytes] | None = None) -> None:
        """Write a folder that loads wherever a checkpoint does; ``path`` must not exist.

        ``side_files``: the original's config.json (required), tokenizer and generation files by name; the default is
        the files that ``penstock.load_network`` stored in the network.  The folder appears complete or not at all.
        """
        if self._network is None:
            raise InvalidArgumentError("save: expected a network that apply has quantized, got none", param="save")
        if side_files is None:
            side_files = getattr(self._network, "side_files", {})
        if "config.json" not in side_files:
            raise InvalidArgumentError("side_files: expected config.json, got none", param="side_files")
        config = ConfigReader.parse(side_files["config.json"])
        if config.has("quantization_config"):
            raise InvalidFileError(
                "config.json: expected the original checkpoint's, got one with quantization_config", param="config.json"
            )
        extra = stored_tensors(self._network, without=self._quantized)
        quantized = self._quantized_tensors(self._network)
        entries = [TensorEntry(name, as_array(value)[1].upper(), tuple(value.shape)) for name, value in extra.items()]
        for name, scheme, rows in quantized:
            shape = rows.q.shape if isinstance(rows, QuantizedRows) else _shape(self._quantized[name])
            entries += quantized_entries(name, scheme, *shape)
        with new_folder(Path(path)) as folder:
            for name, data in side_files.items():
                (folder / name).write_bytes(data)
            section = self.recipe, self._kv_cache
            text = quantized_config(
                config.values,
                self.config.scheme,
                config.dtype() or "f32",
                *section,
                is_mixed=self._keeps_floats,
                schemes={name: scheme.name for name, scheme, _ in quantized},
            )
            (folder / "config.json").write_bytes(text)
            writer = TensorWriter(folder / "model.safetensors", entries)
            for name, value in extra.items():
                writer.add(name, as_array(value)[0])
            for name, scheme, rows in quantized:
                if isinstance(rows, QuantizedRows):
                    add_quantized(writer, name, scheme, rows)
                else:
                    writer.add(name, rows)
            writer.close()

    def _quantized_tensors(self, network: nn.Module) -> list[tuple[str, Scheme, QuantizedRows | NDArray[np.uint8]]]:
        """Return the quantized matrices as a folder stores them: those of experts one by one."""
        parts = expert_parts(network)
        tensors: list[tuple[str, Scheme, QuantizedRows | NDArray[np.uint8]]] = []
        for name, entry in self._quantized.items():
            if not isinstance(entry.rows, QuantizedRows):
                tensors.append((name, entry.scheme, entry.rows))
                continue
            for part in parts.get(name, (ExpertRows(name, 0, len(entry.rows.q)),)):
                rows = slice(part.row_start, part.row_start + part.num_rows)
                groups = None if entry.rows.groups is None else entry.rows.groups[rows]
                tensors.append(
                    (part.name, entry.scheme, QuantizedRows(entry.rows.q[rows], entry.rows.scales[rows], groups))
                )
        return tensors
