"""Export a checkpoint folder as a bundle: capture, graph passes, and weights that stream through the packer.

A user's process runs this in a child process (``penstock.graph.export_child``, started by ``runtime.build``).  Only a
user's own network needs PyTorch, for its capture.  Weights never pass through PyTorch: each is mapped, packed a few
rows at a time and written, and its source pages are released, so that memory use stays far below the model's size.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from penstock.checkpoint.folder import Checkpoint
from penstock.checkpoint.generation import read_generation_config, read_tokenizer_config
from penstock.config import OWN_NAMES, show, show_tensors
from penstock.core import native
from penstock.core.layouts import BLOCKS, FLOAT_DTYPES, TILE_ROWS
from penstock.core.tokenizer import TOKENIZER_SEGMENT
from penstock.core.weights import check_finite, to_float32
from penstock.errors import InvalidArgumentError, InvalidFileError, UnsupportedError
from penstock.file_kinds import is_bundle
from penstock.graph.bundle import BundleWriter
from penstock.graph.ir import Graph, Layout, Part, Weight
from penstock.graph.passes.append_tail import append_tail, check_tail
from penstock.graph.passes.assign_scheme import rotated_weights
from penstock.graph.tokenizer.compiler import compile_tokenizer
from penstock.quant.hadamard import rotate_weight
from penstock.quant.scheme import find_scheme

if TYPE_CHECKING:
    from penstock.graph.builder import Capture as GraphCapture
    from penstock.models.meta import MetaNetwork
    from penstock.sharding.folder import ShardedFolder
    from penstock.sharding.strategy import RowRanges

__all__ = ["ExportReport", "build_graph", "export_bundle"]

_PIECE_BYTES: Final = 16 << 20
"""The most bytes of a checkpoint, and of the bundle, that are packed at once: they are written while the next are."""
_MAX_WAITING_BYTES: Final = 32 << 20
"""The memory of pieces that are packed while others wait to be written, beside room for the largest one."""

_FLOAT_TILES: Final = (Layout.T16_F32, Layout.T16_F16, Layout.T16_BF16)

ExportProgress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class ExportReport:
    """The result of an export: sizes in bytes, times in seconds."""

    network: str
    scheme: str
    num_weights: int
    source_bytes: int
    file_bytes: int
    capture_seconds: float
    pack_seconds: float
    seconds: float
    tokenizer_note: str  # why the core cannot encode and decode, "" if it can
    rounding_note: str  # how much weights that another tool quantized were rounded, or which became wider; "" for none


def export_bundle(
    source: Checkpoint | Path | str,
    out: Path | str | Callable[[], Path],
    *,
    scheme: str | None = None,
    network: str | None = None,
    tail: str | None = None,
    rank: int | None = None,
    without_weights: bool = False,
    progress: ExportProgress | None = None,
) -> ExportReport:
    """Write the bundle ``out`` from the checkpoint folder ``source``; the file appears complete or not at all.

    ``source`` may be an open checkpoint.  A sharded folder gives the bundle of the folder that was cut.
    ``out`` may be a function, which is called when all but the weights is read.
    ``scheme`` defaults to the checkpoint's own type.  ``network`` is "file.py:Class".  ``tail`` "argmax" or "topk:K"
    ends the graph in token ids instead of logits.  ``rank``: of a sharded folder, whose other ranks are not read.
    ``without_weights`` leaves a hole instead of weights.  ``progress(stage, done, total)`` counts bytes of the source
    in stage "pack".  Equal inputs give equal bytes.  The file need not be on the disk yet.  Raises InvalidFileError
    (missing or unused tensors by name, damaged files), UnsupportedError, InvalidArgumentError or FileAccessError.
    """
    start = time.monotonic()
    tell = progress or _ignore
    if tail is not None:
        check_tail(tail)
    checkpoint, folder = (source, None) if isinstance(source, Checkpoint) else _open_source(Path(source), rank)
    chosen = checkpoint.choose_scheme(scheme)
    from penstock.models.meta import construct_on_meta

    thread = ThreadPoolExecutor(1, "penstock-files")
    sides = thread.submit(checkpoint.side_files)
    files = thread.submit(_with_tokenizer, sides)
    thread.shutdown(wait=False)  # an error elsewhere does not wait for this thread, which only reads the checkpoint
    segments = _segments(checkpoint, sides, files, rank or 0)
    how = _How(chosen, construct_on_meta(checkpoint.config, network), tail)
    graph, constants, checkpoint = _capture(checkpoint, folder, rank or 0, how, tell)
    captured = time.monotonic()
    _check_tensors(graph, constants, checkpoint)
    total = sum(checkpoint.stored_bytes(part.name) for part in _stored_parts(graph, constants))
    out = Path(out() if callable(out) else out)
    with native.Context() as context, BundleWriter(out, graph, segments, durable=False) as writer:
        packer = _Packer(graph, checkpoint, constants, context, lambda done: tell("pack", done, total))
        if without_weights:
            writer.leave_weights(0)
        else:
            _write_weights(graph, packer, writer, files)
        files.result()  # its errors come before the file is there, also those of a tokenizer that a rank does not keep
    packed = time.monotonic()
    return ExportReport(
        network=graph.network,
        scheme=chosen,
        num_weights=len(graph.weights),
        source_bytes=total,
        file_bytes=out.stat().st_size,
        capture_seconds=captured - start,
        pack_seconds=packed - captured,
        seconds=packed - start,
        tokenizer_note=files.result()[1],
        rounding_note="; ".join(filter(None, (checkpoint.rounding_note, checkpoint.widening_note(chosen)))),
    )


_Files: TypeAlias = Future[tuple[dict[str, bytes], str]]


def _with_tokenizer(sides: Future[dict[str, bytes]]) -> tuple[dict[str, bytes], str]:
    """Return the files beside the weights with the compiled tokenizer, and why the core cannot use it."""
    files = dict(sides.result())
    files[TOKENIZER_SEGMENT], note = compile_tokenizer(files)
    return files, note


def _segments(
    checkpoint: Checkpoint, sides: Future[dict[str, bytes]], files: _Files, rank: int
) -> dict[str, Callable[[], bytes]]:
    """Return the files of the bundle.

    Those of a folder are read first: a mistake in one is reported before the work begins.  Those of a GGUF file are
    made of its vocabulary while the weights are packed.  The tokenizer of each is compiled then, too.
    """
    made = checkpoint.made_files
    if made is None:
        read_generation_config(sides.result())
        read_tokenizer_config(sides.result())
    names = [*(sides.result() if made is None else made.names()), TOKENIZER_SEGMENT]
    if rank:  # rank 0 has them; each reads the type of keys and values
        section = checkpoint.config.quantization()
        names = [] if section is None or not section.has("kv_cache") else ["config.json"]
    return {name: lambda name=name: files.result()[0][name] for name in names}  # type: ignore[misc]


def _write_weights(graph: Graph, packer: _Packer, writer: BundleWriter, files: _Files) -> None:
    """Pack one piece of a weight after another, while a thread writes what is packed; stop at an error in the other
    files."""
    largest = max(map(packer.largest_piece, graph.weights.values()), default=0)
    memory = _PackingMemory(largest + min(largest, _MAX_WAITING_BYTES))
    with ThreadPoolExecutor(1, "penstock-write") as thread:
        try:
            for weight in graph.weights.values():
                if files.done():
                    files.result()
                written = 0
                for piece in packer.pack(weight, memory):
                    written += len(piece)
                    is_part = written < _num_bytes(weight)
                    memory.free_after(thread.submit(writer.add_weight, weight.name, piece, is_part=is_part))
        finally:
            memory.settle()  # an error of the disk precedes that of the next weight


class _PackingMemory:
    """Memory for packed pieces, of which each is free again when it is written; the lowest free part is used first.

    New pages would cost as much time as the packing, so that few are touched.
    """

    def __init__(self, num_bytes: int) -> None:
        self._bytes = np.zeros(num_bytes, np.uint8)
        self._touched = 0
        self._error: BaseException | None = None
        self._taken = (0, 0)
        self._waiting: deque[tuple[int, int, Future[None]]] = deque()

    def take(self, num_bytes: int, *, zeroed: bool = True) -> NDArray[np.uint8]:
        """Return memory, after a wait for older pieces if there is none; raise the errors of their writing."""
        while self._waiting and self._waiting[0][2].done():
            self._settle_first()
        while (start := self._gap(num_bytes)) is None:
            self._settle_first()
        end = start + num_bytes
        self._taken = (start, end)
        if zeroed:
            self._bytes[start : min(end, self._touched)] = 0
        self._touched = max(self._touched, end)
        return self._bytes[start:end]

    def _gap(self, num_bytes: int) -> int | None:
        start = 0
        for begin, end, _ in sorted(self._waiting, key=lambda part: part[0]):
            if begin - start >= num_bytes:
                return start
            start = end
        return start if len(self._bytes) - start >= num_bytes else None

    def free_after(self, written: Future[None]) -> None:
        """Keep the memory that was taken last until it is written."""
        self._waiting.append((*self._taken, written))

    def _settle_first(self) -> None:
        self._error = self._error or self._waiting.popleft()[2].exception()
        if self._error is not None:
            raise self._error

    def settle(self) -> None:
        """Wait until all is written; raise the first error, behind which the others follow from it."""
        while self._waiting:
            self._settle_first()
        if self._error is not None:
            raise self._error


class _How(NamedTuple):
    """The way of capturing the network: the scheme, the network without weights, and the tail of the graph."""

    scheme: str
    built: MetaNetwork
    tail: str | None


def _capture(
    checkpoint: Checkpoint, folder: ShardedFolder | None, rank: int, how: _How, tell: ExportProgress
) -> tuple[Graph, dict[str, NDArray[np.float32]], Checkpoint]:
    """Return the graph, the weights that the network computes itself, and the checkpoint as the network reads it.

    Of a sharded folder they are those of a rank.
    """
    from penstock.models.sources import as_network, as_rank, check_tensors, differs, schemes_of, sources_of

    built = how.built
    whole: Checkpoint | ShardedFolder = folder or checkpoint
    is_mapped = differs(whole.config, whole.tensors, built.network)
    if folder is None:
        checkpoint = as_network(checkpoint, built.network)
        if built.script is None:  # a user's network may have parameters that it does not read
            check_tensors(checkpoint, built.network, built.name)
        schemes, sources = checkpoint.weight_schemes(how.scheme), {}
    else:
        sources = sources_of(folder.config, folder.tensors, built.network)
        schemes = schemes_of(how.scheme, folder.config, folder.tensors, sources)
    tell("capture", 0, 0)
    graph, constants = build_graph(built, how.scheme, checkpoint.dtype, schemes)
    graph.properties |= {OWN_NAMES: "true"} if is_mapped else {}
    if how.tail is not None:
        append_tail(graph, how.tail)
    if folder is None:
        return graph, constants, checkpoint
    from penstock.graph.rank_part import take_rank  # only ranks need the passes that cut a graph

    part = take_rank(graph, folder, rank, sources, constants)
    own = {name: _select(values, part.rows[name]) for name, values in constants.items() if name in part.rows}
    return part.graph, own, as_rank(checkpoint, built.network, part.sources, part.rows, part.columns)


def _select(values: NDArray[np.float32], rows: RowRanges) -> NDArray[np.float32]:
    """Return the elements of a vector, or the rows of a matrix, that a rank has."""
    return np.concatenate([values[start:stop] for start, stop in rows])


def _ignore(stage: str, done: int, total: int) -> None:
    """Ignore progress; the default callback."""


def _open_source(source: Path, rank: int | None) -> tuple[Checkpoint, ShardedFolder | None]:
    """Return the checkpoint to export; for a rank its part, and the sharded folder that has it."""
    if is_bundle(source):
        raise InvalidArgumentError(
            f"{source}: expected a checkpoint folder, got a bundle, which is already exported", param="source"
        )
    if rank is None and not source.is_dir():
        return Checkpoint.open(source), None
    if rank is None:
        from penstock.sharding.whole import open_checkpoint

        return open_checkpoint(source), None
    from penstock.sharding.folder import ShardedFolder

    folder = ShardedFolder.open(source)
    return folder.rank(rank), folder


def build_graph(
    built: MetaNetwork, scheme: str, dtype: str, schemes: Mapping[str, str] | None = None
) -> tuple[Graph, dict[str, NDArray[np.float32]]]:
    """Return the graph under ``scheme``, with the layouts of its weights, and the weights that the network computes
    itself; ``dtype`` is the checkpoint's, ``schemes`` those of its tensors where they differ."""
    from penstock.graph.passes import assign_scheme, run_passes

    captured = _capture_network(built)
    graph = assign_scheme(run_passes(captured.graph, schemes), scheme, dtype, schemes)
    return graph, captured.constants


def _capture_network(built: MetaNetwork) -> GraphCapture:
    """Trace a built-in network; capture one of a user with PyTorch."""
    sizes = {"context_len": built.context_len, "vocab_size": built.vocab_size}
    if built.is_built_in:
        from penstock.graph.tracer import trace_network

        return trace_network(built.network, network_name=built.name, **sizes)
    from penstock.graph.capture import capture

    return capture(built.network, network_name=built.name, script=built.script, **sizes)


def _stored_parts(graph: Graph, constants: dict[str, NDArray[np.float32]]) -> list[Part]:
    return [part for weight in graph.weights.values() for part in weight.parts if part.name not in constants]


def _check_tensors(graph: Graph, constants: dict[str, NDArray[np.float32]], checkpoint: Checkpoint) -> None:
    """Check that the checkpoint has every tensor that the network reads, in its shape, and no other."""
    names = [part.name for part in _stored_parts(graph, constants)]
    missing = [name for name in names if name not in checkpoint.tensors]
    if missing:
        raise InvalidFileError(
            f"{checkpoint.folder}: lacks {show_tensors(missing)}, which network {graph.network} reads", param=missing[0]
        )
    extra = set(checkpoint.tensors) - set(names).union(*(checkpoint.companions(name) for name in names))
    if extra:
        extra -= checkpoint.redundant_names(extra)
    if extra:
        raise InvalidFileError(
            f"{checkpoint.folder}: has {show_tensors(sorted(extra))}, which network {graph.network} does not read",
            param=min(extra),
        )
    rotated = rotated_weights(graph)
    for weight in graph.weights.values():
        for part in weight.parts:
            if part.name not in constants:
                _check_part(weight, part, checkpoint)
                checkpoint.check_rotation(part.name, weight.name in rotated)


def _check_part(weight: Weight, part: Part, checkpoint: Checkpoint) -> None:
    info = checkpoint.tensors[part.name]
    where = f"{info.file}: tensor {show(part.name)}"
    layout_bits = {Layout.T16_I8: "i8", Layout.T16_I4G32: "u8"}.get(weight.layout)
    blocks = checkpoint.block_scheme(part.name) if checkpoint.is_quantized(part.name) else None
    if blocks is not None and find_scheme(blocks).layout == int(weight.layout):
        expected, actual = _part_shape(weight, part), list(checkpoint.logical_shape(part.name))
    elif checkpoint.is_quantized(part.name):
        if info.dtype != layout_bits:
            raise InvalidFileError(
                f"{where}: expected {'float values' if layout_bits is None else layout_bits.upper()}, "
                f"got {info.dtype.upper()}: this network computes with it as {weight.layout.name}"
            )
        rows = info.shape[0]
        expected, actual = [part.num_rows], [rows]  # only rows: read_quantized checks the columns
    else:
        if info.dtype not in FLOAT_DTYPES:
            raise UnsupportedError(
                f"{where}: dtype: expected F32, F16 or BF16, got {info.dtype.upper()}", param=part.name
            )
        if checkpoint.scheme is not None and layout_bits is not None:
            raise InvalidFileError(
                f"{where}: expected values quantized as {checkpoint.scheme}, got {info.dtype.upper()}"
            )
        expected, actual = _part_shape(weight, part), list(info.shape)
        if weight.rows == 1 and len(actual) == 2 and actual[0] == 1:
            actual = actual[1:]
    if expected != actual:
        raise InvalidFileError(f"{where}: shape: expected {expected}, got {actual}", param=part.name)


def _part_shape(weight: Weight, part: Part) -> list[int]:
    """Return the shape of a tensor.  A vector has one row; the parts of fused vectors count elements."""
    if weight.rows > 1:
        return [part.num_rows, weight.cols]
    return [weight.cols] if len(weight.parts) == 1 else [part.num_rows]


class _Packer:
    """Packs one weight after another, and releases source pages as soon as they are read."""

    def __init__(
        self,
        graph: Graph,
        checkpoint: Checkpoint,
        constants: dict[str, NDArray[np.float32]],
        context: native.Context,
        tell: Callable[[int], None],
    ) -> None:
        self._rotated = rotated_weights(graph)
        self._checkpoint = checkpoint
        self._constants = constants
        self._context = context
        self._tell = tell
        self._done = 0

    def largest_piece(self, weight: Weight) -> int:
        """Return the most bytes of a weight that ``pack`` needs memory for at once."""
        num_bytes = _num_bytes(weight)
        return min(num_bytes, max(_PIECE_BYTES, _tile_bytes(weight))) if self._is_piecewise(weight) else num_bytes

    def _is_piecewise(self, weight: Weight) -> bool:
        """Return True if each part of a weight, and so each piece of a part, begins and ends with a tile.

        The last tile may be incomplete.
        """
        if weight.rows == 1:
            return False
        row = 0
        for part in weight.parts:
            if part.row_start != row or row % TILE_ROWS or part.name in self._constants:
                return False
            if self._checkpoint.is_quantized(part.name) and int(weight.layout) not in BLOCKS:  # integers with scales
                return False
            if self._has_rows(weight, part.name):
                return False
            row += part.num_rows
        return row == weight.rows

    def _has_rows(self, weight: Weight, name: str) -> bool:
        """Return True for a tensor of a folder of another tool whose integers and scales are packed as they are."""
        is_plain = weight.layout == Layout.T16_I8 and weight.name not in self._rotated
        return is_plain and name not in self._constants and self._checkpoint.has_rows(name)

    def pack(self, weight: Weight, memory: _PackingMemory) -> Iterator[NDArray[np.uint8]]:
        """Pack ``weight``; yield its bytes in pieces, in their order.  Each is in ``memory`` that was taken for it."""
        piecewise = self._is_piecewise(weight)
        whole = None if piecewise else memory.take(_num_bytes(weight))
        for part in weight.parts:
            try:
                if whole is None:
                    yield from self._pack_pieces(weight, part, memory)
                else:
                    self._pack_part(weight, part, whole)
            except InvalidArgumentError as error:  # for example a NaN: the check knows its place but not the tensor
                raise InvalidFileError(
                    f"{self._checkpoint.folder}: tensor {show(part.name)}: {error}", param=part.name
                ) from None
            if part.name not in self._constants:
                self._done += self._checkpoint.stored_bytes(part.name)
                self._tell(self._done)
        if whole is not None:
            yield whole

    def _pack_pieces(self, weight: Weight, part: Part, memory: _PackingMemory) -> Iterator[NDArray[np.uint8]]:
        """Pack a part of whole tiles in pieces, each as if it were a weight of its own."""
        is_blocks = int(weight.layout) in BLOCKS
        source = self._checkpoint.read_blocks(part.name) if is_blocks else self._read_matrix(weight, part)
        row_bytes = source.nbytes // max(len(source), 1)
        step = max(1, _PIECE_BYTES // max(row_bytes * TILE_ROWS, _tile_bytes(weight))) * TILE_ROWS
        for begin in range(0, part.num_rows, step):
            rows = source[begin : begin + step]
            num_bytes = native.layout_bytes(int(weight.layout), len(rows), weight.cols)
            is_filled = weight.layout in _FLOAT_TILES and len(rows) % TILE_ROWS == 0  # no byte stays as it was
            piece = memory.take(num_bytes, zeroed=not is_filled)
            at = (int(weight.layout), len(rows), weight.cols, 0, len(rows))
            if is_blocks:
                native.pack_blocks(self._context, *at, rows, piece)
            else:
                self._pack_rows(weight, part, at, rows, piece, begin)
            yield piece
        if is_blocks:
            self._checkpoint.release(part.name)

    def _read_matrix(self, weight: Weight, part: Part) -> NDArray[Any]:
        return self._checkpoint.read(part.name).reshape(part.num_rows, weight.cols)

    def _pack_part(self, weight: Weight, part: Part, packed: NDArray[np.uint8]) -> None:
        """Pack a tensor into the memory of the whole weight."""
        name, info = part.name, self._checkpoint.tensors.get(part.name)
        at = (int(weight.layout), weight.rows, weight.cols, part.row_start, part.num_rows)
        if name in self._constants:
            values = np.ascontiguousarray(self._constants[name], np.float32).reshape(weight.rows, weight.cols)
            native.pack(self._context, *at, FLOAT_DTYPES["f32"], values, packed)
            return
        if info is None:
            raise InvalidFileError("expected a tensor, got none")
        if int(weight.layout) in BLOCKS:
            native.pack_blocks(self._context, *at, self._checkpoint.read_blocks(name), packed)
            self._checkpoint.release(name)
        elif self._checkpoint.is_quantized(name):
            native.pack_quantized(self._context, *at, self._checkpoint.read_quantized(name, weight.cols), packed)
            self._checkpoint.release(name)
        elif self._has_rows(weight, name):
            native.pack_quantized(self._context, *at, self._checkpoint.read_rows(name), packed)
            self._checkpoint.release(name)
        elif weight.rows == 1:
            values = self._checkpoint.read(name)
            check_finite(values, FLOAT_DTYPES[info.dtype])
            source = values.reshape(1, -1)
            start = part.row_start if len(weight.parts) > 1 else 0
            self._pack_vector(weight, start, source, info.dtype, packed)
        else:
            source = self._read_matrix(weight, part)
            step = max(1, _PIECE_BYTES // max(source.itemsize * weight.cols, 1) // TILE_ROWS) * TILE_ROWS
            for begin in range(0, part.num_rows, step):
                rows = source[begin : begin + step]
                self._pack_rows(weight, part, (*at[:3], part.row_start + begin, len(rows)), rows, packed, begin)

    def _pack_vector(
        self, weight: Weight, start: int, source: NDArray[Any], dtype: str, packed: NDArray[np.uint8]
    ) -> None:
        """Pack elements ``start``... of a weight with one row, which is always float32."""
        layout, length = int(weight.layout), source.shape[1]
        vector = np.zeros(native.layout_bytes(layout, 1, length), np.uint8)
        native.pack(self._context, layout, 1, length, 0, 1, FLOAT_DTYPES[dtype], source, vector)
        if len(weight.parts) == 1:
            packed[:] = vector
        else:
            packed.view(np.float32)[start : start + length] = vector.view(np.float32)[:length]

    def _pack_rows(
        self,
        weight: Weight,
        part: Part,
        at: tuple[int, int, int, int, int],
        rows: NDArray[Any],
        packed: NDArray[np.uint8],
        begin: int,
    ) -> None:
        """Check and pack the rows of a matrix from ``begin`` on, and release their pages."""
        dtype, num_bytes = self._checkpoint.tensors[part.name].dtype, rows.nbytes // len(rows)
        check_finite(rows, FLOAT_DTYPES[dtype], begin)
        source = rows
        if weight.name in self._rotated:
            source, dtype = rotate_weight(to_float32(rows, dtype)), "f32"
        native.pack(self._context, *at, FLOAT_DTYPES[dtype], source, packed)
        self._checkpoint.release(part.name, begin * num_bytes, (begin + len(rows)) * num_bytes)


def _num_bytes(weight: Weight) -> int:
    return native.layout_bytes(int(weight.layout), weight.rows, weight.cols)


def _tile_bytes(weight: Weight) -> int:
    """Return the bytes of the rows of a weight that are packed together."""
    return native.layout_bytes(int(weight.layout), TILE_ROWS, weight.cols)
