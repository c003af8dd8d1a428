"""The process that reads a pickled checkpoint: ``python -m penstock.checkpoint.pickle_child IN OUT``.

IN and OUT are numbers of open descriptors.  Before it reads IN, the process gives up sockets, other processes and files
(``processes.confine``), and its memory and time are limited.  It writes the tensors to OUT as a safetensors file; the
parent checks that file as it does any other.  A pickle with anything but tensors by name is refused.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import re
import struct
import sys
from collections.abc import Mapping
from typing import Any, Final

import torch

from penstock.errors import InvalidFileError, PenstockError
from penstock.processes.confine import confine, limit_resources
from penstock.processes.parent import die_with_parent

__all__ = ["main"]

_DTYPES: Final = {
    torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.float64: "F64",
    torch.int8: "I8", torch.uint8: "U8", torch.int16: "I16", torch.int32: "I32", torch.int64: "I64",
    torch.bool: "BOOL",
}  # fmt: skip
_BASE_BYTES: Final = 16 << 30
_BYTES_PER_SECOND: Final = 20_000_000
_BASE_SECONDS: Final = 60
_MAX_NAME: Final = 1024
_PIECE: Final = 1 << 22
_LIBC: Final = ctypes.CDLL(None)
_GLOBAL: Final = re.compile(r"GLOBAL ([\w.]{1,80})")


def main() -> int:
    """Convert IN to OUT; return the exit status.  The reason of a refusal is the last line on standard error."""
    die_with_parent()
    source, out = int(sys.argv[1]), int(sys.argv[2])
    num_bytes = os.fstat(source).st_size
    torch.set_num_threads(1)  # OMP_PROC_BIND binds further ones to cores, which a confined process may not
    torch.zeros(1).contiguous()  # loads what the first tensor loads
    limit_resources(
        memory_bytes=_BASE_BYTES + 3 * num_bytes,
        cpu_seconds=_BASE_SECONDS + num_bytes // _BYTES_PER_SECOND,
        file_bytes=2 * num_bytes + (64 << 20),
    )
    try:
        confine()
        with open(source, "rb", closefd=False) as stream:
            is_archive = stream.read(2) == b"PK"
        path = f"/proc/self/fd/{source}"
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=is_archive)
        _write(_checked(state), out, 2 * num_bytes, is_mapped=is_archive)
    except PenstockError as error:
        print(error, file=sys.stderr)
        return 1
    except Exception as error:
        print(_reason_of(error), file=sys.stderr)
        return 1
    return 0


def _reason_of(error: Exception) -> str:
    if type(error).__name__ != "UnpicklingError":
        return f"{type(error).__name__}: {error}".splitlines()[0][:300]
    found = _GLOBAL.search(str(error))  # PyTorch's text tells to load it without this check
    what = found[1] if found else "other objects, or a damaged file"
    return f"expected tensors by name, found {what}; code in a pickle is never run"


def _checked(state: Any) -> Mapping[str, torch.Tensor]:
    if not isinstance(state, Mapping):
        raise InvalidFileError(f"expected tensors by name, found {type(state).__name__}")
    for name, value in state.items():
        if not isinstance(name, str) or len(name) > _MAX_NAME:
            raise InvalidFileError(f"expected names of tensors, found {name!r:.80}")
        if not isinstance(value, torch.Tensor) or value.layout != torch.strided or value.is_quantized:
            raise InvalidFileError(f"{name!r:.80}: expected a tensor, found {type(value).__name__}")
        if value.dtype not in _DTYPES:
            raise InvalidFileError(f"{name!r:.80}: type {value.dtype} is not supported")
    return state


def _write(state: Mapping[str, torch.Tensor], out: int, max_bytes: int, *, is_mapped: bool) -> None:
    """Write the tensors, the widest elements first, so that each is aligned.

    ``is_mapped``: they lie in the mapped file, so that the memory of those that are written can be released.
    """
    names = sorted(state, key=lambda name: (-state[name].element_size(), name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        start, end = end, end + state[name].numel() * state[name].element_size()
        header[name] = {"dtype": _DTYPES[state[name].dtype], "shape": list(state[name].shape)}
        header[name]["data_offsets"] = [start, end]
    if end > max_bytes:
        raise InvalidFileError(f"expected tensors of at most {max_bytes} bytes, found {end}")
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % 64)
    with open(out, "wb", closefd=False) as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        for name in names:
            flat = state[name].detach().contiguous().reshape(-1)
            for start in range(0, flat.numel(), _PIECE):
                stream.write(flat[start : start + _PIECE].view(torch.uint8).numpy().data)
            if is_mapped:
                _release(state[name].untyped_storage())


def _release(storage: torch.UntypedStorage) -> None:
    """Release the pages of a mapped storage; reading maps them again."""
    first = -(-storage.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    last = (storage.data_ptr() + storage.nbytes()) // mmap.PAGESIZE * mmap.PAGESIZE
    if last > first:
        _LIBC.madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), mmap.MADV_DONTNEED)


if __name__ == "__main__":
    sys.exit(main())
