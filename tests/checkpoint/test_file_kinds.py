"""The kind of a model file is told by its first bytes, not by its name."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from penstock import LLM
from penstock.checkpoint.convert import Conversion
from penstock.checkpoint.folder import Checkpoint
from penstock.checkpoint.gguf.file_name import split_names
from penstock.checkpoint.side_files import read_side_files
from penstock.errors import InvalidArgumentError, UnsupportedError
from penstock.file_kinds import is_bundle, is_gguf
from penstock.graph.export import export_bundle
from penstock.runtime.convert import convert
from penstock.runtime.open import open_program
from tests.support.errors import raises
from tests.support.gguf_files import llama_file

BUNDLE = Path(__file__).parents[2] / "demo" / "demo.psm"
NAMES = ("MODEL.GGUF", "model", "sha256-0123abcd", "model.psm", "model.bin", "x.v1.safetensors")


@pytest.mark.parametrize("name", NAMES)
def test_a_gguf_file_of_any_name_is_one(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(llama_file())
    assert (is_gguf(path), is_bundle(path)) == (True, False)
    assert Checkpoint.open(path).made_files is not None
    assert "config.json" in read_side_files(path)


@pytest.mark.parametrize("name", ["MODEL.PSM", "model", "sha256-0123abcd", "model.gguf", "model.bin"])
def test_a_bundle_of_any_name_is_one(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    shutil.copy(BUNDLE, path)
    assert (is_gguf(path), is_bundle(path)) == (False, True)
    assert "config.json" in read_side_files(path)
    with raises(InvalidArgumentError, match="got a bundle"):
        Checkpoint.open(path)
    with raises(InvalidArgumentError, param="source"):
        export_bundle(path, tmp_path / "out.psm")
    open_program(path).program.close()
    with raises(UnsupportedError, param="model"):
        open_program(path, mode="eager")


def test_a_bundle_without_an_ending_is_converted(tmp_path: Path) -> None:
    shutil.copy(BUNDLE, tmp_path / "blob")
    convert(tmp_path / "blob", tmp_path / "folder", Conversion())
    assert (tmp_path / "folder" / "config.json").exists()


def test_the_name_decides_where_the_bytes_do_not(tmp_path: Path) -> None:
    """A damaged file, one that does not exist, a folder and a pipe, whose opening would wait."""
    (tmp_path / "damaged.Gguf").write_bytes(b"GG")
    (tmp_path / "folder.gguf").mkdir()
    os.mkfifo(tmp_path / "pipe")
    assert is_gguf(tmp_path / "damaged.Gguf")
    assert is_gguf(tmp_path / "absent.gguf")
    assert is_bundle(tmp_path / "absent.psm")
    for name in ("folder.gguf", "pipe", "absent"):
        assert not is_gguf(tmp_path / name)
        assert not is_bundle(tmp_path / name)


def test_the_files_of_a_split_model_keep_the_ending() -> None:
    assert split_names("m-00002-of-00002.GGUF") == ["m-00001-of-00002.GGUF", "m-00002-of-00002.GGUF"]
    assert split_names("m-00001-of-00002") == ["m-00001-of-00002", "m-00002-of-00002"]


@pytest.mark.long
def test_a_blob_of_ollama_answers_as_the_file_does(tmp_path: Path) -> None:
    answers = []
    for name in ("model.gguf", "sha256-0123abcd"):
        (tmp_path / name).write_bytes(llama_file())
        with LLM(tmp_path / name, use_cache=False) as llm:
            answers.append(llm.generate([3, 5, 7], max_tokens=4, temperature=0).token_ids)
    assert answers[0] == answers[1]
