"""Eager mode over several processes: each has some output rows of every matrix, and gloo brings the results together.

A linear's K is never divided, so the bits are those of one process (docs/explanation/ranks.md).  Attention and its keys
and values are whole on each rank.  The processes make the same calls in the same order.
"""

from __future__ import annotations

import atexit
import hashlib
import os
from collections.abc import Iterable
from datetime import timedelta
from itertools import pairwise
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor, nn

from penstock.core.layouts import TILE_ROWS
from penstock.errors import InvalidArgumentError, UnsupportedError
from penstock.launch.environment import read_rank_environment
from penstock.nn.experts import ExpertLinear
from penstock.nn.latent import HeadLinear
from penstock.nn.linear import Linear
from penstock.nn.weight import MatrixLayer

__all__ = ["check_same_batch", "join_ranks", "shard_network"]

_TIMEOUT: Final = timedelta(seconds=300)


def join_ranks(world: int) -> None:
    """Connect with the other processes by gloo, unless the program has done so.

    Raises UnsupportedError (``tensor_parallel_size``) if a launcher has not started ``world`` processes.
    """
    place = read_rank_environment()
    num_processes = dist.get_world_size() if dist.is_initialized() else place.world if place else 1
    if num_processes != world:
        raise UnsupportedError(
            f"tensor_parallel_size: expected {num_processes}, the number of processes in eager mode, got {world}. "
            f"Start the program with `penstock launch --nproc {world}`.",
            param="tensor_parallel_size",
        )
    if dist.is_initialized() or place is None:
        return
    if "MASTER_ADDR" not in os.environ or "MASTER_PORT" not in os.environ:
        raise UnsupportedError(
            f"tensor_parallel_size: expected MASTER_ADDR and MASTER_PORT, which gloo needs; {place.source} does not "
            "set them",
            param="tensor_parallel_size",
        )
    dist.init_process_group("gloo", rank=place.rank, world_size=world, timeout=_TIMEOUT)
    atexit.register(_leave_ranks)


def _leave_ranks() -> None:
    """End gloo's threads, which would abort a process that ends while they run."""
    if dist.is_initialized():
        dist.destroy_process_group()


def shard_network(network: nn.Module) -> None:
    """Cut each packed matrix of a network between tiles of 16 rows; this process keeps its part."""
    rank, world = dist.get_rank(), dist.get_world_size()
    parts: dict[int, Tensor] = {}  # layers may share a matrix
    whole = [layer.packed_weight for layer in network.modules() if isinstance(layer, MatrixLayer)]  # keeps ids apart
    for layer in network.modules():
        packed = layer.packed_weight if isinstance(layer, MatrixLayer) else None
        if isinstance(layer, HeadLinear):
            continue  # whole on each rank
        if isinstance(layer, ExpertLinear):
            _shard_experts(layer, rank, world)
            continue
        if not isinstance(layer, MatrixLayer) or packed is None or layer.rows < world * TILE_ROWS:
            continue
        num_tiles = -(-layer.rows // TILE_ROWS)
        starts = [min(layer.rows, num_tiles * r // world * TILE_ROWS) for r in range(world + 1)]
        unit = 1 if len(packed) == layer.rows else TILE_ROWS
        first, last = starts[rank] // unit, -(-starts[rank + 1] // unit)
        layer.packed_weight = parts.setdefault(id(packed), packed[first:last].clone())
        layer.rows = starts[rank + 1] - starts[rank]
        if isinstance(layer, Linear):
            if layer.bias is not None:
                layer.bias = nn.Parameter(layer.bias[starts[rank] : starts[rank + 1]].clone(), requires_grad=False)
            layer.register_forward_hook(_GatherColumns(starts))
        else:
            rows = _Rows(starts, rank)
            layer.register_forward_pre_hook(rows.take_own)
            layer.register_forward_hook(rows.gather)
    del whole


def _shard_experts(layer: ExpertLinear, rank: int, world: int) -> None:
    """Keep some rows of each expert; all of them where an expert has too few, or ends inside a tile."""
    packed, num_tiles = layer.packed_weight, layer.out_features // TILE_ROWS
    if packed is None or layer.out_features % TILE_ROWS or num_tiles < world:
        return
    starts = [num_tiles * r // world * TILE_ROWS for r in range(world + 1)]
    own = slice(starts[rank], starts[rank + 1])
    unit = 1 if len(packed) == layer.rows else TILE_ROWS
    experts = packed.view(layer.num_experts, -1, *packed.shape[1:])
    layer.packed_weight = experts[:, own.start // unit : own.stop // unit].reshape(-1, *packed.shape[1:])
    layer.out_features = own.stop - own.start
    layer.rows = layer.num_experts * layer.out_features
    if layer.bias is not None:
        layer.bias = nn.Parameter(layer.bias[:, own].clone(), requires_grad=False)
    layer.register_forward_hook(_GatherColumns(starts))


class _GatherColumns:
    """After a linear: the columns of all ranks side by side, of experts those of each slot."""

    def __init__(self, starts: list[int]) -> None:
        self._sizes = [end - begin for begin, end in pairwise(starts)]

    def __call__(self, layer: nn.Module, _inputs: tuple[Tensor, ...], y: Tensor) -> Tensor:
        padded = torch.zeros(*y.shape[:-1], max(self._sizes))  # gloo gathers equal sizes
        padded[..., : y.shape[-1]] = y
        parts = _gather(padded)
        return torch.cat([part[..., :size] for part, size in zip(parts, self._sizes, strict=True)], dim=-1)


class _Rows:
    """Around an embedding: each row comes from the rank that has it.

    Nothing is added, which would lose the sign of -0.
    """

    def __init__(self, starts: list[int], rank: int) -> None:
        self._first, self._last = starts[rank], starts[rank + 1] - 1
        self._ends = torch.tensor(starts[1:], dtype=torch.int32)
        self._ids = torch.zeros(0, dtype=torch.int32)

    def take_own(self, _layer: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Before: ids of rows that other ranks have become any own row."""
        self._ids = inputs[0]
        return (self._ids.clamp(self._first, self._last) - self._first, *inputs[1:])

    def gather(self, _layer: nn.Module, _inputs: tuple[Tensor, ...], y: Tensor) -> Tensor:
        """After: return the row of each id."""
        owners = torch.bucketize(self._ids, self._ends, right=True)
        return torch.stack(_gather(y.contiguous()))[owners, torch.arange(len(owners))]


def _gather(x: Tensor) -> list[Tensor]:
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x)
    return parts


def check_same_batch(arrays: Iterable[npt.NDArray[np.int32]]) -> None:
    """Raise InvalidArgumentError on every rank unless all have the same arrays."""
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(str(array.shape).encode() + array.tobytes())
    own = torch.frombuffer(bytearray(digest.digest()), dtype=torch.uint8)
    for rank, other in enumerate(_gather(own)):
        if not torch.equal(other, own):
            raise InvalidArgumentError(
                f"batch: expected equal batches on all ranks, got another on rank {rank} than on rank "
                f"{dist.get_rank()}: the programs of all ranks must make the same calls",
                param="batch",
            )
