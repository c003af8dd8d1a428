"""The same tokens in any batch: the engine over a program that reveals every wrong page or position."""

from __future__ import annotations

import inspect
import re
import threading
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine.options import EngineOptions
from penstock.engine.params import SamplingParams
from penstock.engine.request import RequestStatus
from penstock.errors import InvalidArgumentError, UnsupportedError
from penstock.llm.llm import LLM
from penstock.llm.llm_options import LLMFields
from tests.support.engine_requests import PARAMS, PROMPTS, WINDOWS, params_of, prompt_of, run_alone
from tests.support.errors import raises
from tests.support.properties import CHECKS


@pytest.mark.parametrize("windows", WINDOWS)
def test_batch_matches_single(make_llm, windows):
    llm = make_llm(windows=windows)
    together = [r.token_ids for r in llm.generate(PROMPTS, PARAMS)]
    assert together == run_alone(make_llm, windows)


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_chunked_matches_whole(make_llm, chunk):
    llm = make_llm(windows=(0, 33), max_chunk=chunk, max_tokens=max(8, chunk))
    assert [r.token_ids for r in llm.generate(PROMPTS, PARAMS)] == run_alone(make_llm, (0, 33))


def test_mixed_prefill_matches_a_single_request(make_llm):
    few, many = (make_llm(options=EngineOptions(max_mixed_tokens=most)) for most in (5, 0))
    for llm in (few, many):
        assert [r.token_ids for r in llm.generate(PROMPTS, PARAMS)] == run_alone(make_llm)
    assert few.engine.num_steps > many.engine.num_steps


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


def test_logits_do_not_disturb_running_requests(make_llm):
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


def test_threads_sharing_an_engine_get_their_own_tokens(make_llm):
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


def test_no_prompts_give_no_results(make_llm, capsys):
    llm = make_llm()
    assert (llm.generate([]), llm.generate([], []), llm.generate([], progress=True)) == ([], [], [])
    with raises(InvalidArgumentError, param="progress", match="'yes'"):
        llm.generate([], progress="yes")
    with raises(InvalidArgumentError, param="prompt", match="at least one token"):
        llm.stream([])
    assert (llm.score([]), llm.embed([])) == ([], [])
    assert capsys.readouterr().err == ""
    with raises(InvalidArgumentError, param="prompt", match="at least one token"):
        llm.stream([])


def test_only_malformed_items_fail(make_llm):
    llm, good = make_llm(), SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)
    items = [5, None, "xy", ("x",), ("x", 5), ("x", good, 5), ("x", good, None, 4), {"prompt": "x"}]
    found = dict(llm.generate_each([*items, ("x", good), ("x", None), ("x", good, None)]))
    for index, item in enumerate(items):
        assert isinstance(found[index], InvalidArgumentError), item
        assert re.match(r"items: expected|params: expected|options: expected", str(found[index]))
    assert len(found[8].token_ids) == len(found[10].token_ids) == 2
    assert found[9].finish_reason
    for wrong in (5, None, "xy", {"a": good}):
        with raises(InvalidArgumentError, param="items"):
            next(llm.generate_each(wrong))
    for wrong in (-1, "x", 1.5, True):
        with raises(InvalidArgumentError, param="max_open"):
            next(llm.generate_each([("x", good)], max_open=wrong))


@pytest.mark.parametrize(
    ("field", "value"),
    [("limits", 5), ("use_cache", "no"), ("progress", 5)],
)
def test_options_of_a_model_are_checked_by_name(field, value):
    with raises(InvalidArgumentError, param=field):
        LLM("demo/demo.psm", **{field: value})


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("frob", "scheme, mode, .*prefix_cache"),
        ("prefix_cach", "prefix_cache"),
        ("thread", "threads"),
        ("max_request", "max_requests"),
        ("num_pages", r"limits=ProgramLimits\(num_pages=...\)"),
    ],
)
def test_an_unknown_option_is_refused_with_the_nearest(name, hint):
    with raises(InvalidArgumentError, param=name, match=f"'{name}': .*{hint}"):
        LLM("demo/demo.psm", **{name: 1})


def test_the_options_that_are_listed_are_those_of_an_llm():
    named = {name for name in inspect.signature(LLM).parameters if name not in ("model", "others")}
    expected = named | set(LLMFields.__annotations__) | set(EngineOptions.__dataclass_fields__)
    with raises(InvalidArgumentError, param="frob", match="scheme, mode") as caught:
        LLM("demo/demo.psm", frob=1)
    assert set(str(caught.value).partition("it has ")[2].split(", ")) == expected


def test_an_error_among_prompts_tells_what_was_done(make_llm):
    llm = make_llm(max_requests=1)
    plain = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    bad = SamplingParams(
        max_tokens=4, allowed_token_ids=[7], logit_bias={7: -100}, bad_words=[llm.tokenizer.decode([7])]
    )
    prompts, params = [[5, 6], [5, 7], [5, 8]], [plain, bad, plain]
    refused = partial(raises, InvalidArgumentError, param=None, code="no_token_allowed")
    with refused(match=r"^prompts\[1\]: .* \(2 of 3 .*generate_each") as caught:
        llm.generate(prompts, params)
    assert isinstance(caught.value.__cause__, InvalidArgumentError)
    with refused(match=r"^(?!prompts)"):
        llm.generate(prompts[1], bad)
    found = dict(llm.generate_each(zip(prompts, params, strict=True)))
    assert [len(found[i].token_ids) for i in (0, 2)] == [4, 4]
    assert isinstance(found[1], InvalidArgumentError)


@pytest.mark.parametrize(
    ("prompt", "param", "fact"),
    [
        ([[]], "prompt", r"prompts\[0\]: .*at least one token"),
        ("", "prompt", "at least one token"),
        ([3, 259], "prompt", r"^prompt\[1\]: .* got 259$"),
        ([-1], "prompt", r"^prompt\[0\]: .* got -1$"),
        ([1.5], "prompt", r"1\.5"),
        ([True], "prompt", r"^prompt\[0\]: .* got True$"),
        ([3] * 512, "prompt", "holds 512"),
        (["the", [3] * 600], "prompt", r"prompts\[1\]: .*600"),
        ({"a": 1}, "prompts", "dict"),
        (7, "prompts", "int"),
        ("\ud800", "text", "character 0"),
    ],
)
def test_a_bad_prompt_is_refused_by_name(make_llm, prompt, param, fact):
    llm = make_llm()
    with raises(InvalidArgumentError, param=param, match=fact):
        llm.generate(prompt)
    assert not llm.engine.scheduler.has_work


def test_missing_tokenizer_and_template_are_named(make_llm):
    llm = make_llm(files={})
    assert llm.generate([3, 4], SamplingParams(max_tokens=2)).text == ""
    with raises(UnsupportedError, match=r"tokenizer\.json"):
        llm.generate("text")
    with raises(UnsupportedError, param="stop"):
        llm.generate([3], SamplingParams(stop="x"))
    with raises(UnsupportedError, param="messages"):
        make_llm().chat([{"role": "user", "content": "hello"}])


def test_items_finished_by_another_thread_are_returned(make_llm):
    llm = make_llm()
    honest = llm.engine.submit

    def submit(*arguments, **options):
        request = honest(*arguments, **options)
        while llm.engine.wait(request, len(request.output_ids)):  # as another thread would
            pass
        return request

    llm.engine.submit = submit
    assert [index for index, _ in llm.generate_each([([5, 6], PARAMS[0]), ([5, 7], PARAMS[1])])] == [0, 1]


def test_items_taken_ahead_are_limited(make_llm):
    llm, taken, ended = make_llm(), [], []

    def items():
        for index in range(9):
            taken.append(index)
            yield [5, 6, index], SamplingParams(max_tokens=1 + index % 3, temperature=0, ignore_eos=True)

    for index, _ in llm.generate_each(items(), max_open=2):
        ended.append(index)
        assert len(taken) <= len(ended) + 1  # one of the two was the item that is an error
    assert sorted(ended) == list(range(9))


@given(data=st.data())
@settings(CHECKS, max_examples=15)
def test_random_arrivals_and_aborts_do_not_change_tokens(make_llm, data):
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
        assert stream._request.status is RequestStatus.FINISHED
