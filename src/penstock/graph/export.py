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
"""The most bytes of a checkpoint that are packed at once, and then written while the next ones are packed."""
_MAX_WAITING_BYTES: Final = 32 << 20
"""The memory of weights that are packed while others wait to be written, beside room for the largest one."""

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
    """Pack one weight after another, while a thread writes what is packed; stop at an error in the other files."""
    sizes = [native.layout_bytes(int(weight.layout), weight.rows, weight.cols) for weight in graph.weights.values()]
    largest = max(sizes, default=0)
    memory = _PackingMemory(largest + min(largest, _MAX_WAITING_BYTES))
    with ThreadPoolExecutor(1, "penstock-write") as thread:
        try:
            for weight, size in zip(graph.weights.values(), sizes, strict=True):
                if files.done():
                    files.result()
                packed = memory.take(size)
                begin = 0
                for end in packer.pack(weight, packed):
                    last = end == size
                    piece = packed[begin:end]
                    memory.free_after(thread.submit(writer.add_weight, weight.name, piece, is_part=not last))
                    begin = end
        finally:
            memory.settle()  # an error of the disk precedes that of the next weight


class _PackingMemory:
    """Memory for packed weights, of which each is free again when it is written; the lowest free part is used first.

    New pages would cost as much time as the packing, so that few are touched.
    """

    def __init__(self, num_bytes: int) -> None:
        self._bytes = np.zeros(num_bytes, np.uint8)
        self._touched = 0
        self._error: BaseException | None = None
        self._waiting: deque[tuple[int, int, deque[Future[None]]]] = deque()

    def take(self, num_bytes: int) -> NDArray[np.uint8]:
        """Return zeroed memory, after a wait for older weights if there is none; raise the errors of their writing."""
        while self._waiting and all(written.done() for written in self._waiting[0][2]):
            self._settle_first()
        while (start := self._gap(num_bytes)) is None:
            self._settle_first()
        end = start + num_bytes
        self._waiting.append((start, end, deque()))
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
        """Keep the memory that was taken last until this piece of it is written; raise the errors of earlier pieces."""
        pieces = self._waiting[-1][2]
        while pieces and pieces[0].done():
            self._settle(pieces.popleft())
        pieces.append(written)

    def _settle(self, written: Future[None]) -> None:
        self._error = self._error or written.exception()
        if self._error is not None:
            raise self._error

    def _settle_first(self) -> None:
        for written in self._waiting.popleft()[2]:
            self._settle(written)

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
        expected, found = _part_shape(weight, part), list(checkpoint.logical_shape(part.name))
    elif checkpoint.is_quantized(part.name):
        if info.dtype != layout_bits:
            raise InvalidFileError(
                f"{where}: expected {'float values' if layout_bits is None else layout_bits.upper()}, "
                f"got {info.dtype.upper()}: this network computes with it as {weight.layout.name}"
            )
        rows = info.shape[0]
        expected, found = [part.num_rows], [rows]  # only rows: read_quantized checks the columns
    else:
        if info.dtype not in FLOAT_DTYPES:
            raise UnsupportedError(
                f"{where}: dtype: expected F32, F16 or BF16, got {info.dtype.upper()}", param=part.name
            )
        if checkpoint.scheme is not None and layout_bits is not None:
            raise InvalidFileError(
                f"{where}: expected values quantized as {checkpoint.scheme}, got {info.dtype.upper()}"
            )
        expected, found = _part_shape(weight, part), list(info.shape)
        if weight.rows == 1 and len(found) == 2 and found[0] == 1:
            found = found[1:]
    if expected != found:
        raise InvalidFileError(f"{where}: shape: expected {expected}, got {found}", param=part.name)


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
        self._rows = 0

    def pack(self, weight: Weight, packed: NDArray[np.uint8]) -> Iterator[int]:
        """Pack ``weight`` into zeroed memory; yield how many of its bytes are complete, in the end all."""
        self._rows = reported = 0
        for part in weight.parts:
            try:
                for _ in self._pack_part(weight, part, packed):
                    complete = self._rows // TILE_ROWS * TILE_ROWS
                    if reported < complete < weight.rows and weight.layout >= Layout.T16_F32:  # whole tiles in a row
                        reported = complete
                        yield native.layout_bytes(int(weight.layout), complete, weight.cols)
            except InvalidArgumentError as error:  # for example a NaN: the check knows its place but not the tensor
                raise InvalidFileError(
                    f"{self._checkpoint.folder}: tensor {show(part.name)}: {error}", param=part.name
                ) from None
        yield len(packed)

    def _pack_part(self, weight: Weight, part: Part, packed: NDArray[np.uint8]) -> Iterator[None]:
        """Pack a tensor; yield after each piece of it, with the rows of the weight so far in ``_rows``."""
        name, info = part.name, self._checkpoint.tensors.get(part.name)
        if name in self._constants:
            values = np.ascontiguousarray(self._constants[name], np.float32).reshape(weight.rows, weight.cols)
            self._pack_rows(weight, part.row_start, values, "f32", packed)
            return
        if info is None:
            raise InvalidFileError("expected a tensor, got none")
        if int(weight.layout) in BLOCKS:
            blocks = self._checkpoint.read_blocks(name)
            for begin, end in self._pieces(part, blocks.nbytes // max(len(blocks), 1)):
                at = (int(weight.layout), weight.rows, weight.cols, part.row_start + begin, end - begin)
                native.pack_blocks(self._context, *at, blocks[begin:end], packed)
                yield
            self._checkpoint.release(name)
        elif self._checkpoint.is_quantized(name):
            integers = self._checkpoint.read_quantized(name, weight.cols)
            at = (int(weight.layout), weight.rows, weight.cols, part.row_start, part.num_rows)
            native.pack_quantized(self._context, *at, integers, packed)
            self._checkpoint.release(name)
        elif weight.rows == 1:
            values = self._checkpoint.read(name)
            check_finite(values, FLOAT_DTYPES[info.dtype])
            source = values.reshape(1, -1)
            start = part.row_start if len(weight.parts) > 1 else 0
            self._pack_vector(weight, start, source, info.dtype, packed)
        else:
            yield from self._pack_matrix(weight, part, info.dtype, packed)
        self._done += self._checkpoint.stored_bytes(name)
        self._tell(self._done)

    def _pieces(self, part: Part, row_bytes: int) -> Iterator[tuple[int, int]]:
        """Yield the ranges of a part's rows, which begin at a tile of the weight, so that no two threads write to one.

        ``_rows`` counts the rows up to the end of the range, if those before it were packed.
        """
        step = max(1, _PIECE_BYTES // max(row_bytes, 1) // TILE_ROWS) * TILE_ROWS
        begin = 0
        while begin < part.num_rows:
            end = min(part.num_rows, begin + step - (part.row_start + begin) % TILE_ROWS)
            if part.row_start + begin == self._rows:
                self._rows = part.row_start + end
            yield begin, end
            begin = end

    def _pack_matrix(self, weight: Weight, part: Part, dtype: str, packed: NDArray[np.uint8]) -> Iterator[None]:
        """Pack a matrix in pieces."""
        source = self._checkpoint.read(part.name).reshape(part.num_rows, weight.cols)
        row_bytes = source.dtype.itemsize * weight.cols
        for begin, end in self._pieces(part, row_bytes):
            check_finite(source[begin:end], FLOAT_DTYPES[dtype], begin)
            self._pack_rows(weight, part.row_start + begin, source[begin:end], dtype, packed)
            self._checkpoint.release(part.name, begin * row_bytes, end * row_bytes)
            yield

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
        self, weight: Weight, row_start: int, source: NDArray[Any], dtype: str, packed: NDArray[np.uint8]
    ) -> None:
        at = (int(weight.layout), weight.rows, weight.cols, row_start, len(source))
        if weight.name in self._rotated:
            source, dtype = rotate_weight(to_float32(source, dtype)), "f32"
        native.pack(self._context, *at, FLOAT_DTYPES[dtype], source, packed)
