"""Pickled weights are read by a confined process that returns tensors and nothing else."""

from __future__ import annotations

import json
import os
import pickle
import signal
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from penstock.checkpoint.pickled import open_pickled, unpickle
from penstock.checkpoint.pickles.decoder import PickleDecoder
from penstock.checkpoint.pickles.file import PickledFile
from penstock.errors import InvalidFileError, PenstockError
from penstock.launch.local_group import describe_end
from penstock.runtime.build import _failure
from tests.support.errors import raises
from tests.support.marks import mostly_long


class Runs:
    """Its pickle calls a function."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


def test_every_type_and_form_comes_back(tmp_path: Path) -> None:
    base = torch.arange(24.0).reshape(4, 6)
    tensors = {
        "view": base[:, 1:3], "turned": base.t(), "scalar": torch.tensor(2.5), "empty": torch.zeros(0, 3),
        "bf16": base.bfloat16(), "f16": base.half(), "f64": base.double(), "int": torch.arange(5),
        "bool": torch.tensor([True, False]), "same": base, "parameter": torch.nn.Parameter(base),
        "steps": base[::2, ::3], "turned large": torch.arange(5 << 20).reshape(5, 1 << 20).t(),
        "module": torch.nn.Linear(3, 2).state_dict(keep_vars=True)["weight"],
    }  # fmt: skip
    for name, legacy in (("zip.bin", False), ("old.bin", True)):
        torch.save(tensors, tmp_path / name, _use_new_zipfile_serialization=not legacy)
        unpickle(tmp_path / name, tmp_path / f"{name}.safetensors")
        found = load_file(tmp_path / f"{name}.safetensors")
        assert found.keys() == tensors.keys()
        assert all(found[key].dtype == value.dtype and torch.equal(found[key], value) for key, value in tensors.items())


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([torch.ones(2)], "expected tensors by name, got list"),
        ({"a": 1}, "'a': expected a tensor, got int"),
        ({"a": {"b": torch.ones(2)}}, "'a': expected a tensor, got dict"),
        ({1: torch.ones(2)}, "expected names of tensors, got 1"),
        ({"a": torch.ones(2, 2).to_sparse()}, "'a': expected a tensor, got a sparse tensor"),
        ({"a": torch.ones(2, dtype=torch.complex64)}, "'a': type torch.complex64 is not supported"),
        ({"a": torch.ones(1).expand(1 << 34)}, "expected tensors of at most"),
    ],
)
def test_anything_but_tensors_is_refused(value: Any, message: str, tmp_path: Path) -> None:
    torch.save(value, tmp_path / "x.bin")
    with pytest.raises(InvalidFileError) as raised:
        unpickle(tmp_path / "x.bin", tmp_path / "x.safetensors")
    assert str(raised.value).startswith(f"x.bin: {message}")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("protocol", [2, 4])
def test_code_in_a_pickle_does_not_run(protocol: int, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    for number, value in enumerate([Runs(os.system, f"touch {mark}"), {"a": Runs(eval, "1")}, Runs(mark.touch)]):
        path = tmp_path / f"{number}.bin"
        path.write_bytes(pickle.dumps(value, protocol))
        zipped = tmp_path / f"{number}-zip.bin"
        torch.save(value, zipped, pickle_protocol=protocol)
        for file in (path, zipped) if protocol == 2 else (path,):  # PyTorch writes archives of protocol 2
            with raises(InvalidFileError, match=rf"^{file.name}: "):
                unpickle(file, file.with_suffix(".safetensors"))
    assert not mark.exists()


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize(
    ("call", "name"),
    [
        (Runs(bytearray, 4 << 30), "__builtin__.bytearray"),
        (Runs(torch.Tensor, 1000), "a call of torch.Tensor"),
        (Runs(torch.FloatStorage, 1000), "a call of torch.FloatStorage"),
    ],
)
def test_memory_without_a_value_is_not_made(call: Runs, name: str, legacy: bool, tmp_path: Path) -> None:
    torch.save({"a": call, "b": torch.ones(1000)}, tmp_path / "x.bin", _use_new_zipfile_serialization=not legacy)
    with raises(InvalidFileError, match=f"x.bin: expected tensors by name, got {name};"):
        unpickle(tmp_path / "x.bin", tmp_path / "x.safetensors")


def rewritten(path: Path, change: Callable[[str, bytes], bytes], method: int = zipfile.ZIP_STORED) -> None:
    """Write an archive again, with other contents of its records."""
    with zipfile.ZipFile(path) as archive:
        records = [(info.filename, archive.read(info)) for info in archive.infolist()]
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, data in records:
            archive.writestr(name, change(name, data))


def test_a_storage_does_not_reach_beyond_its_record(tmp_path: Path) -> None:
    path = tmp_path / "x.bin"
    torch.save({"a": torch.ones(100), "b": torch.zeros(100)}, path)
    rewritten(path, lambda name, data: data[:-4] if name.endswith("data/0") else data)
    with raises(InvalidFileError, match=r"'a': storage '0': expected at most the 396 bytes of its record"):
        unpickle(path, tmp_path / "x.safetensors")
    torch.save({"a": torch.ones(100), "b": torch.zeros(100)}, path)
    number = pickle.dumps(100, 2)[2:-1]  # both sizes of a tensor of 100 elements
    rewritten(path, lambda name, data: data.replace(number + b"\x85", b"K\x65\x85") if "pkl" in name else data)
    with raises(InvalidFileError, match=r"'a': expected a tensor within the 400 bytes of its storage, got one of 404"):
        unpickle(path, tmp_path / "y.safetensors")


def test_a_storage_of_two_types_and_a_missing_one(tmp_path: Path) -> None:
    path = tmp_path / "x.bin"
    torch.save({"a": torch.ones(100), "b": torch.zeros(100, dtype=torch.int32)}, path)
    rewritten(path, lambda name, data: data.replace(b"\x01\x00\x00\x001", b"\x01\x00\x00\x000"))
    with raises(InvalidFileError, match=r"'b': storage '0': expected one type of elements, got two"):
        unpickle(path, tmp_path / "x.safetensors")
    rewritten(path, lambda name, data: data.replace(b"\x01\x00\x00\x000", b"\x01\x00\x00\x007"))
    with raises(InvalidFileError, match=r"'a': storage '7': expected its bytes in the file, got none"):
        unpickle(path, tmp_path / "y.safetensors")


def test_compressed_and_repeated_records_are_named(tmp_path: Path) -> None:
    path = tmp_path / "x.bin"
    torch.save({"a": torch.ones(100)}, path)
    rewritten(path, lambda _, data: data, zipfile.ZIP_DEFLATED)
    with raises(
        InvalidFileError, match=r"record '[\w./]+': expected one that is stored as it is, got a compressed one"
    ):
        unpickle(path, tmp_path / "x.safetensors")
    torch.save({"a": torch.ones(100)}, path)
    with zipfile.ZipFile(path, "a") as archive, pytest.warns(UserWarning, match="Duplicate name"):
        archive.writestr("x/data/0", bytes(400))
    with raises(InvalidFileError, match=r"expected each record of the archive once, got 'data/0' again"):
        unpickle(path, tmp_path / "y.safetensors")


@pytest.mark.parametrize(
    "code", [b"]" * (1 << 20), b"(" * (1 << 20), b"h\x00", b"q\x00", b"R", b"\x8b\xff\xff\xff\x7f"]
)
def test_a_hostile_program_of_a_pickle_is_refused(code: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x.bin"
    torch.save({"a": torch.ones(100)}, path)
    rewritten(path, lambda name, data: b"\x80\x02" + code + b"." if name.endswith("pkl") else data)
    with pytest.raises(InvalidFileError, match=r"^x.bin: (expected|reading it)"):
        unpickle(path, tmp_path / "x.safetensors")


def test_a_record_does_not_reach_into_the_next(tmp_path: Path) -> None:
    """Its size is in the directory at the end of an archive, which may say anything."""
    path = tmp_path / "x.bin"
    torch.save({"a": torch.ones(100), "b": torch.zeros(100)}, path)
    data = bytearray(path.read_bytes())
    PickledFile(memoryview(data))
    entry = data.index(b"x/data/0", data.index(b"PK\x01\x02")) - 46
    assert struct.unpack_from("<2I", data, entry + 20) == (400, 400)
    struct.pack_into("<2I", data, entry + 20, 600, 600)
    with pytest.raises(InvalidFileError, match="expected records that do not overlap"):
        PickledFile(memoryview(data))


def test_numbers_whose_hashes_collide_are_no_names() -> None:
    number = (3 * sys.hash_info.modulus).to_bytes(12, "little")  # the hash of each multiple is 0
    with pytest.raises(InvalidFileError, match="expected names of tensors, got int"):
        PickleDecoder(memoryview(b"\x80\x02}\x8a\x0c" + number + b"Ns.")).decode()
    assert PickleDecoder(memoryview(b"\x80\x02}K\x01Ns.")).decode() == {1: None}


def test_what_a_pickle_would_run_is_named(tmp_path: Path) -> None:
    torch.save({"a": Runs(os.system, "true")}, tmp_path / "x.bin")
    with pytest.raises(InvalidFileError) as raised:
        unpickle(tmp_path / "x.bin", tmp_path / "x.safetensors")
    assert str(raised.value) == ("x.bin: expected tensors by name, got posix.system; code in a pickle is never run")


@pytest.mark.long
def test_a_pickle_is_read_where_threads_are_bound_to_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_PROC_BIND", "true")
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    torch.save({"a": torch.ones(1000, 1000)[:, ::2]}, tmp_path / "x.bin")  # is copied by several threads elsewhere
    unpickle(tmp_path / "x.bin", tmp_path / "x.safetensors")
    assert load_file(tmp_path / "x.safetensors")["a"].shape == (1000, 500)


@pytest.mark.parametrize("data", mostly_long([b"", b"PK\x03\x04", b"\x80\x02.", bytes(1000)], b"PK\x03\x04"))
def test_damaged_files_are_refused(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "x.bin").write_bytes(data)
    with raises(InvalidFileError, match=r"^x.bin: "):
        unpickle(tmp_path / "x.bin", tmp_path / "x.safetensors")


def test_a_child_killed_by_any_signal_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_time = signal.SIGRTMIN + 1  # it has no name
    torch.save({"a": torch.ones(2)}, tmp_path / "x.bin")
    ended = subprocess.CompletedProcess([], -real_time, None, b"")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: ended)
    with pytest.raises(InvalidFileError, match=f"signal {real_time}"):
        unpickle(tmp_path / "x.bin", tmp_path / "x.safetensors")
    assert f"signal {real_time}" in str(_failure({}, -real_time, [], ("", "")))
    assert f"signal {real_time}" in describe_end(-real_time)


def test_several_files_are_one_checkpoint(tmp_path: Path) -> None:
    source, temporary = tmp_path / "source", tmp_path / "temporary"
    source.mkdir()
    temporary.mkdir()
    torch.save({"a": torch.ones(2)}, source / "pytorch_model-1.bin")
    torch.save({"b": torch.zeros(3)}, source / "pytorch_model-2.bin")
    (source / "config.json").write_text('{"model_type": "llama"}')
    index = {"weight_map": {"a": "pytorch_model-1.bin", "b": "pytorch_model-2.bin"}}
    (source / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    assert sorted(open_pickled(source, temporary).tensors) == ["a", "b"]
    index["weight_map"]["b"] = "../x.bin"
    (source / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    with raises(PenstockError, param="weight_map", match="'../x.bin'"):
        open_pickled(source, temporary)
