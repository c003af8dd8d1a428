"""Streamed text equals the whole text, and stop strings end it wherever tokens are cut."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.auto.tokenizer import AutoTokenizer
from penstock.errors import InvalidArgumentError, InvalidFileError, UnsupportedError
from penstock.text.chat_template import encode_chat
from penstock.text.text_stream import StopMatcher, StopRules, TextStream
from penstock.text.tokenizer import Tokenizer
from tests.support.errors import raises
from tests.support.fake_model import byte_fallback_json, byte_level_json, stream_of
from tests.support.properties import CHECKS

SAMPLES = ["the cat sat", "é日本🙂 x", " leading", "a\n\tb", "👩‍👩‍👧 family", "naïve – café", "plainplain", "日日日"]
MANY = settings(CHECKS, max_examples=120)


@pytest.mark.parametrize("text", SAMPLES)
def test_streamed_text_matches_whole_text(any_tokenizer, text):
    ids = any_tokenizer.encode(text)
    streamed, pieces = stream_of(any_tokenizer, ids)
    assert streamed == any_tokenizer.decode(ids) == "".join(pieces)
    assert not any(piece.endswith("\ufffd") for piece in pieces)


@given(text=st.text(max_size=60))
@MANY
def test_any_text_survives_tokens_and_back(any_tokenizer, text):
    ids = any_tokenizer.encode(text, add_special_tokens=False)
    assert stream_of(any_tokenizer, ids)[0] == any_tokenizer.decode(ids)


@pytest.fixture(scope="module")
def byte_level() -> Tokenizer:
    return Tokenizer({"tokenizer.json": byte_level_json()})


@pytest.fixture(scope="module")
def byte_fallback() -> Tokenizer:
    return Tokenizer({"tokenizer.json": byte_fallback_json()})


@given(ids=st.lists(st.integers(0, 258), max_size=60))
@MANY
def test_any_bytes_stream_as_they_decode(byte_level, ids):
    tokenizer = byte_level
    assert stream_of(tokenizer, ids)[0] == tokenizer.decode(ids)


@given(ids=st.lists(st.integers(0, 269), max_size=200))
@MANY
def test_invalid_utf8_never_stalls_the_stream(byte_fallback, ids):
    tokenizer = byte_fallback
    text, pieces = stream_of(tokenizer, ids)
    assert text == "".join(pieces)


def test_special_tokens_are_skipped_and_added_words_kept(any_tokenizer):
    begin = any_tokenizer.token_id("<s>")
    ids = [begin, *any_tokenizer.encode("the", add_special_tokens=False), any_tokenizer.token_id("</s>")]
    assert stream_of(any_tokenizer, ids)[0].strip() == "the"
    assert any_tokenizer.decode(ids, skip_special_tokens=False).startswith("<s>")


def test_the_post_processor_decides_what_begins_a_prompt(any_tokenizer):
    ids = any_tokenizer.encode("cat")
    plain = any_tokenizer.encode("cat", add_special_tokens=False)
    assert ids in (plain, [any_tokenizer.token_id("<s>"), *plain])


@given(
    text=st.text(alphabet="abc", max_size=30),
    stops=st.lists(st.text(alphabet="abc", min_size=1, max_size=4), min_size=1, max_size=3),
    data=st.data(),
)
@MANY
def test_stop_strings_are_found_however_the_text_is_cut(text, stops, data):
    def run(pieces: list[str]) -> tuple[str, bool]:
        matcher, shown = StopMatcher(stops), ""
        for piece in pieces:
            new, stopped = matcher.push(piece)
            shown += new
            assert not any(stop in shown for stop in stops)
            if stopped:
                return shown, True
        return shown + matcher.flush(), False

    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    edges = [0, *cuts, len(text)]
    pieces = [text[a:b] for a, b in pairwise(edges)]
    shown, stopped = run(pieces)
    assert (shown, stopped) == run(list(text)) == run([text])
    assert stopped == any(stop in text for stop in stops)
    assert text.startswith(shown)
    assert stopped or shown == text


def test_a_possible_stop_string_is_held_back():
    matcher = StopMatcher(["\n\n", "END"])
    assert matcher.push("a\n") == ("a", False)
    assert matcher.push("b E") == ("\nb ", False)
    assert matcher.push("N") == ("", False)
    assert matcher.push("T") == ("ENT", False)
    assert matcher.push("xEND tail") == ("x", True)


def test_a_stop_string_split_within_a_character_is_found():
    tokenizer = Tokenizer({"tokenizer.json": byte_level_json()})
    stream = TextStream(tokenizer, StopRules(["日本"]))
    pushed = [stream.push(token) for token in tokenizer.encode("x日本y")]
    stream.finish()
    assert stream.text == "x"
    assert pushed.index(True) == 6


@pytest.mark.parametrize(
    ("files", "error", "message"),
    [
        ({}, UnsupportedError, "tokenizer.json"),
        ({"tokenizer.json": b"{"}, InvalidFileError, "tokenizer.json"),
        ({"tokenizer.json": b'{"version": "9"}'}, InvalidFileError, "tokenizer.json"),
        ({"tokenizer.json": b"\xff\xfe"}, InvalidFileError, "tokenizer.json"),
        ({"tokenizer.json": byte_level_json(), "tokenizer_config.json": b"[]"}, InvalidFileError, "tokenizer_config"),
    ],
)
def test_damaged_tokenizer_files_are_refused_by_name(files, error, message):
    with pytest.raises(error, match=message):
        Tokenizer(files)


@pytest.mark.parametrize("key", ["continuing_subword_prefix", r"continuing\u005fsubword_prefix"])
def test_a_subword_prefix_that_aborts_the_library_is_refused(key):
    model = {"type": "BPE", "vocab": {"a": 0, "é": 1, "aé": 2}, "merges": ["a é"], key: "x"}
    data = json.dumps({"version": "1.0", "model": model}).replace("\\\\u", "\\u").encode()
    with pytest.raises(UnsupportedError, match=r"tokenizer\.json: model: continuing_subword_prefix"):
        Tokenizer({"tokenizer.json": data})


def test_a_tokenizer_that_fails_on_text_is_refused_by_name():
    """A model without its unknown token loads, and then fails on the first unknown word."""
    model = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "?"}
    text = json.dumps({"version": "1.0", "added_tokens": [], "model": model})
    tokenizer = Tokenizer({"tokenizer.json": text.encode()})
    with pytest.raises(InvalidFileError, match=r"tokenizer\.json: .*Missing"):
        tokenizer.encode("b")


def test_the_chat_template_is_found_in_either_file():
    named = [{"name": "tool", "template": "t"}, {"name": "default", "template": "d"}]
    base = {"tokenizer.json": byte_level_json()}
    assert Tokenizer(base).chat_template is None
    config = {"tokenizer_config.json": json.dumps({"chat_template": named}).encode()}
    assert Tokenizer(base | config).chat_template == "d"
    assert Tokenizer(base | config | {"chat_template.jinja": b"j"}).chat_template == "j"


@pytest.mark.parametrize(
    ("file", "reason"),
    [
        ({"chat_template.jinja": b"\xff"}, "UTF-8"),
        ({"chat_template.jinja": b"x\n{% do a %}"}, "line 2: .*'do'"),
        (
            {"chat_template.jinja": b"{% for m in [1] %}{% generation %}{% break %}{% endgeneration %}{% endfor %}"},
            "loop",
        ),
        ({"tokenizer_config.json": b'{"chat_template": 3}'}, "expected a string"),
        (
            {"tokenizer_config.json": b'{"chat_template": {"tool_use": "T", "rag": "R"}}'},
            "'default', got 'rag', 'tool_use'",
        ),
    ],
)
def test_a_template_that_cannot_be_used_leaves_plain_text(file, reason):
    tokenizer = Tokenizer({"tokenizer.json": byte_level_json(), **file})
    assert tokenizer.decode(tokenizer.encode("hi")) == "hi"
    assert tokenizer.chat_template is None
    with raises(UnsupportedError, param="messages", code="invalid_chat_template", match=reason):
        encode_chat(tokenizer, [{"role": "user", "content": "hi"}])


def test_tools_choose_the_template_of_their_name():
    config = {"chat_template": {"tool_use": "T{{ tools | length }}", "rag": "R"}}
    files = {"tokenizer.json": byte_level_json(), "tokenizer_config.json": json.dumps(config).encode()}
    tokenizer = AutoTokenizer(Tokenizer(files))
    messages = [{"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(messages, [{"name": "f"}], tokenize=False) == "T1"
    assert tokenizer.apply_chat_template(messages, chat_template="rag", tokenize=False) == "R"
    with raises(UnsupportedError, param="messages"):
        tokenizer.apply_chat_template(messages)


def test_text_must_be_text(any_tokenizer):
    with raises(InvalidArgumentError, param="text"):
        any_tokenizer.encode(b"x")
