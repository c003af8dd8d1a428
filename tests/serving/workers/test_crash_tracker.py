"""Which requests count as causes of a worker's crash."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.engine.options import RequestOptions
from penstock.llm.answer import EventAnswer
from penstock.processes.supervision import (
    LOOP_KILLS,
    LOST_RANK_STATUS,
    QUICK_DEATH_S,
    Death,
    has_crashed,
    signal_name,
)
from penstock.runtime import machine
from penstock.runtime.machine import OomKills
from penstock.serving.proto import wire_pb2 as pb
from penstock.serving.workers import crash_tracker, worker_group, worker_process
from penstock.serving.workers.crash_tracker import CrashTracker, Loss, Verdict
from penstock.serving.workers.failover import Failover
from penstock.serving.workers.worker_config import WorkerConfig
from penstock.serving.workers.worker_connection import LostWorkerError, OpenRequest, WorkerConnection
from penstock.serving.workers.worker_group import WorkerGroup
from penstock.serving.workers.worker_process import EndedEarlyError, WorkerProcess
from tests.support.waiting import eventually

FREE, SUSPECT, ALONE, PAUSED, REFUSED = Verdict


def test_requests_behind_a_possibly_ended_one_are_suspects() -> None:
    """Two run, and the worker crashes in the first step of an urgent third: the end of one of the two was not heard."""

    async def main() -> None:
        lost: dict[int, bool] = {}
        link = WorkerConnection("m", 0)
        link.get_ready(pb.Ready(plan=pb.Plan(max_requests=2)), None)
        for number in range(6):
            message = pb.ToWorker(submit=pb.Submit(options=pb.Options(priority=-100 if number == 5 else 0)))
            request = OpenRequest(
                EventAnswer(lambda: None),
                message,
                lambda error, number=number: lost.update({number: error.was_running}),
            )
            request.taken.set_result(None)
            request.answer.has_begun = number < 2
            link.begin(request)
        link.fail("it crashed")
        assert lost == {0: True, 1: True, 2: True, 3: False, 4: False, 5: True}

    asyncio.run(main())


def test_waiting_during_three_crashes_counts_as_one() -> None:
    tracker = CrashTracker()
    seen = []
    for worker in ("1", "1", "2", "3", "4", "5", "6"):
        tracker.note(b"x", Loss(worker, was_running=False, num_tokens=1), has_crashed=True)
        seen.append(tracker.verdict(b"x"))
    assert seen == [FREE, FREE, FREE, SUSPECT, SUSPECT, SUSPECT, ALONE]
    tracker.clear(b"x")
    assert tracker.verdict(b"x") is FREE


def test_a_crash_counts_once_for_equal_requests() -> None:
    tracker = CrashTracker()
    for fingerprint, worker in ((b"x", "1"), (b"x", "1"), (b"y", "1")):
        tracker.note(fingerprint, Loss(worker, num_tokens=3), has_crashed=True)
        assert tracker.verdict(fingerprint) is SUSPECT
    tracker.note(b"x", Loss("2"), has_crashed=True)
    assert (tracker.verdict(b"x"), tracker.verdict(b"z")) == (ALONE, FREE)


def test_only_a_crash_alone_refuses_for_good() -> None:
    """However often workers crash with a request among others, it is not known to be the cause."""
    tracker = CrashTracker()
    verdicts = []
    for number in range(1, 20):
        tracker.note(b"x", Loss(str(number), num_tokens=number), has_crashed=True)
        verdicts.append(tracker.verdict(b"x"))
    assert verdicts == [SUSPECT, ALONE, ALONE, *[PAUSED] * 16]
    assert (tracker.pause_s(b"x") > 590, tracker.num_tokens(b"x") > 19) == (True, True)
    tracker.note(b"x", Loss("alone", was_alone=True), has_crashed=True)
    assert tracker.verdict(b"x") is REFUSED
    tracker.note(b"y", Loss("alone", was_alone=True), has_crashed=True)
    assert tracker.verdict(b"y") is ALONE, "one crash may be the machine's"


def test_an_answer_that_goes_on_is_soon_past_the_crash() -> None:
    """It gets the tokens of the lost worker; one that begins again may draw others."""
    tracker = CrashTracker()
    assert tracker.num_tokens(b"x", goes_on=True) == 0
    tracker.note(b"x", Loss("1", num_tokens=500), has_crashed=True)
    assert 500 < tracker.num_tokens(b"x", goes_on=True) < 600
    assert tracker.num_tokens(b"x") > 1000


def test_kills_from_outside_pause_and_never_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pauses grow, so that a request for which a daemon kills workers does not have them killed without bound."""
    tracker, now = CrashTracker(), 0.0
    monkeypatch.setattr(crash_tracker.time, "monotonic", lambda: now)
    for number in range(3):
        assert tracker.verdict(b"x") is FREE
        tracker.note(b"x", Loss(str(number)), has_crashed=False)
    pauses = []
    for number in range(8):
        assert tracker.verdict(b"x") is ALONE
        tracker.note(b"x", Loss(f"alone {number}", was_alone=True), has_crashed=False)
        assert tracker.verdict(b"x") is PAUSED
        pauses.append(tracker.pause_s(b"x"))
        now += min(pauses[-1], 599.0)
        if pauses[-1] == 600:
            break
    assert pauses == [2, 8, 32, 128, 512, 600]
    now += 1.0
    assert tracker.verdict(b"x") is FREE, "forgotten"


def test_kills_among_others_pause_from_the_seventh_on() -> None:
    """A request that lives long beside kills goes on; one that has workers killed late in its answer is bounded."""
    tracker = CrashTracker()
    verdicts, pauses = [], []
    for number in range(12):
        tracker.note(b"x", Loss(str(number), num_tokens=100 * number), has_crashed=False)
        verdicts.append(tracker.verdict(b"x"))
        pauses.append(round(tracker.pause_s(b"x")))
    assert verdicts == [FREE, FREE, ALONE, ALONE, ALONE, ALONE, *[PAUSED] * 6]
    assert pauses == [0] * 6 + [2, 8, 32, 128, 512, 600]


def test_at_most_ten_workers_are_lost_before_a_pause() -> None:
    """Crashes and kills are counted apart."""
    tracker = CrashTracker()
    for number in range(9):
        tracker.note(b"x", Loss(str(number)), has_crashed=number < 3)
        assert tracker.verdict(b"x") is not PAUSED
    tracker.note(b"x", Loss("last"), has_crashed=False)
    assert tracker.verdict(b"x") is PAUSED


@pytest.mark.parametrize(
    ("status", "is_crash"),
    [(0, True), (1, True), (3, True), (-11, True), (-6, True), (-9, False), (-15, False), (-34, False), (None, False),
     (LOST_RANK_STATUS, False)],
)  # fmt: skip
def test_crashes_are_told_from_kills(status: int | None, is_crash: bool) -> None:
    assert has_crashed(status) is is_crash
    assert signal_name(9) == "SIGKILL"
    assert signal_name(200) == "signal 200"


def test_lost_machines_are_no_requests_fault() -> None:
    """It takes a moment until the cause of a loss is known: until then a request is suspected, but not refused."""

    async def main() -> None:
        routes: Any = SimpleNamespace(crashes=CrashTracker())
        request = Failover(
            routes, [5], RequestOptions(), lambda options: pb.ToWorker(submit=pb.Submit(options=options))
        )
        verdicts = []
        for cause in (False, True, False, True):
            connection = request._connection = request._alone_on = WorkerConnection("m", 7, is_remote=True)
            request._note_loss(LostWorkerError("gone"))
            assert not connection.explained.is_set()
            asyncio.get_running_loop().call_soon(connection.note_cause, cause)
            verdicts.append(await request._verdict_with_cause())
        assert verdicts == [PAUSED, PAUSED, PAUSED, REFUSED]
        connection = request._connection = WorkerConnection("m", 0, is_remote=True)  # nothing will say why it went
        request._note_loss(LostWorkerError("gone"))
        assert routes.crashes._records[request._fingerprint].num_kills == 3

    asyncio.run(main())


def test_a_kill_for_lack_of_memory_is_no_kill_from_outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in (("memory.events", "low 0\noom_kill {}\n"), ("memory.oom_control", "under_oom 0\noom_kill {}\n")):
        folder = tmp_path / name.replace(".", "_")
        folder.mkdir()
        (folder / name).write_text(text.format(4))
        monkeypatch.setattr(machine, "_own_cgroups", lambda _controller, folder=folder: iter([folder]))
        kills = OomKills()
        assert not kills.look()
        (folder / name).write_text(text.format(5))
        assert [kills.look(), kills.look()] == [True, False]


def test_each_kill_of_a_shortage_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kills that no look asked for in time were of other programs: they explain no later kill from outside."""
    num_kills, now = 4, 100.0
    monkeypatch.setattr(machine, "num_oom_kills", lambda: num_kills)
    monkeypatch.setattr(machine, "time", SimpleNamespace(monotonic=lambda: now))
    kills = OomKills()
    num_kills = 6
    assert [kills.look(), kills.look(), kills.look()] == [True, True, False]
    num_kills = 9
    assert kills.look()
    now += 11.0
    assert not kills.look()
    num_kills = 10
    assert [kills.look(), kills.look()] == [True, False]


@pytest.mark.parametrize(
    ("status", "was_oom", "is_stopped", "was_killed"),
    [(-9, False, False, True), (-9, True, False, False), (3, False, False, False), (None, False, False, True),
     (LOST_RANK_STATUS, False, False, True), (LOST_RANK_STATUS, True, False, False), (-9, False, True, True)],
)  # fmt: skip
def test_requests_and_crash_loop_agree_on_the_cause(
    status: int | None, was_oom: bool, is_stopped: bool, was_killed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``is_stopped``: it makes no progress until it is killed, because a signal has stopped it."""
    monkeypatch.setattr(worker_process, "is_stopped", lambda _: is_stopped)

    async def main() -> None:
        causes: list[bool] = []
        ended: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()

        def kill() -> None:
            if not ended.done():
                ended.set_result(status)

        process: Any = SimpleNamespace(pid=7, wait=lambda: ended, kill=kill, release=lambda: None)
        kills: Any = SimpleNamespace(look=lambda: was_oom)
        link = WorkerConnection("m", 7)
        link.on_cause(causes.append)
        if is_stopped:
            link.is_hung = True
            link.fail("no progress")
        else:
            kill()
        death = await WorkerProcess(process, link, 600.0, kills).wait_exit()
        assert (death.was_killed, causes) == (was_killed, [not was_killed])
        if not is_stopped:
            assert EndedEarlyError(status, kills).was_killed is was_killed

    asyncio.run(main())


@pytest.mark.parametrize(
    ("deaths", "is_failing"),
    [("ccc", True), ("ckckc", True), ("ccC", True), ("cCkC", True), ("kkk", False), ("kkc", False), ("ckkkc", False),
     ("kkK", False), ("kkKKc", False), ("kkN", False), ("cclc", False), ("k" * (LOOP_KILLS - 1), False),
     ("k" * LOOP_KILLS, True), ("k" + "K" * (LOOP_KILLS - 1), True)],
)  # fmt: skip
def test_only_many_kills_are_a_crash_loop(deaths: str, is_failing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """c: a crash, k: a kill, l: a crash after a long life; C, K, N: a crash, a kill, the loss of a machine that loads.

    They are of one worker, after each other.
    """
    now = 0.0
    monkeypatch.setattr(worker_group, "time", SimpleNamespace(monotonic=lambda: now))

    class Launcher:
        supervision = SimpleNamespace(min_pause_s=0.0, max_pause_s=0.0)
        num_starts = 0

        async def launch(self, config: WorkerConfig, *, is_known: bool = False) -> Any:
            self.num_starts += 1
            if self.num_starts > len(deaths):  # the end of the last worker is known, and the next is not yet ready
                await asyncio.Event().wait()
            kind = deaths[self.num_starts - 1]
            if kind.isupper():
                raise EndedEarlyError({"C": 3, "K": -9, "N": None}[kind])
            link = SimpleNamespace(
                plan=None, card=None, name="w", node="", pid=1, num_lost=0, max_open=0, state_id="", role=""
            )

            async def ended() -> Death:
                nonlocal now
                await asyncio.sleep(0)
                now += QUICK_DEATH_S if kind == "l" else 0.0
                return Death("signal", "", kind == "k")

            return SimpleNamespace(connection=link, wait_exit=ended)

    async def main() -> None:
        launcher: Any = Launcher()
        group = WorkerGroup(launcher, WorkerConfig("", "", "m", "m.psm"), 1, lambda: None, Counter())
        await group.start()
        await eventually(lambda: launcher.num_starts > len(deaths))
        assert group.is_failing is is_failing
        await group.stop()

    asyncio.run(main())
