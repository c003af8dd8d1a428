"""The process that reads a pickled checkpoint: ``python -m penstock.checkpoint.pickle_child IN OUT``.

IN and OUT are numbers of open descriptors.  Before it reads IN, the process gives up sockets, other processes and files
(``processes.confine``), and its memory and time are limited.  It writes the tensors to OUT as a safetensors file; the
parent checks that file as it does any other.  A pickle with anything but tensors by name is refused.
"""

from __future__ import annotations

import codecs
import json
import mmap
import os
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from penstock.checkpoint.pickles.decoder import ELEMENT_TYPES, MAX_PICKLE_BYTES, Opaque, PickledTensor
from penstock.checkpoint.pickles.file import PickledFile, is_convertible
from penstock.errors import InvalidFileError, PenstockError
from penstock.processes.confine import confine, limit_resources
from penstock.processes.parent import die_with_parent

__all__ = ["main"]

_SPARE_BYTES: Final = 256 << 20
_BYTES_PER_PICKLED: Final = 20
"""Memory for the values of a pickle, for each of its bytes."""
_BYTES_PER_SECOND: Final = 20_000_000
_BASE_SECONDS: Final = 60
_MAX_NAME: Final = 1024
_PIECE_BYTES: Final = 1 << 24


def main() -> int:
    """Convert IN to OUT; return the exit status.  The reason of a refusal is the last line on standard error."""
    die_with_parent()
    source, out = int(sys.argv[1]), int(sys.argv[2])
    num_bytes = os.fstat(source).st_size
    memory_bytes = num_bytes + _BYTES_PER_PICKLED * min(num_bytes, MAX_PICKLE_BYTES) + _SPARE_BYTES
    limit_resources(
        memory_bytes=_address_space() + memory_bytes,
        cpu_seconds=_BASE_SECONDS + num_bytes // _BYTES_PER_SECOND,
        file_bytes=2 * num_bytes + (64 << 20),
    )
    codecs.lookup("cp437")  # of names in a zip file: no module can be imported after the next line
    try:
        confine()
        if not num_bytes:
            raise InvalidFileError("expected a checkpoint of torch.save, got an empty file")
        data = mmap.mmap(source, num_bytes, access=mmap.ACCESS_READ)  # views of it stay until the process ends
        _write(PickledFile(memoryview(data)), data, out, 2 * num_bytes)
        return 0
    except MemoryError:
        print(f"reading it takes more than the {memory_bytes} bytes that a file of its size may use", file=sys.stderr)
    except PenstockError as error:
        print(error, file=sys.stderr)
    except Exception as error:
        print(f"{type(error).__name__}: {error}".splitlines()[0][:300], file=sys.stderr)
    return 1


def _address_space() -> int:
    """Return the bytes of this process's address space now."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE


def _checked(state: Any) -> dict[str, PickledTensor]:
    if not isinstance(state, dict):
        raise InvalidFileError(f"expected tensors by name, got {_kind_of(state)}")
    for name, value in state.items():
        if not isinstance(name, str) or len(name) > _MAX_NAME:
            raise InvalidFileError(f"expected names of tensors, got {name!r:.80}")
        if not isinstance(value, PickledTensor):
            raise InvalidFileError(f"{name!r:.80}: expected a tensor, got {_kind_of(value)}")
        if not is_convertible(value):
            raise InvalidFileError(f"{name!r:.80}: type torch.{value.element_type} is not supported")
    return state


def _kind_of(value: Any) -> str:
    return value.kind if isinstance(value, Opaque) else type(value).__name__


def _write(file: PickledFile, data: mmap.mmap, out: int, max_bytes: int) -> None:
    """Write the tensors, the widest elements first, so that each is aligned."""
    state = _checked(file.value)
    sizes = {name: ELEMENT_TYPES[tensor.element_type][1] for name, tensor in state.items()}
    names = sorted(state, key=lambda name: (-sizes[name], name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    places: dict[str, tuple[int, int]] = {}
    end = 0
    for name in names:
        try:
            places[name] = file.place_of(state[name])
        except InvalidFileError as error:
            raise InvalidFileError(f"{name!r:.80}: {error}") from None
        start, end = end, end + _count(state[name]) * sizes[name]
        if end > max_bytes:
            raise InvalidFileError(f"expected tensors of at most {max_bytes} bytes, got {end} or more")
        header[name] = {"dtype": ELEMENT_TYPES[state[name].element_type][0], "shape": list(state[name].shape)}
        header[name]["data_offsets"] = [start, end]
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % 64)
    with open(out, "wb", closefd=False) as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        for name in names:
            if _count(state[name]):
                for piece in _pieces(_view(state[name], data, places[name][0])):
                    stream.write(piece.data)
                _release(data, *places[name])


def _count(tensor: PickledTensor) -> int:
    count = 1
    for size in tensor.shape:
        count *= size
    return count


def _view(tensor: PickledTensor, data: mmap.mmap, start: int) -> NDArray[Any]:
    """Return the elements of a tensor in the mapped file, as unsigned integers."""
    size = ELEMENT_TYPES[tensor.element_type][1]
    return np.ndarray(
        tensor.shape,
        np.dtype(f"u{size}"),
        buffer=data,
        offset=start + tensor.offset * size,
        strides=tuple(stride * size for stride in tensor.strides),
    )


def _pieces(view: NDArray[Any]) -> Iterator[NDArray[Any]]:
    """Return the elements in their order, in contiguous pieces of limited size."""
    if view.nbytes <= _PIECE_BYTES or not view.ndim:
        yield np.ascontiguousarray(view).reshape(-1)
        return
    rows = max(1, _PIECE_BYTES * len(view) // view.nbytes)
    for begin in range(0, len(view), rows):
        piece = view[begin : begin + rows]
        yield from _pieces(piece[0]) if rows == 1 else _pieces(piece)


def _release(data: mmap.mmap, start: int, num_bytes: int) -> None:
    """Release the pages of a storage that was read; reading maps them again."""
    first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
    last = (start + num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if last > first:
        data.madvise(mmap.MADV_DONTNEED, first, last - first)


if __name__ == "__main__":
    sys.exit(main())
