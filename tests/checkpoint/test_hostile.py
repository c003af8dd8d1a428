"""Thousands of damaged files, from a fixed seed: a PenstockError or a sound result, never anything else."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from penstock.checkpoint import tensor_file
from penstock.checkpoint.folder import Checkpoint
from penstock.checkpoint.generation import (
    clean_generation_config,
    read_chat_templates,
    read_generation_config,
    read_tokenizer_config,
)
from penstock.checkpoint.tensor_file import MAX_TENSORS, parse_header
from penstock.config import ConfigReader, parse_json, parse_object
from penstock.errors import InvalidFileError
from tests.support.checkpoint_folders import CONFIG, sound_tensors, write_folder
from tests.support.errors import raises
from tests.support.file_damage import count_refusals, num_mutants


@pytest.mark.long
def test_damaged_safetensors_are_refused_or_sound(tmp_path: Path) -> None:
    folder = write_folder(tmp_path)

    def use(data: bytes) -> None:
        (folder / "model.safetensors").write_bytes(data)
        checkpoint = Checkpoint.open(folder)
        for name, info in checkpoint.tensors.items():
            if info.dtype in ("f32", "f16", "bf16", "i8", "u8"):
                assert checkpoint.read(name).nbytes == info.num_bytes

    count = num_mutants(4000)
    assert count_refusals(1, count, sound_tensors(), use) > count // 2


def test_damaged_configs_are_refused_or_sound() -> None:
    values = CONFIG | {
        "rope_scaling": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64},
        "quantization_config": {"quant_method": "penstock", "scheme": "w4a8", "version": 1},
    }

    def use(data: bytes) -> None:
        reader = ConfigReader.parse(data)
        reader.rope(64)
        reader.dtype()
        reader.quantization()
        reader.int("vocab_size")
        read_generation_config({"config.json": data})

    count = num_mutants(4000)
    assert count_refusals(2, count, json.dumps(values).encode(), use) > count // 2


def test_damaged_generation_configs_are_refused_or_valid() -> None:
    tokenizer = {
        "bos_token": {"content": "<s>", "lstrip": False},
        "eos_token": "</s>",
        "add_bos_token": True,
        "model_max_length": 1e30,
        "chat_template": [{"name": "default", "template": "{{ messages }}"}, {"name": "tool_use", "template": "x"}],
    }
    generation = {"eos_token_id": [1, 2], "do_sample": True, "temperature": 0.6, "top_k": 40, "top_p": 0.9}

    def use_tokenizer(data: bytes) -> None:
        read_tokenizer_config({"tokenizer_config.json": data})
        read_chat_templates({"tokenizer_config.json": data})

    def use_generation(data: bytes) -> None:
        config = read_generation_config({"generation_config.json": data})
        assert 0 <= config.temperature <= 1000
        assert 0 < config.top_p <= 1
        assert config.top_k >= 0
        if clean_generation_config(data) != data:  # with a warning; the rest is used
            raise InvalidFileError("a value is not used")

    count = num_mutants(3000)
    assert count_refusals(3, count, json.dumps(tokenizer).encode(), use_tokenizer) > count // 3
    assert count_refusals(4, count, json.dumps(generation).encode(), use_generation) > count // 3


def test_damaged_indexes_are_refused_or_sound(tmp_path: Path) -> None:
    folder = write_folder(tmp_path)
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    names = ("a.weight", "b.weight", "c.scalar", "d.empty")
    index = {"metadata": {"total_size": 128}, "weight_map": dict.fromkeys(names, "model-00001-of-00001.safetensors")}

    def use(data: bytes) -> None:
        (folder / "model.safetensors.index.json").write_bytes(data)
        Checkpoint.open(folder)

    count = num_mutants(2000)
    assert count_refusals(5, count, json.dumps(index).encode(), use) > count // 2


def test_a_file_that_shrinks_while_it_is_opened_is_refused(tmp_path, monkeypatch):
    folder = write_folder(tmp_path / "model")
    parse = tensor_file.parse_header

    def shrink(*arguments):
        os.truncate(folder / "model.safetensors", 100)
        return parse(*arguments)

    monkeypatch.setattr(tensor_file, "parse_header", shrink)
    with raises(InvalidFileError, param="path", match=r"model\.safetensors: .*shrank"):
        Checkpoint.open(folder)


def _many(count: int) -> bytes:
    entry = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    return json.dumps({f"t{i}": entry for i in range(count)}).encode()


@pytest.mark.parametrize(
    ("header_of", "message"),
    [
        (lambda: _many(300_000), "header: .* 2097152 values, .* 2100000"),
        (lambda: _many(MAX_TENSORS + 2), f"header: .* {MAX_TENSORS} tensors, got {MAX_TENSORS + 2}"),
        (lambda: b'{"a":[' + b"[]," * 20_000_000 + b"[]]}", "header: .* 2097152 values"),
        (lambda: b'{"a":' + b"[" * 500_000 + b"]" * 500_000 + b"}", "header: .* 64 levels"),
        (lambda: b'{"a":' + b"9" * 50_000_000 + b"}", "header: .*JSON"),
    ],
    ids=["empty-tensors", "tensors", "lists", "nesting", "digits"],
)
def test_huge_headers_are_refused_in_seconds(header_of: Callable[[], bytes], message: str) -> None:
    header = header_of()
    start = time.process_time()
    with pytest.raises(InvalidFileError, match=message):
        parse_header(header, len(header) + 8, len(header) + 8, "model.safetensors")
    assert time.process_time() - start < 30


@pytest.mark.long
def test_a_header_of_many_tensors_is_read_in_seconds() -> None:
    header, start = _many(MAX_TENSORS), time.process_time()
    assert len(parse_header(header, 8, 8, "model.safetensors")) == MAX_TENSORS
    assert time.process_time() - start < 30


def test_an_index_of_too_many_tensors_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    names = {f"t{i}": "a.safetensors" for i in range(MAX_TENSORS + 1)}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    with raises(InvalidFileError, param="weight_map", match=f"{MAX_TENSORS} tensors"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize("item", [b"1", b"-1.5", b'"k"', b"[]", b'{"":0}'])
def test_a_config_of_16_mb_takes_no_time(tmp_path: Path, item: bytes) -> None:
    for num_items in ((1 << 20) // 4, (15 << 20) // (len(item) + 1)):
        data = b'{"a":[' + b",".join([item] * num_items) + b"]}"
        start = time.process_time()
        with suppress(InvalidFileError):
            parse_object(data, "config.json")
        assert time.process_time() - start < 5


def test_json_of_too_many_values_is_refused() -> None:
    with pytest.raises(InvalidFileError, match=r"config.json: .* 3 values, .* 4"):
        parse_json(b"[1,[],2]", "config.json", max_values=3)
    assert parse_json(b"[1,[],2]", "config.json", max_values=4) == [1, [], 2]
