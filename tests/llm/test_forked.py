"""A child that is forked while another thread generates: every call is refused by name, and none waits for a lock."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from penstock import AsyncLLM, SamplingParams
from penstock.errors import InvalidArgumentError
from penstock.llm.llm import LLM
from tests.support.hostile_tokenizers import words

REFUSAL = r"LLM: opened in process \d+ and used in its forked child \d+, where its threads do not exist"
PARAMS = SamplingParams(max_tokens=4, ignore_eos=True)


def raise_first(items: Iterator[tuple[int, object]]) -> None:
    """Raise the error of an item that ended with one."""
    for _, item in items:
        assert isinstance(item, InvalidArgumentError)
        raise item


CALLS: dict[str, Callable[[LLM], object]] = {
    "generate": lambda llm: llm.generate([5, 6], PARAMS),
    "generate_each": lambda llm: raise_first(llm.generate_each([([5, 6], PARAMS)])),
    "stream": lambda llm: llm.stream([5, 6], PARAMS),
    "score": lambda llm: llm.score([5, 6]),
    "embed": lambda llm: llm.embed([5, 6]),
    "logits": lambda llm: llm.logits([5, 6]),
    "abort": lambda llm: llm.abort(),
    "step": lambda llm: llm.engine.step(),
}

pytestmark = pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")


@contextmanager
def generating(llm: LLM) -> Iterator[None]:
    """Another thread is in a step and holds the engine's lock."""
    began, goes_on, run = threading.Event(), threading.Event(), llm.engine.program.run

    def slow(batch: object) -> None:
        began.set()
        goes_on.wait(300)
        run(batch)

    llm.engine.program.run = slow
    thread = threading.Thread(target=llm.generate, args=([2, 3], PARAMS))
    thread.start()
    assert began.wait(300)
    try:
        yield
    finally:
        goes_on.set()
        thread.join()
        llm.engine.program.run = run


def in_a_child(call: Callable[[], object]) -> str:
    """What a forked child's call raises, "" for nothing; the child ends after 10 s if the call hangs."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(10)
        message = ""
        try:
            call()
        except InvalidArgumentError as error:
            message = str(error)
        except BaseException as error:
            message = f"other: {error!r}"
        os.write(writer, message.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        message = pipe.read()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, "the call hangs in the forked child"
    return message


@pytest.mark.parametrize("name", CALLS)
def test_a_call_in_a_forked_child_is_refused(name: str, make_llm) -> None:
    llm = make_llm()
    with generating(llm):
        message = in_a_child(lambda: CALLS[name](llm))
    assert re.match(REFUSAL, message), message
    assert len(llm.generate([5, 6], PARAMS).token_ids) == 4


def test_an_open_stream_is_refused_in_a_forked_child(make_llm) -> None:
    llm = make_llm()
    stream = llm.stream([7, 8], PARAMS)
    with generating(llm):
        assert "used in its forked child" in in_a_child(lambda: next(stream))
        assert in_a_child(stream.abort) == ""
    assert len([token for delta in stream for token in delta.token_ids]) == 4


def test_close_in_a_forked_child_spares_the_parent(make_llm) -> None:
    llm = make_llm()
    with generating(llm):
        assert in_a_child(llm.close) == ""
    assert len(llm.generate([5, 6], PARAMS).token_ids) == 4


TEXT_CALLS: dict[str, Callable[[LLM], object]] = {
    "generate": lambda llm: llm.generate("w5 w6", PARAMS),
    "generate_each": lambda llm: raise_first(llm.generate_each([("w5 w6", PARAMS)])),
    "stream": lambda llm: llm.stream("w5 w6", PARAMS),
    "score": lambda llm: llm.score("w5 w6"),
    "embed": lambda llm: llm.embed("w5 w6"),
    "logits": lambda llm: llm.logits("w5 w6"),
}


@contextmanager
def encoding(llm: LLM) -> Iterator[None]:
    """Another thread is in a call to the tokenizer's process and holds its lock."""
    held, goes_on = threading.Event(), threading.Event()

    def hold() -> None:
        with llm.tokenizer._library._lock:
            held.set()
            goes_on.wait(300)

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(300)
    try:
        yield
    finally:
        goes_on.set()
        thread.join()


@pytest.mark.parametrize("name", TEXT_CALLS)
def test_text_in_a_forked_child_is_refused(name: str, make_llm) -> None:
    llm = make_llm(files={"tokenizer.json": words()})
    assert llm.tokenizer.is_isolated
    with encoding(llm):
        message = in_a_child(lambda: TEXT_CALLS[name](llm))
    assert re.match(REFUSAL, message), message
    assert len(llm.generate("w5 w6", PARAMS).token_ids) == 4


def test_close_in_a_forked_child_spares_the_tokenizer(make_llm) -> None:
    llm = make_llm(files={"tokenizer.json": words()})
    child = llm.tokenizer._library._child
    with encoding(llm):
        assert in_a_child(llm.close) == ""
    assert len(llm.generate("w5 w6", PARAMS).token_ids) == 4
    assert llm.tokenizer._library._child is child


def test_an_async_llm_is_refused_in_a_forked_child(make_llm) -> None:
    async def in_parent() -> AsyncLLM:
        return AsyncLLM(make_llm())

    async def ask(asynchronous: AsyncLLM) -> None:
        await asynchronous.generate([5, 6], PARAMS)

    asynchronous = asyncio.run(in_parent())
    assert "used in its forked child" in in_a_child(lambda: asyncio.run(ask(asynchronous)))
    assert in_a_child(lambda: asyncio.run(asynchronous.close())) == ""
    asyncio.run(asynchronous.close())
