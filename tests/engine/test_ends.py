"""How requests end early: aborts, dropped streams, faults, Ctrl-C, a closed engine."""

from __future__ import annotations

import gc
import signal
import threading
from contextlib import closing

import pytest

from penstock.engine.params import ResolvedSampling, SamplingParams
from penstock.engine.request import RequestStatus
from penstock.errors import InternalError, InvalidArgumentError, InvalidFileError
from penstock.llm.result import Delta
from tests.support.engine_requests import PARAMS, PROMPTS, prompt_of
from tests.support.errors import raises
from tests.support.waiting import until


def test_an_abort_from_a_second_thread_frees_everything(make_llm):
    llm = make_llm(context_len=100_000, num_pages=3200)

    def abort() -> None:
        until(lambda: llm.engine.figures().num_running >= 2)
        llm.abort()

    thread = threading.Thread(target=abort, daemon=True)
    thread.start()
    results = llm.generate([prompt_of(5), prompt_of(9)], SamplingParams(max_tokens=90_000, ignore_eos=True))
    thread.join()
    assert [r.finish_reason for r in results] == ["abort", "abort"]
    assert not llm.engine.scheduler.has_work


class Snatched:
    """An engine's lock in another thread, which releases it when this one waits, and takes it again first."""

    def __init__(self, lock) -> None:
        self._lock, self._depth = lock, 0
        self._is_taken, self._is_wanted, self._is_free, self._is_taken_again, self._is_over = (
            threading.Event() for _ in range(5)
        )
        self._other = threading.Thread(target=self._run)
        self._other.start()
        self._is_taken.wait()

    def _run(self) -> None:
        with self._lock:
            self._is_taken.set()
            self._is_wanted.wait()
        self._is_free.wait()
        with self._lock:
            self._is_taken_again.set()
            self._is_over.wait()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if timeout > 0:
            self._is_wanted.set()
        found = self._lock.acquire(blocking, timeout)
        self._depth += found
        return found

    def release(self) -> None:
        self._depth -= 1
        self._lock.release()
        if self._depth == 0:
            self._is_free.set()
            self._is_taken_again.wait()

    def close(self) -> None:
        for event in (self._is_wanted, self._is_free, self._is_over):
            event.set()
        self._other.join()


def test_a_result_right_after_an_abort_is_ready(make_llm):
    """Another thread steps: it holds the lock at the abort, and takes it again as soon as this thread releases it."""
    llm = make_llm()
    stream = llm.stream("the cat", SamplingParams(max_tokens=400, ignore_eos=True))
    next(stream)
    lock = llm.engine._lock
    with closing(Snatched(lock)) as llm.engine._lock:
        stream.abort()
        assert stream.result().finish_reason == "abort"
    llm.engine._lock = lock


def test_a_stream_that_is_dropped_is_aborted(make_llm):
    llm = make_llm()
    for delta in llm.stream("the cat", SamplingParams(max_tokens=400, ignore_eos=True)):
        assert isinstance(delta, Delta)
        break
    assert not llm.engine.scheduler.has_work
    stream = llm.stream("the", SamplingParams(max_tokens=400))
    with raises(InvalidArgumentError, code="not_ended"):
        stream.result()
    stream.abort()
    assert stream.result().finish_reason == "abort"
    assert list(stream)[-1].finish_reason == "abort"


class Cycle:
    """Holds a stream in a reference cycle, which only the garbage collector drops."""

    def __init__(self, stream) -> None:
        self.stream, self.own = stream, self


@pytest.mark.parametrize("place", ["add", "schedule", "advance", "remove", "check_integrity"])
def test_a_stream_collected_within_a_step_ends_after_it(make_llm, monkeypatch, place):
    """At any point of the engine's work on its requests."""
    alone = [make_llm().generate(prompt_of(40, salt), PARAMS[0]).token_ids for salt in (1, 2)]
    llm = make_llm()
    scheduler, inside = llm.engine.scheduler, []
    honest, honest_remove = getattr(scheduler, place), scheduler.remove
    keep = llm.stream(prompt_of(40, 1), PARAMS[0])
    dropped = Cycle(llm.stream(prompt_of(40, 3), SamplingParams(max_tokens=400, ignore_eos=True)))
    llm.engine.step()
    request, dropped = dropped.stream._request, None

    def collect(*arguments):
        if inside:
            return honest(*arguments)
        inside.append(True)
        gc.collect()
        result = honest(*arguments)
        inside[0] = False
        return result

    def remove(request):
        assert not any(inside) or place == "remove", "requests are removed in the middle of other work on them"
        return honest_remove(request)

    gc.disable()
    try:
        monkeypatch.setattr(scheduler, "remove", remove)
        monkeypatch.setattr(scheduler, place, collect)
        late = llm.stream(prompt_of(40, 2), PARAMS[0])
        assert [i for delta in late for i in delta.token_ids] == alone[1]
        llm.engine.check_integrity()
    finally:
        gc.enable()
    assert (request.status, request.finish_reason) == (RequestStatus.FINISHED, "abort")
    assert [i for delta in keep for i in delta.token_ids] == alone[0]


def test_a_step_inside_a_step_of_the_same_thread_is_refused(make_llm):
    llm = make_llm()
    llm.engine.observer = lambda news: llm.engine.step()
    stream = llm.stream(prompt_of(4), PARAMS[0])
    with pytest.raises(InternalError, match="own step"):
        llm.engine.step()
    llm.engine.observer = None
    stream.abort()


def test_ctrl_c_leaves_the_engine_usable(make_llm):
    llm = make_llm(context_len=100_000, num_pages=3200)
    expected = llm.generate(PROMPTS[4], PARAMS[4]).token_ids
    num_before = llm.engine.num_output_tokens

    def interrupt() -> None:
        until(lambda: llm.engine.num_output_tokens > num_before + 10)
        signal.raise_signal(signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, SamplingParams(max_tokens=90_000, ignore_eos=True))
    thread.join()
    assert not llm.engine.scheduler.has_work
    llm.engine.check_integrity()
    assert llm.generate(PROMPTS[4], PARAMS[4]).token_ids == expected


def test_a_failed_step_ends_its_requests_and_not_the_engine(make_llm):
    llm = make_llm()
    llm.engine.program.fail_next = InternalError("planted")
    with pytest.raises(InternalError, match="planted"):
        llm.generate(PROMPTS[:3], PARAMS[:3])
    assert not llm.engine.scheduler.has_work
    assert len(llm.generate(PROMPTS[0], PARAMS[0]).token_ids) == 40


def test_a_row_that_is_not_finite_ends_only_its_request(make_llm):
    alone = [make_llm().generate(prompt, params) for prompt, params in zip(PROMPTS[:3], PARAMS[:3], strict=True)]
    llm = make_llm()
    streams = [llm.stream(prompt, params) for prompt, params in zip(PROMPTS[:3], PARAMS[:3], strict=True)]
    llm.engine.step()
    llm.engine.program.spoil_row = 1
    with pytest.raises(InternalError, match="not finite"):
        list(streams[1])
    llm.engine.check_integrity()
    for index in (0, 2):
        assert [i for delta in streams[index] for i in delta.token_ids] == alone[index].token_ids


def test_failed_detokenization_ends_only_its_request(make_llm):
    class Damaged:
        text = ""

        def push(self, token: int = 0) -> bool:
            raise InvalidFileError("tokenizer.json: planted")

        finish = push

    engine = make_llm().engine
    damaged, sound = (engine.submit([5, 6], ResolvedSampling(max_tokens=4), text=t) for t in (Damaged(), None))
    while engine.wait(sound, len(sound.output_ids)):
        pass
    assert (len(sound.output_ids), sound.error) == (4, None)
    assert damaged.status is RequestStatus.FINISHED
    assert "planted" in str(damaged.error)


class Planted:
    """A text that raises: only at its end, or also at each token."""

    text = ""

    def __init__(self, error: type[BaseException], at_tokens: bool) -> None:
        self.error, self.at_tokens = error, at_tokens

    def push(self, token: int) -> bool:
        if self.at_tokens:
            raise self.error("planted")
        return False

    def finish(self) -> None:
        raise self.error("planted")


@pytest.mark.parametrize("error", [MemoryError, ValueError])
@pytest.mark.parametrize("at_tokens", [False, True])
def test_exceptions_of_text_end_only_its_request(make_llm, error, at_tokens):
    engine = make_llm().engine
    text = Planted(error, at_tokens)
    damaged, aborted = (engine.submit([5, 6], ResolvedSampling(max_tokens=n), text=text) for n in (2, 90))
    sound = engine.submit([5, 6], ResolvedSampling(max_tokens=4))
    engine.step()
    engine.abort(aborted)
    while engine.wait(sound, len(sound.output_ids)):
        pass
    engine.check_integrity()
    assert (len(sound.output_ids), sound.error) == (4, None)
    for request in (damaged, aborted):
        assert request.status is RequestStatus.FINISHED
        assert isinstance(request.error, InternalError)
        assert f"failed: {error.__name__}: planted" in str(request.error)
        assert isinstance(request.error.__cause__, error)
    assert engine.figures().num_finished == {"error": 2, "length": 1}


def test_abort_all_ends_running_waiting_and_new_requests(make_llm):
    engine = make_llm(max_requests=1).engine
    requests = [engine.submit(prompt_of(5, i)) for i in range(2)]
    engine.step()
    requests.append(engine.submit(prompt_of(5, 2)))
    assert [request.status for request in requests[:2]] == [RequestStatus.RUNNING, RequestStatus.WAITING]
    assert len(engine.scheduler.waiting) == 1
    engine.abort_all()
    assert [request.finish_reason for request in requests] == ["abort"] * 3
    assert not engine.has_work


@pytest.mark.parametrize("place", ["schedule", "advance"])
def test_ctrl_c_in_the_books_of_a_step_waits_for_its_end(make_llm, monkeypatch, place):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        engine = make_llm(max_requests=4).engine
        requests = [engine.submit(prompt_of(40, i), ResolvedSampling(max_tokens=6)) for i in range(3)]
        honest = getattr(engine.scheduler, place)

        def interrupted(*arguments):
            monkeypatch.setattr(engine.scheduler, place, honest)
            signal.raise_signal(signal.SIGINT)
            return honest(*arguments)

        monkeypatch.setattr(engine.scheduler, place, interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
        assert engine.num_steps == 1
        assert engine.num_output_tokens > 0
        engine.check_integrity()
        while engine.has_work:
            engine.step()
        alone = make_llm().generate(
            [r.prompt_ids for r in requests], SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
        )
        assert [r.output_ids for r in requests] == [one.token_ids for one in alone]
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_closed_engine_says_so(make_llm):
    llm = make_llm()
    stream = llm.stream("the", SamplingParams(max_tokens=400))
    next(stream)
    llm.close()
    llm.close()
    assert stream.result().finish_reason == "abort"
    with raises(InvalidArgumentError, code="closed"):
        llm.generate("the")


def test_a_submit_during_close_is_ended(make_llm):
    engine = make_llm().engine
    honest = engine.check_prompt

    def check(*arguments, **options):
        engine.close()
        return honest(*arguments, **options)

    engine.check_prompt = check
    request = engine.submit([5, 6])
    assert (request.status, request.finish_reason) == (RequestStatus.FINISHED, "abort")
