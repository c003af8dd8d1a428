"""The router: least cost in seconds, ties in a fixed order, reports in place of estimates, bounded memory."""

from __future__ import annotations

import pytest

from penstock.cluster.routing import Figures, ReplicaRouter, StepTimes
from penstock.engine.page_journal import PageReport
from penstock.errors import InternalError, InvalidArgumentError
from penstock.runtime.program import PAGE_TOKENS
from tests.support.errors import raises

FIGURES = Figures(prefill_token_s=0.001, decode_step_s=0.01, decode_row_s=0.001)


def keys_of(name: str, num_pages: int) -> list[bytes]:
    return [f"{name} {page}".encode() for page in range(num_pages)]


def router_of(num_replicas: int, policy: str = "prefix", **options) -> ReplicaRouter:
    router = ReplicaRouter(policy)
    assert [router.add(FIGURES, 8, **options) for _ in range(num_replicas)] == list(range(num_replicas))
    return router


def send(router: ReplicaRouter, num_tokens: int, keys: list[bytes], session: str = "") -> int:
    route = router.route(num_tokens, keys, session)
    router.begin(route.place, num_tokens - route.num_known * PAGE_TOKENS, keys, session)
    return route.place


def test_a_known_prefix_wins_until_its_queue_costs_more() -> None:
    """Eight pages save 0.256 s; an open request costs 0.064 s of decode, and a queued one 0.044 s of prefill too."""
    router, keys = router_of(2), keys_of("a", 8)
    first = send(router, 300, keys)
    router.prefilled(first, 300)
    places = [send(router, 300, keys) for _ in range(3)]
    assert places == [first, first, 1 - first]


def test_queued_prompt_tokens_count_as_seconds() -> None:
    router = router_of(2)
    busy = send(router, 5000, keys_of("long", 3))
    assert [send(router, 64, []) for _ in range(5)] == [1 - busy] * 5
    router.prefilled(busy, 5000)
    assert send(router, 64, []) == busy


def test_a_full_step_costs_the_wait_for_a_place() -> None:
    router = router_of(2)
    for _ in range(8):
        router.begin(0, 0, [])
    for _ in range(7):
        router.begin(1, 0, [])
    keys = keys_of("a", 1)
    router.begin(0, 0, keys)
    assert router.route(40, keys).place == 1


def test_ties_go_to_knowledge_then_session_then_turn() -> None:
    router = ReplicaRouter()
    tiny = Figures(1e-9, 1e-9, 0)
    for _ in range(3):
        router.add(tiny, 0)
    assert [send(router, 10, []) for _ in range(4)] == [0, 1, 2, 0]
    assert send(router, 10, [], "chat") == 1
    assert [send(router, 10, [], "chat") for _ in range(3)] == [1, 1, 1]
    router.begin(2, 0, keys_of("a", 2))
    assert router.route(100, keys_of("a", 2), "chat").place == 2


def test_policies_without_prefixes() -> None:
    turns = router_of(3, "round-robin")
    assert [send(turns, 10, []) for _ in range(4)] == [0, 1, 2, 0]
    assert turns.route(10, [], places=[0, 2]).place == 2
    least = router_of(3, "least-loaded")
    keys = keys_of("a", 4)
    assert [send(least, 200, keys) for _ in range(3)] == [0, 1, 2]
    least.end(1)
    assert least.route(200, keys).place == 1
    assert least.route(200, keys).num_known == 4, "what is known is reported under every policy"


def test_matches_are_leading_pages() -> None:
    router, keys = router_of(3), keys_of("a", 6)
    router.begin(0, 0, keys)
    router.begin(1, 0, keys[:2])
    router.begin(2, 0, keys[3:])
    assert router.matches(keys).tolist() == [6, 2, 0]
    assert router.matches([]).tolist() == [0, 0, 0]
    assert router.matches(keys_of("b", 2)).tolist() == [0, 0, 0]


def test_what_a_full_cache_loses_counts() -> None:
    """Both replicas miss 10 pages; in the full one they take the place of others."""
    router = router_of(2, max_keys=10)
    router.begin(0, 0, keys_of("a", 10))
    router.end(0)
    router.begin(1, 50, keys_of("b", 1))
    assert router.route(330, keys_of("c", 10)).place == 1
    router.report(0, PageReport(1, True, (), (), num_blank=11))
    assert router.route(330, keys_of("c", 10)).place == 0


def test_state_is_bounded_and_forgotten() -> None:
    router = router_of(2, max_keys=10)
    for number in range(50):
        route = router.route(200, keys_of(str(number), 6))
        router.prefilled(route.place, 0, router.begin(route.place, 200, keys_of(str(number), 6), f"session {number}"))
    assert router.num_keys == 20
    router.report(0, full(keys_of("much", 30)))
    assert router.matches(keys_of("much", 30)[20:]).tolist() == [10, 0], "the newest"
    router.report(0, full([]))
    assert router.num_keys == 10
    router.begin(1, 200, keys_of("on its way", 6))
    router.remove(1)
    assert router.num_keys == 0
    with pytest.raises(InternalError, match="place"):
        router.begin(1, 0, [])
    assert router.add(FIGURES, 8) == 1, "places are used again"


def test_the_first_pages_of_a_prompt_stay_longest() -> None:
    router, keys = router_of(1, max_keys=4), keys_of("a", 6)
    router.prefilled(0, 0, router.begin(0, 0, keys))
    assert router.matches(keys).tolist() == [4]


def test_what_a_replica_reports_replaces_the_estimate() -> None:
    router, keys = router_of(2), keys_of("a", 6)
    missing = router.begin(0, 200, keys)
    assert router.matches(keys).tolist() == [6, 0], "as if it had them"
    router.report(0, full([]))
    assert router.matches(keys).tolist() == [6, 0], "they are on their way"
    router.report(0, PageReport(2, False, keys[:4], (), 90))
    router.prefilled(0, 200, missing)
    assert router.matches(keys).tolist() == [4, 0], "what it has"
    again = router.begin(0, 70, keys)
    also = router.begin(0, 70, keys)
    assert sorted(again) == sorted(also) == keys[4:]
    router.prefilled(0, 70, again)
    assert router.matches(keys).tolist() == [6, 0], "another request waits for them"
    router.prefilled(0, 70, also)
    router.report(0, PageReport(3, False, keys_of("b", 1), keys[1:2], 90))
    assert router.matches(keys).tolist() == [1, 0]
    assert router.matches(keys_of("b", 1)).tolist() == [1, 0], "not from this router"
    router.report(0, full(keys[:3]))
    assert router.matches(keys).tolist() == [3, 0]
    router.report(0, PageReport(5, False, (), [b"never heard of"], 90))
    assert router.num_keys == 3


def test_blank_pages_cost_no_other_page() -> None:
    """Both replicas lack ten pages; one has room for them."""
    router, keys = router_of(2), keys_of("a", 10)
    router.report(0, PageReport(1, True, keys_of("b", 90), (), num_blank=2))
    router.report(1, PageReport(1, True, keys_of("b", 90), (), num_blank=11))
    router.begin(1, 100, [])
    assert router.route(330, keys).place == 1
    router.begin(1, 200, [])
    assert router.route(330, keys).place == 0


def full(keys: list[bytes]) -> PageReport:
    return PageReport(1, True, keys, (), 100)


def test_a_new_router_spreads_what_it_does_not_know() -> None:
    """No stampede: a router that knows nothing sends the same prefix on once its first replica is busy."""
    router, keys = router_of(4), keys_of("a", 100)
    assert len({send(router, 3300, keys) for _ in range(20)}) > 1


def test_a_restarted_router_learns_again_without_a_stampede() -> None:
    """Eight replicas hold three prefixes each.  Their full reports come one by one, between requests for all."""
    num, prefixes = 8, [keys_of(f"prefix {number}", 40) for number in range(24)]
    reports = [full([key for own in prefixes[place::num] for key in own]) for place in range(num)]

    def serve(router: ReplicaRouter, num_rounds: int) -> tuple[list[int], int]:
        """Send each prompt once a round; return the requests by replica, and the pages computed that others had."""
        sent, computed = [0] * num, 0
        for _ in range(num_rounds):
            for keys in prefixes:
                route = router.route(1300, keys)
                router.begin(route.place, 1300 - route.num_known * PAGE_TOKENS, keys)
                sent[route.place] += 1
                computed += 40 - route.num_known
            for place in range(num):
                router.correct(place, 0)
        return sent, computed

    settled = router_of(num)
    for place in range(num):
        settled.report(place, reports[place])
    assert serve(settled, 10) == ([30] * num, 0)
    restarted = router_of(num)
    for place in range(num):
        restarted.report(place, reports[place])
        sent, _ = serve(restarted, 1)
        assert max(sent) <= 6, "no replica gets more than twice its share, known or not"
    sent, computed = serve(restarted, 10)
    assert (max(sent) <= 36, computed) == (True, 0)


def test_measured_steps_become_figures() -> None:
    times = StepTimes()
    assert times.figures(FIGURES) == FIGURES
    times.note_prefill(8, 99.0)
    assert times.figures(FIGURES) == FIGURES, "a short prompt says nothing"
    for _ in range(10):
        times.note_prefill(500, 1.0)
        for batch in (1, 4, 16):
            times.note_decode(batch, 0.010 + batch * 0.002)
    figures = times.figures(FIGURES)
    assert figures.prefill_token_s == pytest.approx(0.002)
    assert figures.decode_step_s == pytest.approx(0.010)
    assert figures.decode_row_s == pytest.approx(0.002)
    alone = StepTimes()
    alone.note_decode(1, 0.016)
    assert alone.figures(FIGURES).decode_row_s == pytest.approx(0.001)


def test_steps_through_the_origin_cost_nothing_alone() -> None:
    times = StepTimes()
    for num_open in [1, 2, 3, 4] * 60:
        times.note_decode(num_open, num_open * 0.0013)
        assert times.figures(Figures()).decode_step_s >= 0.0


def test_replicas_of_different_speed() -> None:
    router = router_of(2)
    router.measure(1, Figures(0.0001, 0.01, 0.001))
    assert [send(router, 2000, []) for _ in range(3)] == [1, 1, 1]


def test_bad_values_are_named() -> None:
    with raises(InvalidArgumentError, param="policy"):
        ReplicaRouter("random")
    with raises(InvalidArgumentError, param="prefill_token_s"):
        Figures(prefill_token_s=-1)
    with pytest.raises(InternalError, match="at least one replica"):
        ReplicaRouter().route(1, [])
