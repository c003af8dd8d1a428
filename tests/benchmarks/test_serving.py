"""benchmarks/serving*.py: when requests leave, what is read of answers, and the arithmetic of a run."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import serving
import serving_overhead
from serving_client import PAUSE_S, Answer, Pausing, Server, pausing_loop, play
from serving_figures import Outcome, figures, outcome_of
from traces import Request

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
DONE = b"data: [DONE]\n\n"
END = b"0\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(text: str, usage: int | None = None) -> bytes:
    told = {"choices": [{"index": 0, "text": text}] if usage is None else [], "usage": None}
    if usage is not None:
        told["usage"] = {"completion_tokens": usage}
    return b"data: " + json.dumps(told).encode() + b"\n\n"


def whole(status: str, body: bytes) -> bytes:
    return b"HTTP/1.1 %b\r\nContent-Length: %d\r\n\r\n%b" % (status.encode(), len(body), body)


def answer_of(*reads: tuple[float, bytes], due: float = 100.0) -> Answer:
    return Answer(due, due, reads[-1][0], reads=[*reads])


def test_arrival_times_do_not_depend_on_read_boundaries():
    first, second = chunk(event("a")), chunk(event("b") + event("c"))
    reads = [
        (101.0, HEAD[:20]),
        (102.0, HEAD[20:] + first[:-7]),
        (103.0, first[-7:] + chunk(event(""))),
        (104.0, second[:9]),
        (105.0, second[9:]),
        (106.0, chunk(event("", 5)) + chunk(DONE) + END),
    ]
    found = outcome_of(answer_of(*reads), 90.0)
    assert (found.kind, found.num_tokens) == ("done", 5)
    assert found.pieces_s == [13.0, 15.0, 15.0]
    assert (found.due_s, found.ended_s) == (10.0, 16.0)


@pytest.mark.parametrize("cut", [0, 30])
def test_a_whole_answer_tells_its_tokens(cut):
    text = whole("200 OK", json.dumps({"choices": [], "usage": {"completion_tokens": 7}}).encode())
    at = text.index(b"\r\n\r\n") + 4 - cut
    found = outcome_of(answer_of((100.5, text[:at]), (101.0, text[at:])), 100.0)
    assert (found.kind, found.num_tokens, found.pieces_s, found.ended_s) == ("done", 7, [], 1.0)


@pytest.mark.parametrize(
    ("read", "kind"),
    [
        (whole("429 Too Many Requests", b"{}"), "429"),
        (HEAD + chunk(event("a")) + END, "cut short"),
        (
            HEAD + chunk(event("a")) + chunk(b'data: {"error": {"message": "no"}}\n\n') + chunk(DONE) + END,
            "error in stream",
        ),
    ],
)
def test_incomplete_responses_are_not_counted_as_done(read, kind):
    assert outcome_of(answer_of((101.0, read)), 100.0).kind == kind


def test_figures_count_from_the_due_time_of_done_requests():
    outcomes = [
        Outcome(0.0, 0.5, 2.0, pieces_s=[1.0, 1.5, 2.0], num_tokens=6),
        Outcome(1.0, 1.0, 5.0, pieces_s=[4.0, 5.0], num_tokens=4),
        Outcome(3.0, 3.0, 3.25, kind="429", num_tokens=0),
        Outcome(3.5, 3.5, 10.0, kind="connection lost", pieces_s=[9.0], num_tokens=3),
    ]
    found = figures(outcomes)
    assert (found["requests"], found["done"], found["not_done"]) == (4, 2, {"429": 1, "connection lost": 1})
    assert (found["seconds"], found["tokens"], found["tokens_per_s"], found["requests_per_s"]) == (10.0, 10, 1.0, 0.2)
    assert found["tokens_per_piece"] == 2.0
    assert found["first_token_s"] == {"50": 2.0, "90": 2.8, "99": 2.98}
    assert found["between_tokens_s"]["50"] == 0.5
    assert found["request_s"]["50"] == 3.0
    assert found["refusal_s"]["99"] == 0.25
    assert found["late_s"]["50"] == 0.5


def test_a_turn_that_takes_twice_as_long_loses_half():
    assert serving_overhead.lost_of([1.0, 1.0, 1.0], [2.0, 2.0, 50.0]) == 50.0
    assert serving_overhead.lost_of([2.0], [1.0]) == -100.0


def test_requests_are_those_of_the_trace():
    server = Server("http://127.0.0.1:1/v1", key="k")
    (sent,) = serving.messages_of(server, [Request(0.0, [5, 6], 3)], {"ignore_eos": None, "model": "m"}, False)
    head, _, body = sent.partition(b"\r\n\r\n")
    assert head.startswith(b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:1\r\n")
    assert b"\r\nAuthorization: Bearer k\r\n" in head
    assert f"Content-Length: {len(body)}".encode() in head
    assert json.loads(body) == {
        "prompt": [5, 6], "max_tokens": 3, "temperature": 0, "model": "m",
        "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip


def test_every_run_has_prompts_of_its_own():
    args = serving.parse(["http://127.0.0.1:1/v1", "--rate", "2,4", "--rounds", "2", "--requests", "3"])
    rates, requests = zip(*serving.runs_of(args), strict=True)
    assert rates == (2.0, 4.0, 2.0, 4.0)
    assert len({tuple(one.prompt) for run in requests for one in run}) == 12


Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def played(serve: Serve, due: list[float], patience_s: float = 30.0, loop_factory: Any = None) -> list[Outcome]:
    """Requests to a server of this test."""

    async def run() -> list[Outcome]:
        tasks: list[asyncio.Future[None]] = []

        async def one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with suppress(ConnectionError):
                await serve(reader, writer)
            writer.close()

        def begin(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            tasks.append(asyncio.ensure_future(one(reader, writer)))

        listener = await asyncio.start_server(begin, "127.0.0.1", 0)
        async with listener:
            port = listener.sockets[0].getsockname()[1]
            server = Server(f"http://127.0.0.1:{port}/v1")
            messages = [server.message("/completions", {"number": number}) for number in range(len(due))]
            start_s, answers = await play(server, messages, due, patience_s)
            await asyncio.gather(*tasks)
            return [outcome_of(answer, start_s) for answer in answers]

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        return runner.run(run())


async def number_of(reader: asyncio.StreamReader) -> int:
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
    return int(json.loads(await reader.readexactly(length))["number"])


def test_a_pausing_client_looks_once_a_millisecond_at_most(monkeypatch):
    pauses = []
    monkeypatch.setattr("serving_client.time.sleep", pauses.append)
    with Pausing() as selector:
        for _ in range(3):
            selector.select(0)
    assert pauses == 3 * [PAUSE_S]


def test_requests_are_answered_in_a_pausing_loop():
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await number_of(reader)
        writer.write(whole("429 Too Many Requests", b"{}"))
        await reader.read()

    assert [one.kind for one in played(serve, [0.0, 0.0], loop_factory=pausing_loop)] == ["429", "429"]


def test_requests_do_not_wait_for_earlier_answers():
    arrived: list[int] = []
    all_there = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        arrived.append(await number_of(reader))
        if len(arrived) == 3:
            all_there.set()
        await all_there.wait()  # nobody is answered before everybody asked
        writer.write(HEAD + chunk(event("a", None)) + chunk(event("", 1)) + chunk(DONE) + END)
        await reader.read()

    outcomes = played(serve, [0.0, 0.02, 0.04])
    assert [one.kind for one in outcomes] == ["done"] * 3
    assert all(one.sent_s >= one.due_s and one.pieces_s[0] >= 0.04 for one in outcomes)


def test_connections_are_reused_and_lost_ones_reported():
    asked: list[list[int]] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        own: list[int] = []
        asked.append(own)
        while True:
            try:
                own.append(await number_of(reader))
            except asyncio.IncompleteReadError:
                break
            if own[-1] == 2:
                writer.write(HEAD + chunk(event("a")))
                break
            writer.write(whole("429 Too Many Requests", b"{}"))

    outcomes = played(serve, [0.0, 0.3, 0.6])
    assert [one.kind for one in outcomes] == ["429", "429", "connection lost"]
    assert asked == [[0, 1, 2]]


def test_an_answer_that_does_not_end_is_given_up():
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await number_of(reader)
        writer.write(HEAD + chunk(event("a")))
        await reader.read()

    (outcome,) = played(serve, [0.0], patience_s=0.2)
    assert outcome.kind == "given up"
