"""Prompts that no context holds, and bodies and texts that take long to read: none may cost the others anything."""

from __future__ import annotations

import json
import threading

import pytest

from penstock.errors import InvalidFileError
from penstock.models import tokenizer_file
from penstock.models.side_files import read_side_files
from penstock.serving import door
from penstock.serving.json_bounds import MAX_NESTS, MAX_VALUES, check_counts
from tests.cli.conftest import DEMO


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [
        ("/v1/completions", "prompt", [1] * 2000),
        ("/v1/completions", "prompt", "x " * 200_000),
        ("/v1/completions", "prompt", ["x", [1] * 2000]),
        ("/v1/embeddings", "input", [1] * 2000),
        ("/tokenize", "prompt", "x " * 200_000),
    ],
)
def test_what_no_context_holds_is_refused_before_it_costs(demo, path, field, value):
    if isinstance(value, list) and isinstance(value[0], str):
        value = [demo.post("/tokenize", prompt=value[0])["tokens"], value[1]]
    backend = demo.models.list()[0]
    num_steps = backend.figures().num_steps
    status, error = demo.refused(path, **{field: value})
    assert (status, error["code"]) == (400, "context_length_exceeded")
    assert backend.figures().num_steps == num_steps
    if path == "/v1/completions":
        cut = demo.post(path, **{field: value}, truncate_prompt_tokens=5, max_tokens=1)
        assert cut["usage"]["prompt_tokens"] <= 10


class Watched:
    """Hands every call on, and notes its name and its thread."""

    def __init__(self, real: object) -> None:
        self._real, self.calls = real, {}

    def __getattr__(self, name: str) -> object:
        self.calls[name] = threading.current_thread().name
        return getattr(self._real, name)


def test_a_long_text_does_not_stop_the_others(demo, monkeypatch):
    """Long texts are encoded in threads of their own: by the core, whose calls let others run, and by that call of the
    library that does."""
    tokenizer = demo.models.list()[0].tokenizer
    short, long = "x = 1\n", "x = 1\n" * 600
    assert len(long) > tokenizer_file._LONG_TEXT
    library = tokenizer_file.LibraryTokenizer(read_side_files(DEMO)["tokenizer.json"])
    expected = [library.encode(one) for one in (short, long)]

    def used(text: str) -> dict[str, str]:
        assert demo.post("/tokenize", prompt=text)["tokens"] == expected[text == long]
        return watched.calls

    watched = Watched(tokenizer._backend)
    monkeypatch.setattr(tokenizer, "_backend", watched)
    assert used(short)["encode"] == "service"
    assert used(long)["encode"].startswith("penstock-text")
    monkeypatch.setattr(tokenizer, "_backend", library)
    watched = Watched(library._tokenizer)
    monkeypatch.setattr(library, "_tokenizer", watched)
    assert used(short)["encode"] == "service"
    assert used(long)["encode_batch_fast"].startswith("penstock-text")


@pytest.mark.parametrize("num_words", [600, 200_000])
def test_a_conversation_that_no_context_holds_is_refused(serve, num_words):
    messages = [{"role": "user", "content": "x " * num_words}]
    service = serve()
    for path in ("/v1/chat/completions", "/tokenize"):
        if num_words > 1000 or path != "/tokenize":
            status, error = service.refused(path, messages=messages)
            assert (status, error["code"], error["param"]) == (400, "context_length_exceeded", "messages")
    assert service.models.list()[0].figures().num_steps == 0


@pytest.mark.parametrize(
    "piece", [b"[],", b"[1],", b"{},", b'["\\\\",{}],', b"[" * 60 + b"]" * 60 + b",", b"1,", b'"",']
)
def test_more_values_than_may_be_are_refused_before_they_are_parsed(demo, piece, monkeypatch):
    monkeypatch.setattr(door, "parse_json", lambda *_: pytest.fail("it was parsed"))
    most = MAX_VALUES if piece.count(b"[") + piece.count(b"{") == 0 else MAX_NESTS
    body = b'{"prompt": [' + (piece * (most // piece.count(b",") + 1))[:-1] + b"]}"
    status, _, data = demo.ask("POST", "/v1/completions", body)
    error = json.loads(data)["error"]
    assert (status, error["code"]) == (400, "invalid_json")
    assert "lists and objects" in error["message"]


@pytest.mark.parametrize(
    "text", ["[" * 200_000, '"{' * 100_000, "\\" * 300_000 + "[{" * 50_000, "," * (MAX_VALUES + 9)]
)
def test_what_a_text_holds_is_not_counted(text):
    """Wherever a slice of the counting begins and ends."""
    data = json.dumps({"prompt": ["x", text, "y"], "n": 1}).encode()
    check_counts(data, "body")
    with pytest.raises(InvalidFileError, match=rf"found {3 + MAX_VALUES + 1} and 2"):
        check_counts(data[:-1] + b"," + b"," * (MAX_VALUES - 1), "body")


def test_others_are_answered_while_a_large_body_is_parsed(demo, monkeypatch):
    begun, let_go, real = threading.Event(), threading.Event(), door.parse_json

    def slow(data, file):
        begun.set()
        assert let_go.wait(600)
        return real(data, file)

    monkeypatch.setattr(door, "parse_json", slow)
    body = {"prompt": "x " * 40_000}
    asking = threading.Thread(target=demo.ask, args=("POST", "/v1/completions", body))
    asking.start()
    try:
        assert begun.wait(600)
        assert demo.ask("GET", "/health/live")[0] == 200
    finally:
        let_go.set()
        asking.join()
