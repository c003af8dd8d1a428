"""What clients read when they are refused: which bound was exceeded, and nothing of the server's folders."""

from __future__ import annotations

import pytest

from penstock.api_errors import FieldError, refusal_of, without_folders
from penstock.errors import FileAccessError, UnavailableError
from penstock.serving.openai.bodies import (
    ChatCompletionRequest,
    CompletionRequest,
    EmbeddingRequest,
    TokenizeRequest,
)
from penstock.serving.request_decoding import converted

LENGTHS = [
    (CompletionRequest, {"prompt": "x", "stop": ["a"] * 65}, "stop: expected a list of 0 to 64 items, got 65"),
    (
        CompletionRequest,
        {"prompt": "x", "stop": "a" * 4097},
        "stop: expected a string of 0 to 4096 characters, got 4097",
    ),
    (
        CompletionRequest,
        {"prompt": "x", "bad_words": ["a"] * 65},
        "bad_words: expected a list of 0 to 64 items, got 65",
    ),
    (CompletionRequest, {"prompt": ["x"] * 2049}, "prompt: expected a list of 1 to 2048 items, got 2049"),
    (CompletionRequest, {"prompt": [[1]] * 2049}, "prompt: expected a list of 1 to 2048 items, got 2049"),
    (CompletionRequest, {"prompt": []}, "prompt: expected a list of 1 to 2048 items, got 0"),
    (EmbeddingRequest, {"input": ["x"] * 2049}, "input: expected a list of 1 to 2048 items, got 2049"),
    (EmbeddingRequest, {"input": ""}, "input: expected a string of 1 or more characters, got 0"),
    (
        ChatCompletionRequest,
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * 4097}]},
        "messages[0].content: expected a list of 0 to 4096 items, got 4097",
    ),
    (
        TokenizeRequest,
        {"messages": [{"role": "user", "content": "x"}] * 4097},
        "messages: expected a list of 1 to 4096 items, got 4097",
    ),
]
TYPES = [
    (CompletionRequest, {"prompt": "x", "stop": 5}, "stop: expected a string or a list of strings, got 5"),
    (CompletionRequest, {"prompt": "x", "stop": ["a", 5]}, "stop[1]: expected a string, got 5"),
    (CompletionRequest, {"prompt": "x", "stop": [5] * 65}, "stop[0]: expected a string, got 5"),
    (CompletionRequest, {"prompt": [1, "x"]}, "prompt[1]: expected an integer from 0 to 2147483647, got 'x'"),
    (
        CompletionRequest,
        {"prompt": {}},
        "prompt: expected a string, a list of strings, a list of token ids, or a list of such lists, got",
    ),
]


@pytest.mark.parametrize(("struct", "body", "message"), LENGTHS + TYPES)
def test_too_long_values_are_refused_by_length(struct, body, message):
    with pytest.raises(FieldError) as raised:
        converted(body, struct)
    assert str(raised.value).startswith(message)


@pytest.mark.parametrize(
    ("text", "public"),
    [
        ("/srv/models/gates/servable.py: no such file", "servable.py: no such file"),
        ("[Errno 2] No such file or directory: '/srv/my models/x.psm'", "[Errno 2] No such file or directory: 'x.psm'"),
        ('load of "/srv/models/" failed (/tmp/a/b.c)', 'load of "models" failed (b.c)'),
        ("not within 600 s; see http://localhost/x/y", "not within 600 s; see http://localhost/x/y"),
        ("gates/servable.py, line 3: 1 / 0 is wrong", "gates/servable.py, line 3: 1 / 0 is wrong"),
        ("", ""),
    ],
)
def test_paths_lose_their_folders(text, public):
    assert without_folders(text) == public


def test_no_folder_of_the_server_reaches_a_client():
    inner = FileAccessError(2, "No such file or directory", "/srv/models/demo.psm")
    for error in (UnavailableError(f"a worker cannot be started: {inner}"), UnavailableError("/srv/models/x: died")):
        assert "/srv" not in str(refusal_of(error, "id"))
    assert "/srv" not in str(refusal_of(inner, "id"))


def test_crashing_workers_leak_no_path():
    from penstock.processes.supervision import SupervisionPolicy
    from penstock.serving.workers.worker_config import WorkerConfig
    from penstock.serving.workers.worker_group import WorkerGroup

    class Launcher:
        supervision = SupervisionPolicy()

    group = WorkerGroup(Launcher(), WorkerConfig("unix:none", "token", "demo", "demo.psm"), 1, lambda: None, {})
    group.error = "/srv/models/demo.psm: No such file or directory"
    assert str(group.unavailable("demo")) == "demo is not ready: no worker is running now. Retry later."
    group._supervisors[0] = object()
    group._failing.add(0)
    assert str(group.unavailable("demo")) == "demo is not ready: its workers crash again and again."
