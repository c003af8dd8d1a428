"""The ctypes declarations of the headers in ``core/include``, and the loading of the library."""

from __future__ import annotations

import ctypes
import functools
import os
import re
import warnings
from ctypes import POINTER, c_char_p, c_double, c_int32, c_int64, c_uint32, c_uint64, c_void_p
from pathlib import Path
from typing import Any, ClassVar, Final

from penstock import env
from penstock.errors import (
    FileAccessError,
    InternalError,
    InvalidArgumentError,
    InvalidFileError,
    OutOfMemoryError,
    PenstockError,
    UnavailableError,
    UnsupportedError,
)
from penstock.validation import refusal

__all__ = ["CLOSED", "ENDED", "check", "library", "library_file", "load_ops", "sized", "warn_of_newer"]

CLOSED: Final = "closed"
"""The reason with which a group of ranks ends that is not needed any more."""
ENDED: Final = "ranks: the group was ended: "
"""With this, before the reason, begins the error of a rank whose group was ended (core/src/comm/)."""
_FIELD: Final = re.compile(
    r"(?:[^:]*: )*?(?P<expected>[a-z_][\w.\[\]]*)(?: \([^()]*\)(?:\.\w+)?|, [\w, ]+)?: expected"
    r"|(?P<first>[a-z_][\w\[\]]*)(?:, [\w, ]+)?: "
    r"|[^:]*/[^:]*: (?:(?P<last>[a-z_][\w.\[\]]*)(?: \([^()]*\)|, [\w, ]+)?: )+"
)
"""The field in a message of the core: of "PATH: FIELD: expected ...", with or without the path, of "FIELD: ...", or the
last one of "PATH: FIELD: ..."."""
_ABI_VERSION = 3
_P32, _P64, _PP = POINTER(c_int32), POINTER(c_int64), POINTER(c_void_p)
_ERRORS: dict[int, type[PenstockError]] = {
    1: InvalidArgumentError,
    2: InvalidFileError,
    3: UnsupportedError,
    4: OutOfMemoryError,
    5: FileAccessError,
    6: InternalError,
    7: UnavailableError,
}


class ContextOptions(ctypes.Structure):
    _fields_: ClassVar = [
        ("struct_size", c_uint32),
        ("num_threads", c_int32),
        ("cpu_level", c_char_p),
        ("comm", c_void_p),
        ("links", c_void_p),
        ("stage_ranks", c_int32),
        ("reserved", c_int32),
    ]


class CommStruct(ctypes.Structure):
    """``ps_comm``: how a rank exchanges bytes with the others."""

    _fields_: ClassVar = [
        ("struct_size", c_uint32),
        ("rank", c_int32),
        ("world", c_int32),
        ("reserved", c_int32),
        ("part_bytes", c_int64),
        ("self", c_void_p),
        ("part", ctypes.CFUNCTYPE(c_void_p, c_void_p)),
        ("all_gather", ctypes.CFUNCTYPE(c_int32, c_void_p, c_uint64, _P64, _PP)),
        ("broadcast", ctypes.CFUNCTYPE(c_int32, c_void_p, c_uint64, c_int32, c_int64, c_int32, _PP)),
        ("send", ctypes.CFUNCTYPE(c_int32, c_void_p, c_int32, c_void_p, c_int64)),
        ("recv", ctypes.CFUNCTYPE(c_int32, c_void_p, c_int32, c_void_p, c_int64)),
        ("barrier", ctypes.CFUNCTYPE(c_int32, c_void_p, c_uint64)),
        ("abort", ctypes.CFUNCTYPE(None, c_void_p, c_char_p)),
        ("await", ctypes.CFUNCTYPE(c_int32, c_void_p, c_int32)),
    ]


class SharedOptions(ctypes.Structure):
    _fields_: ClassVar = [
        ("struct_size", c_uint32),
        ("rank", c_int32),
        ("world", c_int32),
        ("fd", c_int32),
        ("memory", c_void_p),
        ("part_bytes", c_int64),
        ("timeout_ms", c_int64),
        ("epoch", c_uint64),
        ("yield_", c_int32),
        ("reserved", c_int32),
    ]


class JoinOptions(ctypes.Structure):
    _fields_: ClassVar = [
        ("struct_size", c_uint32),
        ("rank", c_int32),
        ("world", c_int32),
        ("yield_", c_int32),
        ("part_bytes", c_int64),
        ("timeout_ms", c_int64),
        ("join_timeout_ms", c_int64),
        ("meeting", c_char_p),
    ]


class MpiOptions(ctypes.Structure):
    _fields_: ClassVar = [
        ("struct_size", c_uint32),
        ("rank", c_int32),
        ("world", c_int32),
        ("trusted_network", c_int32),
        ("part_bytes", c_int64),
        ("timeout_ms", c_int64),
        ("library", c_char_p),
    ]


class RankInfoStruct(ctypes.Structure):
    _fields_: ClassVar = [
        ("struct_size", c_uint32),
        ("rank", c_int32),
        ("world", c_int32),
        ("reserved", c_int32),
        ("part_bytes", c_int64),
    ]


class ModelOptions(ctypes.Structure):
    _fields_: ClassVar = [("struct_size", c_uint32), ("verify", c_int32), ("private_copy", c_int32)]


class ModelInfoStruct(ctypes.Structure):
    _fields_: ClassVar = [
        ("struct_size", c_uint32),
        ("vocab_size", c_int32),
        ("context_len", c_int32),
        ("num_states", c_int32),
        ("num_page_groups", c_int32),
        ("num_weights", c_int32),
        ("num_nodes", c_int32),
        ("weight_bytes", c_int64),
        ("file_bytes", c_int64),
        ("weight_bytes_per_token", c_int64),
        ("network", c_char_p),
        ("scheme", c_char_p),
        ("page_windows", _P32),
        ("hidden_size", c_int32),
        ("tail_k", c_int32),
        ("tail", c_char_p),
        ("format_minor", c_int32),
        ("known_format_minor", c_int32),
        ("bidirectional", c_int32),
        ("context_ranks", c_int32),
        ("prefix_token", c_int64),
        ("kind", c_int32),
        ("num_inputs", c_int32),
        ("num_outputs", c_int32),
        ("num_sizes", c_int32),
    ]


class ValueInfoStruct(ctypes.Structure):
    _fields_: ClassVar = [("struct_size", c_uint32), ("dtype", c_int32), ("name", c_char_p), ("sizes", c_char_p)]


class SizeInfoStruct(ctypes.Structure):
    _fields_: ClassVar = [
        ("struct_size", c_uint32),
        ("reserved", c_int32),
        ("name", c_char_p),
        ("min", c_int64),
        ("max", c_int64),
        ("multiple", c_int64),
        ("example", c_int64),
    ]


class ArrayStruct(ctypes.Structure):
    _fields_: ClassVar = [("data", c_void_p), ("dtype", c_int32), ("ndim", c_int32), ("dims", c_int64 * 6)]


class TokenizerInfoStruct(ctypes.Structure):
    _fields_: ClassVar = [
        ("struct_size", c_uint32),
        ("num_tokens", c_int32),
        ("bos_id", c_int32),
        ("pad_id", c_int32),
        ("unk_id", c_int32),
        ("num_eos_ids", c_int32),
        ("eos_ids", _P32),
        ("kind", c_char_p),
        ("unsupported", c_char_p),
    ]


class ProgramOptionsStruct(ctypes.Structure):
    _fields_: ClassVar = [
        ("struct_size", c_uint32),
        ("max_tokens", c_int32),
        ("max_requests", c_int32),
        ("max_rows", c_int32),
        ("num_pages", c_int32),
        ("num_slots", c_int32),
        ("kv_layout", c_int32),
        ("flags", c_uint32),
        ("group_pages", _P32),
    ]


class PlanStruct(ctypes.Structure):
    _fields_: ClassVar = [
        ("struct_size", c_uint32),
        ("weight_bytes", c_int64),
        ("temporary_bytes", c_int64),
        ("scratch_bytes", c_int64),
        ("kv_bytes", c_int64),
        ("logits_bytes", c_int64),
        ("total_bytes", c_int64),
        ("kv_page_bytes", c_int64),
    ]


class DimStruct(ctypes.Structure):
    _fields_: ClassVar = [("symbol", c_int32), ("reserved", c_int32), ("factor", c_int64), ("offset", c_int64)]


class NodeInfoStruct(ctypes.Structure):
    _fields_: ClassVar = [
        ("struct_size", c_uint32),
        ("output_rank", c_int32),
        ("op", c_char_p),
        ("name", c_char_p),
        ("output", c_char_p),
        ("scheme", c_char_p),
        ("output_dims", DimStruct * 6),
        ("weight_bytes", c_int64),
        ("rows", c_int64),
        ("cols", c_int64),
        ("layout", c_int32),
        ("num_kv_heads", c_int32),
        ("head_dim", c_int32),
        ("window", c_int32),
        ("kept", c_int32),
    ]


class BatchStruct(ctypes.Structure):
    _fields_: ClassVar = [
        ("struct_size", c_uint32),
        ("num_tokens", c_int32),
        ("num_requests", c_int32),
        ("num_rows", c_int32),
        ("page_table_width", c_int32),
        ("token_ids", c_void_p),
        ("positions", c_void_p),
        ("request_starts", c_void_p),
        ("page_tables", c_void_p),
        ("output_rows", c_void_p),
        ("flags", c_uint32),
        ("reserved", c_uint32),
    ]


class SamplingStruct(ctypes.Structure):
    _fields_: ClassVar = [
        ("struct_size", c_uint32),
        ("num_rows", c_int32),
        ("temperature", c_void_p),
        ("top_k", c_void_p),
        ("top_p", c_void_p),
        ("seed", c_void_p),
        ("counter", c_void_p),
        ("slot", c_void_p),
        ("mask", c_void_p),
        ("min_p", c_void_p),
        ("typical_p", c_void_p),
        ("repetition_penalty", c_void_p),
        ("presence_penalty", c_void_p),
        ("frequency_penalty", c_void_p),
        ("history_starts", c_void_p),
        ("prompt_lens", c_void_p),
        ("history", c_void_p),
        ("bias_starts", c_void_p),
        ("bias_ids", c_void_p),
        ("bias", c_void_p),
        ("target", c_void_p),
        ("num_logprobs", c_void_p),
    ]


class SampledStruct(ctypes.Structure):
    _fields_: ClassVar = [
        ("struct_size", c_uint32),
        ("num_top", c_int32),
        ("ids", c_void_p),
        ("logprobs", c_void_p),
        ("ranks", c_void_p),
        ("row_status", c_void_p),
        ("top_ids", c_void_p),
        ("top_logprobs", c_void_p),
    ]


class TensorStruct(ctypes.Structure):
    _fields_: ClassVar = [
        ("data", c_void_p),
        ("dtype", c_int32),
        ("ndim", c_int32),
        ("dims", c_int64 * 6),
        ("row_stride", c_int64),
        ("layout", c_int32),
    ]


class AttrStruct(ctypes.Structure):
    _fields_: ClassVar = [
        ("name", c_char_p),
        ("type", c_int32),
        ("i", c_int64),
        ("f", c_double),
        ("s", c_char_p),
    ]


_RANGE = (c_int64, c_int64, c_int64, c_int64)  # rows, cols, row_start, num_rows
# Name: (result, arguments).  A status is a plain int here; check() turns it into an exception.
_FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "ps_error_message": (c_char_p, ()),
    "ps_version": (c_char_p, ()),
    "ps_abi_version": (c_int32, ()),
    "ps_context_create": (c_int32, (POINTER(ContextOptions), POINTER(c_void_p))),
    "ps_context_destroy": (None, (c_void_p,)),
    "ps_context_agree": (c_int32, (c_void_p, c_char_p)),
    "ps_shared_bytes": (c_int32, (c_int32, c_int64, _P64)),
    "ps_shared_open": (c_int32, (POINTER(SharedOptions), POINTER(POINTER(CommStruct)))),
    "ps_fail": (c_int32, (c_int32, c_char_p)),
    "ps_shared_close": (None, (POINTER(CommStruct),)),
    "ps_shared_join": (c_int32, (POINTER(JoinOptions), POINTER(POINTER(CommStruct)))),
    "ps_mpi_join": (c_int32, (POINTER(MpiOptions), POINTER(POINTER(CommStruct)))),
    "ps_mpi_close": (None, (POINTER(CommStruct),)),
    "ps_model_rank": (c_int32, (c_void_p, POINTER(ProgramOptionsStruct), POINTER(RankInfoStruct))),
    "ps_context_num_threads": (c_int32, (c_void_p,)),
    "ps_context_cpu_level": (c_char_p, (c_void_p,)),
    "ps_cpu_level_at": (c_char_p, (c_int32, _P32)),
    "ps_ops_load": (c_int32, (c_char_p,)),
    "ps_ops_register": (c_int32, (c_void_p,)),
    "ps_model_open": (c_int32, (c_char_p, POINTER(ModelOptions), POINTER(c_void_p))),
    "ps_model_load_huge": (c_int32, (c_void_p, c_void_p)),
    "ps_model_close": (None, (c_void_p,)),
    "ps_model_describe": (c_int32, (c_void_p, POINTER(ModelInfoStruct))),
    "ps_model_input": (c_int32, (c_void_p, c_int32, POINTER(ValueInfoStruct))),
    "ps_model_output": (c_int32, (c_void_p, c_int32, POINTER(ValueInfoStruct))),
    "ps_model_size": (c_int32, (c_void_p, c_int32, POINTER(SizeInfoStruct))),
    "ps_program_predict": (c_int32, (c_void_p, POINTER(ArrayStruct), c_int32)),
    "ps_program_prepare": (c_int32, (c_void_p, POINTER(ArrayStruct), c_int32)),
    "ps_program_output": (c_int32, (c_void_p, c_int32, POINTER(ArrayStruct))),
    "ps_model_segment": (c_int32, (c_void_p, c_char_p, POINTER(c_void_p), _P64)),
    "ps_tokenizer_open": (c_int32, (c_void_p, POINTER(c_void_p))),
    "ps_tokenizer_close": (None, (c_void_p,)),
    "ps_tokenizer_describe": (c_int32, (c_void_p, POINTER(TokenizerInfoStruct))),
    "ps_tokenizer_encode": (c_int32, (c_void_p, c_char_p, c_int64, c_uint32, c_void_p, c_int64, _P64)),
    "ps_tokenizer_decode": (c_int32, (c_void_p, c_void_p, c_int64, c_uint32, _P64, c_char_p, c_int64, _P64)),
    "ps_tokenizer_open_data": (c_int32, (c_char_p, c_int64, POINTER(c_void_p))),
    "ps_tokenizer_tokens": (c_int32, (c_void_p, _PP, _PP, _P64, _PP, _P32)),
    "ps_program_plan": (c_int32, (c_void_p, c_void_p, POINTER(ProgramOptionsStruct), POINTER(PlanStruct))),
    "ps_program_create": (c_int32, (c_void_p, c_void_p, POINTER(ProgramOptionsStruct), POINTER(c_void_p))),
    "ps_program_create_flagged": (
        c_int32,
        (c_void_p, c_void_p, POINTER(ProgramOptionsStruct), c_uint32, POINTER(c_void_p)),
    ),
    "ps_program_destroy": (None, (c_void_p,)),
    "ps_program_resize": (c_int32, (c_void_p, POINTER(ProgramOptionsStruct))),
    "ps_program_run": (c_int32, (c_void_p, POINTER(BatchStruct))),
    "ps_program_follow": (c_int32, (c_void_p,)),
    "ps_program_launch": (c_int32, (c_void_p, POINTER(BatchStruct), POINTER(SamplingStruct), POINTER(SampledStruct))),
    "ps_program_collect": (c_int32, (c_void_p, POINTER(SamplingStruct), POINTER(SampledStruct))),
    "ps_program_sample": (c_int32, (c_void_p, POINTER(SamplingStruct), POINTER(SampledStruct))),
    "ps_program_step": (c_int32, (c_void_p, POINTER(BatchStruct), POINTER(SamplingStruct), POINTER(SampledStruct))),
    "ps_program_logits": (c_int32, (c_void_p, POINTER(c_void_p), _P32, _P32)),
    "ps_program_hidden": (c_int32, (c_void_p, POINTER(c_void_p), _P32, _P32)),
    "ps_program_tail": (c_int32, (c_void_p, POINTER(c_void_p), POINTER(c_void_p), _P32, _P32)),
    "ps_model_file": (c_int32, (c_void_p, _P64)),
    "ps_auto_kv_layout": (c_int32, (c_char_p,)),
    "ps_program_kv": (c_int32, (c_void_p, c_int32, POINTER(c_void_p), _P64, _P32)),
    "ps_program_sum_inputs": (c_int32, (c_void_p, c_int32, c_void_p, c_void_p, c_void_p, c_void_p)),
    "ps_program_profile": (c_int32, (c_void_p, c_int32)),
    "ps_program_profile_spans": (c_int32, (c_void_p, POINTER(c_void_p), _P64)),
    "ps_model_node": (c_int32, (c_void_p, c_int32, POINTER(NodeInfoStruct))),
    "ps_op_run": (c_int32, (c_void_p, c_char_p, POINTER(TensorStruct), c_int32, POINTER(AttrStruct), c_int32)),
    "ps_op_schema": (c_char_p, (c_int32,)),
    "ps_sample": (c_int32, (c_void_p, c_void_p, c_int32, POINTER(SamplingStruct), POINTER(SampledStruct))),
    "ps_layout_bytes": (c_int32, (c_int32, c_int64, c_int64, _P64)),
    "ps_pack": (c_int32, (c_void_p, c_int32, *_RANGE, c_int32, c_void_p, c_void_p)),
    "ps_pack_weighted": (c_int32, (c_void_p, *_RANGE, c_void_p, c_void_p, c_void_p, c_int32, c_void_p)),
    "ps_pack_quantized": (c_int32, (c_void_p, c_int32, *_RANGE, c_void_p, c_void_p, c_void_p, c_void_p)),
    "ps_unpack_quantized": (c_int32, (c_void_p, c_int32, *_RANGE, c_void_p, c_void_p, c_void_p, c_void_p)),
    "ps_pack_blocks": (c_int32, (c_void_p, c_int32, *_RANGE, c_void_p, c_void_p)),
    "ps_unpack": (c_int32, (c_void_p, c_int32, *_RANGE, c_void_p, c_void_p)),
    "ps_probe_bandwidth": (c_int32, (c_void_p, c_int64, c_int32, POINTER(c_double))),
    "ps_probe_compute": (c_int32, (c_void_p, c_int32, c_double, POINTER(c_double))),
    "ps_probe_gather": (c_int32, (POINTER(CommStruct), c_int64, c_int32, _P64)),
    "ps_crc32": (c_uint32, (c_uint32, c_void_p, c_int64)),
}


def library_file() -> Path:
    """Return the path of the library to load: ``PENSTOCK_LIBRARY``, or else the one that was installed."""
    if (path := env.library_path()) is not None:
        return path
    path = Path(__file__).with_name("libpenstock.so")
    return path if path.exists() else _editable_library(path.parents[3]) or path


def _editable_library(tree: Path) -> Path | None:
    """Return the library of an editable install of a source tree, which lies among the installed packages."""
    import json  # only a library that is not beside this file needs them
    from importlib.metadata import PackageNotFoundError, distribution
    from urllib.parse import unquote, urlsplit

    try:
        package = distribution("penstock")
        record = json.loads(package.read_text("direct_url.json") or "{}")  # PEP 610
    except (PackageNotFoundError, ValueError):
        return None
    is_own = unquote(urlsplit(record.get("url", "")).path) == str(tree)
    path = Path(str(package.locate_file("penstock/core/libpenstock.so")))
    return path if is_own and record.get("dir_info", {}).get("editable") and path.exists() else None


def _is_source_tree(path: Path) -> bool:
    """Return True if the library at ``path`` is missing because this package was never installed."""
    is_own = path.parent == Path(__file__).parent
    return is_own and not path.exists() and (path.parents[3] / "pyproject.toml").is_file()


@functools.cache
def library() -> ctypes.CDLL:
    """Load the core once, with the op libraries of ``PENSTOCK_OPS``, and return it.

    Raises UnsupportedError when the file is missing, does not load, or has another ABI version.
    """
    path = library_file()
    if _is_source_tree(path):
        raise UnsupportedError(
            f"{path.parents[3]} is a source tree without the native core. Run `pip install {path.parents[3]}` (with -e "
            "for an editable install), and remove its src folder from PYTHONPATH; or build the core with CMake and set "
            "PENSTOCK_LIBRARY to libpenstock.so."
        )
    try:
        lib = ctypes.CDLL(str(path))
        for name, (result, arguments) in _FUNCTIONS.items():
            function = getattr(lib, name)
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError) as error:
        raise UnsupportedError(
            f"The native core {path} failed to load ({error}). Install the package, or set PENSTOCK_LIBRARY to a build."
        ) from None
    version = int(lib.ps_abi_version())
    if version != _ABI_VERSION:
        raise UnsupportedError(
            f"The native core {path} has the wrong ABI version: expected {_ABI_VERSION}, got {version}. Install "
            "the package again, which builds it."
        )
    for ops_path in env.op_libraries():
        _raise(lib, lib.ps_ops_load(os.fsencode(ops_path)), "PENSTOCK_OPS: ")
    return lib


def load_ops(path: str | os.PathLike[str]) -> None:
    """Load a shared library of custom ops (core/include/penstock_op.h) into this process and those that it starts.

    The library's code runs with the rights of this process, so load only libraries that you trust.  A bundle cannot
    load one: the only ways are this function, ``--ops``, ``Context.ops`` and the environment variable ``PENSTOCK_OPS``.
    Loading the same library again has no effect.

    Raises FileAccessError when the library does not load, InvalidFileError when it has no ops, UnsupportedError when it
    has another ABI version, and InvalidArgumentError when an op is malformed or its name is already taken.
    """
    name = os.fsdecode(path)
    if not name or "\0" in name or os.pathsep in name:
        raise refusal("path", f"the path of a shared library, without {os.pathsep}", name)
    check(library().ps_ops_load(os.fsencode(name)))
    env.pass_on_op_library(os.path.abspath(name))


def check(status: int) -> None:
    """Raise the error of a failed call with the core's message; do nothing for status 0."""
    if status:
        _raise(library(), status)


def _raise(lib: ctypes.CDLL, status: int, prefix: str = "") -> None:
    if status:
        message = lib.ps_error_message().decode("utf-8", "replace")
        code = "group_closed" if message == ENDED + CLOSED else None
        raise _ERRORS.get(status, InternalError)(prefix + message, param=_field_of(message), code=code)


def _field_of(message: str) -> str | None:
    """Return the field that a message of the core is about; None if it names none."""
    match = _FIELD.match(message)
    return (match["expected"] or match["first"] or match["last"]) if match else None


def warn_of_newer(path: str | os.PathLike[str], minor: int, known_minor: int) -> None:
    """Warn (UserWarning) about a bundle whose minor format version ``minor`` is newer than ``known_minor``."""
    if minor > known_minor:  # one call site for all, so that Python's filter shows the warning once per file
        warnings.warn(
            f"{os.fspath(path)}: header.minor: the file has format 1.{minor}, this version reads 1.{known_minor}; "
            "newer fields of the file are ignored",
            stacklevel=1,
        )


def sized(struct: type[Any], **fields: Any) -> Any:
    """Return an instance of ``struct`` with ``struct_size`` set, which tells the core which fields exist."""
    return struct(struct_size=ctypes.sizeof(struct), **fields)
