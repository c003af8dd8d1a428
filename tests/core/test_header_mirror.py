"""The ctypes declarations of ``core/library.py`` are those of the C headers: every field, argument and result."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path
from typing import Any

import pytest

from penstock.core import library

INCLUDE = Path(__file__).parents[2] / "core" / "include"
SCALARS = {
    "int8_t": ctypes.c_int8, "uint8_t": ctypes.c_uint8, "int32_t": ctypes.c_int32, "uint32_t": ctypes.c_uint32,
    "int64_t": ctypes.c_int64, "uint64_t": ctypes.c_uint64, "float": ctypes.c_float, "double": ctypes.c_double,
    "ps_status": ctypes.c_int32,
}  # fmt: skip
POINTERS = (ctypes.c_void_p, ctypes.c_char_p)


def code_of(names: tuple[str, ...]) -> str:
    """The headers without comments and preprocessor lines."""
    text = "\n".join((INCLUDE / name).read_text() for name in names)
    return re.sub(r"^#.*$", "", re.sub(r"/\*.*?\*/", " ", text, flags=re.DOTALL), flags=re.MULTILINE)


CODE = code_of(("penstock.h", "penstock_ranks.h", "penstock_dev.h"))
STRUCTS = {name: body for body, name in re.findall(r"typedef struct ps_\w+ \{(.*?)\} (ps_\w+);", CODE, re.DOTALL)}
FUNCTIONS = {
    name: (result.strip(), arguments)
    for result, name, arguments in re.findall(r"PS_API ([^;()]*?)\b(ps_\w+)\(([^;]*?)\);", CODE, re.DOTALL)
}
ENUMS = set(re.findall(r"\} (ps_\w+);", CODE)) - set(STRUCTS)


def split_type(declaration: str) -> tuple[str, str]:
    """``const char* name`` as ``("char*", "name")``; a function pointer as ``("(*)", "name")``."""
    if function := re.match(r".*?\(\*(\w+)\)\(", declaration):
        return "(*)", function[1]
    words = re.sub(r"\b(const|struct)\b", "", declaration).replace("*", " * ").split()
    length = re.search(r"\[(\w+)\]$", words[-1])
    name = words.pop().partition("[")[0] if words[-1] not in SCALARS and len(words) > 1 else ""
    if name == "*":
        words, name = [*words, "*"], ""
    return words[0] + "*" * words.count("*") + (f"[{length[1]}]" if length else ""), name


def fields_of(struct: str) -> list[tuple[str, str]]:
    """The types and names of a struct's fields; ``int32_t rank, world`` are two."""
    fields = []
    for line in STRUCTS[struct].replace("\n", " ").split(";"):
        if not line.strip():
            continue
        if "(*" in line:
            fields.append(split_type(line.strip()))
            continue
        first, *others = line.split(",")
        base = re.sub(r"\b(const|struct)\b", "", first).replace("*", " ").split()[0]
        fields += [split_type(first), *(split_type(f"{base} {other}") for other in others)]
    return fields


def compare(c_type: str, declared: Any, where: str, structs: dict[str, Any]) -> None:
    """One type of a header beside one of ctypes.  ``structs`` collects which class stands for which struct."""
    if array := re.fullmatch(r"(\w+)\[(\w+)\]", c_type):
        if issubclass(declared, ctypes.Array):
            assert array[2] == str(declared._length_), where
            return compare(array[1], declared._type_, where, structs)
        c_type = array[1] + "*"  # an argument
    if c_type == "(*)":
        assert issubclass(declared, ctypes._CFuncPtr), where
    elif c_type.endswith("*"):
        target = c_type[:-1]
        if declared in POINTERS:
            assert declared is ctypes.c_void_p or target in ("char", "void"), where
        elif target.endswith("*") or target not in (*SCALARS, *STRUCTS):
            assert declared._type_ in (ctypes.c_void_p, *POINTERS) or issubclass(declared._type_, ctypes._Pointer), (
                where
            )
        else:
            compare(target, declared._type_, where, structs)
    elif c_type in STRUCTS:
        assert issubclass(declared, ctypes.Structure), where
        assert structs.setdefault(c_type, declared) is declared, where
    else:
        assert declared is (ctypes.c_int32 if c_type in ENUMS else SCALARS[c_type]), f"{where}: {c_type}"
    return None


def compare_function(name: str, structs: dict[str, Any]) -> None:
    result, arguments = FUNCTIONS[name]
    declared_result, declared = library._FUNCTIONS[name]
    types = [split_type(text)[0] for text in arguments.split(",") if text.strip() != "void"]
    assert len(types) == len(declared), name
    for index, (c_type, argument) in enumerate(zip(types, declared, strict=True)):
        compare(c_type, argument, f"{name}, argument {index}", structs)
    if result == "void":
        assert declared_result is None, name
    else:
        compare(split_type(result + " x")[0], declared_result, f"{name}: result", structs)


def compare_struct(name: str, structs: dict[str, Any]) -> None:
    declared = structs[name]._fields_
    fields = fields_of(name)
    assert [field.rstrip("_") for field, _ in declared] == [field for _, field in fields], name
    for (c_type, field), (_, own) in zip(fields, declared, strict=True):
        compare(c_type, own, f"{name}.{field}", structs)


def test_functions_and_structs_are_those_of_the_headers() -> None:
    structs: dict[str, Any] = {}
    for name in library._FUNCTIONS:
        compare_function(name, structs)
    assert {"ps_batch", "ps_sampling", "ps_comm", "ps_tensor", "ps_plan"} <= set(structs)
    compared: set[str] = set()
    while waiting := set(structs) - compared:  # a struct may have others
        for name in waiting:
            compare_struct(name, structs)
        compared |= waiting
    classes = {value for value in vars(library).values() if isinstance(value, type)}
    own = {value for value in classes if issubclass(value, ctypes.Structure) and value.__module__ == library.__name__}
    assert own == set(structs.values())


def test_errors_are_those_of_the_headers() -> None:
    (body,) = re.findall(r"typedef enum ps_status \{(.*?)\}", CODE, re.DOTALL)
    codes = [int(number) for number in re.findall(r"= (\d+)", body)]
    assert codes == [0, *library._ERRORS]


def test_a_wrong_mirror_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = type("Wrong", (ctypes.Structure,), {"_fields_": [("num_tokens", ctypes.c_int32)]})
    with pytest.raises(AssertionError, match="ps_batch"):
        compare_struct("ps_batch", {"ps_batch": wrong})
    arguments = (ctypes.c_int32, ctypes.c_void_p, ctypes.c_int64)
    monkeypatch.setitem(library._FUNCTIONS, "ps_crc32", (ctypes.c_uint32, arguments))
    with pytest.raises(AssertionError, match="ps_crc32, argument 0"):
        compare_function("ps_crc32", {})
