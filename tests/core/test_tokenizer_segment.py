"""The compiled tokenizer: what is not compiled is named, what is damaged is refused, what is asked wrongly too."""

from __future__ import annotations

import ctypes
import json
import resource
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers

from penstock.core.library import check, library
from penstock.core.native import Model
from penstock.core.tokenizer import TOKENIZER_SEGMENT, NativeTokenizer
from penstock.errors import InvalidArgumentError, InvalidFileError, PenstockError, UnsupportedError
from penstock.graph.tokenizer.compiler import compile_tokenizer
from penstock.graph.tokenizer.segment import KIND_BYTES, STEP_REPLACE, TokenizerTables, encode_tables
from tests.support.errors import raises
from tests.support.tiny_graph import tiny_graph, write_bundle
from tests.support.tokenizer_kinds import KINDS, ROOT, segment_of

DEMO = (ROOT / "demo" / "model" / "tokenizer.json").read_bytes()
WORD_LEVEL = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a")).to_str().encode()  # noqa: S106
NAMES = (
    "token_begins", "token_bytes", "token_flags", "merge_begins", "merges", "bytes", "characters", "words", "added",
    "added_normalized", "steps", "prefix", "suffix", "eos", "text", "trie", "model", "first_begins", "first_bytes",
    "scores", "charsmap", "charsmap_text",
)  # fmt: skip


@pytest.fixture
def open_segment(tmp_path: Path) -> Callable[[bytes], NativeTokenizer]:
    def get(segment: bytes) -> NativeTokenizer:
        path = tmp_path / "a.psm"
        with Model.open(write_bundle(path, tiny_graph(), segments={TOKENIZER_SEGMENT: segment})) as model:
            return NativeTokenizer(model)

    return get


def changed(**components: Any) -> dict[str, bytes]:
    """The demo's file with other components; of the model single fields."""
    values = json.loads(DEMO)
    values["model"] |= components.pop("model", {})
    return {"tokenizer.json": json.dumps(values | components).encode()}


def word_piece(**options: Any) -> dict[str, bytes]:
    """The file of a WordPiece model."""
    model = tokenizers.models.WordPiece({"a": 0}, **({"unk_token": "a"} | options))
    return {"tokenizer.json": tokenizers.Tokenizer(model).to_str().encode()}


def unigram(normalizer: Any = None, unk_id: int | None = 0, **components: Any) -> dict[str, bytes]:
    """The file of a Unigram model; ``normalizer`` is a component or its type."""
    model = {"type": "Unigram", "vocab": [["a", -1.0]], "unk_id": unk_id, "byte_fallback": False}
    normalizer = {"type": normalizer} if isinstance(normalizer, str) else normalizer
    return {"tokenizer.json": json.dumps({"model": model, "normalizer": normalizer} | components).encode()}


@pytest.mark.parametrize(
    ("files", "named"),
    [
        (changed(normalizer={"type": "ByteLevel"}), "normalizer ByteLevel"),
        (changed(normalizer={"type": "Sequence", "normalizers": [{"type": "ByteLevel"}]}), "normalizer ByteLevel"),
        (changed(pre_tokenizer={"type": "Whitespace"}), "pre_tokenizer Whitespace"),
        (
            changed(
                pre_tokenizer={
                    "type": "Sequence",
                    "pretokenizers": [
                        {"type": "Split", "pattern": {"Regex": r"\d"}, "behavior": "Isolated", "invert": False},
                        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
                    ],
                }
            ),
            r"pre_tokenizer Split with the pattern '\\{2}d', Isolated",
        ),
        (changed(decoder={"type": "Fuse"}), "decoder Fuse"),
        (
            changed(post_processor={"type": "BertProcessing", "sep": ["a", 1], "cls": ["b", 1 << 20]}),
            "post_processor: an id beyond the vocabulary",
        ),
        (changed(model={"dropout": 0.5}), "model.dropout"),
        (changed(model={"end_of_word_suffix": "</w>"}), "model.end_of_word_suffix"),
        (changed(model={"unk_token": "absent"}), "model.unk_token"),
        ({}, "the model has none"),
        ({"tokenizer.json": WORD_LEVEL}, "model 'WordLevel'"),
        (word_piece(max_input_chars_per_word=5000), "model.max_input_chars_per_word: .* 4096, got 5000"),
        (word_piece(unk_token="absent"), "model.unk_token"),  # noqa: S106
        (unigram(unk_id=None), "model.unk_id: expected a token, got null"),
        (unigram({"type": "Replace", "pattern": {"Regex": "x+"}, "content": "y"}), "normalizer Replace"),
        (unigram(pre_tokenizer={"type": "Metaspace", "replacement": "_"}), "pre_tokenizer Metaspace"),
        (
            unigram("Nmt", pre_tokenizer={"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "first"}),
            "prepend_scheme first",
        ),
        (unigram(decoder={"type": "CTC", "pad_token": "a", "word_delimiter_token": "|", "cleanup": True}), "CTC"),
    ],
)
def test_uncompiled_tokenizers_are_named_and_ids_still_work(
    files: dict[str, bytes], named: str, open_segment: Callable[[bytes], NativeTokenizer]
) -> None:
    segment, reason = compile_tokenizer(
        files | {"generation_config.json": b'{"eos_token_id": [7, 9], "bos_token_id": 3}'}
    )
    tokenizer = open_segment(segment)
    assert tokenizer.info.unsupported == reason
    assert (tokenizer.info.eos_ids, tokenizer.info.bos_id, tokenizer.info.num_tokens) == ((7, 9), 3, 0)
    for call in (lambda: tokenizer.encode("a"), lambda: tokenizer.decode([1])):
        with pytest.raises(UnsupportedError, match=rf"tokenizer.json: .*{named}.*: token ids"):
            call()


def test_a_bundle_without_one_is_refused(bundle_of: Callable[..., Path]) -> None:
    with (
        Model.open(bundle_of()) as model,
        pytest.raises(UnsupportedError, match="has none"),
    ):
        NativeTokenizer(model)


def test_the_demo_says_its_ids() -> None:
    with Model.open(ROOT / "demo" / "demo.psm") as model:
        info = NativeTokenizer(model).info
    assert (info.kind, info.num_tokens, info.bos_id, info.eos_ids) == ("byte-level BPE", 4096, 0, (1,))


def place_of(segment: bytes, name: str) -> tuple[int, int]:
    """Where a table begins, and its number of elements."""
    begin, count = struct.unpack_from("<II", segment, 48 + 8 * NAMES.index(name))
    return 4 * begin, count


@pytest.mark.parametrize(
    ("table", "at", "value", "field", "message"),
    [
        ("trie", 0, 2, "trie[0]", r"expected children"),
        ("trie", 8, 1, "trie[1]", r"expected children"),
        ("trie", 12, 1 << 20, "trie[1]", r"expected a token"),
        ("trie", 12, 0xFF << 24, "trie[2]", r"expected bytes that ascend"),
        ("model", 0, 1 << 20, "model[0]", r"expected at most 4096 characters"),
        ("model", 4, 1 << 20, "model[1]", r"expected a node of the trie"),
        ("first_begins", 4, 1 << 20, "first_begins[2]", r"first_begins\["),
        ("token_begins", 4, 1 << 20, "token_begins[2]", "expected"),
        ("merge_begins", 4, 1 << 20, "merge_begins[2]", "expected"),
        ("merges", 0, 1 << 20, "merges[0]", r"expected a right token, got 1048576"),
        ("merges", 8, 1 << 20, "merges[0]", r"expected a token, got 1048576"),
        ("bytes", 40, 1 << 20, "bytes[10]", r"expected a token"),
        ("words", 0, 1 << 20, "words[0]", r"expected a token"),
        ("added", 0, 1 << 20, "added[0]", r"expected a token"),
        ("added", 4, 1 << 20, "added[0]", r"expected flags that are known"),
        ("added", 8, 1 << 20, "added[0]", r"expected a place within the text"),
        ("added", 12, 0, "added[0]", r"expected 1 to 1024 bytes, got 0"),
        ("prefix", 0, 1 << 20, "prefix[0]", r"expected a token"),
    ],
)
def test_damaged_tables_are_refused_by_name(
    table: str, at: int, value: int, field: str, message: str, open_segment: Callable[[bytes], NativeTokenizer]
) -> None:
    segment = bytearray(segment_of(KINDS["WordPiece" if NAMES.index(table) > NAMES.index("text") else "llama3"]()))
    struct.pack_into("<I", segment, place_of(bytes(segment), table)[0] + at, value)
    with raises(InvalidFileError, param=field, match=message):
        open_segment(bytes(segment))


@pytest.mark.parametrize("name", NAMES)
def test_tables_beyond_the_segment_are_refused_by_name(
    name: str, open_segment: Callable[[bytes], NativeTokenizer]
) -> None:
    segment = segment_of(KINDS["Unigram"]())
    for at, value in ((0, 1 << 30), (0, 0), (4, 1 << 31)):
        damaged = bytearray(segment)
        struct.pack_into("<I", damaged, 48 + 8 * NAMES.index(name) + at, value)
        with raises(InvalidFileError, param=name, match="^segment tokenizer.bin: "):
            open_segment(bytes(damaged))


def test_headers_of_others_are_refused(open_segment: Callable[[bytes], NativeTokenizer]) -> None:
    segment = segment_of(KINDS["qwen2"]())
    for at, value, kind, param, message in (
        (0, 1, InvalidFileError, "magic", "magic"),
        (8, 3, UnsupportedError, "version", "version: expected 1 to 2, got 3: export the model again"),
        (8, 2, InvalidFileError, "num_tables", "num_tables: expected 22, got 15"),
        (12, 9, UnsupportedError, "kind", "kind"),
        (16, 1 << 31, UnsupportedError, None, "flags"),
        (20, 9, UnsupportedError, None, "split"),
        (24, 9, UnsupportedError, None, "metaspace"),
        (28, 1 << 30, InvalidFileError, "num_tokens", "num_tokens"),
        (44, 3, InvalidFileError, "num_tables", "num_tables"),
    ):
        damaged = bytearray(segment)
        struct.pack_into("<I", damaged, at, value)
        with raises(kind, param=param, match=f"segment tokenizer.bin: {message}"):
            open_segment(bytes(damaged))
    with raises(InvalidFileError, param="header"):
        open_segment(segment[:20])
    with raises(InvalidFileError, param="header"):
        open_segment(segment[:60])


def test_wrong_calls_are_errors(open_segment: Callable[[bytes], NativeTokenizer]) -> None:
    tokenizer = open_segment(segment_of(KINDS["qwen2"]()))
    core, handle, count = library(), tokenizer.handle, ctypes.c_int64(-5)
    ids = np.zeros(4, np.int32)

    def encode(text: bytes | None, size: int, flags: int = 0, capacity: int = 4, handle: int | None = handle) -> None:
        where = ids.ctypes.data if capacity >= 0 else None
        check(core.ps_tokenizer_encode(handle, text, size, flags, where, abs(capacity), ctypes.byref(count)))

    for param, match, call in (
        ("tokenizer", "null", lambda: encode(b"a", 1, handle=None)),
        ("text", "text, ids, count", lambda: encode(None, 1)),
        ("text", "text, ids, count", lambda: encode(b"a", 1, capacity=-4)),
        ("bytes", "bytes, capacity", lambda: encode(b"a", -1)),
        ("flags", "0x8", lambda: encode(b"a", 1, 8)),
        ("text", "UTF-8.* byte 2", lambda: encode(b"ab\xff", 3)),
        ("text", "UTF-8.* byte 1", lambda: encode(b"a\xed\xa0\x80", 4)),
        ("text", "character 1", lambda: tokenizer.encode("a\ud800")),
        ("ids[1]", "got -1", lambda: tokenizer.decode([5, -1])),
    ):
        with raises(InvalidArgumentError, param=param, match=match):
            call()
    assert count.value == -5
    encode(b"a b c d e f", 11, capacity=2)  # more than there is room for: two written, all counted
    assert count.value == len(tokenizer.encode("a b c d e f"))
    assert list(ids[2:]) == [0, 0]
    assert tokenizer.decode([1 << 30]) == ""
    tokenizer.close()
    with pytest.raises(PenstockError):
        tokenizer.encode("a")
    with raises(InvalidArgumentError, param="tokenizer"):
        encode(b"a", 1)


def test_a_tokenizer_keeps_its_model(tmp_path: Path) -> None:
    segment = segment_of(KINDS["demo"]())
    path = write_bundle(tmp_path / "a.psm", tiny_graph(), segments={TOKENIZER_SEGMENT: segment})
    for mmap in (True, False):
        model = Model.open(path, mmap=mmap)
        tokenizer = NativeTokenizer(model)
        model.close()
        assert tokenizer.decode(tokenizer.encode("def add(a, b):")) == "def add(a, b):"


def hostile(**tables: object) -> bytes:
    """A segment of single bytes, whose first tokens are the 256 bytes."""
    texts = [bytes([byte]) for byte in range(256)]
    values: dict[str, object] = {"kind": KIND_BYTES, "byte_tokens": list(range(256)), "token_texts": texts} | tables
    values["token_flags"] = bytes(len(values["token_texts"]))  # type: ignore[arg-type]
    return encode_tables(TokenizerTables(**values))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("tables", "field", "message"),
    [
        (
            {"token_texts": [b"a" * 4097] * 256},
            "token_begins[0]",
            r"expected a token of at most 4096 bytes",
        ),
        ({"prefix": [1] * 1025}, "prefix[0]", r"expected at most 1024 tokens, got 1025"),
        ({"suffix": [1] * 1025}, "suffix[0]", r"expected at most 1024 tokens, got 1025"),
    ],
)
def test_tables_that_make_much_of_little_are_refused(
    tables: dict[str, object], field: str, message: str, open_segment: Callable[[bytes], NativeTokenizer]
) -> None:
    with raises(InvalidFileError, param=field, match=message):
        open_segment(hostile(**tables))


def test_the_text_of_ids_is_limited(open_segment: Callable[[bytes], NativeTokenizer]) -> None:
    tokenizer = open_segment(hostile(token_texts=[b"a" * 4096] * 256))
    assert len(tokenizer.decode([7] * 1000)) == 4_096_000
    with raises(InvalidArgumentError, param="ids"):
        tokenizer.decode([7] * 70_000)


def test_growth_stops_before_it_needs_memory(open_segment: Callable[[bytes], NativeTokenizer]) -> None:
    """Two steps of 16 times each: the second ends at the limit, not behind it."""
    tokenizer = open_segment(hostile(steps=[(STEP_REPLACE, b"a", b"a" * 16)] * 2))
    text = "a" * (4 << 20)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + (600 << 20), before[1]))
    try:
        with raises(UnsupportedError, param="steps[1]", match=r".* 16 times"):
            tokenizer.encode(text)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
