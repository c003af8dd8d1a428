"""The native core as Python objects: numpy in, numpy out, no PyTorch.

Every failure raises a class of ``penstock.errors`` with the core's message.  An object keeps the objects that it was
made from alive.  ``close()`` frees its memory, once no view of it is held, and may be called twice; any use after it
raises.  Calls release the interpreter lock.  Only one thread at a time may use a program.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from penstock.core.arrays import (
    Biases,
    Penalties,
    Sampled,
    Sampling,
    StepBatch,
    batch_struct,
    sampled_struct,
    sampling_struct,
)
from penstock.core.context import Context, Handle, address_of
from penstock.core.library import (
    AttrStruct,
    ModelInfoStruct,
    ModelOptions,
    PlanStruct,
    ProgramOptionsStruct,
    RankInfoStruct,
    TensorStruct,
    check,
    library,
    library_file,
    sized,
    warn_of_newer,
)
from penstock.core.weights import QuantizedRows, crc32, layout_bytes
from penstock.errors import InvalidArgumentError, InvalidFileError
from penstock.file_kinds import has_bundle_magic, refuse_mindspore
from penstock.validation import refusal

__all__ = [
    "ALL_THREADS",
    "EMPTY_KERNELS",
    "INPUT_SUMS",
    "POISON",
    "Biases",
    "Context",
    "CoreProgram",
    "CoreTensor",
    "MemoryPlan",
    "Model",
    "ModelInfo",
    "Penalties",
    "ProgramOptions",
    "QuantizedRows",
    "RankInfo",
    "Sampled",
    "Sampling",
    "StepBatch",
    "StepCall",
    "cpu_levels",
    "crc32",
    "layout_bytes",
    "library_file",
    "op_schemas",
    "pack",
    "pack_blocks",
    "pack_quantized",
    "plan",
    "probe_bandwidth",
    "probe_compute",
    "rank_info",
    "run_op",
    "sample_logits",
    "unpack",
    "unpack_quantized",
    "version",
]  # fmt: skip

pack, unpack = Context.pack, Context.unpack
pack_blocks = Context.pack_blocks
pack_quantized, unpack_quantized = Context.pack_quantized, Context.unpack_quantized
EMPTY_KERNELS = 1
"""A program flag: run everything except the kernels, to measure only the executor."""
ALL_THREADS = 4
"""A program flag: use all threads in every step, however short; for tests and measurements."""
INPUT_SUMS = 8
"""A program flag: allow ``CoreProgram.sum_inputs``."""
POISON = 2
"""A program flag: fill temporaries with NaN before each step, to find aliasing errors."""


def _instead_of(path: Path) -> str:
    """Return what to open instead of a file that is not a bundle; "" for a bundle, which is damaged."""
    if path.is_dir() or has_bundle_magic(path):
        return ""
    folder = f", such as {path.parent}" if (path.parent / "config.json").exists() else ""
    return f". Pass a checkpoint folder{folder}, a GGUF file or a .psm bundle."


@dataclass(frozen=True)
class ModelInfo:
    """The description of a bundle.

    ``page_windows`` has one entry per page group; 0 keeps the whole context.  ``hidden_size`` is the width of
    ``CoreProgram.hidden``, 0 without one.  ``tail`` is "argmax" or "topk" when the graph ends in ``tail_k`` ids per
    row, "" when it ends in logits.  ``format_minor`` is the file's version, ``known_format_minor`` the core's.
    ``bidirectional``: attention is not causal, so a step takes only whole requests.  ``context_ranks``: the ranks that
    the pages of a request are dealt out to.  ``prefix_token``: of an encoder-decoder the first token of the decoder, of
    a network with a prefix mask the first one behind the prefix, -1 of others; a request's first step has it and all
    tokens before it.  ``kind``: 1 of a general network (``penstock.core.predict``), which has named inputs, outputs and
    sizes.
    """

    network: str
    scheme: str
    vocab_size: int
    context_len: int
    num_states: int
    num_page_groups: int
    page_windows: tuple[int, ...]
    num_weights: int
    num_nodes: int
    weight_bytes: int
    file_bytes: int
    weight_bytes_per_token: int
    hidden_size: int = 0
    tail_k: int = 0
    tail: str = ""
    format_minor: int = 0
    known_format_minor: int = 0
    bidirectional: bool = False
    context_ranks: int = 1
    prefix_token: int = -1
    kind: int = 0
    num_inputs: int = 0
    num_outputs: int = 0
    num_sizes: int = 0


class Model(Handle):
    """An open, validated bundle.  ``Model.open`` makes one."""

    _destroy = "ps_model_close"
    _is_private = False

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, verify: bool = False, mmap: bool = True) -> Self:
        """Open and validate a bundle.

        ``verify`` also checks the checksum of every segment.  ``mmap`` False reads the file into private memory, which
        ``overwrite`` needs.  Warns (UserWarning) about a newer minor format version, whose new fields are ignored.
        """
        options = sized(ModelOptions, verify=int(verify), private_copy=int(not mmap))
        out = ctypes.c_void_p()
        name = os.fsencode(path)
        if b"\0" in name:
            raise refusal("path", "a file name", path)
        try:
            check(library().ps_model_open(name, ctypes.byref(options), ctypes.byref(out)))
        except InvalidFileError as error:
            refuse_mindspore(Path(os.fsdecode(path)))
            raise error.with_message(f"{error}{_instead_of(Path(os.fsdecode(path)))}") from None
        model = cls(address_of(out))
        model._is_private = not mmap
        warn_of_newer(path, model.info.format_minor, model.info.known_format_minor)
        return model

    @property
    def stamp(self) -> tuple[int, ...]:
        """The identity of the open file (``penstock.core.metadata.stamp_of``)."""
        out = (ctypes.c_int64 * 4)()
        check(library().ps_model_file(self.handle, out))
        return tuple(out)

    def load_huge(self, context: Context) -> None:
        """Copy the weights into private memory with huge pages, using the context's threads.

        Programs that are created afterwards read the copy.  The file's page cache is dropped, so that memory holds the
        weights once.  The caller must check beforehand that they fit.  Raises InvalidFileError when the file shrank or
        changed after it was opened.
        """
        check(library().ps_model_load_huge(self.handle, context.handle))

    @property
    def info(self) -> ModelInfo:
        """The description of the bundle."""
        out = sized(ModelInfoStruct)
        check(library().ps_model_describe(self.handle, ctypes.byref(out)))
        fields = {name: getattr(out, name) for name, *_ in ModelInfoStruct._fields_ if name != "struct_size"}
        fields["network"], fields["scheme"] = out.network.decode(), out.scheme.decode()
        fields["tail"], fields["bidirectional"] = out.tail.decode(), bool(out.bidirectional)
        fields["page_windows"] = tuple(out.page_windows[: out.num_page_groups])
        return ModelInfo(**fields)

    def segment(self, name: str) -> memoryview | None:
        """Return a read-only view of a segment's bytes; None when the bundle has no segment of that name."""
        data, size = ctypes.c_void_p(), ctypes.c_int64()
        check(library().ps_model_segment(self.handle, name.encode(), ctypes.byref(data), ctypes.byref(size)))
        if size.value < 0:
            return None
        if data.value is None or size.value == 0:
            return memoryview(b"")
        return self._view(data.value, size.value).toreadonly()

    def overwrite(self, name: str, offset: int, data: npt.NDArray[np.uint8]) -> None:
        """Write bytes into a segment of a model that was opened with ``mmap=False``; call it only between steps.

        A mapped file is never written: raises InvalidArgumentError for such a model, and for bytes beyond the segment.
        """
        segment = self.segment(name)
        if not self._is_private or segment is None:
            raise refusal("overwrite", "a segment in private memory", name)
        if offset < 0 or offset + data.nbytes > segment.nbytes or not data.flags.c_contiguous:
            raise InvalidArgumentError(f"overwrite: expected bytes within the segment {name!r:.60}", param="overwrite")
        ctypes.memmove(np.frombuffer(segment, np.uint8).ctypes.data + offset, data.ctypes.data, data.nbytes)


@dataclass(frozen=True)
class ProgramOptions:
    """The limits that a program's memory is planned for.

    ``kv_layout`` is a ``ps_kv_layout``.  ``flags``, combined with ``|``, are for tests and measurements
    (core/include/penstock_dev.h) and do not change the plan.  ``group_pages``: the pages of each page group, at most
    ``num_pages``; empty is ``num_pages`` for all.
    """

    max_tokens: int
    max_requests: int
    max_rows: int
    num_pages: int
    num_slots: int = 0
    kv_layout: int = 1
    flags: int = 0
    group_pages: tuple[int, ...] = ()


@dataclass(frozen=True)
class MemoryPlan:
    """The bytes that a program needs.  ``kv_page_bytes`` is the size of one page, summed over all states."""

    weight_bytes: int
    temporary_bytes: int
    scratch_bytes: int
    kv_bytes: int
    logits_bytes: int
    total_bytes: int
    kv_page_bytes: int


def _options_struct(options: ProgramOptions, num_page_groups: int = 0) -> ProgramOptionsStruct:
    names = [name for name in options.__dataclass_fields__ if name != "group_pages"]
    fields = {name: int(getattr(options, name)) for name in names}
    group_pages = options.group_pages
    for name, value in (*fields.items(), *(("group_pages", count) for count in group_pages)):
        if not 0 <= value < 1 << 31:
            raise InvalidArgumentError(f"{name}: expected an integer from 0 to 2^31 - 1, got {value}", param=name)
    del fields["flags"]  # 0 in the struct: ps_program_create_flagged takes them as an argument
    struct: ProgramOptionsStruct = sized(ProgramOptionsStruct, **fields)
    if group_pages:
        if len(group_pages) != num_page_groups:
            raise InvalidArgumentError(
                f"group_pages: expected {num_page_groups} numbers, got {len(group_pages)}", param="group_pages"
            )
        struct.group_pages = (ctypes.c_int32 * len(group_pages))(*group_pages)
    return struct


def plan(model: Model, context: Context, options: ProgramOptions) -> MemoryPlan:
    """Return the memory that a program with these limits would need.  Allocates nothing."""
    out = sized(PlanStruct)
    struct = _options_struct(options, model.info.num_page_groups)
    check(library().ps_program_plan(model.handle, context.handle, ctypes.byref(struct), ctypes.byref(out)))
    return MemoryPlan(**{name: getattr(out, name) for name, *_ in PlanStruct._fields_ if name != "struct_size"})


@dataclass(frozen=True)
class RankInfo:
    """The rank that a bundle was cut for, 0 of 1 for a whole one, and the ``part_bytes`` that its comm needs."""

    rank: int
    world: int
    part_bytes: int


def rank_info(model: Model, options: ProgramOptions) -> RankInfo:
    """Return what a program with these limits needs of a group of ranks."""
    out, struct = sized(RankInfoStruct), _options_struct(options, model.info.num_page_groups)
    check(library().ps_model_rank(model.handle, ctypes.byref(struct), ctypes.byref(out)))
    return RankInfo(out.rank, out.world, out.part_bytes)


class CoreProgram(Handle):
    """A model with its memory: temporaries, KV pages, logits."""

    _destroy = "ps_program_destroy"

    def __init__(self, model: Model, context: Context, options: ProgramOptions) -> None:
        info = model.info
        self._vocab_size, self._num_page_groups = info.vocab_size, info.num_page_groups
        struct, out = _options_struct(options, info.num_page_groups), ctypes.c_void_p()
        at = model.handle, context.handle, ctypes.byref(struct), int(options.flags), ctypes.byref(out)
        check(library().ps_program_create_flagged(*at))
        super().__init__(address_of(out))
        self._model, self._context = model, context
        self._input_sums: dict[int, list[npt.NDArray[Any] | None]] = {}

    def run(self, batch: StepBatch) -> None:
        """Compute one step.  Its logits stay valid until the next one."""
        self._check_parents()
        check(library().ps_program_run(self.handle, ctypes.byref(batch_struct(batch, self._num_page_groups))))

    def follow(self) -> None:
        """On a rank other than 0: wait for the next step of rank 0, and compute this rank's part of it.

        Raises UnavailableError when the group was ended; its code is "group_closed" if the reason is ``CLOSED``.
        """
        self._check_parents()
        check(library().ps_program_follow(self.handle))

    def sample(self, sampling: Sampling) -> Sampled:
        """Sample the R rows of the last step."""
        self._check_parents()
        struct, rows = sampling_struct(sampling, self._vocab_size)
        out, sampled = sampled_struct(sampling, rows)
        check(library().ps_program_sample(self.handle, ctypes.byref(struct), ctypes.byref(out)))
        return sampled

    def step(self, batch: StepBatch, sampling: Sampling) -> Sampled:
        """Run and sample in one native call."""
        return self.step_call(batch, sampling)()

    def step_call(self, batch: StepBatch, sampling: Sampling | None = None) -> StepCall:
        """Return a ``step`` that can be called more than once, without checking its arrays again."""
        self._check_parents()
        return StepCall(self, batch, sampling)

    def logits(self) -> npt.NDArray[np.float32]:
        """Return the last step's logits [R, vocab]: a view of the program's memory that the next step overwrites."""
        return self._floats("ps_program_logits")

    def hidden(self) -> npt.NDArray[np.float32]:
        """Return the last step's hidden rows [T, width], from which the output rows were selected.

        In a language model these are the rows of the last norm.  The result is a view that the next step overwrites.
        Raises InvalidArgumentError when the batch did not request them (``StepBatch.hidden``), UnsupportedError for a
        graph that selects its rows in another way.
        """
        return self._floats("ps_program_hidden")

    def tail(self) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32] | None]:
        """Return the last step's token ids [R, k], best first, of a graph that ends in argmax or topk.

        For topk the second result is their logits [R, k]; for argmax it is None.  Both are views that the next step
        overwrites.  Raises UnsupportedError for a graph that ends in logits.
        """
        self._check_parents()
        ids, values, rows, k = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_int32(), ctypes.c_int32()
        out = (ctypes.byref(result) for result in (ids, values, rows, k))
        check(library().ps_program_tail(self.handle, *out))
        shape, size = (rows.value, k.value), rows.value * k.value * 4
        token_ids = np.frombuffer(self._view(ids.value or 0, size), np.int32).reshape(shape)
        if values.value is None:
            return token_ids, None
        return token_ids, np.frombuffer(self._view(values.value, size), np.float32).reshape(shape)

    def _floats(self, function: str) -> npt.NDArray[np.float32]:
        self._check_parents()
        data, rows, cols = ctypes.c_void_p(), ctypes.c_int32(), ctypes.c_int32()
        check(getattr(library(), function)(self.handle, ctypes.byref(data), ctypes.byref(rows), ctypes.byref(cols)))
        if rows.value == 0 or data.value is None:
            return np.zeros((0, cols.value), np.float32)
        view = self._view(data.value, rows.value * cols.value * 4)
        return np.frombuffer(view, np.float32).reshape(rows.value, cols.value)

    def kv(self, state: int) -> npt.NDArray[np.uint8]:
        """Return the KV pages of a state as raw bytes [pages of its group, page_bytes]: a writable view."""
        self._check_parents()
        data, page_bytes, num_pages = ctypes.c_void_p(), ctypes.c_int64(), ctypes.c_int32()
        out = (ctypes.byref(result) for result in (data, page_bytes, num_pages))
        check(library().ps_program_kv(self.handle, state, *out))
        view = self._view(data.value or 0, num_pages.value * page_bytes.value)
        return np.frombuffer(view, np.uint8).reshape(num_pages.value, page_bytes.value)

    def sum_inputs(
        self,
        index: int,
        *,
        squares: npt.NDArray[np.float64] | None = None,
        maxima: npt.NDArray[np.float32] | None = None,
        rows: npt.NDArray[np.float32] | None = None,
        experts: npt.NDArray[np.int32] | None = None,
    ) -> None:
        """From the next step on, add up the input of the linear that is node ``index`` of the graph.

        ``squares`` [cols]: to which the squares of each column are added.  ``maxima`` [cols]: the largest magnitudes.
        ``rows`` [max_tokens, cols]: where each step copies its input to.  None: not.  The sums do not depend on the
        number of threads.

        The first two of an ``expert_linear`` are [experts, cols], each over the rows that are routed to the expert, and
        each step copies the numbers of the experts to ``experts`` [max_tokens, k].  An ``expert_linear`` whose experts
        of a token have an input each has ``rows`` [max_tokens, k, cols].  Raises InvalidArgumentError for a program
        without ``INPUT_SUMS``.
        """
        self._check_parents()
        named = {"squares": squares, "maxima": maxima, "rows": rows, "experts": experts}
        arrays = list(named.values())
        for name, array in named.items():
            if array is not None and not (array.flags.c_contiguous and array.flags.writeable):
                raise InvalidArgumentError(f"{name}: expected a C-contiguous, writable array", param=name)
        at = (None if array is None else array.ctypes.data for array in arrays)
        check(library().ps_program_sum_inputs(self.handle, index, *at))
        self._input_sums[index] = arrays

    def _check_parents(self) -> None:
        _ = self.handle, self._model.handle, self._context.handle


class StepCall:
    """A step whose arrays are checked once; each call computes it with their current contents.

    It serves the steps of a growing answer, which differ only in numbers: checking and wrapping a dozen arrays takes
    longer than reading them.  ``batch`` and ``sampling`` are the objects that it was made from; without ``sampling`` no
    row is sampled, which only ``launch`` and ``collect`` allow.
    """

    def __init__(self, program: CoreProgram, batch: StepBatch, sampling: Sampling | None) -> None:
        self.batch, self.sampling = batch, sampling
        self._program = program
        self._batch = ctypes.byref(batch_struct(batch, program._num_page_groups))
        self._rows: tuple[object, object] = (None, None)
        self._sampled: Sampled | None = None
        if sampling is not None:
            struct, rows = sampling_struct(sampling, program._vocab_size)
            out, self._sampled = sampled_struct(sampling, rows)
            self._rows = ctypes.byref(struct), ctypes.byref(out)

    @property
    def sampled(self) -> Sampled:
        """The result of the last call, which the next one overwrites."""
        if self._sampled is None:
            raise InvalidArgumentError("step: expected a sampling, got none", param="step")
        return self._sampled

    def __call__(self) -> Sampled:
        """Compute the step and sample its rows."""
        self._program._check_parents()
        check(library().ps_program_step(self._program.handle, self._batch, *self._rows))
        return self.sampled

    def launch(self) -> None:
        """On rank 0 of a pipeline: start the step, which ``collect`` ends.  Steps end in the order of their launches.

        There can be as many steps in flight as stages.
        """
        self._program._check_parents()
        check(library().ps_program_launch(self._program.handle, self._batch, *self._rows))

    def collect(self) -> Sampled | None:
        """Wait for the step, and sample its rows if there is a sampling."""
        self._program._check_parents()
        check(library().ps_program_collect(self._program.handle, *self._rows))
        return self._sampled


@dataclass(frozen=True)
class CoreTensor:
    """An operand of ``run_op``.

    A weight has dims (rows, cols) and a ``ps_layout``; a state has dims (num_pages, num_kv_heads, head_dim) and a
    ``ps_kv_layout``.  ``row_stride`` is the distance between the rows of a value, in elements.
    """

    address: int
    dtype: int
    dims: Sequence[int]
    row_stride: int
    layout: int = 0


def _tensor_struct(tensor: CoreTensor | None) -> TensorStruct:
    if tensor is None:
        return TensorStruct()
    if len(tensor.dims) > 6:
        raise InvalidArgumentError(f"dims: expected up to 6, got {list(tensor.dims)}", param="dims")
    dims = (ctypes.c_int64 * 6)(*tensor.dims)
    return TensorStruct(tensor.address, tensor.dtype, len(tensor.dims), dims, tensor.row_stride, tensor.layout)


def _attr_struct(name: str, value: int | float | str) -> AttrStruct:
    if isinstance(value, (bool, int)):
        return AttrStruct(name.encode(), 1, int(value), 0.0, None)
    if isinstance(value, float):
        return AttrStruct(name.encode(), 2, 0, value, None)
    return AttrStruct(name.encode(), 3, 0, 0.0, value.encode())


def run_op(
    context: Context, op: str, tensors: Sequence[CoreTensor | None], attrs: Mapping[str, int | float | str]
) -> None:
    """Run one op of the table.  ``tensors`` are those of its schema in order, then its outputs, which the caller
    allocates."""
    tensor_structs = (TensorStruct * len(tensors))(*(_tensor_struct(tensor) for tensor in tensors))
    attr_structs = (AttrStruct * len(attrs))(*(_attr_struct(name, value) for name, value in attrs.items()))
    status = library().ps_op_run(context.handle, op.encode(), tensor_structs, len(tensors), attr_structs, len(attrs))
    check(status)


def sample_logits(context: Context, logits: npt.NDArray[np.float32], sampling: Sampling) -> Sampled:
    """Sample rows of logits [R, vocab] that do not belong to a program."""
    if logits.ndim != 2 or logits.dtype != np.float32 or not logits.flags.c_contiguous:
        raise InvalidArgumentError(
            f"logits: expected C-contiguous float32 [rows, vocab], got {logits.dtype.name} {list(logits.shape)}",
            param="logits",
        )
    struct, rows = sampling_struct(sampling, logits.shape[1])
    if rows != logits.shape[0]:
        raise InvalidArgumentError(
            f"temperature: expected {logits.shape[0]} values, one per row, got {rows}", param="temperature"
        )
    out, sampled = sampled_struct(sampling, rows)
    status = library().ps_sample(
        context.handle, logits.ctypes.data, logits.shape[1], ctypes.byref(struct), ctypes.byref(out)
    )
    check(status)
    return sampled


def probe_bandwidth(context: Context, buffer_bytes: int = 256 << 20, passes: int = 5) -> float:
    """Return the bytes per second that the context's threads read from a private buffer, in the fastest pass."""
    out = ctypes.c_double()
    check(library().ps_probe_bandwidth(context.handle, buffer_bytes, passes, ctypes.byref(out)))
    return out.value


def probe_compute(context: Context, dtype: int, seconds: float = 0.1) -> float:
    """Return operations per second in registers; a multiply-add counts as two.  ``dtype`` is F32, BF16 or I8 of
    ``ps_dtype``; ``seconds`` is the duration of the measurement."""
    out = ctypes.c_double()
    check(library().ps_probe_compute(context.handle, dtype, seconds, ctypes.byref(out)))
    return out.value


def cpu_levels() -> list[tuple[str, bool]]:
    """Return the instruction levels of this build, best first, and for each whether this machine runs it."""
    levels: list[tuple[str, bool]] = []
    runnable = ctypes.c_int32()
    while name := library().ps_cpu_level_at(len(levels), ctypes.byref(runnable)):
        levels.append((name.decode(), bool(runnable.value)))
    return levels


def op_schemas() -> list[str]:
    """Return "name.version schema" for every op of the core."""
    schemas: list[str] = []
    while text := library().ps_op_schema(len(schemas)):
        schemas.append(text.decode())
    return schemas


def version() -> str:
    """Return the version of the core."""
    return str(library().ps_version().decode())
