"""Vocabularies of byte strings by rank: Mistral's tekken.json, and files of tiktoken."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import tiktoken
from transformers.integrations.mistral.tokenizer import convert_tekken_tokenizer

from penstock.checkpoint.generation import read_generation_config, read_tokenizer_config
from penstock.checkpoint.side_files import read_folder_files
from penstock.checkpoint.tokenizer_file import LibraryTokenizer
from penstock.cli.run.run import check_tokenizer
from penstock.core.tokenizer import NativeTokenizer as CoreTokenizer
from penstock.errors import InvalidFileError, UnsupportedError
from penstock.graph.tokenizer.compiler import compile_tokenizer
from tests.support.errors import raises
from tests.support.tokenizer_folders import TEXTS, byte_ranks, tekken_file, tiktoken_file


def tekken_folder(folder: Path, values: object = None, **files: object) -> Path:
    (folder / "tekken.json").write_text(json.dumps(tekken_file() if values is None else values))
    for name, content in {"config": {"model_type": "mistral"}, **files}.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize("changes", [{}, {"default_num_special_tokens": None, "default_vocab_size": None}])
def test_tekken_has_the_ids_of_transformers_and_tiktoken(changes: dict[str, Any], tmp_path: Path) -> None:
    files = read_folder_files(tekken_folder(tmp_path, tekken_file(**changes)))
    theirs: Any = convert_tekken_tokenizer(str(tmp_path / "tekken.json"))
    pattern = tekken_file()["config"]["pattern"]
    encoding = tiktoken.Encoding("tekken", pat_str=pattern, mergeable_ranks=byte_ranks(), special_tokens={})
    ours: list[Any] = [LibraryTokenizer(files["tokenizer.json"])]
    segment, reason = compile_tokenizer(files)
    if not reason:
        ours.append(CoreTokenizer.of_segment(segment))
    num_specials = 6 if changes else 9
    for tokenizer in ours:
        for text in TEXTS:
            ids = tokenizer.encode(text, add_special_tokens=False)
            assert ids == theirs.encode(text)
            assert tokenizer.encode(text) == [1, *ids]  # <s>, as mistral-common begins a prompt
            assert tokenizer.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
            if not any(special in text for special in ("<s>", "</s>", "<unk>", "<pad>")):
                assert ids == [num_specials + token for token in encoding.encode(text)]
    assert read_tokenizer_config(files).special_tokens == theirs.special_tokens_map
    assert read_generation_config(files).eos_token_ids == (2,)


def test_tekken_beside_other_files(tmp_path: Path) -> None:
    config = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": False, "eos_token": "[/INST]"}
    files = read_folder_files(tekken_folder(tmp_path, tokenizer_config=config, generation_config={"eos_token_id": 2}))
    assert LibraryTokenizer(files["tokenizer.json"]).encode("a") == [9 + byte_ranks()[b"a"]]
    assert read_generation_config(files).eos_token_ids == (2, 4)
    (tmp_path / "tokenizer.json").write_bytes(files["tokenizer.json"])
    (tmp_path / "tekken.json").write_text("{}")  # tokenizer.json counts more
    assert read_folder_files(tmp_path)["tokenizer.json"] == files["tokenizer.json"]


DAMAGED: list[tuple[dict[str, Any], str]] = [
    ({"config": None}, "config"),
    ({"config": {}}, "pattern"),
    ({"config": {"pattern": "a", "default_num_special_tokens": 5}}, "default_num_special_tokens"),
    ({"config": {"pattern": "a", "default_num_special_tokens": 10**9}}, "default_num_special_tokens"),
    ({"vocab": []}, "vocab"),
    ({"vocab": [{"token_bytes": "?"}]}, "vocab"),
    ({"vocab": [{"token_bytes": ""}]}, "vocab"),
    ({"vocab": [7]}, "vocab"),
    ({"special_tokens": [{"rank": 1, "token_str": "<s>"}]}, "special_tokens"),
    ({"special_tokens": [{"rank": True, "token_str": "<s>"}]}, "special_tokens"),
    ({"special_tokens": [{"rank": i, "token_str": "<s>"} for i in range(2)]}, "special_tokens"),
    ({"special_tokens": {"<s>": 0}}, "special_tokens"),
]


@pytest.mark.parametrize(("changes", "param"), DAMAGED)
def test_a_damaged_tekken_is_refused_by_name(changes: dict[str, Any], param: str, tmp_path: Path) -> None:
    with raises(InvalidFileError, param=param):
        read_folder_files(tekken_folder(tmp_path, tekken_file() | changes))


def test_a_tekken_of_the_first_version_says_what_to_do(tmp_path: Path) -> None:
    values = {key: value for key, value in tekken_file().items() if key != "special_tokens"}
    with raises(UnsupportedError, param="special_tokens", match="mistral-common"):
        read_folder_files(tekken_folder(tmp_path, values))


def tiktoken_folder(folder: Path, name: str, data: bytes | None = None, **config: object) -> Path:
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / name).write_bytes(tiktoken_file() if data is None else data)
    return folder


def test_tokenizer_model_may_be_a_file_of_tiktoken(tmp_path: Path) -> None:
    made = []
    for name in ("tiktoken.model", "tokenizer.model"):
        (tmp_path / name).mkdir()
        config = {"bos_token": "<s>", "add_bos_token": True}
        files = read_folder_files(tiktoken_folder(tmp_path / name, name, **config))
        made.append(files["tokenizer.json"])
    assert made[0] == made[1]


@pytest.mark.parametrize(
    "data",
    [b"", b"YQ== 1\nYg== 1\n", b"YQ== 1\n\nYQ== x\n", b"YQ== 99999999\n", b"YQ= 1\n", b"\xff" * 9,
     b"%s 0\n" % (b"YWFh" * (1 << 21))],
)  # fmt: skip
def test_a_damaged_file_of_tiktoken_is_named(data: bytes, tmp_path: Path) -> None:
    with raises(InvalidFileError, match=r"^tiktoken\.model: "):
        read_folder_files(tiktoken_folder(tmp_path, "tiktoken.model", data))


def test_reserved_tokens_are_limited(tmp_path: Path) -> None:
    config = {"added_tokens_decoder": {"99999999": {"content": "<far>"}}}
    with raises(InvalidFileError, param="added_tokens_decoder"):
        read_folder_files(tiktoken_folder(tmp_path, "tiktoken.model", **config))


@pytest.mark.parametrize("name", ["qwen.tiktoken", "tiktoken.model", "tokenizer.model"])
def test_a_vocabulary_for_python_code_is_named(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The folder opens, for token ids, and its text is refused with what to do."""
    tiktoken_folder(tmp_path, name, auto_map={"AutoTokenizer": ["tokenization_x.TokenizerX", None]})
    with caplog.at_level(logging.WARNING, "penstock.tokenizer_files"):
        assert "tokenizer.json" not in read_folder_files(tmp_path)
    (message,) = caplog.messages
    assert name in message
    if name == "qwen.tiktoken":
        with raises(UnsupportedError, match=r"qwen\.tiktoken"):
            check_tokenizer(tmp_path)
