"""Limits on tokenizer.json and tokenizer_config.json: one sentence that names file and field, within seconds."""

from __future__ import annotations

import base64
import json
import time
from typing import Any

import pytest

from penstock.checkpoint.generation import read_tokenizer_config
from penstock.checkpoint.tokenizer_limits import MAX_ADDED_TOKENS, MAX_GROWTH, check_tokenizer_file
from penstock.errors import InvalidFileError
from penstock.graph.tokenizer.compiler import compile_tokenizer
from tests.support.hostile_tokenizers import backtracks, grows, replace, vocab, words
from tests.support.tokenizer_kinds import KINDS

MAX_SECONDS = 10  # of CPU time, for any file


def added(count: int) -> list[dict[str, Any]]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    return [{"id": i + 5000, "content": f"<t{i}>", **flags} for i in range(count)]


def chain(*steps: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "normalizers": list(steps)}


def charsmap(*texts: bytes) -> dict[str, Any]:
    blob = (8).to_bytes(4, "little") + bytes(8) + b"".join(text + b"\0" for text in texts)
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(blob).decode()}


TEMPLATE = {"type": "TemplateProcessing", "single": [{"Sequence": {"id": "A", "type_id": 0}}] * 100, "pair": []}
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
EMPTY_MATCH = {"type": "Replace", "pattern": {"Regex": "x*"}, "content": "a" * 99}
HOSTILE = {
    "six replacements": ({"normalizer": grows(1000, 6)}, "normalizer: expected"),
    "of a decoder": ({"decoder": grows(1000, 6, "decoders")}, "decoder: expected steps"),
    "nested": ({"normalizer": chain(grows(100, 1), chain(grows(100, 1), grows(100, 1)))}, "normalizer: expected"),
    "without a type": ({"normalizer": {"normalizers": [{"pattern": {"String": "a"}, "content": "a" * 5000}]}}, "norma"),
    "prepended": (
        {"normalizer": chain(*[{"type": "Prepend", "prepend": "a" * 100}] * 3)},
        "normalizer: expected",
    ),
    "empty matches": ({"normalizer": chain(*[EMPTY_MATCH] * 3)}, "normalizer: expected"),
    "a charsmap": ({"normalizer": charsmap(b"a" * 5000)}, "normalizer: expected"),
    "byte levels": (
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [BYTE_LEVEL] * 40}},
        "pre_tokenizer: exp",
    ),
    "templates": (
        {"post_processor": {"type": "Sequence", "processors": [TEMPLATE] * 3}},
        "post_processor: expected steps",
    ),
    "a long template": ({"post_processor": TEMPLATE | {"pair": TEMPLATE["single"] * 11}}, "post_processor.pair: expec"),
    "added tokens": ({"added_tokens": added(MAX_ADDED_TOKENS + 1)}, "added_tokens: expected at most 131072 entries"),
    "a long token": ({"model": vocab(**{"a": 0, "b" * 5000: 1})}, "model.vocab: expected tokens of at most 4096 char"),
    "one id twice": ({"model": vocab(a=0, b=1, c=1)}, "model.vocab: 'b' and 'c' have the same id 1"),
    "a huge id": ({"model": vocab(a=0, b=4_000_000_000)}, "model.vocab: 'b': expected an id from 0 to 16777215, got"),
    "a negative id": ({"model": vocab(a=0, b=-1)}, "model.vocab: 'b': expected an id from 0 to 16777215, got -1"),
    "a huge added id": ({"added_tokens": [added(1)[0] | {"id": 1 << 30}]}, "added_tokens: expected ids up to"),
    "added tokens that grow": (
        {"added_tokens": [{"content": "a" * 4000, "id": i} for i in range(50)], "normalizer": grows(4000, 1)},
        "added_tokens: expected at most 67108864 bytes after normalization",
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("kind", HOSTILE)
def test_files_beyond_the_limits_are_refused(kind: str) -> None:
    fields, message = HOSTILE[kind]
    with pytest.raises(InvalidFileError, match=rf"^tokenizer\.json: {message}"):
        check_tokenizer_file(words(**fields))
    with pytest.raises(InvalidFileError, match=rf"^tokenizer\.json: {message}"):
        compile_tokenizer({"tokenizer.json": words(**fields)})  # in the exporting process, without a limit


def test_usual_files_are_within_the_limits() -> None:
    xlnet = chain(
        replace("``", '"'), replace("''", '"'), {"type": "NFKD"}, {"type": "StripAccents"}, {"type": "Lowercase"},
        charsmap(b"a" * 33), {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "},
    )  # fmt: skip
    check_tokenizer_file(words(normalizer=xlnet))
    check_tokenizer_file(words(normalizer=grows(MAX_GROWTH, 1), pre_tokenizer=backtracks()))
    check_tokenizer_file(words(added_tokens=added(MAX_ADDED_TOKENS)))
    for make in KINDS.values():
        check_tokenizer_file(make().to_str().encode())


def limited(call: Any) -> str:
    """The message of a call that must be refused in time."""
    begun = time.process_time()
    with pytest.raises(InvalidFileError) as caught:
        call()
    assert time.process_time() - begun < MAX_SECONDS
    assert str(caught.value).isprintable()
    return str(caught.value)


def test_a_million_added_tokens_are_refused() -> None:
    entries = b",".join(b'{"id":%d,"content":"<t%d>"}' % (i, i) for i in range(10**6))
    data = b'{"version":"1.0","added_tokens":[' + entries + b'],"model":{"type":"WordLevel","vocab":{},"unk_token":""}}'
    assert "tokenizer.json: expected at most 262144 objects" in limited(lambda: check_tokenizer_file(data))
    config = (
        b'{"added_tokens_decoder":{' + b",".join(b'"%d":{"content":"<t%d>"}' % (i, i) for i in range(10**6)) + b"}}"
    )
    message = limited(lambda: read_tokenizer_config({"tokenizer_config.json": config}))
    assert message.startswith("tokenizer_config.json: expected at most 262144 objects")


@pytest.mark.long
def test_as_many_values_as_fit_are_read_in_time() -> None:
    config = {"added_tokens_decoder": {str(i): i for i in range(1_000_000)}}
    data = json.dumps(config).encode()
    begun = time.process_time()
    read_tokenizer_config({"tokenizer_config.json": data})
    assert time.process_time() - begun < MAX_SECONDS


def test_more_values_than_fit_are_refused_by_their_number() -> None:
    values = b'{"a":[' + b"1," * (5 << 20) + b"1]}"
    assert "values" in limited(lambda: read_tokenizer_config({"tokenizer_config.json": values}))
