"""Calibration texts: the forms of files, sequences and their digest, and what is too small."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.calibration.texts import calibration_data, check_num_tokens, read_texts
from penstock.errors import FileAccessError, InvalidArgumentError, InvalidFileError
from penstock.models.mapped import open_mapped
from penstock.text.tokenizer import Tokenizer
from tests.support.command import FOLDER
from tests.support.errors import raises

MESSAGES = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
TURNS = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]
LINES = [
    "plain",
    {"text": "a"},
    {"prompt": "b", "completion": "c"},
    {"messages": MESSAGES},
    {"conversations": TURNS},
    MESSAGES,
    {"input_ids": [5, 7]},
]
TEXTS = ["plain", "a", "bc", MESSAGES, MESSAGES, MESSAGES, (5, 7)]


def llm(context_len: int = 4096) -> Any:
    """A model whose tokens are characters; its template writes one token for each message."""
    return SimpleNamespace(
        tokenizer=SimpleNamespace(encode=lambda text: [ord(letter) for letter in text]),
        chat_prompt=lambda messages, continue_final_message: [7] * len(messages),
        info=SimpleNamespace(context_len=context_len),
    )


def write(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_files_hold_texts_and_conversations(tmp_path: Path) -> None:
    lines = "\n".join(json.dumps(line) for line in LINES)
    assert read_texts(write(tmp_path / "a.jsonl", lines + "\n\n")) == TEXTS
    assert read_texts(write(tmp_path / "a.json", json.dumps(LINES))) == TEXTS
    assert read_texts(write(tmp_path / "a.txt", '{"text": 1}\nmore')) == ['{"text": 1}\nmore']
    assert read_texts(write(tmp_path / "empty.txt", " \n")) == []


@pytest.mark.parametrize(
    "text",
    [
        b"\xff\xfe",
        "{",
        "3",
        '{"other": 1}',
        '{"messages": [1]}',
        '{"messages": [{"role": "user"}]}',
        "[]x",
        '{"input_ids": [-1]}',
    ],
)
def test_other_contents_are_refused(text: str | bytes, tmp_path: Path) -> None:
    with raises(InvalidFileError, param="calibration"):
        read_texts(write(tmp_path / "a.jsonl", text))


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with raises(FileAccessError):
        read_texts(tmp_path / "none.txt")


def test_sequences_are_evenly_spaced(tmp_path: Path) -> None:
    file = write(tmp_path / "a.txt", "".join(chr(200 + i) for i in range(2000)))
    data = calibration_data(llm(), file, 1 << 20, 300)
    assert [len(ids) for ids in data.sequences] == [300] * 6 + [200]
    assert data.sequences[1][0] == 500
    part = calibration_data(llm(), file, 600, 300)
    assert part.num_tokens == 600
    assert [ids[0] for ids in part.sequences] == [200, 1100]
    assert part.source == "a.txt"
    assert part.digest == calibration_data(llm(), file, 600, 300).digest != data.digest


def test_the_limit_of_tokens_is_reached(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", "\n".join([json.dumps("x" * 80)] * 200))
    data = calibration_data(llm(), file, 256)
    assert [len(ids) for ids in data.sequences] == [80, 80, 80, 16]


def test_sequences_fit_into_the_context(tmp_path: Path) -> None:
    data = calibration_data(llm(128), write(tmp_path / "a.txt", "x" * 300))
    assert [len(ids) for ids in data.sequences] == [128, 128, 44]


def test_few_tokens_are_refused(tmp_path: Path) -> None:
    for text in ("", "x" * 255):
        with raises(InvalidArgumentError, param="calibration", code="too_few_tokens"):
            calibration_data(llm(), write(tmp_path / "a.txt", text))
        with raises(InvalidArgumentError, param="calibration", code="too_few_tokens"):
            check_num_tokens(open_mapped(FOLDER).side_files(), tmp_path / "a.txt")


def test_tokens_are_counted_without_a_model(tmp_path: Path) -> None:
    files, words = open_mapped(FOLDER).side_files(), "def f(x): return x + 1\n" * 40
    ids = check_num_tokens({}, write(tmp_path / "a.jsonl", json.dumps({"input_ids": [7] * 300})))
    expected = len(Tokenizer(files).encode(words))
    assert (ids, check_num_tokens(files, write(tmp_path / "a.txt", words))) == (300, expected)
    many = write(tmp_path / "many.txt", words * 200)
    assert 256 <= check_num_tokens(files, many) < check_num_tokens(files, many, 10**9)
