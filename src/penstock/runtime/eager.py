"""Eager mode: the network's own Python, op by op, for debugging.

It runs the same kernels on the same packed bytes as graph mode, so its numbers are equal bit for bit.  A breakpoint in
a layer shows named tensors in their logical shapes.  ``PENSTOCK_REFERENCE=1`` runs the PyTorch references instead.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from penstock.checkpoint.folder import Checkpoint
from penstock.config import show, show_tensors
from penstock.core import layouts, native
from penstock.core.native import QuantizedRows
from penstock.errors import InvalidArgumentError, InvalidFileError, UnsupportedError
from penstock.models.meta import construct_on_meta
from penstock.models.network_script import script_errors
from penstock.models.sources import as_network
from penstock.nn import (
    Batch,
    ConvWeight,
    DistanceBias,
    ExpertLinear,
    Linear,
    LMHead,
    OutputRows,
    PrefixLengths,
    ShortConv,
    allocate_states,
    assign_page_groups,
    load_weights,
    paged_layers,
    shared_matrices,
)
from penstock.nn.packing import pack_blocks, pack_matrix, pack_parts, pack_quantized
from penstock.nn.ranks import check_same_batch, join_ranks, shard_network
from penstock.nn.weight import WeightPart
from penstock.ops.eager import use_context
from penstock.runtime.program import PAGE_TOKENS, ProgramInfo, ProgramLimits, kv_layout_of, pages_by_group, pages_for

__all__ = ["EagerProgram"]

_LOG = logging.getLogger("penstock.eager")
_FAILED = -2
"""The token in a slot whose row failed to sample."""

_KV_DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "int8": torch.int8, "int4": torch.uint8}
_FLOAT_BITS = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
_VECTOR = 0
_PLAIN = ShortConv | ConvWeight | DistanceBias
"""The layers whose ``weight`` is a matrix that is not packed."""


class EagerProgram:
    """A checkpoint folder as a Program.  Only one thread at a time may use it.

    ``scheme`` None keeps the checkpoint's own type; ``network`` is "file.py:Class".  The attributes ``network`` (the
    module) and ``states`` are for inspection.  ``num_ranks``: the processes of a launcher, each of which opens the
    folder and runs the same batches (``nn/ranks.py``).
    """

    def __init__(
        self,
        checkpoint: Checkpoint | Path | str,
        *,
        scheme: str | None = None,
        threads: int = 0,
        limits: ProgramLimits,
        network: str | None = None,
        num_ranks: int = 1,
    ) -> None:
        self._num_ranks = num_ranks
        if num_ranks > 1:
            join_ranks(num_ranks)
        if not isinstance(checkpoint, Checkpoint):
            checkpoint = Checkpoint.open(checkpoint)
        self._context = native.Context(threads)
        scheme = checkpoint.choose_scheme(scheme)
        built = construct_on_meta(checkpoint.config, network)
        self.network, self._script = built.network, built.script
        checkpoint = as_network(checkpoint, built.network)
        groups = assign_page_groups(self.network)
        bidirectional = any(not layer.causal for layer in paged_layers(self.network).values())
        token = next((layer.token for layer in self.network.modules() if isinstance(layer, PrefixLengths)), -1)
        limits = _complete(limits, built.context_len, scheme, bidirectional or token >= 0)
        with use_context(self._context), torch.no_grad():
            _WeightReader(checkpoint, scheme).load(self.network)
            for note in filter(None, (checkpoint.rounding_note, checkpoint.widening_note(scheme))):
                _LOG.warning("penstock: %s: %s", checkpoint.folder, note)
            if num_ranks > 1:
                shard_network(self.network)
            sizes = limits.num_pages, limits.max_requests, limits.max_tokens
            group_pages = pages_by_group([group.window for group in groups], *sizes)
            allocate_states(self.network, limits.num_pages, _KV_DTYPES[limits.kv_layout], group_pages)
        heads = [module for module in self.network.modules() if isinstance(module, LMHead)]
        gathers = [module for module in self.network.modules() if isinstance(module, OutputRows)] or heads
        if len(heads) == 1:
            gathers[0].register_forward_pre_hook(self._keep_hidden)
        weight_bytes = sum(t.nbytes for t in (*self.network.parameters(), *self._packed_weights()))
        self.limits = limits
        self.info = ProgramInfo(
            network=built.name,
            scheme=scheme,
            mode="eager",
            vocab_size=built.vocab_size,
            context_len=limits.context_len,
            page_windows=tuple(group.window for group in groups) or (0,),
            weight_bytes=weight_bytes,
            weight_bytes_per_token=weight_bytes - self._table_bytes(),
            num_threads=self._context.num_threads,
            cpu_level=self._context.cpu_level,
            hidden_size=(getattr(gathers[0], "width", 0) or heads[0].cols) if len(heads) == 1 else 0,
            bidirectional=bidirectional,
            prefix_token=token,
            group_pages=group_pages,
        )
        self._hidden: Tensor = torch.zeros(0, self.info.hidden_size)
        self._logits: NDArray[np.float32] = np.zeros((0, built.vocab_size), np.float32)
        self._slots: dict[int, int] = {}

    @property
    def states(self) -> dict[str, Tensor]:
        """The KV pages of each layer, [num_pages, page_elements]."""
        return {name: layer.state for name, layer in paged_layers(self.network).items()}

    def _packed_weights(self) -> list[Tensor]:
        buffers = dict(self.network.named_buffers())  # a tied matrix counts once
        return [tensor for name, tensor in buffers.items() if name.endswith("packed_weight")]

    def _table_bytes(self) -> int:
        """Return the bytes of tables that only an embedding reads; a token reads one row, which is negligible."""
        linear = {id(layer.packed_weight) for layer in self.network.modules() if isinstance(layer, Linear)}
        return sum(tensor.nbytes for tensor in self._packed_weights() if id(tensor) not in linear)

    def run(self, batch: native.StepBatch) -> None:
        """Compute one step; InvalidArgumentError names the field that is out of range."""
        token_ids = self._resolve_slots(batch.token_ids)
        failed = np.flatnonzero(token_ids == _FAILED)
        token_ids[failed] = 0  # lets the rest of the batch run; the failed requests get NaN logits below
        self._check(batch, token_ids)
        arrays = (token_ids, batch.positions, batch.request_starts, batch.page_tables, batch.output_rows)
        if self._num_ranks > 1:
            check_same_batch(arrays)
        with use_context(self._context), torch.no_grad(), script_errors(self._script):
            logits = self.network(Batch(*(torch.from_numpy(array.copy()) for array in arrays)))
        self._check_output(logits, len(batch.output_rows))
        self._logits = logits.numpy()
        if failed.size:
            request_of = np.repeat(np.arange(len(batch.request_starts) - 1), np.diff(batch.request_starts))
            self._logits[np.isin(request_of[batch.output_rows], request_of[failed])] = np.nan

    def _check_output(self, output: object, num_rows: int) -> None:
        """Refuse an output of the network that graph mode refuses, too."""
        expected = [num_rows, self.info.vocab_size]
        if not isinstance(output, Tensor):
            raise InvalidFileError(
                f"{self._forward_name()}: output: expected logits {expected}, got {type(output).__name__}",
                param="output",
            )
        if list(output.shape) != expected or output.dtype != torch.float32:
            raise InvalidFileError(
                f"{self._forward_name()}: output: expected float32 logits {expected}, one row per entry of "
                f"batch.output_rows, got {output.dtype} {list(output.shape)}; select rows with batch.output_rows",
                param="output",
            )

    def _forward_name(self) -> str:
        return f"{self._script or 'network'}: {type(self.network).__name__}.forward"

    def logits(self) -> NDArray[np.float32]:
        """Return the last step's logits, [R, vocab]."""
        return self._logits

    def hidden(self) -> NDArray[np.float32]:
        """Return the last step's hidden rows, [T, hidden_size], from which the output head selected its rows."""
        return self._hidden.numpy()

    def _keep_hidden(self, _head: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        self._hidden = inputs[0]

    def sample(self, sampling: native.Sampling) -> native.Sampled:
        """Sample every row of the last step."""
        num_slots = self.limits.max_requests
        if sampling.slot is not None and ((sampling.slot < -1) | (sampling.slot >= num_slots)).any():
            raise InvalidArgumentError(
                f"slot: expected -1 or a slot below {num_slots}, got {sampling.slot.tolist()}", param="slot"
            )
        plain = replace(sampling, slot=None)  # this class keeps the slots itself
        logits = np.ascontiguousarray(self._logits)
        if sampling.penalties is not None:
            history = self._resolve_slots(sampling.penalties.history)
            failed = np.flatnonzero(history == _FAILED)
            if failed.size:  # a row whose history has such a token fails too
                history[failed], logits = 0, logits.copy()
                logits[np.searchsorted(sampling.penalties.starts, failed, side="right") - 1] = np.nan
            plain = replace(plain, penalties=replace(sampling.penalties, history=history))
        sampled = native.sample_logits(self._context, logits, plain)
        if sampling.slot is not None:
            for slot, token in zip(sampling.slot.tolist(), sampled.ids.tolist(), strict=True):
                if slot >= 0:
                    self._slots[slot] = token if token >= 0 else _FAILED
        return sampled

    def step(self, batch: native.StepBatch, sampling: native.Sampling) -> native.Sampled:
        """Run and sample in one call."""
        self.run(batch)
        return self.sample(sampling)

    def page_memory(self) -> list[list[NDArray[np.uint8]]]:
        """Return nothing: pages of eager mode stay where they are."""
        return []

    def end_exchanges(self) -> None:
        """Do nothing: steps in eager mode end by themselves."""

    def close(self) -> None:
        """Free the memory.  A second call does nothing."""
        self.network = nn.Module()
        self._context.close()

    def _resolve_slots(self, token_ids: NDArray[np.int32]) -> NDArray[np.int32]:
        """Return a copy with each -1-s replaced by the token last sampled in slot s, or ``_FAILED`` if that failed."""
        if not (token_ids < 0).any():
            return token_ids.copy()
        missing = [int(-1 - t) for t in token_ids if t < 0 and int(-1 - t) not in self._slots]
        if missing:
            raise InvalidArgumentError(
                f"token_ids: expected a slot with a sampled token, got slot {missing[0]}", param="token_ids"
            )
        return np.array([t if t >= 0 else self._slots[int(-1 - t)] for t in token_ids], np.int32)

    def _check(self, batch: native.StepBatch, token_ids: NDArray[np.int32]) -> None:
        limits, info = self.limits, self.info
        counts = {
            "token_ids": (len(token_ids), limits.max_tokens),
            "request_starts": (len(batch.request_starts) - 1, limits.max_requests),
            "output_rows": (len(batch.output_rows), limits.max_rows),
        }
        for name, (count, max_count) in counts.items():
            if count > max_count:
                raise InvalidArgumentError(f"{name}: expected at most {max_count}, got {count}", param=name)
        if not len(token_ids):
            raise InvalidArgumentError("token_ids: expected at least 1 token, got none", param="token_ids")
        for name, array, end in (
            ("token_ids", token_ids, info.vocab_size),
            ("positions", batch.positions, info.context_len),
            ("output_rows", batch.output_rows, len(token_ids)),
        ):
            if array.size and not 0 <= int(array.min()) <= int(array.max()) < end:
                raise InvalidArgumentError(
                    f"{name}: expected 0 to {end - 1}, got {array.min()} to {array.max()}", param=name
                )
        begins = batch.positions[batch.request_starts[:-1]]
        if info.bidirectional and begins.any():
            raise UnsupportedError(
                f"positions: expected requests that begin at position 0, got {begins.tolist()}: the network's "
                "attention is not causal, so a request must run whole in one step",
                param="positions",
            )
        if batch.page_tables.shape[0] != len(info.page_windows):
            raise InvalidArgumentError(
                f"page_tables: expected {len(info.page_windows)} groups, got {batch.page_tables.shape[0]}",
                param="page_tables",
            )
        if batch.page_tables.shape[2] * PAGE_TOKENS <= int(batch.positions.max()):
            raise InvalidArgumentError(
                f"page_tables: expected pages for position {batch.positions.max()}, got {batch.page_tables.shape[2]}",
                param="page_tables",
            )


def _complete(limits: ProgramLimits, max_context_len: int, scheme: str, whole_prompts: bool) -> ProgramLimits:
    """Replace zeros in ``limits`` by defaults: one row and one whole context per request.

    With ``whole_prompts`` the default is one row per token.
    """
    max_rows = max(limits.max_tokens, limits.max_requests) if whole_prompts else limits.max_requests
    context_len = min(limits.context_len or max_context_len, max_context_len)
    return replace(
        limits,
        max_rows=limits.max_rows or max_rows,
        num_pages=limits.num_pages or pages_for(context_len) * limits.max_requests,
        context_len=context_len,
        kv_layout=kv_layout_of(limits.kv_layout, scheme),
    )


_MAX_LISTED = 5


def _listed(names: list[str]) -> str:
    """Return the first names of a list, and how many more there are."""
    more = f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
    return ", ".join(map(show, names[:_MAX_LISTED])) + more


class _WeightReader:
    """Reads checkpoint tensors as packed torch tensors, one at a time; names those that are missing or unused."""

    def __init__(self, checkpoint: Checkpoint, scheme: str) -> None:
        self._checkpoint = checkpoint
        self._scheme = scheme

    def load(self, network: nn.Module) -> None:
        """Set every weight of the network."""
        self._matrices = {matrix.name: matrix for matrix in shared_matrices(network)}
        vectors = {name for name, tensor in network.named_parameters() if tensor.ndim == 1}
        convolutions = [path for path, module in network.named_modules() if isinstance(module, _PLAIN)]
        vectors |= {f"{path}.weight" for path in convolutions}
        experts = {path: module for path, module in network.named_modules() if isinstance(module, ExpertLinear)}
        vectors |= {f"{path}.bias" for path, module in experts.items() if module.bias is not None}
        parts = {part.name for matrix in self._matrices.values() for part in matrix.parts}
        needed, folder = parts | vectors, self._checkpoint.folder
        stored = set(self._checkpoint.tensors)
        missing = sorted(needed - stored)
        extra = stored - needed.union(*(self._checkpoint.companions(name) for name in needed))
        if extra:
            extra -= self._checkpoint.redundant_names(extra)
        if missing:
            raise InvalidFileError(
                f"{folder}: lacks {show_tensors(missing)}, which the network reads", param=missing[0]
            )
        if extra:
            foreign = sorted(extra & {name for name, _ in network.named_parameters()})
            if foreign:
                layer = network.get_submodule(foreign[0].rpartition(".")[0])
                raise UnsupportedError(
                    f"{folder}: {show_tensors(foreign)}: expected a layer of penstock.nn, got "
                    f"{type(layer).__module__}.{type(layer).__qualname__}",
                    param=foreign[0],
                )
            raise InvalidFileError(
                f"{folder}: has {show_tensors(sorted(extra))}, which the network does not read", param=min(extra)
            )
        schemes = self._checkpoint.weight_schemes(self._scheme)
        load_weights(network, self._scheme, self._checkpoint.dtype, self._read, schemes)

    def _read(self, name: str, layout: int, rotated: bool) -> Tensor:
        if layout == _VECTOR:
            return self._floats(name).float()
        matrix = self._matrices[name]
        rows, cols = matrix.rows, matrix.cols
        for part in matrix.parts:
            self._checkpoint.check_rotation(part.name, rotated)
        if layout in layouts.BLOCKS:
            parts = [(self._checkpoint.read_blocks(part.name), part.row_start) for part in matrix.parts]
            if self._shape_of(matrix.parts) != [rows, cols]:
                raise InvalidFileError(
                    f"tensor {show(name)}: shape: expected {[rows, cols]}, got {self._shape_of(matrix.parts)}",
                    param=name,
                )
            return pack_blocks(parts, layout, rows, cols)
        if len(matrix.parts) > 1:
            stacked = [(self._part(part, cols, layout, rotated), part.row_start) for part in matrix.parts]
            return pack_parts(stacked, layout, rows, rotated)
        shape = self._checkpoint.logical_shape(name)
        if not self._checkpoint.is_quantized(name):
            if tuple(shape) != (rows, cols):
                raise InvalidFileError(
                    f"tensor {show(name)}: shape: expected {[rows, cols]}, got {list(shape)}", param=name
                )
            if self._has_rows(name, layout, rotated):
                return pack_quantized(self._checkpoint.read_rows(name), layout)
            return pack_matrix(self._floats(name), layout, rotated)
        if shape[0] != rows or layout not in (layouts.T16_I8, layouts.T16_I4G32):
            raise InvalidFileError(
                f"tensor {show(name)}: shape: expected {[rows, cols]}, got {list(shape)}", param=name
            )
        return pack_quantized(self._checkpoint.read_quantized(name, cols), layout)

    def _shape_of(self, parts: Sequence[WeightPart]) -> list[int]:
        """Return the rows of all parts, and the columns of the first."""
        shapes = [self._checkpoint.logical_shape(part.name) for part in parts]
        return [sum(shape[0] for shape in shapes), shapes[0][1]]

    def _has_rows(self, name: str, layout: int, rotated: bool) -> bool:
        """Return True for a tensor of a folder of another tool whose integers and scales are packed as they are."""
        return layout == layouts.T16_I8 and not rotated and self._checkpoint.has_rows(name)

    def _part(self, part: WeightPart, cols: int, layout: int, rotated: bool) -> Tensor | QuantizedRows:
        """Return the rows of a stacked matrix that one tensor has."""
        name, expected = part.name, [part.num_rows, cols]
        actual = list(self._checkpoint.logical_shape(name))
        if actual[0] != expected[0] or (actual != expected and not self._checkpoint.is_quantized(name)):
            raise InvalidFileError(f"tensor {show(name)}: shape: expected {expected}, got {actual}", param=name)
        if self._checkpoint.is_quantized(name):
            return self._checkpoint.read_quantized(name, cols)
        return self._checkpoint.read_rows(name) if self._has_rows(name, layout, rotated) else self._floats(name)

    def _floats(self, name: str) -> Tensor:
        dtype = self._checkpoint.tensors[name].dtype
        if dtype not in _FLOAT_BITS:
            raise UnsupportedError(
                f"tensor {show(name)}: dtype: expected F32, F16 or BF16, got {dtype.upper()}", param=name
            )
        stored = torch.from_numpy(self._checkpoint.read(name).copy())
        return stored if dtype == "f32" else stored.view(torch.int16).view(_FLOAT_BITS[dtype])
