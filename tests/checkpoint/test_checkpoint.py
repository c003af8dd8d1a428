"""Checkpoint folders: read without copies, refused with file and tensor."""

from __future__ import annotations

import json
import os
import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from penstock.checkpoint.folder import Checkpoint
from penstock.checkpoint.side_files import read_small_file
from penstock.errors import FileAccessError, InvalidArgumentError, InvalidFileError, PenstockError, UnsupportedError
from tests.support.checkpoint_folders import CONFIG, safetensors, sound_tensors, write_folder
from tests.support.errors import raises

ENTRY = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}


def test_reads_equal_what_the_library_wrote(tmp_path: Path) -> None:
    tensors = {"x.weight": np.arange(12, dtype=np.float32).reshape(3, 4), "y": np.ones(5, np.float16)}
    write_folder(tmp_path)
    save_file(tensors, tmp_path / "model.safetensors")
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.read("x.weight").tobytes() == tensors["x.weight"].tobytes()
    assert checkpoint.read("y").view(np.float16).tolist() == [1.0] * 5
    assert checkpoint.tensors["y"].dtype == "f16"
    assert checkpoint.scheme is None


def test_reads_are_views_that_outlive_release(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(write_folder(tmp_path))
    view = checkpoint.read("a.weight")
    before = view.copy()
    assert not view.flags.owndata
    assert not view.flags.writeable
    checkpoint.release("a.weight")
    assert (view == before).all()
    assert checkpoint.read("c.scalar").shape == ()
    assert checkpoint.read("d.empty").shape == (0, 7)


def test_the_type_with_most_bytes_is_the_checkpoints(tmp_path: Path) -> None:
    assert Checkpoint.open(write_folder(tmp_path)).dtype == "f32"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "8 bytes"),
        (b"\x02\0\0", "8 bytes"),
        (struct.pack("<Q", 2**63) + b"{}", "header: .* 2 bytes"),
        (struct.pack("<Q", 3) + b"{}", "header: .* 2 bytes"),
        (safetensors(b" {}"), "header: .*object"),
        (safetensors(b'{"a":1'), "header: .*JSON"),
        (safetensors(b'{"a":{"dtype":"F32"},"a":1}'), "appears twice"),
        (safetensors({"__metadata__": {"x": 1}}), "__metadata__: .*strings"),
        (safetensors({"a": 3}), "'a': .*dtype, shape and data_offsets"),
        (safetensors({"a": ENTRY | {"more": 1}}, bytes(16)), "dtype, shape and data_offsets"),
        (safetensors({"a": ENTRY | {"dtype": "F4"}}, bytes(16)), "dtype: .*F32"),
        (safetensors({"a": ENTRY | {"dtype": ["F32"]}}, bytes(16)), "dtype: .*F32"),
        (safetensors({"a": ENTRY | {"shape": [2, -2]}}, bytes(16)), "shape: .* 8 sizes"),
        (safetensors({"a": ENTRY | {"shape": [2, True]}}, bytes(16)), "shape: .* 8 sizes"),
        (safetensors({"a": ENTRY | {"shape": [1] * 9}}, bytes(16)), "shape: .* 8 sizes"),
        (safetensors({"a": ENTRY | {"shape": [2**40, 2**40]}}, bytes(16)), "shape: "),
        (safetensors({"a": ENTRY | {"shape": [2, 3]}}, bytes(16)), "data_offsets: .* 24 bytes, got 16"),
        (
            safetensors({"a": ENTRY | {"data_offsets": [16, 0]}}, bytes(16)),
            "data_offsets: .* 16 bytes, got -16",
        ),
        (safetensors({"a": ENTRY | {"data_offsets": [0.0, 16]}}, bytes(16)), "two offsets"),
        (safetensors({"a": ENTRY}, bytes(15)), "96 bytes .* got 95: truncated"),
        (safetensors({"a": ENTRY}, bytes(17)), "after the last tensor"),
        (safetensors({"a": ENTRY | {"data_offsets": [4, 20]}}, bytes(20)), "leaves a hole"),
        (safetensors({"a": ENTRY, "b": ENTRY | {"data_offsets": [8, 24]}}, bytes(24)), "overlaps"),
    ],
)
def test_damaged_safetensors_name_the_field(tmp_path: Path, data: bytes, message: str) -> None:
    with pytest.raises(PenstockError, match=message) as caught:
        Checkpoint.open(write_folder(tmp_path, data))
    assert str(caught.value).startswith("model.safetensors: ")


def test_unreadable_element_types_are_refused_when_read(tmp_path: Path) -> None:
    entry = {"dtype": "I64", "shape": [2], "data_offsets": [0, 16]}
    checkpoint = Checkpoint.open(write_folder(tmp_path, safetensors({"ids": entry}, bytes(16))))
    with raises(UnsupportedError, param="ids"):
        checkpoint.read("ids")


def test_unaligned_tensors_are_copied(tmp_path: Path) -> None:
    header = {"x": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}, "a": ENTRY | {"data_offsets": [1, 17]}}
    data = np.arange(4, dtype=np.float32).tobytes()
    read = Checkpoint.open(write_folder(tmp_path, safetensors(header, b"\0" + data))).read("a")
    assert read.flags.aligned
    assert read.tobytes() == data


def write_shards(folder: Path, weight_map: dict[str, object]) -> Path:
    write_folder(folder)
    (folder / "model.safetensors").unlink()
    one = safetensors({"a": ENTRY}, bytes(16))
    (folder / "model-1.safetensors").write_bytes(one)
    (folder / "model-2.safetensors").write_bytes(one.replace(b'"a"', b'"b"'))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def test_shards_read_as_one(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(write_shards(tmp_path, {"a": "model-1.safetensors", "b": "model-2.safetensors"}))
    assert set(checkpoint.tensors) == {"a", "b"}
    names = [stamp.name for stamp in checkpoint.files]
    assert names == ["config.json", "model-1.safetensors", "model-2.safetensors", "model.safetensors.index.json"]


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({}, "tensor names and files"),
        ({"a": "../model-1.safetensors"}, r"the name of a \.safetensors file"),
        ({"a": "/etc/passwd"}, r"the name of a \.safetensors file"),
        ({"a": "sub/x.safetensors"}, r"the name of a \.safetensors file"),
        ({"a": ".hidden.safetensors"}, r"the name of a \.safetensors file"),
        ({"a": 7}, r"the name of a \.safetensors file"),
        ({"a": "model-9.safetensors"}, "'model-9.safetensors'"),
    ],
)
def test_an_index_names_plain_files_of_the_folder(tmp_path: Path, weight_map: dict[str, object], message: str) -> None:
    with raises(InvalidFileError, param="weight_map", match=message):
        Checkpoint.open(write_shards(tmp_path, weight_map))


@pytest.mark.parametrize(
    ("weight_map", "names", "num_warnings"),
    [
        ({"a": "model-1.safetensors", "z": "model-1.safetensors"}, {"a"}, 0),
        ({"z": "model-1.safetensors"}, {"a"}, 1),
        ({"a": "model-2.safetensors", "b": "model-1.safetensors"}, {"a", "b"}, 0),
        ({"a": "model-1.safetensors", "x": "model-2.safetensors"}, {"a", "b"}, 1),
    ],
)
def test_what_the_files_have_counts_not_what_the_index_says(
    tmp_path: Path, weight_map: dict[str, object], names: set[str], num_warnings: int, caplog: pytest.LogCaptureFixture
) -> None:
    """As in transformers; the network names a tensor that no file has."""
    assert set(Checkpoint.open(write_shards(tmp_path, weight_map)).tensors) == names
    assert len(caplog.records) == num_warnings


def test_shards_without_an_index_are_read_if_all_are_there(tmp_path: Path) -> None:
    write_shards(tmp_path, {"a": "model-1.safetensors"})
    (tmp_path / "model.safetensors.index.json").unlink()
    (tmp_path / "model-1.safetensors").rename(tmp_path / "model-00001-of-00002.safetensors")
    with raises(InvalidFileError, match=r"model-00002-of-00002\.safetensors"):
        Checkpoint.open(tmp_path)
    (tmp_path / "model-2.safetensors").rename(tmp_path / "model-00002-of-00002.safetensors")
    assert set(Checkpoint.open(tmp_path).tensors) == {"a", "b"}


@pytest.mark.parametrize(("name", "hint"), [("rank_0", "--merge` makes"), ("rank_0.psm", "inspect takes each")])
def test_a_folder_of_ranks_is_refused_with_a_way_out(tmp_path: Path, name: str, hint: str) -> None:
    write_folder(tmp_path)
    (tmp_path / name).mkdir()
    with raises(UnsupportedError, param="folder", match=f"several ranks; .*{hint}.*--tp"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt"])
def test_other_formats_are_refused_with_a_way_out(tmp_path: Path, name: str) -> None:
    write_folder(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / name)
    with raises(UnsupportedError, param="folder", match=f"{name}: .*safetensors"):
        Checkpoint.open(tmp_path)


def test_folders_without_a_checkpoint_are_refused(tmp_path: Path) -> None:
    with raises(FileAccessError, param="folder"):
        Checkpoint.open(tmp_path / "gone")
    with raises(InvalidFileError, param="folder", match=r"folder with config\.json, got no file$"):
        Checkpoint.open(tmp_path)
    (tmp_path / "x.psm").touch()
    with raises(InvalidFileError, param="folder", match=r"got no file; to run a bundle, pass .*x\.psm$"):
        Checkpoint.open(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(InvalidFileError, match=r"expected model\.safetensors or"):
        Checkpoint.open(tmp_path)
    with raises(InvalidArgumentError, param="folder"):
        Checkpoint.open(tmp_path / "config.json")
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    with raises(UnsupportedError, param="folder", match=r"to run a GGUF file, pass .*x\.gguf"):
        Checkpoint.open(tmp_path)


def test_a_pipe_in_place_of_a_file_never_blocks(tmp_path: Path) -> None:
    write_folder(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    os.mkfifo(tmp_path / "model.safetensors")
    with raises(InvalidFileError, param="path", match="regular file"):
        Checkpoint.open(tmp_path)


def test_foreign_quantization_is_refused(tmp_path: Path) -> None:
    with raises(UnsupportedError, param="quantization_config", match="'hqq'"):
        Checkpoint.open(write_folder(tmp_path, quantization_config={"quant_method": "hqq"}))


def test_every_truncation_is_an_error(tmp_path: Path) -> None:
    data = sound_tensors()
    for length in range(len(data)):
        with pytest.raises(InvalidFileError):
            Checkpoint.open(write_folder(tmp_path, data[:length]))


def test_a_sentencepiece_tokenizer_without_the_extra_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_folder(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"\n\x09\n\x05<unk>\x18\x02")  # Unigram
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UnsupportedError, match=r"tokenizer\.model.* \S+\[sentencepiece\]"):
        Checkpoint.open(tmp_path).side_files()
    (tmp_path / "tokenizer.json").write_text("{}")
    assert Checkpoint.open(tmp_path).side_files()["tokenizer.json"] == b"{}"


def test_side_files_are_read_with_a_limit(tmp_path: Path) -> None:
    write_folder(tmp_path)
    (tmp_path / "tokenizer_config.json").write_bytes(b" " * 200)
    assert list(Checkpoint.open(tmp_path).side_files()) == ["config.json", "tokenizer_config.json"]
    with raises(InvalidFileError, param="path", match=r"tokenizer_config\.json: .* 100 bytes"):
        read_small_file(tmp_path / "tokenizer_config.json", 100)


def test_a_small_file_takes_no_more_memory_than_its_size(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b"x" * 1000)
    tracemalloc.start()
    try:
        assert read_small_file(tmp_path / "config.json") == b"x" * 1000
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
