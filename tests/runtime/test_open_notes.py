"""What a start says about the scheme: how much memory the values of a GGUF file take."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.runtime.open import _suggestion


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
