"""What a start says: about the memory that a scheme takes, and the warnings of a folder."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.runtime.cache import Cache
from penstock.runtime.open import _suggestion
from tests.support.command import FOLDER
from tests.support.gguf_files import llama_file, text_metadata


def program(scheme: str, weight_bytes: int) -> Any:
    return SimpleNamespace(info=SimpleNamespace(scheme=scheme, weight_bytes=weight_bytes))


@pytest.mark.parametrize(
    ("file_bytes", "words"),
    [
        ((4000,), "as stored"),
        ((3000, 1000), "as stored"),
        ((500,), "about 8 times its memory"),
        ((900, 300), "about 3"),
    ],
)
def test_values_of_a_gguf_file_take_what_they_take(file_bytes: tuple[int, ...], words: str, tmp_path: Path) -> None:
    names = ["m.gguf"] if len(file_bytes) == 1 else ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"]
    for name, size in zip(names, file_bytes, strict=True):
        (tmp_path / name).write_bytes(b"\0" * size)
    (note,) = _suggestion(program("f32", 4000), tmp_path / names[0])
    assert words in note
    assert _suggestion(program("w8a8", 1000), tmp_path / names[0]) == []


def warned_folder(path: Path) -> Path:
    folder = shutil.copytree(FOLDER, path / "model")
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text('{"hidden_size": 1,' + config.lstrip()[1:])
    (folder / "generation_config.json").write_text('{"eos_token_id": 1, "temperature": "warm"}')
    return folder


def warned_gguf(path: Path) -> Path:
    file = path / "model.gguf"
    file.write_bytes(llama_file(text_metadata() | {"tokenizer.ggml.unknown_token_id": 5000}))
    return file


@pytest.mark.parametrize(
    ("source", "words"),
    [(warned_folder, ["hidden_size", "temperature"]), (warned_gguf, ["ggml.unknown_token_id"])],
)
def test_every_start_logs_the_warnings_of_a_model(
    source: Callable[[Path], Path], words: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of its configuration, which is read for the key of a bundle, and of what only the export reads."""
    model, cache = source(tmp_path), Cache(tmp_path / "cache")
    starts = []
    for scheme in (None, None, "f32", "f32"):  # the third reads the model again, for a bundle that it may have
        caplog.clear()
        cache.find_or_build(model, scheme)
        starts.append(sorted(record.getMessage() for record in caplog.records))
    assert [word in message for word, message in zip(words, starts[0], strict=True)] == [True] * len(words)
    assert starts == [starts[0]] * 4
