"""Stages that join over TLS: the same answers as one process, and what happens when one is lost or does not fit."""

from __future__ import annotations

import asyncio
import gc
import os
import re
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.core.link_comm import ROWS
from penstock.core.rank_layout import RankLayout
from penstock.engine.params import SamplingParams
from penstock.env import child_environment
from penstock.errors import InvalidArgumentError, InvalidFileError, UnavailableError, UnsupportedError
from penstock.llm.llm import LLM
from penstock.processes.frames import FrameStream
from penstock.processes.tls import TlsSession, client_context, connect
from penstock.runtime.ranks.remote_group import ALPN, RemoteGroup
from penstock.runtime.ranks.remote_stage import StageSource, join_pipeline
from penstock.runtime.ranks.stage_links import MAX_FRAME_BYTES, Frame, Kind
from penstock.runtime.ranks.stage_server import StageServer
from penstock.version import __version__
from tests.support.errors import raises
from tests.support.marks import mostly_long
from tests.support.ports import free_port
from tests.support.rank_processes import DEMO, LIMITS, PROMPTS, tokens_of
from tests.support.services import certificate, versions
from tests.support.stage_processes import TOKEN, Stages, stages
from tests.support.waiting import eventually

__all__ = ["certificate", "stages", "versions"]

GREEDY = SamplingParams(max_tokens=30, temperature=0.0)
SAMPLED = SamplingParams(max_tokens=30, temperature=0.9, top_p=0.9, seed=3, n=2, logprobs=3)
LONG = SamplingParams(max_tokens=200, ignore_eos=True)
CHECKSUM = "0" * 64
JOIN = {"token": TOKEN, "version": __version__, "checksum": CHECKSUM, "rank": 0, "threads": 1, "available": 1 << 30}


@pytest.fixture(scope="module")
def one() -> Iterator[LLM]:
    with LLM(DEMO, threads=1, limits=LIMITS) as llm:
        yield llm


def test_answers_equal_those_of_one_process(stages: Stages, one: LLM) -> None:
    """Three stages, of which the second gets its rows from another machine too; then a second group of the same."""
    for _ in range(2):
        with stages.open_llm(3) as llm:
            assert tokens_of(llm, PROMPTS, GREEDY) == tokens_of(one, PROMPTS, GREEDY)
            assert tokens_of(llm, PROMPTS, SAMPLED) == tokens_of(one, PROMPTS, SAMPLED)
            assert llm.logits(PROMPTS[0]).tobytes() == one.logits(PROMPTS[0]).tobytes()
            assert list(llm.embed(PROMPTS[1]).vector) == list(one.embed(PROMPTS[1]).vector)
    assert len(stages.processes) == 3
    stages.processes[0].terminate()
    assert stages.processes[0].wait(300) == 0


@pytest.mark.parametrize(
    ("number", "reason"),
    [
        (signal.SIGKILL, "closed the connection"),
        (signal.SIGTERM, "was stopped"),
        (signal.SIGSTOP, "is lost: no message for 1.7 s"),
    ],
)
def test_a_stage_that_is_lost_ends_the_group(number: int, reason: str, stages: Stages, one: LLM) -> None:
    with stages.open_llm() as llm:
        stream = llm.stream(PROMPTS[0], LONG)
        next(stream)
        stages.processes[0].send_signal(number)
        with raises(UnavailableError, match=f"rank [12].* {reason}"):
            llm.generate([PROMPTS[0]] * 400, LONG)  # for longer than the limit
        with pytest.raises(UnavailableError):
            llm.generate(PROMPTS[1], GREEDY)
    if number == signal.SIGSTOP:
        stages.processes[0].send_signal(signal.SIGCONT)  # it comes back, and joins the next group
    else:
        stages.processes[0].wait(300)
    with stages.open_llm() as llm:
        assert tokens_of(llm, PROMPTS, GREEDY) == tokens_of(one, PROMPTS, GREEDY)
    assert len(stages.processes) == (2 if number == signal.SIGSTOP else 3)


def test_another_token_or_bundle_is_refused(stages: Stages, versions: list[Path], tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.psm"
    damaged.write_bytes(DEMO.read_bytes()[:-100])

    def start() -> None:
        for reason, options in {
            "the token is not known here": {"token": "cd" * 32},
            "rank 0 runs another bundle": {"model": versions[0]},
            "damaged.psm": {"model": damaged},
        }.items():
            refused = stages.start("--once", **options)
            assert reason in refused.communicate(timeout=300)[1]
            assert refused.returncode != 0
        stages.start("--once")
        stages.start("--once")

    with stages.open_llm(on_listen=start) as llm:
        assert len(llm.generate(PROMPTS[0], GREEDY).token_ids) == 30


def test_a_stage_too_many_waits_for_the_next_group(stages: Stages) -> None:
    with stages.open_llm():
        third = stages.start()
        assert third.stderr is not None
        assert "the group has all its stages; trying again" in third.stderr.readline()
        assert third.poll() is None


class Group:
    """A group of two stages, whose ends are connections of this process."""

    def __init__(self, certificate: tuple[Path, Path], layout: RankLayout) -> None:
        ports: list[int] = []
        self.certificate = certificate[0]
        server = StageServer("localhost", 0, *certificate, TOKEN, 10.0, ports.append)
        self.group = RemoteGroup(server, layout, CHECKSUM)
        (self.port,) = ports
        self.streams: list[FrameStream[Frame]] = []

    async def connect(self) -> FrameStream[Frame]:
        connection = await connect("localhost", self.port, 10.0)
        tls = TlsSession(client_context(self.certificate.read_bytes(), [ALPN]), "localhost")
        await tls.handshake(connection)
        stream = FrameStream(connection, Frame.parse, MAX_FRAME_BYTES, tls)
        self.streams.append(stream)
        return stream

    async def join(self) -> None:
        """Let both stages join, in the order of their ranks."""
        for number in range(2):
            stream = await self.connect()
            stream.send(Frame.of(Kind.JOIN, **JOIN))
            await eventually(lambda: len(self.group._members) != number)  # noqa: B023

    async def begin(self) -> None:
        """Bring the group to the point at which it computes."""
        await self.join()
        self.group.await_stages()
        self.group.connect(4096)
        self.group.start({"limits": {}})
        for stream in self.streams:
            stream.listen(lambda _: None)
            stream.send(Frame(Kind.READY))
        await asyncio.to_thread(self.group.await_ready)

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        async def main() -> None:
            try:
                await work
            finally:
                for stream in self.streams:
                    stream.close()

        asyncio.run(main())


@pytest.fixture
def group(certificate: tuple[Path, Path], request: pytest.FixtureRequest) -> Iterator[Group]:
    found = Group(certificate, getattr(request, "param", RankLayout(pp=2)))
    yield found
    found.group.close()


def test_a_stage_that_leaves_too_early_is_named(group: Group) -> None:
    async def main() -> None:
        await group.join()
        assert len(group.group.await_stages()) == 2
        address = group.group._members[1].address
        group.streams[1].close()
        await eventually(lambda: len(group.group._members) != 2)
        with raises(UnavailableError, param="stage_server", match=re.escape(address)):
            group.group.connect(4096)

    group.run(main())


@pytest.mark.parametrize("group", [RankLayout(tp=2, pp=2)], indirect=True)
@pytest.mark.parametrize(("reported", "named"), [(2, 2), (1, 1), (3, 1), (None, 1), (True, 1)])
def test_one_rank_of_a_stage_that_fails_is_named(reported: object, named: int, group: Group) -> None:
    """A stage has ranks 1 and 2, and the other one 3 and 4."""

    async def main() -> None:
        await group.join()
        group.group.await_stages()
        group.group.connect(4096)
        group.group.start({"limits": {}})
        failure = {"error": "InvalidFileError", "message": "weights: damaged", "rank": reported}
        group.streams[0].send(Frame.of(Kind.FAILED, **failure))
        with pytest.raises(InvalidFileError, match=f"^Rank {named}: weights: damaged$"):
            await asyncio.to_thread(group.group.await_ready)

    group.run(main())


def test_stages_that_never_open_have_a_limit(monkeypatch: pytest.MonkeyPatch, certificate: tuple[Path, Path]) -> None:
    monkeypatch.setenv("PENSTOCK_RANK_OPEN_SECONDS", "0.1")
    monkeypatch.setattr("penstock.runtime.ranks.remote_group.BEAT_S", 0.05)
    limited = Group(certificate, RankLayout(pp=2))

    async def main() -> None:
        await limited.join()
        limited.group.await_stages()
        limited.group.connect(4096)
        limited.group.start({"limits": {}})
        with pytest.raises(UnavailableError, match=r"^the ranks did not open within 0\.1 s$"):
            await asyncio.to_thread(limited.group.await_ready)

    try:
        limited.run(main())
    finally:
        limited.group.close()


def test_a_stage_that_is_silent_while_it_opens_is_lost(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.runtime.ranks.remote_group.BEAT_S", 0.05)
    monkeypatch.setattr("penstock.runtime.ranks.remote_group._SILENCE_S", 0.3)

    async def main() -> None:
        await group.join()
        group.group.await_stages()
        group.group.connect(4096)
        group.group.start({"limits": {}})
        waiting = asyncio.ensure_future(asyncio.to_thread(group.group.await_ready))
        for _ in range(12):
            group.streams[1].send(Frame(Kind.BEAT))
            await asyncio.sleep(0.05)
        with pytest.raises(UnavailableError, match=r"^rank 1 at .* is lost: no message for 0\.3 s$"):
            await waiting

    group.run(main())


def test_a_peer_that_breaks_the_protocol_is_disconnected(
    group: Group, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.runtime.ranks.remote_group._FLUSH_S", 0.05)

    async def main() -> None:
        deep = await group.connect()
        deep.send(Frame(Kind.JOIN, data=b'{"a":' + b"[" * 60_000))
        await asyncio.wait_for(deep.ended.wait(), 300)
        unnamed = await group.connect()
        unnamed.send(Frame.of(Kind.JOIN, version=__version__))
        refusal = await unnamed.read()
        assert refusal is not None
        assert refusal.message()["message"] == "the token is not known here"

    group.run(main())
    gc.collect()  # asyncio reports the error of a task when it deletes the task
    assert not caplog.records


def test_a_slow_message_is_a_sign_of_life(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.runtime.ranks.remote_group.BEAT_S", 0.05)
    monkeypatch.setattr("penstock.runtime.ranks.remote_group.BEAT_LIMIT_S", 600.0)

    async def main() -> None:
        deaths: list[str] = []
        group.group.watch(deaths.append)
        await group.begin()
        first, second = group.streams
        frame = Frame(ROWS, 1, 0, bytes(1 << 16), group.group._epoch).SerializeToString()
        data = struct.pack("<I", len(frame)) + frame
        stream = group.group._members[0].stream
        for piece in range(0, len(data), 1 << 12):
            assert first._tls is not None
            before = stream.heard
            first._transmit(first._tls.encrypt(data[piece : piece + (1 << 12)]))
            await eventually(lambda: stream.heard > before)  # noqa: B023
        second.send(Frame(Kind.BEAT))
        assert not deaths
        monkeypatch.setattr("penstock.runtime.ranks.remote_group.BEAT_LIMIT_S", 0.4)
        await eventually(lambda: deaths)
        assert "is lost: no message for 0.4 s" in deaths[0]

    group.run(main())


def test_a_message_of_another_group_ends_the_group(group: Group) -> None:
    """A half of a group that was lost, and its messages, have the number of that group."""

    async def main() -> None:
        deaths: list[str] = []
        group.group.watch(deaths.append)
        await group.begin()
        epoch = group.group._epoch
        group.streams[0].send(Frame(ROWS, 1, 2, bytes(64), epoch))
        await asyncio.sleep(0.1)
        assert not deaths
        group.streams[0].send(Frame(ROWS, 1, 2, bytes(64), epoch ^ 1))
        await eventually(lambda: deaths)
        assert f"broke the protocol: rank 1 sent a message of group {epoch ^ 1}, not {epoch}" in deaths[0]

    group.run(main())


def test_a_message_that_is_too_long_is_named(group: Group) -> None:
    async def main() -> None:
        deaths: list[str] = []
        group.group.watch(deaths.append)
        await group.begin()
        stream = group.streams[0]
        assert stream._tls is not None
        stream._transmit(stream._tls.encrypt(struct.pack("<I", MAX_FRAME_BYTES + 1)))
        await eventually(lambda: deaths)
        assert "rank 1 at" in deaths[0]
        assert f"broke the protocol: received a message of {MAX_FRAME_BYTES + 1} bytes" in deaths[0]

    group.run(main())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("host", ""),
        ("port", 99_999),
        ("certificate", None),
        ("key", 1),
        ("token", ""),
        ("token", None),
        ("token", "short"),
        ("join_s", "x"),
        ("join_s", 0),
    ],
)
def test_a_wrong_field_of_a_stage_server_is_named(field: str, value: Any) -> None:
    fields: dict[str, Any] = {"host": "localhost", "port": 0, "certificate": Path("c"), "key": Path("k")}
    with pytest.raises(InvalidArgumentError, match=f"^{field}: expected ") as refusal:
        StageServer(**{**fields, "token": TOKEN, field: value})
    assert refusal.value.param == field


def test_a_stage_server_of_another_type_is_refused() -> None:
    with raises(InvalidArgumentError, param="stage_server"):
        LLM(DEMO, pipeline_parallel_size=2, stage_server="x")  # type: ignore[arg-type]


def test_stages_that_do_not_come_are_named(stages: Stages) -> None:
    server = stages.server(join_s=0.2)
    descriptors = len(os.listdir("/proc/self/fd"))
    with raises(UnavailableError, param="stage_server"):
        LLM(DEMO, pipeline_parallel_size=2, stage_server=server)
    assert len(os.listdir("/proc/self/fd")) <= descriptors  # fewer if garbage of an earlier test went


def test_rank_0_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.runtime.ranks.remote_stage._CONNECT_S", 0.2)
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        pytest.raises(UnavailableError, match=r"127\.0\.0\.1:\d+: no answer within 0\.2 s$"),
    ):
        asyncio.run(join_pipeline(StageSource(DEMO), silent.getsockname(), TOKEN, None, again=False))


def test_a_stage_that_joins_once_may_start_first(stages: Stages) -> None:
    stages.port = free_port()
    started = [stages.start("--once") for _ in range(2)]
    for stage in started:
        assert stage.stderr is not None
        assert "Connection refused; trying again in 0.2 s" in stage.stderr.readline()
    with stages.open_llm(on_listen=lambda: None) as llm:
        assert len(llm.generate(PROMPTS[0], GREEDY).token_ids) == 30
    assert [stage.wait(300) for stage in started] == [0, 0]


def test_a_stage_server_without_stages_is_refused(stages: Stages) -> None:
    with raises(UnsupportedError, param="stage_server"):
        LLM(DEMO, stage_server=stages.server())


@pytest.mark.parametrize("tp", mostly_long([1, 2], 1))
def test_the_command_line_waits_for_stages(tp: int, stages: Stages, tmp_path: Path, one: LLM) -> None:
    token = tmp_path / "token"
    token.write_text(TOKEN + "\n")
    token.chmod(0o600)
    command = [sys.executable, "-m", "penstock", "run", DEMO, PROMPTS[0], "--max-tokens", "20", "--temperature", "0"]
    command += ["--tp", tp, "--pp", "2", "--stage-port", "0", "--stage-host", "localhost", "--stage-token-file", token]
    command += ["--stage-certificate", stages.certificate, "--stage-key", stages.key]
    with subprocess.Popen(
        [str(word) for word in command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=child_environment(),
    ) as run:
        assert run.stderr is not None
        while "Waiting for 2 stages" not in (line := run.stderr.readline()):
            assert line
        stages.port = int(line.rpartition(":")[2])
        once = [stages.start("--once") for _ in range(2)]
        text, _ = run.communicate(timeout=300)
    assert run.returncode == 0
    assert one.generate(PROMPTS[0], SamplingParams(max_tokens=20, temperature=0.0)).text.strip() in text
    assert [process.wait(300) for process in once] == [0, 0]
