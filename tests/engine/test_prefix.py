"""The prefix cache: a prompt with a known beginning computes only the rest, and gets the same tokens."""

from __future__ import annotations

import pytest

from penstock.engine.options import EngineOptions, RequestOptions
from penstock.engine.pages import FREED, PageKeys, PageLedger, PagePool
from penstock.engine.params import ResolvedSampling, SamplingParams
from penstock.engine.request import Request
from penstock.engine.scheduler import Scheduler
from penstock.errors import InternalError
from tests.support.engine_requests import PARAMS, PROMPTS, WINDOWS, params_of, prompt_of, run_alone
from tests.support.marks import mostly_long

UNCACHED = EngineOptions(prefix_cache=False)
GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)


SMALL = {"num_pages": 16, "context_len": 512}


def shared_prompts(shared_len: int = 200) -> list[list[int]]:
    """Return prompts with one beginning and ends of different lengths, and prompts that share a little less."""
    beginning = prompt_of(shared_len, 3)
    tails = [prompt_of(length, 20 + length) for length in (1, 5, 24, 31, 32, 33, 60)]
    return [beginning + tail for tail in tails] + [beginning[:cut] + prompt_of(40, 9) for cut in (31, 32, 64, 100)]


@pytest.mark.parametrize("windows", WINDOWS)
@pytest.mark.parametrize("limits", mostly_long([{}, SMALL, {"max_tokens": 16, "max_requests": 3}], SMALL))
def test_cached_matches_uncached(make_llm, windows, limits):
    prompts = shared_prompts()
    params = [params_of(index, max_tokens=40) for index in range(len(prompts))]
    expected = [
        make_llm(windows=windows, max_tokens=512, options=UNCACHED).generate(p, s).token_ids
        for p, s in zip(prompts, params, strict=True)
    ]
    llm = make_llm(windows=windows, **limits)
    for _ in range(3):  # later rounds find what the first left
        results = llm.generate(prompts, params)
        assert [r.token_ids for r in results] == expected
        llm.engine.check_integrity()
    assert llm.engine.figures().num_cached_tokens > 0
    assert sum(r.num_cached_tokens for r in results) > 0


def test_a_second_turn_computes_only_its_new_tokens(make_llm):
    llm = make_llm(windows=(0, 40))
    first = llm.generate(prompt_of(100), GREEDY)
    assert first.num_cached_tokens == 0
    history = first.prompt_token_ids + first.token_ids
    before = llm.engine.program.num_tokens_run
    second = llm.generate(history + prompt_of(10, 5), GREEDY)
    # 107 tokens have keys and values (nothing follows from the last one yet), three pages of them are full.
    assert second.num_cached_tokens == 96
    assert llm.engine.program.num_tokens_run - before == len(history) + 10 - 96 + 7
    assert llm.generate(history + prompt_of(10, 5), GREEDY).token_ids == second.token_ids


def test_a_fully_known_prompt_computes_its_last_token_again(make_llm):
    llm = make_llm()
    llm.generate(prompt_of(64), GREEDY)
    assert llm.generate(prompt_of(64), GREEDY).num_cached_tokens == 32
    assert llm.generate(prompt_of(65), GREEDY).num_cached_tokens == 64


def test_without_the_cache_nothing_is_shared(make_llm):
    llm = make_llm(options=UNCACHED)
    for _ in range(2):
        assert llm.generate(prompt_of(100), GREEDY).num_cached_tokens == 0
    assert llm.engine.figures().num_named_pages == 0
    assert llm.engine.figures().hit_rate == 0


def test_salts_share_nothing_with_each_other(make_llm):
    llm = make_llm()
    found = []
    for salt in ("", "a", "b", "a", "b", ""):
        stream = llm.stream(prompt_of(100), GREEDY, RequestOptions(cache_salt=salt))
        list(stream)
        found.append(stream.result().num_cached_tokens)
    assert found == [0, 0, 0, 96, 96, 96]


def test_requests_of_one_step_share_what_one_of_them_computes(make_llm):
    llm = make_llm(max_tokens=512)
    together = llm.generate([prompt_of(100)] * 5, GREEDY)
    assert [r.num_cached_tokens for r in together] == [0, 96, 96, 96, 96]
    assert llm.engine.program.num_tokens_run == 100 + 4 * 4 + 5 * 7


def test_a_prompt_under_way_takes_over_what_became_known(make_llm):
    llm = make_llm(max_tokens=40, max_requests=4)
    results = llm.generate([prompt_of(200), prompt_of(200)], GREEDY)
    assert results[0].token_ids == results[1].token_ids
    assert results[1].num_cached_tokens >= 150


def test_a_preempted_request_finds_its_own_pages_again(make_llm):
    llm = make_llm(num_pages=12, context_len=384)
    results = llm.generate(PROMPTS, PARAMS)
    assert llm.engine.scheduler.num_preemptions > 0
    assert [r.token_ids for r in results] == run_alone(make_llm)
    with_cache = llm.engine.program.num_tokens_run
    bare = make_llm(num_pages=12, context_len=384, options=UNCACHED)
    bare.generate(PROMPTS, PARAMS)
    assert with_cache < bare.engine.program.num_tokens_run


def test_an_aborted_request_leaves_its_pages_for_others(make_llm):
    llm = make_llm()
    stream = llm.stream(prompt_of(100), SamplingParams(max_tokens=100, ignore_eos=True))
    next(stream)
    stream.abort()
    assert all(pool.num_free == pool.num_pages for pool in llm.engine.scheduler.ledger.pools)
    assert llm.generate(prompt_of(100), GREEDY).num_cached_tokens == 96


def test_pages_of_a_request_that_failed_are_not_shared(make_llm):
    engine = make_llm().engine
    sampling = ResolvedSampling(max_tokens=20)
    failing = engine.submit(prompt_of(100), sampling)
    for _ in range(4):
        engine.step()
    assert engine.figures().num_named_pages == 3
    engine.program.spoil_row = 0
    engine.step()
    assert failing.error is not None
    assert engine.figures().num_named_pages == 0
    engine.check_integrity()
    again = engine.submit(prompt_of(100), sampling)
    while engine.wait(again, len(again.output_ids)):
        pass
    assert (again.num_cached, again.error) == (0, None)


def test_forgetting_computes_everything_again(make_llm):
    llm = make_llm()
    first = llm.generate(prompt_of(100), GREEDY)
    llm.engine.forget_prefixes()
    again = llm.generate(prompt_of(100), GREEDY)
    assert (again.num_cached_tokens, again.token_ids) == (0, first.token_ids)


def test_the_page_unused_for_longest_goes_first():
    pool = PagePool(3)
    pages = [pool.take() for _ in range(3)]
    for page, key in zip(pages, (b"a", b"b", b"c"), strict=True):
        pool.name(page, key)
        pool.give_back(page)
    pool.share(pages[0])
    pool.give_back(pages[0])  # used again, so now evicted last
    assert pool.take() == pages[1]
    assert [pool.find(key) for key in (b"a", b"b", b"c")] == [pages[0], None, pages[2]]
    assert pool.take() == pages[2]
    pool.check_integrity([pages[1], pages[2]])
    assert pool.num_free == 1


def test_the_end_of_a_sequence_goes_before_its_beginning():
    ledger = PageLedger(4, (0,))
    pages = ledger.open()
    ledger.grow(pages, 128)
    ledger.name(pages, [b"0", b"1", b"2", b"3"])
    ledger.close(pages)
    ledger.grow(pages, 64)
    assert [ledger.pools[0].find(key) is not None for key in (b"0", b"1", b"2", b"3")] == [True, True, False, False]


def test_a_page_has_one_name_and_a_name_one_page():
    pool = PagePool(3)
    first, second = pool.take(), pool.take()
    pool.name(first, b"a")
    pool.name(second, b"a")
    pool.name(first, b"b")
    assert (pool.find(b"a"), pool.find(b"b")) == (first, None)
    pool.check_integrity([first, second])
    pool.give_back(second)
    with pytest.raises(InternalError, match="cannot be named"):
        pool.name(second, b"c")
    pool._key_of[second] = b"c"
    with pytest.raises(InternalError, match="disagree"):
        pool.check_integrity([first])


def test_a_windowed_group_shares_what_a_token_sees_and_no_more():
    ledger = PageLedger(16, (0, 40))
    keys = [bytes([i]) for i in range(8)]
    pages = ledger.open()
    ledger.grow(pages, 256)
    ledger.name(pages, keys)
    ledger.slide(pages, 256)
    assert ledger.count_shareable(ledger.open(), 0, keys) == 8
    ledger.close(pages)
    other = ledger.open()
    ledger.adopt(other, 0, keys)
    assert other.num_freed == [0, 6]  # position 256 sees 217 and later
    assert [page == FREED for page in other.tables[1]] == [True] * 6 + [False] * 2
    ledger.close(other)
    windowed = ledger.pools[1]
    while windowed.find(keys[7]) is not None:  # only the windowed group drops it, after all older ones
        windowed.take()
    assert ledger.pools[0].find(keys[7]) is not None
    assert ledger.count_shareable(ledger.open(), 0, keys) == 0


def test_a_long_prompt_leaves_the_snapshots_of_others():
    """Of its own, every 16th stays; the states at the ends of other requests are found again."""
    ledger = PageLedger(1000, (0, 2), group_pages=(1000, 50))
    ends = []
    for number in range(10):
        pages, keys = ledger.open(), [b"%d.%d" % (number, i) for i in range(3)]
        ledger.grow(pages, 96)
        ledger.name(pages, keys)
        ledger.slide(pages, 96)
        ledger.close(pages)
        ends.append(keys)
    pages, keys = ledger.open(), [b"long.%d" % i for i in range(320)]
    for stop in range(16, 321, 16):
        ledger.grow(pages, 32 * stop)
        ledger.name(pages, keys[:stop])
        ledger.slide(pages, 32 * stop)
    ledger.close(pages)
    ledger.check_integrity([])
    shareable = [ledger.count_shareable(ledger.open(), 0, keys) for keys in ends]
    assert shareable == [3] * 10
    assert [ledger.count_shareable(ledger.open(), 0, keys[:n]) for n in (320, 304, 303)] == [320, 304, 288]


def test_keys_follow_from_every_token_before_and_from_the_salt():
    def keys_of(tokens: list[int], salt: str = "", maker: PageKeys | None = None) -> list[bytes]:
        keys: list[bytes] = []
        (maker or shared).extend(keys, salt, tokens)
        return keys

    shared = PageKeys()
    tokens = list(range(100))
    keys = keys_of(tokens)
    assert len(keys) == 3
    assert len(set(keys)) == 3
    assert keys_of(tokens[:64]) == keys[:2]
    for position in (0, 31, 32, 95):
        changed = keys_of([*tokens[:position], 7777, *tokens[position + 1 :]])
        same = position // 32
        assert changed[:same] == keys[:same]
        assert not set(changed[same:]) & set(keys)
    assert not set(keys_of(tokens, "tenant")) & set(keys)
    assert not set(keys_of(tokens, "", PageKeys())) & set(keys)
    grown = keys_of(tokens[:32])
    shared.extend(grown, "", tokens[32:])
    assert grown == keys


def test_a_page_named_before_it_was_computed_would_be_noticed(make_llm, monkeypatch):
    """The tests above can fail: they do with a scheduler that names pages too early."""
    honest = Scheduler._continue

    def hasty(self, step, request):
        honest(self, step, request)
        if request.pages is not None and request.id in step.chunks:
            chunk = step.chunks[request.id]
            self.ledger.name(request.pages, request.page_keys[: (chunk.start + chunk.num_tokens) // 32])
            step.pending.clear()

    monkeypatch.setattr(Scheduler, "_continue", hasty)
    engine = make_llm(max_tokens=512).engine
    requests = [engine.submit(prompt_of(100), ResolvedSampling(max_tokens=4)) for _ in range(3)]
    while engine.wait(requests[-1], len(requests[-1].output_ids)):
        pass
    assert any(isinstance(request, Request) and request.error is not None for request in requests)


@pytest.mark.parametrize("max_chunk", [0, 100, 20])
@pytest.mark.parametrize("several", [{"n": 4}, {"n": 2, "best_of": 4}])
def test_answers_to_one_prompt_share_its_computation_and_pages(make_llm, max_chunk, several):
    llm = make_llm(max_chunk=max_chunk, max_tokens=512)
    engine, held = llm.engine, []
    engine.observer = lambda news: held.append((len(engine.scheduler.running), engine.figures().num_held_pages))
    params = SamplingParams(max_tokens=8, temperature=1, seed=1, ignore_eos=True, **several)
    result = llm.generate(prompt_of(230), params)
    assert len(result.choices) == several["n"]
    # 7 whole pages once, and for each answer the page that it continues in, with 6 of the prompt's tokens.
    assert engine.program.num_tokens_run == 230 + 3 * 6 + 4 * 7
    assert max(held) == (4, 7 + 4)
    engine.check_integrity()


@pytest.mark.parametrize("windows", WINDOWS)
@pytest.mark.parametrize("limits", mostly_long([{}, {"max_requests": 2}, {"num_pages": 20, "context_len": 512}], {}))
def test_only_answers_to_one_prompt_share_without_prefix_cache(make_llm, windows, limits):
    llm = make_llm(windows=windows, options=UNCACHED, **limits)
    params = SamplingParams(max_tokens=40, temperature=1, seed=1, ignore_eos=True, n=4)
    alone = [make_llm(windows=windows).generate(prompt_of(230), params).choices[i].token_ids for i in range(4)]
    both = llm.generate([prompt_of(230), prompt_of(230)], params)
    assert [[choice.token_ids for choice in one.choices] for one in both] == [alone, alone]
    figures = llm.engine.figures()
    if not figures.num_preemptions:  # each prompt once, and for each answer 6 tokens of the page that it continues in
        assert llm.engine.program.num_tokens_run == 2 * (230 + 3 * 6 + 4 * 39)
    assert figures.num_cached_tokens >= 2 * 3 * 224 or "num_pages" in limits
    llm.engine.check_integrity()
    before = llm.engine.program.num_tokens_run
    llm.generate(prompt_of(230), GREEDY)
    assert llm.engine.program.num_tokens_run - before == 230 + 7


def test_a_prompt_waits_for_pages_that_another_computes(make_llm):
    """Also where a chunk ends in the middle of a page."""
    llm = make_llm(max_chunk=10, max_tokens=64)
    results = llm.generate([prompt_of(200), [*prompt_of(200), 5, 6], prompt_of(150)], GREEDY)
    assert [r.num_cached_tokens for r in results] == [0, 192, 128]
    assert llm.engine.program.num_tokens_run == 200 + 10 + 22 + 3 * 7
