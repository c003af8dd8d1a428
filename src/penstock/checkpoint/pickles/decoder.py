"""The pickles of PyTorch's checkpoints, decoded into plain values and ``PickledTensor``.

A pickle is a program for a stack machine that may call any function.  This machine knows the instructions that
``torch.save`` writes for tensors.  The few names that a pickle may use are keys of a table here; nothing is imported
and nothing else is called, so that decoding takes memory in proportion to the pickle.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final

from penstock.config import is_integer, show
from penstock.errors import InvalidFileError
from penstock.validation import printable

__all__ = ["ELEMENT_TYPES", "MAX_PICKLE_BYTES", "Opaque", "PickleDecoder", "PickledTensor", "Storage"]

MAX_PICKLE_BYTES: Final = 32 << 20
ELEMENT_TYPES: Final = {
    "float32": ("F32", 4), "float16": ("F16", 2), "bfloat16": ("BF16", 2), "float64": ("F64", 8),
    "int8": ("I8", 1), "uint8": ("U8", 1), "int16": ("I16", 2), "int32": ("I32", 4), "int64": ("I64", 8),
    "bool": ("BOOL", 1),
}  # fmt: skip
"""The types of elements that are converted: their name in safetensors, and their bytes."""
_STORAGES: Final = {
    "FloatStorage": "float32", "HalfStorage": "float16", "BFloat16Storage": "bfloat16", "DoubleStorage": "float64",
    "CharStorage": "int8", "ByteStorage": "uint8", "ShortStorage": "int16", "IntStorage": "int32",
    "LongStorage": "int64", "BoolStorage": "bool", "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
}  # fmt: skip
_UNTYPED: Final = ("torch.storage.UntypedStorage", "torch.UntypedStorage", "torch.storage._UntypedStorage")
_TYPES: Final = (
    *ELEMENT_TYPES, "complex64", "complex128", "uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e5m2",
    "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu",
)  # fmt: skip
_CLASSES: Final = ("torch.Tensor", "torch.nn.parameter.Parameter", "torch.nn.Parameter", "torch.nn.parameter.Buffer")
"""Names that stand for a tensor's class as an argument; a call of one makes memory without a value."""
_REBUILD: Final = "torch._utils._rebuild_"
_CALLS: Final = (
    "collections.OrderedDict",
    "torch._tensor._rebuild_from_type_v2",
    f"{_REBUILD}parameter",
    f"{_REBUILD}parameter_with_state",
    f"{_REBUILD}tensor",
    f"{_REBUILD}tensor_v2",
    f"{_REBUILD}tensor_v3",
    f"{_REBUILD}sparse_tensor",
    "torch.Size",
    "torch.device",
    "torch.serialization._get_layout",
)
_MAX_NAME: Final = 200
_MAX_PROTOCOL: Final = 5
_MAX_DIMS: Final = 32
_MAX_KEY: Final = 2**31 - 1


@dataclass(frozen=True)
class _Name:
    """A name that the pickle uses."""

    text: str


@dataclass(frozen=True)
class Opaque:
    """A value that is no tensor of numbers, and of which only ``kind`` is known."""

    kind: str


@dataclass(frozen=True)
class Storage:
    """A run of elements: the record ``key`` has its bytes.  ``element_type`` "" for one that is counted in bytes."""

    key: str
    element_type: str
    num_elements: int


@dataclass(frozen=True)
class PickledTensor:
    """A tensor in a storage; ``offset`` and ``strides`` are counted in elements."""

    storage: Storage
    element_type: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


_MARK: Final = Opaque("mark")


class PickleDecoder:
    """Decodes the pickles of one file, one after another; ``position`` is the byte after the last one."""

    def __init__(self, data: memoryview, position: int = 0) -> None:
        self._data, self.position = data, position
        self._end = len(data)
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def decode(self) -> Any:
        """Return the value of the next pickle; InvalidFileError names what is neither a tensor nor a plain value."""
        self._stack, self._memo = [], {}
        self._end = min(len(self._data), self.position + MAX_PICKLE_BYTES)
        try:
            while (code := self._take(1)[0]) != _STOP:
                step = _STEPS.get(code)
                if step is None:
                    raise InvalidFileError(f"expected tensors by name, got the pickle instruction {bytes([code])!r}")
                step(self)
            return self._stack.pop()
        except (AttributeError, IndexError, KeyError, RecursionError, TypeError, ValueError, struct.error):
            raise InvalidFileError("expected tensors by name, got a damaged pickle") from None

    def _take(self, count: int) -> memoryview:
        start, end = self.position, self.position + count
        if count < 0 or end > self._end:
            raise InvalidFileError("expected tensors by name, got a damaged pickle, or one that is too large")
        self.position = end
        return self._data[start:end]

    def _number(self, form: str) -> int:
        value: int = struct.unpack(form, self._take(struct.calcsize(form)))[0]
        return value

    def _line(self) -> str:
        start = self.position
        text, newline, _ = bytes(self._data[start : min(start + _MAX_NAME, self._end)]).partition(b"\n")
        self._take(len(text) + 1)
        if not newline:
            raise ValueError
        return text.decode()

    def _push(self, value: Any) -> None:
        self._stack.append(value)

    def _drop(self, value: Any) -> None:
        """Do nothing with a value that has been read."""

    def _protocol(self) -> None:
        if self._take(1)[0] > _MAX_PROTOCOL:
            raise ValueError

    def _pop_to_mark(self) -> list[Any]:
        place = len(self._stack) - 1
        while self._stack[place] is not _MARK:
            place -= 1
            if place < 0:
                raise IndexError
        items = self._stack[place + 1 :]
        del self._stack[place:]
        return items

    def _text(self, form: str) -> None:
        self._push(str(self._take(self._number(form)), "utf-8", "surrogatepass"))

    def _bytes(self, form: str) -> None:
        self._push(bytes(self._take(self._number(form))))

    def _integer(self, form: str) -> None:
        data = self._take(self._number(form))
        if len(data) > 16:
            raise ValueError
        self._push(int.from_bytes(data, "little", signed=True))

    def _name(self, module: str, name: str) -> None:
        text = f"{module}.{name}"
        short = name if module == "torch" else ""
        if text in (*_CALLS, *_CLASSES, *_UNTYPED) or short in _STORAGES or short in _TYPES:
            self._push(_Name(text))
            return
        raise InvalidFileError(f"expected tensors by name, got {printable(text[:80])}; code in a pickle is never run")

    def _name_of_stack(self) -> None:
        name, module = self._stack.pop(), self._stack.pop()
        if not isinstance(name, str) or not isinstance(module, str):
            raise TypeError
        self._name(module, name)

    def _tuple(self, count: int) -> None:
        items = tuple(self._stack[-count:])
        if len(items) != count:
            raise IndexError
        del self._stack[-count:]
        self._push(items)

    def _append(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if not isinstance(target, list):
            raise TypeError
        target.extend(items)

    def _set(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if not isinstance(target, dict):
            raise TypeError
        target.update(_entries(zip(items[::2], items[1::2], strict=True), target))

    def _set_one(self) -> None:
        value, key = self._stack.pop(), self._stack.pop()
        self._set([key, value])

    def _build(self) -> None:
        """Drop the state of an object: attributes of a dictionary of tensors, such as its ``_metadata``."""
        self._stack.pop()
        if not isinstance(self._stack[-1], dict | PickledTensor):
            raise TypeError

    def _call(self) -> None:
        arguments, function = self._stack.pop(), self._stack.pop()
        if not isinstance(function, _Name) or not isinstance(arguments, tuple):
            raise TypeError
        self._push(_called(function.text, arguments))

    def _storage(self) -> None:
        """Push the storage that a persistent id names: ("storage", type, key, device, number of elements, view)."""
        kind, name, key, _, num_elements, *view = self._stack.pop()
        if kind != "storage" or not isinstance(name, _Name) or not isinstance(key, str):
            raise TypeError
        if view not in ([], [None]):
            raise InvalidFileError(f"storage {show(key)}: a view of another storage is not supported")
        short = name.text.removeprefix("torch.")
        if name.text not in _UNTYPED and short not in _STORAGES:
            raise TypeError
        self._push(Storage(key, _STORAGES.get(short, ""), _count(num_elements)))


def _entries(pairs: Iterable[Any], present: dict[Any, Any]) -> dict[Any, Any]:
    """Return the entries to add to a dictionary; each key is a name, or a small number, that it has not yet.

    The hashes of large numbers can be chosen so that all of them collide.
    """
    entries: dict[Any, Any] = {}
    for key, value in pairs:
        if not isinstance(key, str) and not is_integer(key, 0, _MAX_KEY):
            raise InvalidFileError(f"expected names of tensors, got {type(key).__name__}")
        if key in entries or key in present:
            raise InvalidFileError(f"expected each name once, got {show(key)} again")
        entries[key] = value
    return entries


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise ValueError
    return value


def _counts(values: Any) -> tuple[int, ...]:
    if not isinstance(values, tuple) or len(values) > _MAX_DIMS:
        raise TypeError
    return tuple(map(_count, values))


def _called(name: str, arguments: tuple[Any, ...]) -> Any:
    """Return the value that a call in a pickle stands for."""
    if name == "collections.OrderedDict":
        return _entries(arguments[0] if arguments else (), {})
    if name == "torch.Size":
        return _counts(tuple(arguments[0]))
    if name == "torch._tensor._rebuild_from_type_v2":
        function, _, inner, _ = arguments
        return _called(function.text, inner)
    if name in (f"{_REBUILD}parameter", f"{_REBUILD}parameter_with_state"):
        return arguments[0]
    if name in (f"{_REBUILD}tensor", f"{_REBUILD}tensor_v2", f"{_REBUILD}tensor_v3"):
        return _tensor(name, arguments)
    if name in _CALLS:
        return Opaque("a sparse tensor" if "sparse" in name else name)
    raise InvalidFileError(
        f"expected tensors by name, got a call of {printable(name[:80])}; code in a pickle is never run"
    )


def _tensor(name: str, arguments: tuple[Any, ...]) -> PickledTensor:
    storage, offset, shape, strides = arguments[:4]
    if not isinstance(storage, Storage):
        raise TypeError
    element_type = storage.element_type
    if name.endswith("_v3"):
        element_type = arguments[6].text.removeprefix("torch.")
        if element_type not in _TYPES:
            raise TypeError
    shape, strides = _counts(shape), _counts(strides)
    if len(shape) != len(strides):
        raise ValueError
    return PickledTensor(storage, element_type, _count(offset), shape, strides)


_STOP: Final = ord(".")
_Step = Callable[[PickleDecoder], None]
_STEPS: Final[dict[int, _Step]] = {
    0x80: PickleDecoder._protocol,
    0x95: lambda d: d._drop(d._take(8)),
    ord("("): lambda d: d._push(_MARK),
    ord(")"): lambda d: d._push(()),
    ord("]"): lambda d: d._push([]),
    ord("}"): lambda d: d._push({}),
    ord("N"): lambda d: d._push(None),
    0x88: lambda d: d._push(True),
    0x89: lambda d: d._push(False),
    ord("t"): lambda d: d._push(tuple(d._pop_to_mark())),
    0x85: lambda d: d._tuple(1),
    0x86: lambda d: d._tuple(2),
    0x87: lambda d: d._tuple(3),
    ord("0"): lambda d: d._drop(d._stack.pop()),
    ord("a"): lambda d: d._append([d._stack.pop()]),
    ord("e"): lambda d: d._append(d._pop_to_mark()),
    ord("s"): PickleDecoder._set_one,
    ord("u"): lambda d: d._set(d._pop_to_mark()),
    ord("q"): lambda d: d._memo.__setitem__(d._number("<B"), d._stack[-1]),
    ord("r"): lambda d: d._memo.__setitem__(d._number("<I"), d._stack[-1]),
    0x94: lambda d: d._memo.__setitem__(len(d._memo), d._stack[-1]),
    ord("h"): lambda d: d._push(d._memo[d._number("<B")]),
    ord("j"): lambda d: d._push(d._memo[d._number("<I")]),
    ord("K"): lambda d: d._push(d._number("<B")),
    ord("M"): lambda d: d._push(d._number("<H")),
    ord("J"): lambda d: d._push(d._number("<i")),
    0x8A: lambda d: d._integer("<B"),
    0x8B: lambda d: d._integer("<i"),
    ord("G"): lambda d: d._push(d._number(">d")),
    0x8C: lambda d: d._text("<B"),
    ord("X"): lambda d: d._text("<I"),
    0x8D: lambda d: d._text("<Q"),
    ord("U"): lambda d: d._text("<B"),
    ord("T"): lambda d: d._text("<i"),
    ord("C"): lambda d: d._bytes("<B"),
    ord("B"): lambda d: d._bytes("<I"),
    ord("c"): lambda d: d._name(d._line(), d._line()),
    0x93: PickleDecoder._name_of_stack,
    ord("R"): PickleDecoder._call,
    ord("b"): PickleDecoder._build,
    ord("Q"): PickleDecoder._storage,
}
"""The instructions that ``torch.save`` writes, by their code (Python's ``pickletools`` describes each)."""
