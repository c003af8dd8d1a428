"""The library's tokenizers run in a process of their own: limits on memory and time, errors, restarts, speed."""

from __future__ import annotations

import gc
import os
import threading
from pathlib import Path

import psutil
import pytest

from penstock.checkpoint import tokenizer_process
from penstock.checkpoint.tokenizer_process import TokenizerProcess
from penstock.errors import InvalidArgumentError, InvalidFileError, TokenizerError
from penstock.text.text_stream import TextStream
from penstock.text.tokenizer import Tokenizer
from tests.support.errors import raises
from tests.support.hostile_tokenizers import backtracks, grows, replace, words

LONG = "a" * 200_000


def children() -> set[int]:
    return {one.pid for one in psutil.Process().children(recursive=True)}


@pytest.mark.long
def test_text_that_grows_too_long_ends_the_process_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_process, "CALL_SECONDS", 60)
    tokenizer = TokenizerProcess(words(normalizer=grows(4000, 1)))
    assert tokenizer.encode("a") == [1]
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: .* memory .* text"):
        tokenizer.encode(LONG)
    assert tokenizer.encode("a") == [1]  # another process


def test_decoding_that_grows_ends_the_process_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_process, "STEP_SECONDS", 60)
    tokenizer = Tokenizer({"tokenizer.json": words(decoder=grows(4000, 1, "decoders"))})
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: .*(memory|\d+ bytes)"):
        tokenizer.decode([0] * 60_000)
    assert tokenizer.decode([0]) == "a" * 4000


def test_time_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_process, "CALL_SECONDS", 0.2)
    tokenizer = TokenizerProcess(words(pre_tokenizer=backtracks()))
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: .* too long .* text"):
        tokenizer.encode(("a" * 26 + "b ") * 3000)
    assert tokenizer.encode("a") == [0]


def test_a_process_that_sleeps_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """It uses no CPU time: the parent's clock ends it."""
    tokenizer = TokenizerProcess(words())
    tokenizer.open()
    assert tokenizer._child is not None
    psutil.Process(tokenizer._child.process.pid).suspend()
    monkeypatch.setattr(tokenizer_process, "_WALL_FACTOR", 0.0)
    monkeypatch.setattr(tokenizer_process, "_WALL_SECONDS", 0.3)
    with pytest.raises(TokenizerError, match="too long"):
        tokenizer.encode("a")
    monkeypatch.undo()
    assert tokenizer.encode("a") == [0]


@pytest.mark.parametrize("field", ["normalizer", "pre_tokenizer", "decoder"])
def test_a_pattern_that_backtracks_is_one_line(field: str, capfd: pytest.CaptureFixture[str]) -> None:
    text = "a" * 60 + "b"
    data = words(**{field: backtracks("Split" if field == "pre_tokenizer" else "Replace")})
    data = data.replace(b'"w2"', b'"' + text.encode() + b'"')
    tokenizer = Tokenizer({"tokenizer.json": data})
    with pytest.raises(TokenizerError) as caught:
        tokenizer.decode([2]) if field == "decoder" else tokenizer.encode(text)
    assert "backtracks too often" in str(caught.value)
    assert str(caught.value).isprintable()
    out, err = capfd.readouterr()
    assert (out, err) == ("", "")


def test_a_process_that_ends_again_and_again_is_left_off() -> None:
    tokenizer = TokenizerProcess(words())
    for _ in range(tokenizer_process.MAX_DEATHS):
        tokenizer.open()
        assert tokenizer._child is not None
        tokenizer._child.process.kill()
        with pytest.raises(TokenizerError):
            tokenizer.encode("a")
    before = children()
    with pytest.raises(TokenizerError, match="3 times"):
        tokenizer.encode("a")
    assert not children() - before
    tokenizer._refused_until = 0.0
    assert tokenizer.encode("a") == [0]


def test_the_process_ends_with_its_tokenizer() -> None:
    before = children()
    tokenizer = Tokenizer({"tokenizer.json": words()})
    assert len(children() - before) == 1
    tokenizer.close()
    assert not children() - before  # children of other tests may have ended meanwhile
    assert tokenizer.encode("a") == [0]
    assert len(children() - before) == 1
    del tokenizer
    gc.collect()
    assert not children() - before


def test_a_fork_has_a_process_of_its_own() -> None:
    tokenizer = TokenizerProcess(words())
    assert tokenizer.encode("a a") == [0, 0]
    assert tokenizer._child is not None
    status = Path("/proc", str(tokenizer._child.process.pid), "status").read_text()
    assert "NoNewPrivs:\t1" in status  # Landlock, if the kernel has it, needs this
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            status = 0 if tokenizer.encode("a a a") == [0, 0, 0] else 2
            tokenizer.close()
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert tokenizer.encode("a") == [0]


def test_threads_share_a_process() -> None:
    tokenizer = TokenizerProcess(words())
    failed: list[object] = []

    def work(count: int) -> None:
        for _ in range(50):
            if tokenizer.encode("a " * count) != [0] * count or tokenizer.decode([0] * count) != " ".join("a" * count):
                failed.append(count)

    threads = [threading.Thread(target=work, args=(count,)) for count in range(2, 8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failed


def test_a_streamed_token_is_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's step waits for each call: a token of a stream costs at most one."""
    tokenizer = Tokenizer({"tokenizer.json": words(decoder=replace("w", " w"))})
    calls: list[int] = []
    real = TokenizerProcess._call
    monkeypatch.setattr(TokenizerProcess, "_call", lambda self, *given: calls.append(1) or real(self, *given))
    stream = TextStream(tokenizer)
    for token in range(2, 42):
        stream.push(token)
    stream.finish()
    assert stream.text == tokenizer.decode(list(range(2, 42)))
    assert len(calls) <= 41


def test_ids_beyond_32_bits_are_refused_here() -> None:
    tokenizer = TokenizerProcess(words())
    for ids in ([1 << 40], [-1, 2], ["a", "b"]):
        with raises(InvalidArgumentError, param="ids"):
            tokenizer.decode(ids)  # type: ignore[arg-type]


def test_opening_is_limited_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_process, "OPEN_SECONDS", 0.001)
    with pytest.raises(InvalidFileError, match=r"tokenizer\.json: .* too long .* open"):
        Tokenizer({"tokenizer.json": words()})
