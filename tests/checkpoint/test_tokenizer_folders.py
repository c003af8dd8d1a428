"""Folders with every kind of vocabulary file and every file beside it: ids and texts are those of transformers."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from penstock.checkpoint.generation import read_tokenizer_config
from penstock.checkpoint.side_files import read_folder_files
from penstock.checkpoint.tokenizer_file import LibraryTokenizer
from penstock.core.tokenizer import NativeTokenizer as CoreTokenizer
from penstock.graph.tokenizer.compiler import compile_tokenizer
from tests.support.tokenizer_folders import SHAPES, TEXTS

_PIECES = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model")


@pytest.mark.parametrize("shape", SHAPES)
def test_ids_and_texts_are_those_of_transformers(shape: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoTokenizer

    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", "")
    SHAPES[shape](tmp_path)
    if any((tmp_path / name).exists() for name in _PIECES) and importlib.util.find_spec("sentencepiece") is None:
        pytest.skip("transformers needs the package sentencepiece for this file")
    files = read_folder_files(tmp_path)
    theirs: Any = AutoTokenizer.from_pretrained(tmp_path)
    ours: list[Any] = [LibraryTokenizer(files["tokenizer.json"])]
    segment, reason = compile_tokenizer(files)
    if not reason:
        ours.append(CoreTokenizer.of_segment(segment))
    for text in TEXTS:
        for adds in (True, False):
            ids = theirs.encode(text, add_special_tokens=adds)
            for tokenizer in ours:
                assert tokenizer.encode(text, add_special_tokens=adds) == ids, (text, theirs.convert_ids_to_tokens(ids))
                for skips in (True, False):
                    written = tokenizer.decode(ids, skip_special_tokens=skips)
                    assert written == theirs.decode(ids, skip_special_tokens=skips)
    named = theirs.special_tokens_map.items()  # a class also names tokens that the vocabulary lacks
    known = {name: text for name, text in named if ours[0].token_id(text) is not None}
    assert read_tokenizer_config(files).special_tokens == known
