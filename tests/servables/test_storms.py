"""Versions change under traffic over both protocols: no request fails, and each response is of one version.

``PENSTOCK_CHAOS=n`` repeats the storms n times (``make chaos``); 32 is 1,024 switches, and 1,024 changes by each of 32.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random

import psutil
import pytest

from penstock import Client, ServiceError
from tests.support.http_service import SECONDS, until
from tests.support.servable_folders import write
from tests.support.servable_storms import CHAOS, KEY, TWICE, Ask, Traffic, asker, service, told_by
from tests.support.serve_command import ask

THREADS = 32
CHANGES = 32 * CHAOS if CHAOS > 1 else 16
"""Of each thread."""
KINDS = {"load": 58, "other": 25, "steady": 3, "unload": 14}
"""Changes of a hundred.  One in seven unloads is told that there is nothing to unload, so that 12 % do."""
REFUSALS = {
    "": {"one is not loaded"},
    "2": {"one is not loaded", "version 2 of one is no longer loaded"},
}
"""What who asks for a version may be told by design, in these words alone: nothing else ends a request."""


@pytest.mark.long
def test_switches_under_traffic_fail_no_request(tmp_path: Path) -> None:
    """No request fails, none is answered by two versions, and no client sees an older version after a newer one."""
    folder = write(tmp_path / "root", "one", TWICE)
    seen: list[Counter[int]] = [Counter() for _ in range(4)]
    newest = [0] * 4

    def work(one: Ask, way: int) -> None:
        version, first, second = one("one")
        assert version == str(first) == str(second)
        assert first >= newest[way]
        newest[way] = first
        seen[way][first] += 1

    switches = THREADS * CHAOS
    with service(tmp_path) as (process, url, grpc), Client(url, api_key=KEY, timeout_s=SECONDS) as admin:
        traffic = Traffic(url, grpc, work)
        try:
            for number in range(2, 2 + switches):
                (folder / f"{number}.tmp").mkdir()
                (folder / f"{number}.tmp").rename(folder / str(number))
                admin.servables.load("one")
                assert not traffic.errors
                if number > 3:
                    (folder / str(number - 2)).rmdir()
            until(lambda: traffic.errors or min(newest) == 1 + switches)
        finally:
            traffic.end()
        until(lambda: len(process.children(recursive=True)) == 1, "the end of old versions' processes")
        assert [one["is_ready"] for one in versions(url) if one["state"] == "READY"] == [True]
    assert len(sum(seen, Counter())) > switches // 2, "each of most versions answered somebody"


def versions(url: str) -> list[dict[str, object]]:
    found: list[dict[str, object]] = ask(url, "/status")["servables"][0]["versions"]
    return found


@pytest.mark.long
def test_loads_and_unloads_by_many_under_traffic(tmp_path: Path) -> None:
    """Who asks is answered by one version, or told that none is there, and never fails at a servable beside, one of
    whose versions comes and goes, nor at its version that stays.
    """
    for name in ("one", "steady"):
        write(tmp_path / "root", name, TWICE, versions=(1, 2))
    ends: list[Counter[str]] = [Counter() for _ in range(4)]

    def work(one: Ask, way: int) -> None:
        turn = ends[way].total()
        assert one("steady", "2" if turn % 2 else "") == ("2", 2, 2)
        named = "2" if turn % 3 == 0 else ""
        found, told = told_by(one, "one", named)
        if told:
            assert told in REFUSALS[named]
            ends[way]["none"] += 1
        else:
            version, first, second = found
            assert version == str(first) == str(second) == (named or version)
            assert version in "12"
            ends[way]["answered"] += 1

    done: Counter[str] = Counter()
    with service(tmp_path) as (process, url, grpc):
        traffic = Traffic(url, grpc, work)
        threads = [threading.Thread(target=change, args=(url, place, done, traffic.errors)) for place in range(THREADS)]
        try:
            for one in threads:
                one.start()
            for one in threads:
                one.join()
            if traffic.errors:
                raise traffic.errors[0]
            come_and_go(url, grpc, traffic, ends)
        finally:
            traffic.end()
        until(lambda: len(process.children(recursive=True)) == 2, "the end of other versions' processes")
    assert sum(done.values()) == THREADS * CHANGES
    assert 0.08 < done["unload"] / sum(done.values()) < 0.16, done
    assert all(one["none"] for one in ends), "and each was told that nobody is there"


def come_and_go(url: str, grpc: str, traffic: Traffic, ends: list[Counter[str]]) -> None:
    """Without further changes, unloaded servables refuse all requests and loaded ones answer all."""
    with Client(url, api_key=KEY, timeout_s=SECONDS) as admin:
        admin.servables.load("one")
        admin.servables.unload("one")
        for way in range(2):
            one, close = asker(url, grpc, way)
            for named in ("", "2"):
                assert told_by(one, "one", named) == ((), "one is not loaded")
            close()
        admin.servables.load("steady", versions="latest")
        admin.servables.load("one", versions="latest")
    before = [one["answered"] for one in ends]
    until(lambda: traffic.errors or all(one["answered"] > two for one, two in zip(ends, before, strict=True)))


def change(url: str, place: int, done: Counter[str], errors: list[BaseException]) -> None:
    """Mostly loads, some with other versions and labels; an unload of what is not loaded is told so.

    ``errors`` are everybody's: who finds one goes no further.
    """
    random = Random(place)
    try:
        with Client(url, api_key=KEY, timeout_s=SECONDS, retries=0) as admin:
            for _ in range(CHANGES):
                kind = random.choices([*KINDS], [*KINDS.values()])[0]
                chosen = {"versions": random.choice(("1", "2", "all")), "labels": {"stable": 2}}
                try:
                    if kind == "load":
                        admin.servables.load("one")
                    elif kind == "other":
                        admin.servables.load("one", **chosen)
                    elif kind == "steady":
                        admin.servables.load("steady", **chosen)
                    else:
                        admin.servables.unload("one")
                except ServiceError as error:
                    if (kind, error.status) != ("unload", 404):
                        raise
                    kind = "missed"
                done[kind] += 1
                if errors:
                    break
    except BaseException as error:
        errors.append(error)


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    before = {*psutil.Process().children(recursive=True)}
    yield
    assert {*psutil.Process().children(recursive=True)} <= before
