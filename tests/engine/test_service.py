"""How requests are served: priorities, deadlines, queue limits, truncation."""

from __future__ import annotations

import threading
import time
from collections import deque

import pytest

from penstock.engine.options import EngineOptions, RequestOptions
from penstock.engine.params import SamplingParams
from penstock.engine.request import Request, RequestStatus
from penstock.errors import DeadlineError, InternalError, InvalidArgumentError, PenstockError, QueueFullError
from penstock.runtime.program import ProgramLimits
from tests.support.engine_requests import finish_order, prompt_of, submit
from tests.support.errors import raises
from tests.support.fake_model import FILES


def test_lower_priority_numbers_go_first_then_arrival(make_llm):
    engine = make_llm(max_requests=1).engine
    requests = [submit(engine, priority=p) for p in (5, 0, 5, -3, 0)]
    assert finish_order(engine, requests) == [3, 1, 4, 0, 2]


def test_urgent_requests_preempt_only_less_urgent_ones(make_llm):
    engine = make_llm(max_requests=2).engine
    slow = [submit(engine, max_tokens=40, salt=i, priority=1) for i in range(2)]
    for _ in range(5):
        engine.step()
    equal, urgent = submit(engine, priority=1), submit(engine, priority=0)
    assert finish_order(engine, [*slow, equal, urgent]) == [3, 0, 1, 2]
    assert [r.num_preemptions for r in (*slow, equal, urgent)] == [0, 1, 0, 0]
    alone = make_llm().engine
    for i, request in enumerate(slow):
        other = submit(alone, max_tokens=40, salt=i)
        while alone.wait(other, len(other.output_ids)):
            pass
        assert other.output_ids == request.output_ids


def test_an_urgent_prompt_goes_before_the_rest_of_a_long_one(make_llm):
    engine = make_llm(max_tokens=32).engine
    long = submit(engine, length=400, priority=1)
    engine.step()
    urgent = submit(engine, length=60, salt=1, max_tokens=2)
    for _ in range(3):
        engine.step()
    assert urgent.output_ids
    assert not long.output_ids
    assert finish_order(engine, [long, urgent])[0] == 1


def test_urgent_requests_take_pages_from_the_less_urgent(make_llm):
    engine = make_llm(num_pages=8, context_len=256, max_tokens=256, options=EngineOptions(max_mixed_tokens=0)).engine
    slow = [submit(engine, length=100, max_tokens=20, salt=i, priority=9) for i in range(2)]
    engine.step()
    urgent = submit(engine, length=200, max_tokens=4, salt=7)
    engine.step()
    assert urgent.output_ids
    assert [r.status for r in slow] == [RequestStatus.WAITING] * 2
    assert finish_order(engine, [*slow, urgent])[0] == 2


def test_a_full_queue_refuses_and_has_room_again_later(make_llm):
    engine = make_llm(max_requests=1, options=EngineOptions(max_waiting=3)).engine
    requests = [submit(engine, salt=i) for i in range(4)]  # one of them gets the place
    for _ in range(3):
        with raises(QueueFullError, code="queue_full", match="3 "):
            submit(engine)
        engine.step()
    while requests[0].status is not RequestStatus.FINISHED:
        engine.step()
    requests.append(submit(engine))
    assert finish_order(engine, requests)[-1] == 4
    assert all(request.error is None for request in requests)


def test_free_places_are_room(make_llm):
    engine = make_llm(max_requests=4, options=EngineOptions(max_waiting=1)).engine
    requests = [submit(engine, salt=i) for i in range(5)]
    with raises(QueueFullError, code="queue_full", match="1 "):
        submit(engine)
    engine.abort(requests[2])
    requests.append(submit(engine))
    engine.abort_all()
    assert all(request.status is RequestStatus.FINISHED for request in requests)
    assert finish_order(engine, [submit(engine, salt=i) for i in range(5)])


def test_concurrent_submits_never_exceed_max_waiting(make_llm):
    engine = make_llm(max_requests=2, options=EngineOptions(max_waiting=3)).engine
    honest = type(engine).has_room
    together = threading.Barrier(8)
    accepted, refused = [], []

    class Slow(type(engine)):
        @property
        def has_room(self) -> bool:
            found = honest.fget(self)
            time.sleep(0.005)  # time for another thread between the check and the queueing
            return found

    def one(salt: int) -> None:
        together.wait(600)
        try:
            accepted.append(submit(engine, salt=salt))
        except QueueFullError:
            refused.append(salt)

    engine.__class__ = Slow
    threads = [threading.Thread(target=one, args=(salt,)) for salt in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(600)
    assert (len(accepted), len(refused)) == (5, 3)
    assert len(finish_order(engine, accepted)) == 5


def test_abort_all_reaches_a_request_that_moves_meanwhile(make_llm):
    """Another thread's step moves the request from one list to the next between two reads of them."""
    engine = make_llm(max_requests=2).engine
    requests = [submit(engine, max_tokens=300, salt=i) for i in range(4)]

    others: list[threading.Thread] = []

    class Moving(list):
        def copy(self):
            found = list(self)
            if not others:
                others.append(threading.Thread(target=engine.step))
                others[0].start()
                others[0].join(0.3)  # under the engine's lock it cannot step
            return found

    engine.scheduler.running = Moving()
    engine.abort_all()
    others[0].join(600)
    late = submit(engine, max_tokens=3, salt=9)
    finish_order(engine, [])
    assert [r.finish_reason for r in requests] == ["abort"] * 4
    assert (late.finish_reason, len(late.output_ids)) == ("length", 3)
    assert engine.figures().num_finished == {"abort": 4, "length": 1}


def test_a_request_aborted_before_queueing_stays_ended(make_llm):
    """It arrives after the new requests were taken and before the aborts are carried out."""
    engine = make_llm().engine
    found: list[Request] = []

    class Late(deque):
        def __bool__(self) -> bool:
            if not found and not len(self):
                found.append(None)
                found[0] = submit(engine, max_tokens=300)
                engine._aborts.append(found[0])
                return False
            return len(self) > 0

    engine._incoming = Late()
    engine.step()
    assert finish_order(engine, []) == []
    assert (found[0].status, found[0].finish_reason) == (RequestStatus.FINISHED, "abort")
    assert engine.figures().num_finished == {"abort": 1}


def test_fewer_rows_than_requests_are_refused_by_name():
    with raises(InvalidArgumentError, param="max_rows", match=r"max_requests \(2\)"):
        ProgramLimits(max_rows=1, max_requests=2)
    assert ProgramLimits(max_rows=2, max_requests=2).max_rows == 2


def test_options_go_for_every_call(make_llm):
    """Prompts share pages only under the same salt."""
    llm = make_llm(context_len=256)
    prompt, params = prompt_of(100), SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)

    def one_of_each(options: RequestOptions) -> int:
        ((_, outcome),) = llm.generate_each([(prompt, params)], options=options)
        if isinstance(outcome, PenstockError):
            raise outcome
        return outcome.num_cached_tokens

    calls = {
        "generate": lambda o: llm.generate([prompt], params, options=o)[0].num_cached_tokens,
        "generate_each": one_of_each,
        "score": lambda o: llm.score([prompt], options=o) and 0,
        "embed": lambda o: llm.embed([prompt], "last", options=o)[0].num_cached_tokens,
    }
    for name, call in calls.items():
        salted = RequestOptions(cache_salt=name)
        assert call(salted) == 0
        if name != "score":  # which computes its own rows
            assert call(salted) > 0
        with pytest.raises(DeadlineError):
            call(RequestOptions(deadline_s=1e-9))
        with raises(InvalidArgumentError, param="options", match="RequestOptions"):
            call({"priority": 1})
    with raises(InvalidArgumentError, param="options", match="RequestOptions"):
        llm.stream(prompt, params, {"priority": 1})
    with raises(InvalidArgumentError, param="options", match="RequestOptions"):
        llm.engine.submit(prompt, options="x")
    llm.score(prompt, options=RequestOptions(cache_salt="scored"))
    assert llm.generate(prompt, params, options=RequestOptions(cache_salt="scored")).num_cached_tokens > 0


def test_truncate_prompt_in_each_call(make_llm):
    llm = make_llm(context_len=128)
    prompt, params = prompt_of(300), SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
    cut = RequestOptions(truncate_prompt=True)
    assert llm.generate([prompt], params, options=cut)[0].prompt_token_ids == prompt[-108:]
    assert next(llm.generate_each([(prompt, params)], options=cut))[1].prompt_token_ids == prompt[-108:]
    assert llm.embed(prompt, options=cut).token_ids == prompt[-128:]
    with raises(InvalidArgumentError, param="truncate_prompt"):
        llm.score(prompt[:10], options=cut)


def test_a_conversation_takes_options(make_llm):
    files = FILES | {"chat_template.jinja": b"{% for m in messages %}{{ m.content }}{% endfor %}"}
    llm = make_llm(files=files)
    messages = [{"role": "user", "content": "the cat sat on the mat " * 4}]
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    salts = [
        llm.chat(messages, params, options=RequestOptions(cache_salt=s)).num_cached_tokens for s in ("a", "b", "a")
    ]
    assert salts[:2] == [0, 0]
    assert salts[2] > 0


def test_the_prompt_that_cannot_be_scored_or_embedded_is_named(make_llm):
    llm = make_llm()
    for call in (llm.score, llm.embed):
        with raises(InvalidArgumentError, param="prompt", match=r"^prompts\[1\]: prompt\[0\]: .* got 999"):
            call([[5], [999]])
        with raises(InvalidArgumentError, param="prompt", match=r"^prompt\[0\]: .* got 999"):
            call([999])
        llm.engine.program.fail_next = InternalError("planted")
        with pytest.raises(InternalError, match=r"prompts\[0\]: planted"):
            call([[5], [6]])


def test_deadlines_end_running_and_waiting_requests(make_llm, later):
    engine = make_llm(max_requests=1, context_len=4096).engine
    first = submit(engine, max_tokens=3000, deadline_s=2000)
    second = submit(engine, max_tokens=3000, deadline_s=1000)
    third = submit(engine, max_tokens=5, deadline_s=9000)
    for ahead in (0, 1001, 2001):
        later.ahead = ahead
        for _ in range(3):
            engine.step()
        assert (first.error is None, second.error is None) == (ahead < 2000, ahead < 1000)
    finish_order(engine, [first, second, third])
    assert 0 < len(first.output_ids) < 10
    assert isinstance(first.error, DeadlineError)
    assert isinstance(first.error, TimeoutError)
    assert isinstance(second.error, DeadlineError)
    assert (second.output_ids, third.error, len(third.output_ids)) == ([], None, 5)


def test_deadlines_of_finished_requests_are_forgotten(make_llm):
    engine = make_llm().engine
    for _ in range(40):
        finish_order(engine, [submit(engine, max_tokens=1, deadline_s=1e6) for _ in range(8)])
    assert len(engine._deadlines) <= 72


def test_a_prompt_is_truncated_only_when_asked(make_llm):
    llm = make_llm(context_len=128)
    prompt = prompt_of(300)
    params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
    with raises(InvalidArgumentError, param="prompt", match="holds 128"):
        llm.stream(prompt, params)
    cut = llm.stream(prompt, params, RequestOptions(truncate_prompt=True))
    list(cut)
    assert cut.result().prompt_token_ids == prompt[-108:]
    assert cut.result().token_ids == llm.generate(prompt[-108:], params).token_ids
    half = llm.stream(prompt, SamplingParams(max_tokens=500, ignore_eos=True), RequestOptions(truncate_prompt=True))
    assert len(half._request.prompt_ids) == 64
    for length in (50, 110, 127):  # 127 fit, whether there is room for the whole answer or for one token
        whole = llm.stream(prompt[:length], params, RequestOptions(truncate_prompt=True))
        assert whole._request.prompt_ids == prompt[:length]
    with raises(InvalidArgumentError, param="prompt", match="at least one token"):
        llm.stream([], params, RequestOptions(truncate_prompt=True))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("priority", 1.5),
        ("priority", 2**31),
        ("priority", True),
        ("deadline_s", 0),
        ("deadline_s", float("nan")),
        ("deadline_s", "1"),
        ("cache_salt", b"x"),
        ("cache_salt", "x" * 1025),
        ("truncate_prompt", 1),
    ],
)
def test_a_bad_request_option_is_refused_by_name(field, value):
    with raises(InvalidArgumentError, param=field):
        RequestOptions(**{field: value})


@pytest.mark.parametrize(
    "fields",
    [{"max_chunk": -1}, {"max_mixed_tokens": -1}, {"prefix_cache": 1}, {"max_waiting": 0.5}, {"priority_s": 0}],
)
def test_a_bad_engine_option_is_refused_by_name(fields):
    with raises(InvalidArgumentError, param=next(iter(fields))):
        EngineOptions(**fields)


def test_the_engines_own_priority_s_counts(make_llm):
    def order(priority_s: float) -> list[int]:
        engine = make_llm(max_requests=1, options=EngineOptions(priority_s=priority_s)).engine
        return finish_order(engine, [submit(engine, priority=p) for p in (2, 0)])

    assert order(1e6) == [1, 0]
    assert order(1e-12) == [0, 1]
