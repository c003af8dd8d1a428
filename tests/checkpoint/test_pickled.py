"""Pickled weights are read by a confined process that returns tensors and nothing else."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from penstock.checkpoint.pickled import open_pickled, unpickle
from penstock.errors import InvalidFileError, PenstockError
from tests.support.errors import raises
from tests.support.marks import mostly_long


class Runs:
    """Its pickle calls a function."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.long
def test_every_type_and_form_comes_back(tmp_path: Path) -> None:
    base = torch.arange(24.0).reshape(4, 6)
    tensors = {
        "view": base[:, 1:3], "turned": base.t(), "scalar": torch.tensor(2.5), "empty": torch.zeros(0, 3),
        "bf16": base.bfloat16(), "f16": base.half(), "f64": base.double(), "int": torch.arange(5),
        "bool": torch.tensor([True, False]), "same": base, "parameter": torch.nn.Parameter(base),
    }  # fmt: skip
    for name, legacy in (("zip.bin", False), ("old.bin", True)):
        torch.save(tensors, tmp_path / name, _use_new_zipfile_serialization=not legacy)
        unpickle(tmp_path / name, tmp_path / f"{name}.safetensors")
        found = load_file(tmp_path / f"{name}.safetensors")
        assert found.keys() == tensors.keys()
        assert all(found[key].dtype == value.dtype and torch.equal(found[key], value) for key, value in tensors.items())


@pytest.mark.long
@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([torch.ones(2)], "expected tensors by name, found list"),
        ({"a": 1}, "'a': expected a tensor, found int"),
        ({"a": {"b": torch.ones(2)}}, "'a': expected a tensor, found dict"),
        ({1: torch.ones(2)}, "expected names of tensors, found 1"),
        ({"a": torch.ones(2, 2).to_sparse()}, "'a': expected a tensor"),
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


@pytest.mark.long
@pytest.mark.parametrize("protocol", [2, 4])
def test_code_in_a_pickle_does_not_run(protocol: int, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    for number, value in enumerate([Runs(os.system, f"touch {mark}"), {"a": Runs(eval, "1")}, Runs(mark.touch)]):
        path = tmp_path / f"{number}.bin"
        path.write_bytes(pickle.dumps(value, protocol))
        zipped = tmp_path / f"{number}-zip.bin"
        torch.save(value, zipped, pickle_protocol=protocol)
        for file in (path, zipped) if protocol == 2 else (path,):  # PyTorch writes archives of protocol 2
            with pytest.raises(InvalidFileError, match=rf"^{file.name}: "):
                unpickle(file, file.with_suffix(".safetensors"))
    assert not mark.exists()


def test_what_a_pickle_would_run_is_named(tmp_path: Path) -> None:
    torch.save({"a": Runs(os.system, "true")}, tmp_path / "x.bin")
    with pytest.raises(InvalidFileError) as raised:
        unpickle(tmp_path / "x.bin", tmp_path / "x.safetensors")
    assert str(raised.value) == ("x.bin: expected tensors by name, found posix.system; code in a pickle is never run")


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
    with pytest.raises(InvalidFileError, match=r"^x.bin: "):
        unpickle(tmp_path / "x.bin", tmp_path / "x.safetensors")


@pytest.mark.long
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
