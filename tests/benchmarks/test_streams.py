"""benchmarks/streams.py, offline.py, prefill_apart*.py: missing tokens are seen, and answers are handed over."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import offline
import paced_worker
import streams
from serving_client import Answer

from benchmarks import prefill_apart, prefill_apart_costs
from penstock.engine.params import SamplingParams
from penstock.llm.engine_thread import StepEvent
from tests.support.waiting import until

DEMO = Path(__file__).parents[2] / "demo" / "demo.psm"
HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def answer_of(numbers: list[int], status: bytes = b"200 OK") -> Answer:
    """An answer with a read for each token; token n was made at n s and arrives half a second later."""
    answer = Answer(0.0, ended_s=9.0, reads=[(0.0, HEAD.replace(b"200 OK", status))])
    for number in numbers:
        data = json.dumps({"choices": [{"text": f"{number}:{number * 1000000} "}]})
        line = f"data: {data}\n\n".encode()
        answer.reads.append((number + 0.5, b"%x\r\n%b\r\n" % (len(line), line)))
    return answer


def test_a_missing_token_or_a_refusal_is_an_error() -> None:
    whole, short, refused = answer_of([0, 1, 2, 3]), answer_of([0, 1, 3]), answer_of([], b"429 Full")
    seen = streams.seen_by([whole], 4, 1.0, 3.0)
    assert (seen.num_held, seen.num_tokens, seen.delays_s, seen.errors) == (1, 2, [0.5, 0.5], {})
    lost = Answer(0.0, lost="connection lost", reads=[*whole.reads])
    seen = streams.seen_by([short, refused, lost], 4, 1.0, 3.0)
    text = "expected tokens 0 to 3 in order, got 3"
    assert seen.errors == {text: 1, "status 429": 1, "connection lost": 1}


def test_a_paced_engine_sends_a_token_each_step() -> None:
    events: list[StepEvent] = []
    llm: Any = SimpleNamespace(close=lambda: None)
    engine = paced_worker.PacedEngine(100.0, llm, events.extend)
    engine.submit(1, [5, 6], SamplingParams(max_tokens=3))
    engine.submit(2, [5], SamplingParams(max_tokens=1000))
    until(lambda: sum(event.key == 1 for event in events) == 3, "the last token")
    engine.abort(2)
    num_events = sum(event.key == 2 for event in events)
    engine.submit(3, [5], SamplingParams(max_tokens=5))
    until(lambda: sum(event.key == 3 for event in events) == 5, "the tokens of five steps")
    engine.close()
    assert sum(event.key == 2 for event in events) == num_events
    first, _, last = (event for event in events if event.key == 1)
    assert first.started is not None
    assert first.started.num_prompt_tokens == 2
    assert (last.text.split(":")[0], last.finish_reason, last.is_last) == ("2", "length", True)


def test_an_answer_with_too_few_tokens_does_not_count(tmp_path: Path) -> None:
    def line(name: str, num_tokens: int) -> str:
        body = {"usage": {"completion_tokens": num_tokens}}
        return json.dumps({"custom_id": name, "error": None, "response": {"body": body}}) + "\n"

    failed = json.dumps({"custom_id": "3", "error": {"message": ""}, "response": None}) + "\n"
    path = tmp_path / "answers.jsonl"
    path.write_text(line("1", offline.NUM_NEW) + line("2", 1) + failed + line("1", offline.NUM_NEW))
    assert offline.num_answers(path) == 1


def test_decode_apart_has_no_pauses_of_prompts() -> None:
    args = argparse.Namespace(requests=60, costs=None, kv_bytes=1000, gb_s=1.0)
    together, _ = prefill_apart_costs.play(args, [4], 512, 2.0)
    apart, _ = prefill_apart_costs.play(args, [2, 2], 512, 2.0)
    longest = [max(max(one) for one in taken.pauses_s) for taken in (together, apart)]
    assert longest[0] > 0.1 > 0.03 > longest[1], "a chunk of 512 tokens takes 140 ms, a decode step at most 26"
    assert (len(together.handed_s), len(apart.handed_s)) == (0, 60)


@pytest.mark.long
def test_workers_hand_answers_over() -> None:
    options = {"bundle": DEMO, "workers": 2, "threads": 1, "context": 1024, "new_tokens": 96, "max_requests": 8}
    args = argparse.Namespace(**options)
    trace = prefill_apart.trace_of(args, 4.0, 6)
    taken, _ = asyncio.run(prefill_apart.play(args, 1, trace))
    assert taken.num_tokens == sum(ask.num_new for ask in trace)
    assert taken.handed_s
