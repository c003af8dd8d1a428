"""Pages go from one engine to another: only whole ones with the right checksum are used, and none is lost or leaks."""

from __future__ import annotations

import pytest

from penstock.engine.options import EngineOptions, RequestOptions
from penstock.engine.page_copies import HeldPages, grant_pages, hold_pages
from penstock.engine.params import ResolvedSampling
from penstock.runtime.program import PAGE_TOKENS
from tests.support.engine_requests import prompt_of

LENGTH = 5 * PAGE_TOKENS + 7


def generate(engine, prompt, num_tokens=9, salt="") -> list[int]:
    request = engine.submit(
        prompt, ResolvedSampling(max_tokens=num_tokens, temperature=1, seed=3), options=RequestOptions(cache_salt=salt)
    )
    while engine.has_work:
        engine.step()
    assert request.finish_reason == "length", request.error
    return request.output_ids


def copied(sender: HeldPages, receiver: HeldPages) -> None:
    sender.begin_at(receiver.first)
    assert sender.num_parts == receiver.num_parts
    while (data := sender.read()) is not None:
        assert receiver.write(data)


@pytest.fixture(autouse=True)
def release(make_llm, monkeypatch):
    """Whatever a test holds is released at its end, before the engines are checked for pages that are left."""
    held: list[HeldPages] = []
    honest = HeldPages.__init__

    def note(self, *arguments) -> None:
        honest(self, *arguments)
        held.append(self)

    monkeypatch.setattr(HeldPages, "__init__", note)
    yield
    for pages in held:
        pages.release()


@pytest.fixture(params=[(0,), (0, 33), (40,), (70, 0)], ids=str)
def engines(make_llm, request):
    return [make_llm(windows=request.param, max_tokens=256).engine for _ in range(2)]


def test_copied_pages_replace_the_computation(engines) -> None:
    first, second = engines
    prompt = prompt_of(LENGTH, 1)
    expected = generate(first, prompt)
    sender = hold_pages(first, prompt, "")
    assert sender is not None
    assert sender.num_pages == 5
    receiver = grant_pages(second, prompt[: 5 * PAGE_TOKENS], "")
    assert receiver is not None
    copied(sender, receiver)
    assert sender.is_known
    assert receiver.use(sender.num_done, sender.checksum)
    before = second.program.num_tokens_run
    assert generate(second, prompt) == expected
    assert second.program.num_tokens_run - before == 7 + 8, "the end of the prompt, and the answer but its last token"
    assert grant_pages(second, prompt[: 5 * PAGE_TOKENS], "other").first == 0, "salts keep prompts apart"
    again = grant_pages(second, prompt[: 5 * PAGE_TOKENS], "")
    assert (again.first, again.num_parts) == (5, 0), "known pages are not copied"


def test_damaged_or_partial_pages_are_not_used(engines) -> None:
    first, second = engines
    prompt = prompt_of(LENGTH, 2)
    expected = generate(first, prompt)
    for damage in ("byte", "count", "part", "size", "checksum"):
        sender, receiver = hold_pages(first, prompt, ""), grant_pages(second, prompt[: 5 * PAGE_TOKENS], "")
        sender.begin_at(receiver.first)
        num_parts = sender.num_parts
        for number in range(num_parts):
            data = sender.read()
            if damage == "byte" and number == num_parts - 1:
                data = bytes([data[0] ^ 1]) + data[1:]
            if damage == "size" and not number:
                assert not receiver.write(data[:-1])
                assert not receiver.write(data + b"\0")
                assert not receiver.write(b"")
            if damage != "part" or number:
                assert receiver.write(data)
        checksum = sender.checksum if damage != "checksum" else b""
        assert receiver.use(num_parts - (damage == "count"), checksum) == (damage == "size")
        receiver.release()
        sender.release()
        if damage == "size":
            second.forget_prefixes()
            continue
        before = second.program.num_tokens_run
        assert generate(second, prompt) == expected
        assert second.program.num_tokens_run - before == LENGTH + 8, "everything is computed"
        second.forget_prefixes()


def test_no_pages_are_granted_where_they_are_short(make_llm) -> None:
    engine = make_llm(num_pages=6, max_tokens=64).engine
    prompt = prompt_of(LENGTH, 3)
    granted = grant_pages(engine, prompt, "")
    assert granted is not None
    assert grant_pages(engine, prompt_of(LENGTH, 4), "") is None
    granted.release()
    granted = grant_pages(engine, prompt_of(LENGTH, 4), "")
    assert granted is not None
    assert not granted.use(0, granted.checksum), "a part is missing"
    engine.fail_all(RuntimeError("planted"))  # all pages are free now, and may belong to others
    assert not granted.write(bytes(PAGE_TOKENS * 16))
    assert len(generate(engine, prompt)) == 9


def test_pages_of_a_failed_request_are_not_sent_as_known(make_llm) -> None:
    engine = make_llm(max_tokens=256).engine
    prompt = prompt_of(LENGTH, 5)
    generate(engine, prompt)
    sender = hold_pages(engine, prompt, "")
    assert sender.is_known
    engine.submit(prompt, ResolvedSampling(max_tokens=4))
    engine.step()
    engine.program.fail_next = RuntimeError("planted")
    engine.step()
    assert not sender.is_known


def test_engines_that_do_not_share_prompts_copy_nothing(make_llm) -> None:
    engine = make_llm(options=EngineOptions(prefix_cache=False), max_tokens=256).engine
    prompt = prompt_of(LENGTH, 6)
    generate(engine, prompt)
    assert hold_pages(engine, prompt, "") is None
    assert grant_pages(engine, prompt, "") is None
    other = make_llm(max_tokens=256).engine
    assert hold_pages(other, prompt, "") is None, "it has not computed the prompt"
    assert hold_pages(other, prompt[:5], "") is None, "less than a page"
