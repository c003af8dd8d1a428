"""Importance matrices: written and read as llama.cpp's, compared with the gguf package."""

from __future__ import annotations

import dataclasses
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest

from penstock.checkpoint.gguf.imatrix import is_imatrix, read_imatrix, write_imatrix
from penstock.errors import FileAccessError, InvalidFileError, PenstockError, UnsupportedError
from penstock.quant.input_statistics import InputStatistics, WeightInputs
from tests.support.errors import raises

Q, DOWN = "model.layers.0.self_attn.q_proj.weight", "model.layers.11.mlp.down_proj.weight"
SUMS = np.arange(1, 9, dtype=np.float64)


def statistics(**weights: WeightInputs) -> InputStatistics:
    own = {Q: WeightInputs(SUMS, 4, SUMS.astype(np.float32)), DOWN: WeightInputs(SUMS * 2, 4)}
    return InputStatistics(own | weights, 4, "ab", "texts.txt")


def binary(*entries: tuple[str, int, np.ndarray]) -> bytes:
    """The older form."""
    data = struct.pack("<i", len(entries))
    for name, calls, values in entries:
        data += struct.pack("<i", len(name)) + name.encode() + struct.pack("<ii", calls, len(values))
        data += values.astype("<f4").tobytes()
    return data + struct.pack("<ii", 3, 4) + b"text"


def test_a_written_file_is_one_of_llama_cpp(tmp_path: Path) -> None:
    assert write_imatrix(tmp_path / "a.gguf", statistics(), "llama") == 2
    reader = gguf.GGUFReader(tmp_path / "a.gguf")
    assert reader.fields["general.type"].contents() == "imatrix"
    assert reader.fields["imatrix.datasets"].contents() == ["texts.txt"]
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    assert sorted(tensors) == [
        "blk.0.attn_q.weight.counts", "blk.0.attn_q.weight.in_sum2",
        "blk.11.ffn_down.weight.counts", "blk.11.ffn_down.weight.in_sum2",
    ]  # fmt: skip
    assert tensors["blk.0.attn_q.weight.in_sum2"].shape.tolist() == [8, 1]
    assert tensors["blk.11.ffn_down.weight.in_sum2"].data.reshape(-1).tolist() == (2 * SUMS).tolist()
    assert tensors["blk.0.attn_q.weight.counts"].data.reshape(-1).tolist() == [4]
    read = read_imatrix(tmp_path / "a.gguf", "llama")
    assert read.weights.keys() == {Q, DOWN}
    assert read.weights[Q].mean_squares.tolist() == (SUMS / 4).tolist()
    with raises(FileAccessError):
        write_imatrix(tmp_path / "a.gguf", statistics(), "llama")


@pytest.mark.parametrize(("own", "name"), [("lm_head", "output"), ("model.embed_tokens", "token_embd")])
def test_the_inputs_of_the_head_are_written(tmp_path: Path, own: str, name: str) -> None:
    heads = {f"{own}.weight": WeightInputs(SUMS * 3, 4)}
    assert write_imatrix(tmp_path / "a.gguf", dataclasses.replace(statistics(), heads=heads), "llama") == 3
    tensors = {tensor.name: tensor.data for tensor in gguf.GGUFReader(tmp_path / "a.gguf").tensors}
    assert tensors[f"{name}.weight.in_sum2"].reshape(-1).tolist() == (3 * SUMS).tolist()
    assert read_imatrix(tmp_path / "a.gguf", "llama").weights[f"{own}.weight"].count == 4


def test_files_of_llama_cpp_are_read(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "")
    writer.add_string("general.type", "imatrix")
    sums = np.arange(12, dtype=np.float32).reshape(3, 4)
    writer.add_tensor("blk.0.ffn_gate_exps.weight.in_sum2", sums)
    writer.add_tensor("blk.0.ffn_gate_exps.weight.counts", np.array([[2.0], [0.0], [1.0]], np.float32))
    writer.add_tensor("output.weight.in_sum2", sums[:1])
    writer.add_tensor("output.weight.counts", np.array([[1.0]], np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    read = read_imatrix(tmp_path / "a.gguf", "mixtral")
    experts = [name for name in read.weights if name != "lm_head.weight"]
    assert len(experts) == 3
    assert "lm_head.weight" in read.weights
    assert read.weights[experts[0]].mean_squares.tolist() == [0, 0.5, 1, 1.5]
    assert read.weights[experts[1]].count == 0


def test_the_older_form_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.dat"
    path.write_bytes(binary(("blk.0.attn_q.weight", 2, SUMS), ("blk.0.other.weight", 1, SUMS)))
    assert is_imatrix(path)
    read = read_imatrix(path, "llama")
    assert read.weights[Q].mean_squares.tolist() == (SUMS / 2).tolist()
    assert len(read.weights) == 1


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"text",
        binary(("blk.0.attn_q.weight", 1, SUMS))[:30],
        binary(("x" * 300, 1, SUMS)),
        binary(("blk.0.other.weight", 1, SUMS)),
        binary(("blk.0.attn_q.weight", 1, -SUMS)),
        binary(("blk.0.attn_q.weight", 1, SUMS * np.nan)),
        b"GGUF" + bytes(20),
    ],
)
def test_other_data_is_refused(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a.dat"
    path.write_bytes(data)
    with raises((InvalidFileError, PenstockError)):
        read_imatrix(path, "llama")


def test_families_without_names_are_refused(tmp_path: Path) -> None:
    with raises(UnsupportedError):
        write_imatrix(tmp_path / "a.gguf", statistics(), "other")
