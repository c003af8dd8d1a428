"""Arrays of strings in GGUF files: read as a whole, they are those that are read one at a time."""

from __future__ import annotations

import json
import struct
import tracemalloc

import pytest

from penstock.checkpoint.gguf.metadata import Metadata
from penstock.checkpoint.gguf.reader import read_header
from penstock.checkpoint.tokenizer_files.merge_table import MadeMerges, merge_table
from penstock.errors import InvalidFileError
from tests.support.errors import raises
from tests.support.gguf_files import gguf_bytes

ARRAYS = {
    "short": ["a", "bc", "\u2581d", "<|end|>"] * 50,
    "long": ["a" * 255, "b" * 256, "c" * 70000, "d"],
    "empty": ["", "a", "", "", "b"],
    "zeros": ["a\0", "\0b", "\0" * 9, "c"],
    "one": ["a"],
}


@pytest.mark.parametrize("name", ARRAYS)
def test_strings_are_read_as_they_are(name: str) -> None:
    data = gguf_bytes({"before": 1, "texts": ARRAYS[name], "behind": "text"}, {})
    assert dict(read_header(memoryview(data), "m.gguf").metadata) == {
        "before": 1,
        "texts": ARRAYS[name],
        "behind": "text",
    }


def test_a_vocabulary_is_apart_only_where_it_is_read() -> None:
    texts = [f"\u2581{number}" for number in range(5000)]
    data = gguf_bytes({"texts": texts}, {})
    stored = read_header(memoryview(data), "m.gguf").metadata
    assert not isinstance(stored["texts"], list)
    assert Metadata(stored, "m.gguf").texts("texts") == texts
    with raises(InvalidFileError, param="texts"):
        Metadata(stored, "m.gguf").flag("texts", False)
    with raises(InvalidFileError, match="texts"):  # where the file is opened, as of other damage
        read_header(memoryview(data.replace(texts[-1].encode(), b"\xff" * len(texts[-1].encode()))), "m.gguf")


@pytest.mark.parametrize("length", [0, 3, 255, 1 << 24, (1 << 24) + 1, 1 << 63])
def test_a_wrong_length_names_its_array(length: int) -> None:
    data = bytearray(gguf_bytes({"texts": ["abcd"] * 8}, {}))
    place = data.index(b"abcd", data.index(b"abcd") + 4)
    data[place - 8 : place] = struct.pack("<Q", length)
    with raises(InvalidFileError, param="texts"):
        read_header(memoryview(bytes(data)), "m.gguf")


def test_a_string_that_is_no_utf_8_names_its_array() -> None:
    data = gguf_bytes({"texts": ["abcd"] * 8}, {}).replace(b"abcd", b"ab\xff\xfe", 1)
    with raises(InvalidFileError, param="texts"):
        read_header(memoryview(data), "m.gguf")


def test_an_array_without_a_zero_byte_names_its_array() -> None:
    data = gguf_bytes({"texts": ["abcd"]}, {})
    place = data.rindex(struct.pack("<Q", 4) + b"abcd")
    with raises(InvalidFileError, param="texts"):
        read_header(memoryview(data[:place] + b"\xff" * 64), "m.gguf")


def test_damage_of_the_header_names_its_field() -> None:
    tensor = (0, (2, 2), bytes(16))
    data = gguf_bytes({"key": 1}, {"a": tensor, "b": tensor})
    table = data.index(struct.pack("<Q", 1) + b"b")
    for place, value, field in (
        (8, 1 << 40, "tensor_count"),
        (16, 1 << 40, "metadata_kv_count"),
        (data.index(b"key") + 3, 99, "key"),  # the type of its value
        (table + 33, 0, "b"),  # the offset, which is that of the other tensor then
    ):
        changed = bytearray(data)
        struct.pack_into("<I" if field == "key" else "<Q", changed, place, value)
        with raises(InvalidFileError, param=field):
            read_header(memoryview(changed), "m.gguf")


@pytest.mark.parametrize("texts", [[""] * 100, ["a", *[""] * 99]])
def test_little_of_a_file_is_searched_for_strings(texts: list[str]) -> None:
    """Zeros behind strings are as many as a file of tensors has; the memory is that of the strings."""
    data = gguf_bytes({"texts": texts}, {}) + bytes(1 << 24)
    tracemalloc.start()
    try:
        assert read_header(memoryview(data), "m.gguf").metadata["texts"] == texts
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("lines", "is_made"),
    [
        (['a "', "\\ b", "a\n b", "\u2581 a"], True),
        (["a b", "a  b"], False),
        (["a b", "ab"], False),
        (["a\x7f b", "a b"], False),
        (["a b", "a missing"], False),
        ([], False),
    ],
)
def test_merges_have_the_text_and_the_ids_of_their_pairs(lines: list[str], is_made: bool) -> None:
    pairs = [line.split(" ") for line in lines]
    texts = {text for pair in pairs for text in (*pair, "".join(pair))} - {"missing", "amissing"}
    vocab = {text: i for i, text in enumerate(sorted(texts))}
    made = MadeMerges.of(lines, vocab)
    assert (made is not None) == is_made
    if made is not None:
        assert json.loads(made.text) == pairs
        assert made.text == json.dumps(pairs, ensure_ascii=False)
        expected = [[vocab[a], vocab[b], rank, vocab[a + b]] for rank, (a, b) in enumerate(pairs)]
        assert made.table.tolist() == expected


@pytest.mark.parametrize(
    "made",
    [["ab", "bc", "abc"], ["bc", "ab", "abc"], ["ab", "x", "bc", "abc"], ["ab", "bc"], []],
    ids=["in order", "other order", "a token between", "one without an id", "none"],
)
def test_merges_have_the_ids_of_the_vocabulary(made: list[str]) -> None:
    vocab = {text: number for number, text in enumerate(["a", "b", "c", *made])}
    lefts, rights = ["a", "b", "ab"], ["b", "c", "c"]
    if "abc" not in made:
        with pytest.raises(KeyError):
            merge_table(vocab, lefts, rights)
        return
    expected = [[vocab[a], vocab[b], i, vocab[a + b]] for i, (a, b) in enumerate(zip(lefts, rights, strict=True))]
    assert merge_table(vocab, lefts, rights).tolist() == expected
    shifted = {text: number + 7 for text, number in vocab.items()}
    assert (merge_table(shifted, lefts, rights)[:, 3] - 7).tolist() == [row[3] for row in expected]
