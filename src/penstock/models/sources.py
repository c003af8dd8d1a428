"""Tables of the tensors that a network's parameters come from, for its method ``tensor_sources``.

A network whose checkpoint stores every parameter under its own name, in its own form, needs none.  Beside the method
it may have ``unread_tensors``, patterns of names of tensors that it need not read, and ``tensor_prefix``, with which
the names of its tensors begin except in folders of the bare model.  ``other_prefixes`` are pairs: if no tensor begins
with the first text, names in the table that do so begin with the second.  ``other_ends`` are pairs, too: if a tensor
ends with the second text, the sources of parameters that end with the first do.  ``bare_prefix`` is such a prefix of a
network that needs no table otherwise.  ``tied_tensors`` are further names of tensors by which a folder may have the one
that is given for each: in its place, or beside it with equal values.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Final

from penstock.checkpoint.folder import Checkpoint
from penstock.checkpoint.pooling.files import has_language_head
from penstock.checkpoint.sources import (
    STACKED_GATES,
    MappedCheckpoint,
    Source,
    Sources,
    has_own_names,
    has_stacked_experts,
    resolve_sources,
)
from penstock.checkpoint.stored.tied_head import HEADS
from penstock.checkpoint.tensor_file import TensorInfo
from penstock.config import ConfigReader, show, show_tensors
from penstock.errors import InvalidFileError
from penstock.nn import ExpertLinear, LayerNorm, RMSNorm
from penstock.nn.base import nn
from penstock.quant.mixed_schemes import mixed_schemes
from penstock.quant.scheme import default_scheme

__all__ = [
    "add_to_norms", "as_network", "as_rank", "check_tensors", "differs", "fused_rows", "parameter_names", "renamed",
    "schemes_of", "sources_of", "stacked_experts", "stacked_gates", "transposed",
]  # fmt: skip


def differs(config: ConfigReader, tensors: Collection[str], network: nn.Module) -> bool:
    """Return True if the network's parameters differ from the tensors of the checkpoint with ``config``.

    The network says so, the experts of its layers are stacked, the folder is one of the bare model, or it has a tied
    tensor under another name.
    """
    declares = any(hasattr(network, name) for name in ("tensor_sources", "unread_tensors", "tensor_prefix"))
    differ = declares or has_stacked_experts(tensors) or _is_bare(tensors, network)
    differ = differ or bool(_tied_sources(config, tensors, network, {}))
    return differ and not has_own_names(config)


def _is_bare(tensors: Collection[str], network: nn.Module) -> bool:
    prefix = getattr(network, "bare_prefix", "")
    return bool(prefix) and not any(name.startswith(prefix) for name in tensors)


def as_network(checkpoint: Checkpoint, network: nn.Module) -> Checkpoint:
    """Return the checkpoint as a network reads it; ``network`` has its logical weights, for example meta tensors.

    Raises InvalidFileError, which names a tensor of the checkpoint.
    """
    if not differs(checkpoint.config, checkpoint.tensors, network):
        return checkpoint
    sources = sources_of(checkpoint.config, checkpoint.tensors, network)
    unread, copies = getattr(network, "unread_tensors", ()), getattr(network, "tied_tensors", None)
    return MappedCheckpoint(checkpoint, _shapes(network), sources, unread=unread, copies=copies)


def parameter_names(network: nn.Module) -> list[str]:
    """Return the names of a network's parameters, with one for the matrix of each expert."""
    stacked = {f"{path}.weight" for path, module in network.named_modules() if isinstance(module, ExpertLinear)}
    return [name for name in _shapes(network) if name not in stacked]


def check_tensors(checkpoint: Checkpoint, network: nn.Module, name: str) -> None:
    """Check that a checkpoint has the parameters of a network, in their shapes, before the network is captured.

    A configuration with more layers than the weights is then an error at once.  ``checkpoint`` is that of
    ``as_network``.  Raises InvalidFileError, which names the first missing tensors, or one of another shape.
    """
    names, shapes = parameter_names(network), _shapes(network)
    missing = [own for own in names if own not in checkpoint.tensors]
    if missing:
        raise InvalidFileError(
            f"{checkpoint.folder}: lacks {show_tensors(missing)}, which network {name} reads", param=missing[0]
        )
    for own in names:
        info, expected = checkpoint.tensors[own], list(shapes[own])
        actual = list(info.shape[1:] if len(info.shape) == 2 and info.shape[0] == 1 == len(expected) else info.shape)
        if actual != expected and not checkpoint.is_quantized(own):
            raise InvalidFileError(
                f"{info.file}: tensor {show(own)}: shape: expected {expected}, got {actual}", param=own
            )


def _shapes(network: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the parameters, and of the matrices of experts, which are read one by one."""
    shapes = {name: tuple(parameter.shape) for name, parameter in network.named_parameters()}
    for path, module in network.named_modules():
        if isinstance(module, ExpertLinear):
            shapes |= {part.name: (part.num_rows, module.cols) for part in module.weight_parts(path)}
    return shapes


def sources_of(config: ConfigReader, tensors: Collection[str], network: nn.Module) -> dict[str, tuple[Source, ...]]:
    """Return where the parameters of a network come from that are not the tensor of their name.

    ``tensors``: the names in the checkpoint with ``config``.
    """
    if not differs(config, tensors, network):
        return {}
    declare = getattr(network, "tensor_sources", None)
    table: Sources = {} if declare is None else declare()
    if has_stacked_experts(tensors):
        table = {**table, **_in_memory_names(tensors, network, table)}
    for own, other in getattr(network, "other_ends", ()):
        if any(name.endswith(other) for name in tensors):
            ends = [name for name in _shapes(network) if name.endswith(own)]
            table = {**table, **{name: Source(f"{name.removesuffix(own)}{other}") for name in ends}}
    for own, other in getattr(network, "other_prefixes", ()):
        if not any(name.startswith(own) for name in tensors):
            table = {name: _with_prefix(sources, own, other) for name, sources in table.items()}
    prefix = getattr(network, "tensor_prefix", "") or getattr(network, "bare_prefix", "")
    sources = resolve_sources(table, _shapes(network), tensors, prefix)
    return sources | _tied_sources(config, tensors, network, sources)


def _tied_sources(
    config: ConfigReader, tensors: Collection[str], network: nn.Module, sources: Mapping[str, tuple[Source, ...]]
) -> dict[str, tuple[Source, ...]]:
    """Return the sources of parameters whose tensors the folder only has under another name that is tied to them.

    As in transformers 5, an embedding that is missing is the output head, if config.json ties the two.
    """
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in network.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    result: dict[str, tuple[Source, ...]] = {}
    for first, *others in names.values():
        pieces = sources.get(first, (Source(first),))
        if len(pieces) > 1 or pieces[0].tensor in tensors:
            continue
        tied = [name for name, own in getattr(network, "tied_tensors", {}).items() if own == pieces[0].tensor]
        tied += [*others, *HEADS] if others and has_language_head(config) else []
        tensor = next((name for name in tied if name in tensors), None)
        if tensor is not None:
            result[first] = (replace(pieces[0], tensor=tensor),)
    return result


def _with_prefix(sources: Source | tuple[Source, ...], own: str, other: str) -> tuple[Source, ...]:
    """Return the sources with ``other`` instead of ``own`` where the name of a tensor begins with it."""
    pieces = sources if isinstance(sources, tuple) else (sources,)
    begin = len(own)
    return tuple(
        replace(piece, tensor=other + piece.tensor[begin:]) if piece.tensor.startswith(own) else piece
        for piece in pieces
    )


def as_rank(
    part: Checkpoint,
    network: nn.Module,
    sources: Mapping[str, tuple[Source, ...]],
    rows: Mapping[str, Sequence[tuple[int, int]]],
    columns: Mapping[str, Sequence[tuple[int, int]]],
) -> Checkpoint:
    """Return a rank's part of a checkpoint as a network reads it.

    ``sources``: of the parameters that the rank has, in its tensors.  ``rows``: those of each that it has, or
    ``columns``.
    """
    unread = (*getattr(network, "unread_tensors", ()), *getattr(network, "tied_tensors", ()))
    if not sources and not unread:
        return part
    sizes = {name: sum(stop - start for start, stop in own) for name, own in (*rows.items(), *columns.items())}
    shapes = {
        name: (shape[0], sizes[name]) if name in columns else (sizes[name], *shape[1:])
        for name, shape in _shapes(network).items()
        if name in sources
    }
    return MappedCheckpoint(part, shapes, sources, unread=unread, is_part=True)


def schemes_of(
    scheme: str,
    config: ConfigReader,
    tensors: Mapping[str, TensorInfo],
    sources: Mapping[str, tuple[Source, ...]],
) -> dict[str, str] | None:
    """Return what ``Checkpoint.weight_schemes`` returns, for a folder of which no rank has all ``tensors``.

    ``sources``: where the network's parameters come from.  Of float folders only those in MXFP4 have a scheme of their
    own.
    """
    if scheme != "mxfp4":
        return mixed_schemes(config, {name: info.dtype for name, info in tensors.items()})
    floats = {name: info.dtype for name, info in tensors.items() if info.dtype in ("f32", "f16", "bf16")}
    own = {name: scheme if pieces[0].scales else floats.get(pieces[0].tensor) for name, pieces in sources.items()}
    return {name: default_scheme(dtype) for name, dtype in floats.items()} | {
        name: chosen for name, chosen in own.items() if chosen is not None
    }


_MEMORY_NAMES: Final = (
    (".block_sparse_moe.", ".mlp."),
    (".router.layer.", ".router."),
    (".mlp.moe_statics.", ".mlp.gate.moe_statics."),
    ("model.layers.", "model.language_model.layers."),
)
"""The parts of stored names, and those of names in the memory of transformers 5: ``save_original_format=False``."""


def _in_memory_names(tensors: Collection[str], network: nn.Module, table: Sources) -> dict[str, Source]:
    """Return the sources of parameters whose tensors have the names and forms of transformers 5 in memory."""

    def stored(name: str) -> str | None:
        names = (name, *(name.replace(own, other) for own, other in _MEMORY_NAMES))
        return next((other for other in names if other in tensors), None)

    result: dict[str, Source] = {}
    for path, module in network.named_modules():
        name = stored(f"{path.removesuffix('.experts')}{STACKED_GATES}")
        if path.endswith(".experts") and name and len(list(module.children())) == 3:
            down = f"{name.removesuffix('gate_up_proj')}down_proj"
            result |= stacked_gates(network, path, (name, down))
    for parameter, _ in network.named_parameters():
        source = table.get(parameter, Source(parameter))
        if isinstance(source, Source) and source.tensor not in tensors and (name := stored(source.tensor)):
            result[parameter] = replace(source, tensor=name)
    return result


def fused_rows(network: nn.Module, fused: str, parts: Sequence[str], groups: int = 1) -> dict[str, Source]:
    """Return the sources of linears ``parts`` whose rows one tensor ``fused`` of the same module stacks.

    With ``groups`` the tensor has, for each group of heads, first its rows of ``parts[0]``, then of ``parts[1]`` and
    so on: [groups, sum of rows, in_features].
    """
    table = {}
    for path, _ in list(network.named_modules()):
        parent, _, last = path.rpartition(".")
        if last != parts[0]:
            continue
        layers = [network.get_submodule(f"{parent}.{part}") for part in parts]
        sizes = [layer.get_parameter("weight").shape[0] // groups for layer in layers]
        for i, (part, layer) in enumerate(zip(parts, layers, strict=True)):
            starts = [group * sum(sizes) + sum(sizes[:i]) for group in range(groups)]
            rows = tuple((start, start + sizes[i]) for start in starts)
            for leaf, _ in layer.named_parameters(recurse=False):
                table[f"{parent}.{part}.{leaf}"] = Source(f"{parent}.{fused}.{leaf}", rows)
    return table


def stacked_experts(network: nn.Module, *, transposed: bool = False, mxfp4: bool = False) -> dict[str, Source]:
    """Return the sources of experts that one tensor of three dimensions has, with the name of their layer.

    "mlp.experts.3.down_proj.weight" is matrix 3 of "mlp.experts.down_proj" [experts, out, in], or [experts, in, out]
    if ``transposed``; the biases are those of "mlp.experts.down_proj_bias" [experts, out].  With ``mxfp4`` the matrices
    are those of "mlp.experts.down_proj_blocks" [experts, out, groups, 16] and "..._scales", which are not transposed.
    """
    table = {}
    for path, module in network.named_modules():
        if not isinstance(module, ExpertLinear):
            continue
        for index, part in enumerate(module.weight_parts(path)):
            packed = Source(f"{path}_blocks", index=index, scales=f"{path}_scales")
            table[part.name] = packed if mxfp4 else Source(path, index=index, transposed=transposed)
        if module.bias is not None:
            table[f"{path}.bias"] = Source(f"{path}_bias")
    return table


def stacked_gates(network: nn.Module, path: str, tensors: tuple[str, str]) -> dict[str, Source]:
    """Return the sources of the experts ``path``, whose layers are a gate, an up and a down projection in this order.

    ``tensors``: the gates above the up projections, [experts, 2 * size, hidden], and the down projections [experts,
    hidden, size].
    """
    layers = dict(network.get_submodule(path).named_children())
    table = {}
    for (name, layer), tensor, which in zip(layers.items(), (tensors[0], *tensors), (0, 1, 0), strict=True):
        for index, part in enumerate(layer.weight_parts(f"{path}.{name}")):  # type: ignore[operator]
            rows = ((which * part.num_rows, (which + 1) * part.num_rows),)
            table[part.name] = Source(tensor, rows, index=index)
    return table


def add_to_norms(network: nn.Module, plus: float = 1.0) -> dict[str, Source]:
    """Return the sources of the weights of norms that a checkpoint stores less ``plus``."""
    return {
        f"{path}.weight": Source(f"{path}.weight", plus=plus)
        for path, module in network.named_modules()
        if isinstance(module, RMSNorm | LayerNorm)
    }


def renamed(network: nn.Module, table: Mapping[str, Source], names: Sequence[tuple[str, str]]) -> dict[str, Source]:
    """Return ``table`` with other names of tensors: in each, every text of ``names`` is replaced, in their order."""
    result = {}
    for name, _ in network.named_parameters():
        source = table.get(name, Source(name))
        tensor = source.tensor
        for own, stored in names:
            tensor = tensor.replace(own, stored)
        result[name] = replace(source, tensor=tensor)
    return result


def transposed(network: nn.Module, table: Mapping[str, Source], layers: Sequence[str]) -> dict[str, Source]:
    """Return ``table`` with the matrices of ``layers``, last parts of module paths, stored as [in, out] (Conv1D)."""
    result = dict(table)
    for name, parameter in network.named_parameters():
        if parameter.ndim == 2 and name.split(".")[-2] in layers:
            result[name] = replace(result.get(name, Source(name)), transposed=True)
    return result
