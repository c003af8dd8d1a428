"""Quantize a checkpoint folder without PyTorch, for ``penstock quantize``.

The result is a folder that loads wherever a checkpoint does.  A linear weight ``X.weight`` becomes integers with
scales in ``X.weight_scale`` and, for 4 bit, ``X.weight_groups``; an output head may become blocks; other tensors are
copied unchanged.
docs/guides/quantization.md describes the folder.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.checkpoint.folder import Checkpoint
from penstock.checkpoint.gguf.k_blocks import quantize_q6_k
from penstock.checkpoint.side_files import write_side_files
from penstock.config import check_choice, show
from penstock.core.layouts import BLOCKS
from penstock.core.native import Context, QuantizedRows
from penstock.core.weights import to_float32
from penstock.errors import InvalidArgumentError, InvalidFileError, UnsupportedError
from penstock.quant.folder import add_quantized, new_folder, quantized_config, quantized_entries
from penstock.quant.matrix import quantize_rows
from penstock.quant.mixed_schemes import HEAD_BLOCKS, HEADS, TOKEN_TABLES
from penstock.quant.ptq_config import check_blacklist, is_listed
from penstock.quant.scheme import Scheme, find_scheme, quantizing_scheme
from penstock.quant.tensor_writer import TensorEntry, TensorWriter

__all__ = ["QuantizeReport", "Rounding", "check_float_weights", "head_blocks", "plan_weights", "quantize_checkpoint"]

EMBEDDING_WORDS: Final = ("embed", "wte", "wpe")
FLOAT_LAYERS: Final = ("gate", "router", "wg", "shared_expert_gate", "conv", "conv1d", "relative_attention_bias")
"""The names of routers and convolutions, which networks compute in float32 under every scheme."""
FLOATS: Final = ("f32", "f16", "bf16")
EMBEDDINGS: Final = ("int8",)
"""The types that an embedding may be rounded to: integers with a scale for each row."""
_ENCODER_TABLES: Final = ("word_embeddings.weight", "tok_embeddings.weight")
_PIECE_VALUES: Final = 1 << 22
QuantizeProgress = Callable[[int, int], None]


class Rounding(Protocol):
    """A method that chooses the integers of each weight; without one they are rounded to nearest."""

    @property
    def recipe(self) -> Mapping[str, Any]:
        """Return the values of config.json about the method."""

    def values(self, name: str, data: NDArray[Any], dtype: str) -> NDArray[np.float32]:
        """Return the values of a matrix before it is rounded to blocks."""

    def column_weights(self, name: str) -> NDArray[np.float32] | None:
        """Return how much the error of each column counts in a matrix that is rounded to blocks; None for all alike."""

    def tensor(self, name: str, data: NDArray[Any], dtype: str) -> NDArray[Any]:
        """Return the values of a tensor of the folder, before a matrix is rounded: those of the source, or folded."""

    def rows(
        self, context: Context, name: str, matrix: NDArray[Any], dtype: str, scheme: Scheme
    ) -> Iterator[QuantizedRows]:
        """Yield the integers of the weight ``name`` in runs of rows; arguments as of ``quantize_rows``."""


@dataclass(frozen=True)
class QuantizeReport:
    """The result of a quantization: sizes in bytes, time in seconds."""

    scheme: str
    num_quantized: int
    source_bytes: int
    num_bytes: int
    seconds: float


def plan_weights(
    checkpoint: Checkpoint,
    scheme: Scheme,
    blacklist: Sequence[str] = (),
    head: str | None = None,
    embedding: str | None = None,
) -> dict[str, Scheme]:
    """Return the scheme of each tensor to quantize: float matrices ``X.weight``, but no embedding, router, convolution.

    An embedding that is also the output head is quantized with the head's scheme.  A tensor whose name contains a
    string of ``blacklist`` keeps its floats; InvalidArgumentError if that are only some of the experts of a layer.
    ``head``: the scheme of the output head, None for ``scheme.head``; InvalidArgumentError if it fits no head.
    ``embedding``: one of ``EMBEDDINGS`` for an embedding that is not the head, None for its floats;
    InvalidArgumentError if there is none.
    """
    if head is not None:
        check_choice("head", head, (HEAD_BLOCKS,))
    head_scheme = find_scheme(head or scheme.head)
    if not head_scheme.in_blocks:
        head_scheme = replace(head_scheme, exportable=scheme.exportable)
    tied = checkpoint.config.bool("tie_word_embeddings", not _has_head(checkpoint))
    table_scheme = _embedding_scheme(checkpoint, scheme, embedding, tied)
    plan = {}
    for name, info in checkpoint.tensors.items():
        if len(info.shape) != 2 or info.dtype not in FLOATS or not name.endswith(".weight") or 0 in info.shape:
            continue
        parent, layer = ["", *name.removesuffix(".weight").split(".")][-2:]
        if layer in TOKEN_TABLES or any(word in layer for word in EMBEDDING_WORDS):
            if layer in TOKEN_TABLES and (tied or table_scheme is not None):
                plan[name] = table_scheme or head_scheme
            continue
        if parent == "router" or (layer in FLOAT_LAYERS and not _is_half_of_a_layer(checkpoint, name)):
            continue
        plan[name] = head_scheme if name in HEADS else scheme
    check_blacklist(plan, blacklist)
    if head is not None:
        _check_head({name: checkpoint.tensors[name].shape[1] for name, row in plan.items() if row is head_scheme}, head)
    return {name: scheme for name, scheme in plan.items() if not is_listed(name, blacklist)}


def _embedding_scheme(checkpoint: Checkpoint, scheme: Scheme, embedding: str | None, tied: bool) -> Scheme | None:
    """Return the scheme of an embedding that is not the head; None if it keeps its floats, or is the head."""
    if embedding is None:
        return None
    check_choice("embedding", embedding, EMBEDDINGS)
    tables = [name for name in checkpoint.tensors if name.split(".")[-2:-1] in [[table] for table in TOKEN_TABLES]]
    if tied or not tables:
        raise InvalidArgumentError(
            "embedding: expected a model whose embedding is not its output head, got "
            + (
                "one whose head has the weight of its embedding" if tied else f"one without {' or '.join(TOKEN_TABLES)}"
            ),
            param="embedding",
        )
    return replace(find_scheme(scheme.head), exportable=scheme.exportable)


def _check_head(columns: Mapping[str, int], head: str) -> None:
    """Refuse a scheme of blocks for a model without an output head, or with other ``columns`` than whole blocks."""
    block_len = BLOCKS[find_scheme(head).layout].block_len
    misfit = next((f"{cols} of {name}" for name, cols in columns.items() if cols % block_len), None)
    if misfit is None and not columns:
        misfit = "a model without a quantized output head"
    if misfit is not None:
        raise InvalidArgumentError(
            f"head: expected an output head whose columns are a multiple of {block_len} for {head}, got {misfit}",
            param="head",
        )


def _is_half_of_a_layer(checkpoint: Checkpoint, name: str) -> bool:
    """Return True for the ``gate`` of a gated feed-forward layer, which has an ``up`` of its shape; routers do not."""
    other = checkpoint.tensors.get(name.removesuffix("gate.weight") + "up.weight")
    return name.endswith(".gate.weight") and other is not None and other.shape == checkpoint.tensors[name].shape


def _has_head(checkpoint: Checkpoint) -> bool:
    return any(name in checkpoint.tensors for name in HEADS)


def _has_float_head(checkpoint: Checkpoint, plan: Mapping[str, Scheme]) -> bool:
    """Return True if an embedding that the plan leaves in floats may be the output head, as in encoders."""
    tables = [name for name in checkpoint.tensors if name.endswith(_ENCODER_TABLES) and name not in plan]
    return bool(tables) and not _has_head(checkpoint)


def _entries(checkpoint: Checkpoint, plan: dict[str, Scheme], names: list[str]) -> list[TensorEntry]:
    entries = []
    for name in names:
        info = checkpoint.tensors[name]
        scheme = plan.get(name)
        if scheme is None:
            if info.dtype not in FLOATS:
                raise UnsupportedError(
                    f"{info.file}: tensor {show(name)}: dtype {info.dtype.upper()} is not supported", param=name
                )
            entries.append(TensorEntry(name, info.dtype.upper(), info.shape))
            continue
        if f"{name}_scale" in checkpoint.tensors:
            raise UnsupportedError(
                f"{info.file}: expected float weights, got a tensor {show(name + '_scale')} of quantized ones",
                param=name + "_scale",
            )
        rows, cols = info.shape
        entries += quantized_entries(name, scheme, rows, cols)
    return entries


def check_float_weights(checkpoint: Checkpoint) -> None:
    """Refuse a folder that is quantized already; UnsupportedError."""
    if checkpoint.scheme is not None:
        raise UnsupportedError(
            f"{checkpoint.folder}: expected float weights, got weights quantized as {checkpoint.scheme}. "
            "Use the original checkpoint.",
            param="scheme",
        )


def quantize_checkpoint(
    source: Checkpoint | Path | str,
    out: Path | str,
    scheme: str | Scheme,
    progress: QuantizeProgress | None = None,
    rounding: Rounding | None = None,
    blacklist: Sequence[str] = (),
    head: str | None = None,
    embedding: str | None = None,
) -> QuantizeReport:
    """Write the folder ``out``, which must not exist, from the checkpoint folder ``source``.

    Of a family whose tensors differ from the network's parameters, ``source`` is what ``models.mapped.open_mapped``
    returns; the folder then has the parameters.

    ``scheme``: a name, or what ``quantizing_scheme`` returns; the recipe tells if it is exportable.
    ``rounding``: the method that chooses the integers; None rounds to nearest.  ``blacklist``, ``head``, ``embedding``:
    of ``plan_weights``.
    ``progress(done, total)`` counts bytes of the source.  The folder appears complete or not at all.  Raises what
    ``Checkpoint.open`` raises, and InvalidArgumentError for a scheme that does not quantize or an existing ``out``.
    """
    start = time.monotonic()
    scheme_row = quantizing_scheme(scheme) if isinstance(scheme, str) else scheme
    checkpoint = source if isinstance(source, Checkpoint) else Checkpoint.open(source)
    check_float_weights(checkpoint)
    plan = plan_weights(checkpoint, scheme_row, blacklist, head, embedding)
    is_usual = plan.keys() == plan_weights(checkpoint, scheme_row).keys() and not _has_float_head(checkpoint, plan)
    redundant = checkpoint.redundant_names()
    names = [name for name in checkpoint.tensors if name not in redundant]
    total = sum(checkpoint.tensors[name].num_bytes for name in names)
    side_files = checkpoint.side_files()
    recipe = ({} if rounding is None else dict(rounding.recipe)) | (
        {"exportable": True} if scheme_row.exportable else {}
    )
    schemes = {name: row.name for name, row in plan.items()}
    side_files["config.json"] = quantized_config(
        checkpoint.config.values, scheme_row.name, checkpoint.dtype, recipe, is_mixed=not is_usual, schemes=schemes
    )
    with new_folder(Path(out)) as folder:
        write_side_files(folder, side_files)
        writer = TensorWriter(folder / "model.safetensors", _entries(checkpoint, plan, names))
        done_bytes = 0
        with Context() as context:
            for name in names:
                _write_tensor(writer, context, checkpoint, name, plan.get(name), rounding)
                checkpoint.release(name)
                done_bytes += checkpoint.tensors[name].num_bytes
                if progress is not None:
                    progress(done_bytes, total)
        num_bytes = writer.close()
    return QuantizeReport(scheme_row.name, len(plan), total, num_bytes, time.monotonic() - start)


def head_blocks(
    matrix: NDArray[Any], dtype: str, column_weights: NDArray[np.float32] | None = None
) -> Iterator[NDArray[np.uint8]]:
    """Round a matrix [rows, cols] to the blocks of ``HEAD_BLOCKS``, and yield them in runs of rows.

    ``matrix`` holds float32, or the bits of ``dtype`` "f16" or "bf16" as uint16.  ``column_weights``: of
    ``quantize_q6_k``.
    """
    step = max(1, _PIECE_VALUES // matrix.shape[1])
    for start in range(0, len(matrix), step):
        yield quantize_q6_k(to_float32(matrix[start : start + step], dtype), column_weights)


def _write_tensor(
    writer: TensorWriter,
    context: Context,
    checkpoint: Checkpoint,
    name: str,
    scheme: Scheme | None,
    rounding: Rounding | None,
) -> None:
    data, dtype = checkpoint.read(name), checkpoint.tensors[name].dtype
    if rounding is not None:
        data = rounding.tensor(name, data, dtype)
    if scheme is None:
        writer.add(name, data)
        return
    try:
        if scheme.in_blocks:
            pieces_of_head = (
                head_blocks(data, dtype)
                if rounding is None
                else head_blocks(rounding.values(name, data, dtype), "f32", rounding.column_weights(name))
            )
            for blocks in pieces_of_head:
                writer.add(name, blocks)
            return
        pieces = (
            quantize_rows(context, scheme, data, dtype)
            if rounding is None
            else rounding.rows(context, name, data, dtype, scheme)
        )
        for rows in pieces:
            add_quantized(writer, name, scheme, rows)
    except InvalidArgumentError as error:  # for example a NaN: the packer knows the row but not the name
        raise InvalidFileError(f"{checkpoint.tensors[name].file}: tensor {show(name)}: {error}", param=name) from None
