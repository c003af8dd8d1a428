"""The same tokens in any company: the engine over a program that sees every page and position mistake."""

from __future__ import annotations

import gc
import signal
import threading
import time

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.engine.llm import LLM
from penstock.engine.request import ResolvedSampling, SamplingParams, Status
from penstock.engine.result import Delta
from penstock.errors import InternalError, InvalidArgumentError, InvalidFileError, UnsupportedError

LENGTHS = [1, 2, 31, 32, 33, 64, 65, 100, 255, 257]
WINDOWS = [(0,), (40,), (0, 33)]


def prompt_of(length: int, salt: int = 0) -> list[int]:
    return [(7 * i + 13 * salt) % 250 + 2 for i in range(length)]


def params_of(index: int, max_tokens: int = 40) -> SamplingParams:
    if index % 2 == 0:
        return SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
    return SamplingParams(max_tokens=max_tokens, temperature=0.9, top_k=20, top_p=0.9, seed=index, ignore_eos=True)


PROMPTS = [prompt_of(length, salt) for salt, length in enumerate(LENGTHS)]
PARAMS = [params_of(index) for index in range(len(PROMPTS))]


def run_alone(make_llm, windows=(0,)) -> list[list[int]]:
    llm = make_llm(windows=windows, max_tokens=512)
    return [llm.generate(p, s).token_ids for p, s in zip(PROMPTS, PARAMS, strict=True)]


@pytest.mark.parametrize("windows", WINDOWS)
def test_batch_matches_single(make_llm, windows):
    llm = make_llm(windows=windows)
    together = [r.token_ids for r in llm.generate(PROMPTS, PARAMS)]
    assert together == run_alone(make_llm, windows)


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_chunked_matches_whole(make_llm, chunk):
    llm = make_llm(windows=(0, 33), max_chunk=chunk, max_tokens=max(8, chunk))
    assert [r.token_ids for r in llm.generate(PROMPTS, PARAMS)] == run_alone(make_llm, (0, 33))


@pytest.mark.parametrize("windows", WINDOWS)
def test_preempted_matches_uninterrupted(make_llm, windows):
    llm = make_llm(windows=windows, num_pages=12, context_len=384)
    results = llm.generate(PROMPTS, PARAMS)
    assert llm.engine.scheduler.num_preemptions > 0
    assert [r.token_ids for r in results] == run_alone(make_llm, windows)


def test_order_does_not_matter(make_llm):
    forward = [r.token_ids for r in make_llm().generate(PROMPTS, PARAMS)]
    backward = [r.token_ids for r in make_llm().generate(PROMPTS[::-1], PARAMS[::-1])]
    assert forward == backward[::-1]


@pytest.mark.parametrize("temperature", [0, 1.5])
def test_streamed_matches_whole(make_llm, temperature):
    llm = make_llm()
    params = SamplingParams(max_tokens=200, temperature=temperature, seed=3, ignore_eos=True)
    whole = llm.generate("the cat", params)
    deltas = list(llm.stream("the cat", params))
    assert "".join(d.text for d in deltas) == whole.text
    assert [i for d in deltas for i in d.token_ids] == whole.token_ids
    assert [d.finish_reason for d in deltas if d.finish_reason] == ["length"] == [deltas[-1].finish_reason]
    assert whole.text == llm.tokenizer.decode(whole.token_ids)


def test_logits_match_the_tokens_that_were_chosen(make_llm):
    llm = make_llm(windows=(0, 33))
    prompt = prompt_of(70)
    result = llm.generate(prompt, SamplingParams(max_tokens=30, temperature=0, ignore_eos=True))
    logits = llm.logits(prompt + result.token_ids)
    assert logits.shape == (100, 259)
    assert logits.dtype == np.float32
    assert logits.argmax(axis=1)[69:-1].tolist() == result.token_ids


def test_logits_beside_running_requests_change_nothing(make_llm):
    alone = make_llm().generate(prompt_of(40), PARAMS[1]).token_ids
    llm = make_llm(num_pages=4, context_len=128)
    stream = llm.stream(prompt_of(40), PARAMS[1])
    ids = list(next(stream).token_ids)
    before = llm.logits(prompt_of(100, 1))  # with pages for one of the two
    for delta in stream:
        ids += delta.token_ids
    assert ids == alone
    assert np.array_equal(before, llm.logits(prompt_of(100, 1)))


def test_a_request_ends_by_end_token_length_or_context(make_llm):
    llm = make_llm(context_len=64)
    free = llm.generate(prompt_of(5), SamplingParams(max_tokens=500, temperature=0, ignore_eos=True))
    assert free.finish_reason == "length"
    assert len(free.token_ids) == 64 - 5
    ends = make_llm(files={"generation_config.json": b'{"eos_token_id": [%d]}' % free.token_ids[9]})
    stopped = ends.generate(prompt_of(5), SamplingParams(max_tokens=50, temperature=0))
    assert stopped.finish_reason == "stop"
    first = free.token_ids.index(free.token_ids[9])
    assert stopped.token_ids == free.token_ids[: first + 1]


def test_a_stop_string_across_tokens_ends_the_text_before_it(make_llm):
    llm = make_llm()
    whole = llm.generate("the cat", SamplingParams(max_tokens=120, temperature=1, seed=5, ignore_eos=True))
    stop = whole.text[20:25]
    cut = whole.text.index(stop)
    for params in (SamplingParams(max_tokens=120, temperature=1, seed=5, stop=stop, ignore_eos=True),):
        result = llm.generate("the cat", params)
        assert result.finish_reason == "stop"
        assert result.text == whole.text[:cut]
        assert "".join(d.text for d in llm.stream("the cat", params)) == result.text
        assert len(result.token_ids) < len(whole.token_ids)


def test_a_seed_reproduces_and_a_fresh_one_is_reported(make_llm):
    llm = make_llm()
    hot = SamplingParams(max_tokens=20, temperature=2.0, ignore_eos=True)
    first, second = llm.generate("the", hot), llm.generate("the", hot)
    assert first.token_ids != second.token_ids
    again = llm.generate("the", SamplingParams(max_tokens=20, temperature=2.0, seed=first.seed, ignore_eos=True))
    assert again.token_ids == first.token_ids


def test_defaults_come_from_the_generation_config(make_llm):
    files = {"generation_config.json": b'{"do_sample": true, "temperature": 0.5, "top_k": 7, "max_new_tokens": 9}'}
    llm = make_llm(files=files)
    stream = llm.stream([5, 6])
    sampling = stream._request.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.max_tokens) == (0.5, 7, 1.0, 9)
    sampling = llm.stream([5], SamplingParams(temperature=0, top_p=0.5))._request.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.0, 7, 0.5)
    stream.abort()
    greedy = make_llm(files={})
    assert greedy.stream([5])._request.sampling.temperature == 0
    assert greedy.stream([5], SamplingParams(top_k=3))._request.sampling.temperature == 1.0


def test_an_abort_from_a_second_thread_frees_everything(make_llm):
    llm = make_llm(context_len=100_000, num_pages=3200)
    threading.Timer(0.2, llm.abort).start()
    start = time.monotonic()
    results = llm.generate([prompt_of(5), prompt_of(9)], SamplingParams(max_tokens=90_000, ignore_eos=True))
    assert time.monotonic() - start < 20
    assert [r.finish_reason for r in results] == ["abort", "abort"]
    assert not llm.engine.scheduler.has_work


def test_a_stream_that_is_dropped_is_aborted(make_llm):
    llm = make_llm()
    for delta in llm.stream("the cat", SamplingParams(max_tokens=400, ignore_eos=True)):
        assert isinstance(delta, Delta)
        break
    assert not llm.engine.scheduler.has_work
    stream = llm.stream("the", SamplingParams(max_tokens=400))
    with pytest.raises(InvalidArgumentError, match="not ended"):
        stream.result()
    stream.abort()
    assert stream.result().finish_reason == "abort"
    assert list(stream)[-1].finish_reason == "abort"


class Cycle:
    """Holds a stream that nothing but the garbage collector lets go."""

    def __init__(self, stream) -> None:
        self.stream, self.own = stream, self


@pytest.mark.parametrize("place", ["add", "schedule", "advance", "remove", "check_integrity"])
def test_a_stream_that_the_garbage_collector_drops_in_the_middle_of_a_step_ends_after_it(make_llm, monkeypatch, place):
    """Wherever in the engine's work on its requests that is."""
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
    assert (request.status, request.finish_reason) == (Status.FINISHED, "abort")
    assert [i for delta in keep for i in delta.token_ids] == alone[0]


def test_a_step_inside_a_step_of_the_same_thread_is_refused(make_llm):
    llm = make_llm()
    llm.engine.observer = lambda news: llm.engine.step()
    stream = llm.stream(prompt_of(4), PARAMS[0])
    with pytest.raises(InternalError, match="again in the middle of its own step"):
        llm.engine.step()
    llm.engine.observer = None
    stream.abort()


def test_ctrl_c_leaves_the_engine_usable(make_llm):
    llm = make_llm(context_len=100_000, num_pages=3200)
    expected = llm.generate(PROMPTS[4], PARAMS[4]).token_ids
    timer = threading.Timer(0.3, signal.raise_signal, [signal.SIGINT])
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, SamplingParams(max_tokens=90_000, ignore_eos=True))
    timer.join()
    assert not llm.engine.scheduler.has_work
    llm.engine.check_integrity()
    assert llm.generate(PROMPTS[4], PARAMS[4]).token_ids == expected


def test_threads_that_share_an_engine_get_what_they_would_get_alone(make_llm):
    alone = run_alone(make_llm)
    llm = make_llm()
    found: dict[int, list[int]] = {}

    def work(index: int) -> None:
        found[index] = llm.generate(PROMPTS[index], PARAMS[index]).token_ids

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(PROMPTS))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[i] for i in range(len(PROMPTS))] == alone


def test_a_failed_step_ends_its_requests_and_not_the_engine(make_llm):
    llm = make_llm()
    llm.engine.program.fail_next = InternalError("planted")
    with pytest.raises(InternalError, match="planted"):
        llm.generate(PROMPTS[:3], PARAMS[:3])
    assert not llm.engine.scheduler.has_work
    assert len(llm.generate(PROMPTS[0], PARAMS[0]).token_ids) == 40


def test_a_row_that_is_no_number_ends_its_request_alone(make_llm):
    alone = [make_llm().generate(prompt, params) for prompt, params in zip(PROMPTS[:3], PARAMS[:3], strict=True)]
    llm = make_llm()
    streams = [llm.stream(prompt, params) for prompt, params in zip(PROMPTS[:3], PARAMS[:3], strict=True)]
    llm.engine.step()
    llm.engine.program.spoil_row = 1
    with pytest.raises(InternalError, match="logits are not finite"):
        list(streams[1])
    llm.engine.check_integrity()
    for index in (0, 2):
        assert [i for delta in streams[index] for i in delta.token_ids] == alone[index].token_ids


def test_text_that_cannot_be_made_ends_its_request_alone(make_llm):
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
    assert damaged.status is Status.FINISHED
    assert "planted" in str(damaged.error)


class Planted:
    """A text that raises: at its end alone, or at each token, too."""

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
def test_whatever_a_text_raises_ends_its_request_alone(make_llm, error, at_tokens):
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
        assert request.status is Status.FINISHED
        assert isinstance(request.error, InternalError)
        assert f"failed: {error.__name__}: planted" in str(request.error)
        assert isinstance(request.error.__cause__, error)
    assert engine.figures().num_finished == {"error": 2, "length": 1}


def test_no_prompts_give_no_results(make_llm, capsys):
    llm = make_llm()
    assert (llm.generate([]), llm.generate([], []), llm.generate([], progress=True)) == ([], [], [])
    assert (llm.score([]), llm.embed([])) == ([], [])
    assert capsys.readouterr().err == ""
    with pytest.raises(InvalidArgumentError, match="prompt is empty"):
        llm.stream([])


def test_the_error_of_several_prompts_says_what_was_done_and_where_it_is_kept(make_llm):
    llm = make_llm(max_requests=1)
    plain = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    bad = SamplingParams(
        max_tokens=4, allowed_token_ids=[7], logit_bias={7: -100}, bad_words=[llm.tokenizer.decode([7])]
    )
    prompts, params = [[5, 6], [5, 7], [5, 8]], [plain, bad, plain]
    message = r"prompts\[1\]: no token is allowed here.* \(2 of 3 prompts were done; generate_each gives"
    with pytest.raises(InvalidArgumentError, match=message) as caught:
        llm.generate(prompts, params)
    assert isinstance(caught.value.__cause__, InvalidArgumentError)
    with pytest.raises(InvalidArgumentError, match=r"^no token is allowed here"):
        llm.generate(prompts[1], bad)
    found = dict(llm.generate_each(zip(prompts, params, strict=True)))
    assert [len(found[i].token_ids) for i in (0, 2)] == [4, 4]
    assert isinstance(found[1], InvalidArgumentError)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([[]], r"prompts\[0\]: prompt is empty"),
        ("", "empty"),
        ([3, 259], "token id 259 at 1 is not in 0 to 258"),
        ([-1], "token id -1"),
        ([1.5], "whole numbers"),
        ([True], "token id True"),
        ([3] * 512, "512 tokens, but the context holds 512"),
        (["the", [3] * 600], r"prompts\[1\]: prompt has 600"),
        ({"a": 1}, "dict"),
        (7, "int"),
        ("\ud800", "surrogate"),
    ],
)
def test_a_bad_prompt_is_refused_by_name(make_llm, prompt, message):
    llm = make_llm()
    with pytest.raises(InvalidArgumentError, match=message):
        llm.generate(prompt)
    assert not llm.engine.scheduler.has_work


def test_what_the_model_lacks_is_said(make_llm):
    llm = make_llm(files={})
    assert llm.generate([3, 4], SamplingParams(max_tokens=2)).text == ""
    with pytest.raises(UnsupportedError, match=r"tokenizer\.json"):
        llm.generate("text")
    with pytest.raises(UnsupportedError, match="stop"):
        llm.generate([3], SamplingParams(stop="x"))
    with pytest.raises(UnsupportedError, match="chat template"):
        make_llm().chat([{"role": "user", "content": "hello"}])


def test_items_that_another_thread_finished_are_given_all_the_same(make_llm):
    llm = make_llm()
    honest = llm.engine.submit

    def submit(*arguments, **options):
        request = honest(*arguments, **options)
        while llm.engine.wait(request, len(request.output_ids)):  # as the other thread would
            pass
        return request

    llm.engine.submit = submit
    assert [index for index, _ in llm.generate_each([([5, 6], PARAMS[0]), ([5, 7], PARAMS[1])])] == [0, 1]


def test_no_more_items_are_taken_ahead_than_may_be(make_llm):
    llm, taken, ended = make_llm(), [], []

    def items():
        for index in range(9):
            taken.append(index)
            yield [5, 6, index], SamplingParams(max_tokens=1 + index % 3, temperature=0, ignore_eos=True)

    for index, _ in llm.generate_each(items(), max_open=2):
        ended.append(index)
        assert len(taken) <= len(ended) + 1  # the one that is handed on was one of the two
    assert sorted(ended) == list(range(9))


def test_abort_all_ends_who_runs_who_waits_and_who_has_just_come(make_llm):
    engine = make_llm(max_requests=1).engine
    requests = [engine.submit(prompt_of(5, i)) for i in range(2)]
    engine.step()
    requests.append(engine.submit(prompt_of(5, 2)))
    assert [request.status for request in requests[:2]] == [Status.RUNNING, Status.WAITING]
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
    with pytest.raises(InvalidArgumentError, match="closed"):
        llm.generate("the")


def test_a_request_that_comes_while_another_thread_closes_is_ended(make_llm):
    engine = make_llm().engine
    honest = engine.check_prompt

    def check(*arguments, **options):
        engine.close()
        return honest(*arguments, **options)

    engine.check_prompt = check
    request = engine.submit([5, 6])
    assert (request.status, request.finish_reason) == (Status.FINISHED, "abort")


@given(data=st.data())
@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_requests_that_come_and_go_change_nobody_elses_tokens(make_llm, data):
    windows = data.draw(st.sampled_from(WINDOWS))
    llm: LLM = make_llm(windows=windows, num_pages=8, context_len=256, max_tokens=data.draw(st.sampled_from([8, 40])))
    engine = llm.engine
    live, started = [], []
    for _ in range(data.draw(st.integers(1, 25))):
        move = data.draw(st.sampled_from(["add", "add", "step", "step", "step", "abort"]))
        if move == "add":
            salt, length = data.draw(st.integers(0, 9)), data.draw(st.integers(1, 120))
            stream = llm.stream(prompt_of(length, salt), params_of(salt, max_tokens=12))
            live.append(stream)
            started.append((stream, prompt_of(length, salt), params_of(salt, max_tokens=12)))
        elif move == "step":
            engine.step()
        elif live:
            live.pop(data.draw(st.integers(0, len(live) - 1))).abort()
        engine.check_integrity()
    while engine.scheduler.has_work or engine._incoming:
        engine.step()
        engine.check_integrity()
    for stream, prompt, params in started[:4]:
        result = stream.result()
        whole = llm.generate(prompt, params).token_ids
        assert result.token_ids == whole[: len(result.token_ids)]
        assert result.finish_reason == "abort" or result.token_ids == whole
        assert stream._request.status is Status.FINISHED
