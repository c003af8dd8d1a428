"""The tokenizer of a BERT checkpoint without tokenizer.json is that of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.checkpoint.side_files import read_folder_files
from penstock.errors import InvalidFileError
from penstock.graph.tokenizer.compiler import compile_tokenizer
from penstock.text.tokenizer import Tokenizer
from tests.support.errors import raises
from tests.support.tokenizer_kinds import KINDS, SAMPLES

SPECIALS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def folder_of(folder: Path, lines: list[str], **config: Any) -> Path:
    (folder / "vocab.txt").write_text("\n".join(lines) + "\n")
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"tokenizer_class": "BertTokenizer", "do_lower_case": False},
        {"tokenizer_class": "DistilBertTokenizerFast", "strip_accents": False, "tokenize_chinese_chars": False},
    ],
)
def test_ids_are_those_of_transformers(config: dict[str, Any], tmp_path: Path) -> None:
    from transformers import BertTokenizer

    vocab = KINDS["WordPiece"]().get_vocab(with_added_tokens=False)
    lines = sorted(vocab, key=vocab.__getitem__)
    theirs = BertTokenizer(
        vocab={line: number for number, line in enumerate(lines)},
        **{key: value for key, value in config.items() if key != "tokenizer_class"},
    )
    files = read_folder_files(folder_of(tmp_path, lines, **config))
    segment, reason = compile_tokenizer(files)
    ours = Tokenizer({**files, "tokenizer.bin": segment})
    assert reason == ""
    assert not ours.is_isolated
    for text in (*SAMPLES, "[CLS] a [MASK] b", "\x07 \u00ad é"):
        assert ours.encode(text) == theirs.backend_tokenizer.encode(text).ids


def test_other_vocabularies_are_no_tokenizer(tmp_path: Path) -> None:
    assert "tokenizer.json" not in read_folder_files(folder_of(tmp_path, SPECIALS, tokenizer_class="EsmTokenizer"))
    assert "tokenizer.json" not in read_folder_files(folder_of(tmp_path, ["<cls>", "<eos>"]))


@pytest.mark.parametrize(
    ("lines", "config", "field", "message"),
    [
        (["[UNK]"], {"tokenizer_class": "BertTokenizer"}, "sep_token", r"vocab.txt: '\[SEP\]', the sep_token"),
        (SPECIALS, {"do_lower_case": 1}, "do_lower_case", r"tokenizer_config.json: do_lower_case"),
        (SPECIALS, {"cls_token": 7}, "cls_token", r"tokenizer_config.json: cls_token"),
    ],
)
def test_damage_is_named(lines: list[str], config: dict[str, Any], field: str, message: str, tmp_path: Path) -> None:
    with raises(InvalidFileError, param=field, match=message):
        read_folder_files(folder_of(tmp_path, lines, **config))


def test_text_that_is_no_utf8_is_refused(tmp_path: Path) -> None:
    folder_of(tmp_path, SPECIALS)
    (tmp_path / "vocab.txt").write_bytes(b"[UNK]\n\xff\n")
    with raises(InvalidFileError, param="vocab.txt"):
        read_folder_files(tmp_path)
