"""Prompts that no context holds, and bodies and texts that take long to read: none may cost the others anything."""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FunctionType

import pytest

from penstock import config
from penstock.checkpoint.side_files import read_side_files
from penstock.checkpoint.tokenizer_process import TokenizerProcess
from penstock.errors import InvalidFileError
from penstock.serving import request_decoding
from penstock.serving.json_bounds import (
    MAX_ESCAPES,
    MAX_KEYS,
    MAX_NESTS,
    MAX_STRINGS,
    MAX_VALUES,
    check_counts,
)
from tests.support.command import DEMO


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
def test_prompts_beyond_the_context_are_refused_early(demo, path, field, value):
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
    """Long texts are encoded in threads of their own; those of a tokenizer in another process always, in its own."""
    tokenizer = demo.models.list()[0].tokenizer
    short, long = "x = 1\n", "x = 1\n" * 600
    isolated = TokenizerProcess(read_side_files(DEMO)["tokenizer.json"])
    expected = [isolated.encode(one) for one in (short, long)]

    def used(text: str) -> dict[str, str]:
        assert demo.post("/tokenize", prompt=text)["tokens"] == expected[text == long]
        return watched.calls

    watched = Watched(tokenizer._backend)
    monkeypatch.setattr(tokenizer, "_backend", watched)
    assert used(short)["encode"] == "service"
    assert used(long)["encode"].startswith("penstock-text")
    watched = Watched(isolated)
    monkeypatch.setattr(tokenizer, "_backend", watched)
    monkeypatch.setattr(tokenizer, "_is_isolated", True)
    assert used(short)["encode"].startswith("penstock-tokenizer")
    assert used(long)["encode"].startswith("penstock-tokenizer")


@pytest.mark.parametrize("num_words", [600, 200_000])
def test_a_conversation_that_no_context_holds_is_refused(serve, num_words):
    messages = [{"role": "user", "content": "x " * num_words}]
    service = serve()
    for path in ("/v1/chat/completions", "/tokenize"):
        if num_words > 1000 or path != "/tokenize":
            status, error = service.refused(path, messages=messages)
            assert (status, error["code"], error["param"]) == (400, "context_length_exceeded", "messages")
    assert service.models.list()[0].figures().num_steps == 0


MANY = {
    "lists": (b"[],", MAX_NESTS, "lists and objects"),
    "lists of one": (b"[1],", MAX_NESTS, "lists and objects"),
    "objects": (b"{},", MAX_NESTS, "lists and objects"),
    "lists behind escapes": (b'["\\\\",{}],', MAX_NESTS // 2, "lists and objects"),
    "nested lists": (b"[" * 60 + b"]" * 60 + b",", MAX_NESTS // 60 + 1, "lists and objects"),
    "numbers": (b"1,", MAX_VALUES, "values"),
    "empty strings": (b'"",', MAX_STRINGS, "strings"),
    "keys in objects": (b'{"a":1,"b":2},', MAX_KEYS // 2, "keys"),
    "newlines": (b'"' + 64 * b"\\n" + b'",', MAX_ESCAPES // 64, "escapes"),
    "backslashes": (b'"' + 63 * b"\\\\" + b'\\"",', MAX_ESCAPES // 64, "escapes"),
}
"""What a body is made of, more often than which number of times it is refused, and what it has too many of."""


@pytest.mark.parametrize("case", MANY)
def test_too_many_values_are_refused_before_parsing(demo, case, monkeypatch):
    monkeypatch.setattr(request_decoding, "parse_json", lambda *_: pytest.fail("it was parsed"))
    piece, most, name = MANY[case]
    body = b'{"prompt": [' + (piece * (most + 1))[:-1] + b"]}"
    status, _, data = demo.ask("POST", "/v1/completions", body)
    error = json.loads(data)["error"]
    assert (status, error["code"]) == (400, "invalid_json")
    assert error["message"].endswith(f" {name}, got more")


def test_distinct_keys_are_counted_before_they_are_parsed(demo, monkeypatch):
    monkeypatch.setattr(request_decoding, "parse_json", lambda *_: pytest.fail("it was parsed"))
    for num_keys in (MAX_KEYS + 1, 700_000):
        body = b'{"logit_bias": {' + b",".join(b'"%x":0' % key for key in range(num_keys)) + b"}}"
        for path in ("/v1/completions", "/v2/models/demo/infer"):
            status, _, data = demo.ask("POST", path, body)
            assert status == 400
            assert b"at most 32768 keys" in data


@pytest.mark.parametrize("num_bytes", [(1 << 16) - 1, 1 << 16, (1 << 16) + 1, 200_000])
def test_counts_do_not_depend_on_slices(num_bytes):
    """Escapes and quotes at the ends of slices; a small body that has too much of something is impossible."""
    for start in range(8):
        text = b"x" * start + b'\\\\\\"[{,:' * ((num_bytes - start) // 8)
        check_counts(b'["' + text + b'"]', "body")
        with pytest.raises(InvalidFileError, match="lists and objects"):
            check_counts(b'["' + text + b'",' + b"[" * (MAX_NESTS + 1), "body")


@pytest.mark.parametrize(
    "text", ["[" * 200_000, '"{' * 100_000, "\\" * 300_000 + "[{" * 50_000, "," * (MAX_VALUES + 9)]
)
def test_brackets_in_strings_are_not_counted(text):
    """Wherever a slice of the counting begins and ends."""
    data = json.dumps({"prompt": ["x", text, "y"], "n": 1}).encode()
    check_counts(data, "body")
    with pytest.raises(InvalidFileError, match="1048576 values"):
        check_counts(data[:-1] + b"," + b"," * (MAX_VALUES - 1), "body")


def test_one_large_body_is_decoded_at_a_time(demo, monkeypatch):
    running, most, real = [], [], request_decoding.parse_json

    def counting(data, file, **options):
        running.append(1)
        most.append(len(running))
        time.sleep(0.05)
        running.pop()
        return real(data, file, **options)

    monkeypatch.setattr(request_decoding, "parse_json", counting)
    body = {"prompt": "x " * 40_000}
    with ThreadPoolExecutor(8) as clients:
        found = list(clients.map(lambda _: demo.ask("POST", "/v1/completions", body)[0], range(8)))
    assert found == 8 * [400]  # no context holds it
    assert most == 8 * [1]


def test_a_large_body_lets_other_threads_run(monkeypatch):
    """Python code is called for each number: there the interpreter lets other threads run."""
    called = []

    class Spy:
        def __init__(self, decoder):
            self.decode = lambda text: called.append(decoder) or decoder.decode(text)

    plain, sharing = config._DECODER, config._SHARING_DECODER
    monkeypatch.setattr(config, "_DECODER", Spy(plain))
    monkeypatch.setattr(config, "_SHARING_DECODER", Spy(sharing))
    for num_values in (10, 20_000):
        values = {"whole": [*range(num_values)], "fractions": [one + 0.5 for one in range(num_values)]}
        data = json.dumps(values).encode()
        assert config.parse_json(data, "body", lets_threads_run=True) == values
        assert config.parse_json(data, "config.json") == values
    assert called == [plain, plain, sharing, plain]
    assert all(isinstance(hook, FunctionType) for hook in (sharing.parse_int, sharing.parse_float))


def test_others_are_answered_while_a_large_body_is_parsed(demo, monkeypatch):
    begun, let_go, real = threading.Event(), threading.Event(), request_decoding.parse_json

    def slow(data, file, **options):
        begun.set()
        assert let_go.wait(600)
        return real(data, file, **options)

    monkeypatch.setattr(request_decoding, "parse_json", slow)
    body = {"prompt": "x " * 40_000}
    asking = threading.Thread(target=demo.ask, args=("POST", "/v1/completions", body))
    asking.start()
    try:
        assert begun.wait(600)
        assert demo.ask("GET", "/health/live")[0] == 200
    finally:
        let_go.set()
        asking.join()


def test_the_documents_state_the_bounds():
    text = (Path(__file__).parents[3] / "docs" / "guides" / "serving.md").read_text()
    bounds = f"{MAX_VALUES:,} values, of them {MAX_NESTS:,} lists and objects and {MAX_STRINGS:,} strings"
    assert bounds in text
    assert f"{MAX_KEYS:,} keys and {MAX_ESCAPES:,} escapes" in text
