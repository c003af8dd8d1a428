"""The files beside a tokenizer: end tokens, ids that no token has, silly lengths, and damage by name."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from penstock.checkpoint.folder import Checkpoint
from penstock.checkpoint.generation import read_generation_config, read_tokenizer_config
from penstock.checkpoint.side_files import read_folder_files, read_side_files
from penstock.checkpoint.tokenizer_file import LibraryTokenizer
from penstock.checkpoint.tokenizer_files.names import TOKENIZER_INPUTS
from penstock.errors import InvalidArgumentError, InvalidFileError
from penstock.hub.allowed_files import choose_files
from penstock.hub.names import ModelName
from penstock.hub.remote_model import RemoteFile, RemoteModel
from penstock.runtime.cache import bundle_key
from penstock.sharding.folder import kept_files
from tests.support.checkpoint_folders import write_folder
from tests.support.errors import raises
from tests.support.gguf_files import llama_file, text_metadata
from tests.support.tokenizer_folders import SHAPES

LLAMA_3 = "Llama 3, special_tokens_map.json"


def folder_of(folder: Path, shape: str = LLAMA_3, **files: object) -> Path:
    SHAPES[shape](folder)
    for name, value in files.items():
        (folder / f"{name}.json").write_text(value if isinstance(value, str) else json.dumps(value))
    return folder


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({}, {}, (402,)),
        ({"eos_token_id": 401}, {"eos_token_id": 400}, (401, 402)),
        ({"eos_token_id": [401, 402]}, {}, (401, 402)),
        (None, {"eos_token_id": [400, -1]}, (400, 402)),
        ({"eos_token_id": -1}, {"eos_token_id": 400}, (400, 402)),
    ],
)
def test_the_end_token_of_the_tokenizer_ends_texts(
    generation: dict[str, Any] | None, config: dict[str, Any], expected: tuple[int, ...], tmp_path: Path
) -> None:
    written = {} if generation is None else {"generation_config": generation | {"top_k": 7}}
    files = read_folder_files(folder_of(tmp_path, config=config, **written))
    assert read_generation_config(files).eos_token_ids == expected
    if generation is not None:
        assert json.loads(files["generation_config.json"])["top_k"] == 7


def test_a_damaged_generation_config_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = folder_of(tmp_path, config={"eos_token_id": 400})
    (folder / "generation_config.json").write_text('{"top_k": 7')
    assert read_generation_config(read_folder_files(folder)).eos_token_ids == (400, 402)
    assert "generation_config.json" in caplog.text


def test_complete_files_keep_their_bytes(tmp_path: Path) -> None:
    folder_of(tmp_path, "Llama 3", config={"eos_token_id": 402})
    files = read_folder_files(tmp_path)
    assert files == {name: (tmp_path / name).read_bytes() for name in files}
    assert list(files) == ["config.json", "tokenizer.json", "tokenizer_config.json"]


def test_a_completed_folder_is_complete(tmp_path: Path) -> None:
    files = read_folder_files(folder_of(tmp_path, "Llama 3, both older files"))
    (tmp_path / "again").mkdir()
    for name, data in files.items():
        (tmp_path / "again" / name).write_bytes(data)
    assert read_folder_files(tmp_path / "again") == files


def test_ids_beside_the_vocabulary_are_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "penstock.tokenizer_files"):
        files = read_folder_files(folder_of(tmp_path, added_tokens={"<new>": 403, "<far>": 900}))
    assert LibraryTokenizer(files["tokenizer.json"]).encode("<new><far>", add_special_tokens=False) == [403, 404]
    assert ["<far>" in message and "404" in message for message in caplog.messages] == [True]


@pytest.mark.parametrize(
    ("shape", "files", "param"),
    [
        (LLAMA_3, {"added_tokens": {"<new>": "403"}}, "<new>"),
        (LLAMA_3, {"added_tokens": {"<new>": -1}}, "<new>"),
        (LLAMA_3, {"special_tokens_map": {"bos_token": 7}}, "bos_token"),
        (LLAMA_3, {"special_tokens_map": {"additional_special_tokens": "<x>"}}, "additional_special_tokens"),
        (LLAMA_3, {"tokenizer_config": {"added_tokens_decoder": {"x": {"content": "<x>"}}}}, "added_tokens_decoder"),
        (LLAMA_3, {"tokenizer_config": {"added_tokens_decoder": {"403": {"content": 7}}}}, "content"),
        ("GPT-2, vocab.json", {"tokenizer_config": {"add_prefix_space": "yes"}}, "add_prefix_space"),
        ("T5", {"tokenizer_config": {"extra_ids": 1 << 20}}, "extra_ids"),
        ("RoBERTa, vocab.json", {"tokenizer_config": {"cls_token": None}}, "cls_token"),
    ],
)
def test_wrong_values_are_refused_by_name(shape: str, files: dict[str, object], param: str, tmp_path: Path) -> None:
    with raises(InvalidFileError, param=param):
        read_folder_files(folder_of(tmp_path, shape, **files))


def test_damaged_vocabularies_are_refused_by_name(tmp_path: Path) -> None:
    folder_of(tmp_path, "GPT-2, vocab.json")
    for name, data in (("merges.txt", b"#version: 0.2\na b c\n"), ("merges.txt", b"\xff"), ("vocab.json", b"[]")):
        good = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(data)
        with raises(InvalidFileError, match=rf"^{name}: "):
            read_folder_files(tmp_path)
        (tmp_path / name).write_bytes(good)
    (tmp_path / "vocab.json").unlink()
    (tmp_path / "spiece.model").write_bytes(b"\x00")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "T5Tokenizer"}')
    with raises(InvalidFileError, match=r"^spiece\.model: "):
        read_folder_files(tmp_path)


@pytest.mark.parametrize(
    "changes",
    [
        {"added_tokens": {"a": 1}}, {"added_tokens": 7}, {"added_tokens": [7]}, {"added_tokens": [{"content": "<x>"}]},
        {"model": 7}, {"model": {"vocab": [[["a"], 1]]}}, {"model": {"vocab": {"a": "b"}}}, {"pre_tokenizer": [7]},
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [7]}},
    ],
)  # fmt: skip
def test_a_damaged_tokenizer_is_left_to_the_library(changes: dict[str, Any], tmp_path: Path) -> None:
    folder_of(tmp_path, "GPT-2, tokenizer.json, add_prefix_space", added_tokens={"<new>": 401})
    values = json.loads((tmp_path / "tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps(values | changes))
    with raises(InvalidFileError, match=r"^tokenizer\.json: "):
        LibraryTokenizer(read_folder_files(tmp_path)["tokenizer.json"])


@pytest.mark.parametrize(
    ("value", "expected"),
    [("512", 512), ("1e30", None), ("-1", None), ("0", None), ("Infinity", None), ('"long"', None), ("null", None)],
)
def test_a_length_that_is_no_limit_sets_none(value: str, expected: int | None) -> None:
    files = {"tokenizer_config.json": f'{{"model_max_length": {value}}}'.encode()}
    assert read_tokenizer_config(files).max_len == expected


def test_tokenizer_files_are_downloaded_kept_and_in_the_key(tmp_path: Path) -> None:
    names = ("config.json", "model.safetensors", *TOKENIZER_INPUTS)
    listed = tuple(RemoteFile(name, 10, "0" * 40) for name in names)
    assert {file.name for file in choose_files(RemoteModel(ModelName("a/b"), "0" * 40, listed))} == set(names)
    write_folder(tmp_path)
    keys = {bundle_key(Checkpoint.open(tmp_path), "f32")}
    for name in TOKENIZER_INPUTS:
        (tmp_path / name).write_text("{}")
        keys.add(bundle_key(Checkpoint.open(tmp_path), "f32"))
        with raises(InvalidArgumentError, param="path"):
            read_side_files(tmp_path / name)
    assert len(keys) == 1 + len(TOKENIZER_INPUTS)
    assert set(TOKENIZER_INPUTS) <= kept_files(tmp_path).keys()


def test_gguf_ids_that_no_token_has_count_as_missing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ids = {"padding": 4294967295, "unknown": 5000, "eot": 4294967295, "bos": 265}
    metadata = text_metadata() | {f"tokenizer.ggml.{name}_token_id": token for name, token in ids.items()}
    path = tmp_path / "m.gguf"
    path.write_bytes(llama_file(metadata))
    with caplog.at_level(logging.WARNING, "penstock.tokenizer_files"):
        files = Checkpoint.open(path).side_files()
    assert sorted(name for name in ids for message in caplog.messages if f"ggml.{name}_" in message) == sorted(ids)
    assert read_tokenizer_config(files).special_tokens == {"eos_token": "</s>"}
    assert read_generation_config(files).eos_token_ids == (2,)
    texts = metadata["tokenizer.ggml.tokens"]
    assert [texts[i] for i in LibraryTokenizer(files["tokenizer.json"]).encode("ab")] == ["\u2581ab"]


def test_gguf_tokens_without_a_text_are_named(tmp_path: Path) -> None:
    metadata = text_metadata()
    metadata["tokenizer.ggml.tokens"][261] = ""
    path = tmp_path / "m.gguf"
    path.write_bytes(llama_file(metadata))
    tokenizer = LibraryTokenizer(Checkpoint.open(path).side_files()["tokenizer.json"])
    assert tokenizer.token_id("[EMPTY_261]") == 261
    with raises(InvalidFileError, param="tokenizer.ggml.bos_token_id"):
        path.write_bytes(llama_file(metadata | {"tokenizer.ggml.bos_token_id": "1"}))
        Checkpoint.open(path).side_files()
