"""benchmarks/peers/load.py: traces, what became of them, rates, ratios; and Penstock's own figures there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[2]
PEERS = ROOT / "benchmarks" / "peers"
sys.path.append(str(PEERS))

import load  # noqa: E402
import load_llamacpp  # noqa: E402
import load_table  # noqa: E402
import processes  # noqa: E402
import traces  # noqa: E402
from jobs import Results  # noqa: E402
from play import play_steps  # noqa: E402
from systems import PENSTOCK, System, find_system  # noqa: E402
from traces import Event, Request  # noqa: E402

OURS, OPENVINO, LLAMA, VLLM = (
    find_system(name) for name in ("penstock w8a8", "openvino int8", "llama.cpp Q8_0", "vllm w8a8")
)
HEADER: dict[str, Any] = {
    "machine": "a processor",
    "threads": 2,
    "options": {},
    "versions": {},
    "limits": {"read": 34e9, "int8": 8e11, "bf16": 4e11, "f32": 2e11},
    "date": "2026-01-01",
}


def row(system: System, measure: str, round_: int, tokens_per_s: float, p99: float = 1.0) -> dict[str, Any]:
    """``p99``: seconds to the first token; a tenth of it between tokens."""
    key = {"shape": "348m", "system": system.name, "measure": measure, "round": round_}
    times = {name: {"50": p99 / 4, "90": p99 / 2, "99": p99} for name in ("first_token_s", "request_s")}
    between = {"50": p99 / 40, "90": p99 / 20, "99": p99 / 10}
    rates = {"tokens_per_s": tokens_per_s, "requests_per_s": tokens_per_s / 64}
    return {**key, **times, **rates, "between_tokens_s": between, "peak_rss_bytes": 1 << 30}


def results_of(path: Path, *rows: dict[str, Any]) -> Results:
    path.touch()
    return Results(path, HEADER, list(rows))


def test_rates_scale_the_arrivals_of_the_same_trace() -> None:
    slow, fast, at_once = traces.mixed(1.0), traces.mixed(4.0), traces.mixed()
    assert [r.prompt for r in slow] == [r.prompt for r in fast] == [r.prompt for r in at_once]
    assert [r.num_new for r in slow] == [r.num_new for r in fast] == [r.num_new for r in at_once]
    assert [r.due_s / 4 for r in slow] == pytest.approx([r.due_s for r in fast])
    assert {r.due_s for r in at_once} == {0.0}
    assert slow[0].due_s == 0 < slow[1].due_s


def test_lengths_have_their_means_and_gaps_that_of_the_rate() -> None:
    many = traces.mixed(2.0, num_requests=2000)
    prompts, answers = [len(r.prompt) for r in many], [r.num_new for r in many]
    assert sum(prompts) / 2000 == pytest.approx(traces.MEAN_PROMPT, rel=0.1)
    assert sum(answers) / 2000 == pytest.approx(traces.MEAN_ANSWER, rel=0.1)
    assert max(p + a for p, a in zip(prompts, answers, strict=True)) <= traces.MAX_LEN
    assert min(answers) >= 1
    assert many[-1].due_s == pytest.approx(1000, rel=0.1)


def test_a_shared_trace_shares_its_beginning_and_no_more(tmp_path: Path) -> None:
    asked = traces.shared()
    assert len({tuple(r.prompt[: traces.SHARED_TOKENS]) for r in asked}) == 1
    assert len({tuple(r.prompt[traces.SHARED_TOKENS :]) for r in asked}) == traces.NUM_REQUESTS
    assert {len(r.prompt) for r in asked} == {traces.SHARED_PROMPT}
    traces.write(tmp_path / "new" / "shared.jsonl", asked)
    assert traces.read(tmp_path / "new" / "shared.jsonl") == asked


def test_latencies_count_from_when_a_request_was_due() -> None:
    requests = [Request(0.0, [1], 3), Request(2.0, [1], 1)]
    events = [Event(5.0, 1, 1), Event(1.0, 0, 1), Event(4.0, 0, 2)]
    found = traces.figures(requests, events)
    assert found["seconds"] == 5.0
    assert found["tokens_per_s"] == pytest.approx(4 / 5)
    assert found["first_token_s"]["50"] == pytest.approx(2.0)  # of 1.0 and 3.0
    assert found["between_tokens_s"]["50"] == pytest.approx(1.5)  # 3.0, and 0.0 for what came with it
    assert found["request_s"]["99"] == pytest.approx(3.99)


def test_an_answer_of_another_length_is_refused() -> None:
    with pytest.raises(SystemExit, match="request 0: expected 3 tokens, got 2"):
        traces.figures([Request(0.0, [1], 3)], [Event(1.0, 0, 2)])


def test_a_request_is_submitted_at_its_due_time() -> None:
    class Echo:
        def __init__(self) -> None:
            self.left: dict[int, int] = {}
            self.most = 0

        def submit(self, number: int, request: Request) -> None:
            self.left[number] = request.num_new
            self.most = max(self.most, len(self.left))

        def step(self) -> list[tuple[int, int]]:
            news = [(number, 1) for number in self.left]
            self.left = {number: count - 1 for number, count in self.left.items() if count > 1}
            return news

    asked = [Request(0.0, [1], 3), Request(0.0, [1], 2), Request(0.05, [1], 1)]
    echo = Echo()
    events = play_steps(echo, asked)
    assert [event.number for event in events] == [0, 1, 0, 1, 0, 2]
    assert events[-1].at_s >= 0.05
    assert echo.most == 2


def test_a_stream_of_the_server_counts_what_it_held_back() -> None:
    lines = [
        (0.1, b"HTTP/1.1 200 OK\r\n"),
        (0.5, b'data: {"content": "a", "tokens_predicted": 1, "stop": false}\n'),
        (0.9, b'data: {"content": "b", "tokens_predicted": 3, "stop": false}\n'),
        (0.9, b"\n"),
        (1.0, b'data: {"content": "", "tokens_predicted": 3, "stop": true}\n'),
    ]
    assert load_llamacpp.count_tokens(lines, 7) == [Event(0.5, 7, 1), Event(0.9, 7, 2)]
    with pytest.raises(SystemExit, match=r"request 7: .*no slot"):
        load_llamacpp.count_tokens([(0.1, b"error: no slot\n")], 7)


def test_rates_are_fixed_shares_of_the_best_peers_capacity(tmp_path: Path) -> None:
    own, theirs = row(OURS, "mixed", 0, 6400.0), row(OPENVINO, "mixed", 0, 64.0)
    results = results_of(tmp_path / "r.jsonl", own, theirs, row(VLLM, "mixed", 0, 128.0), row(VLLM, "shared", 0, 999.0))
    assert load.capacity_of(results, "348m", "8 bit") == 2.0
    results.add(row(LLAMA, "mixed", 0, 640.0))
    assert load.capacity_of(results, "348m", "8 bit") == 2.0
    assert Results.read(results.path).header["capacity"] == {"348m 8 bit": 2.0}
    with pytest.raises(SystemExit, match="348m 4 bit: rates are shares"):
        load.capacity_of(results, "348m", "4 bit")
    place = load.write_traces(tmp_path, results, "348m", "8 bit", ["mixed-80"])
    assert traces.read(place / "mixed-80.jsonl") == traces.mixed(1.6)


def test_only_penstock_runs_without_cache_and_results_stay(tmp_path: Path) -> None:
    args = SimpleNamespace(shape="348m", system=[OURS.name, OPENVINO.name, VLLM.name], measure=None, rounds=1)
    done = results_of(tmp_path / "r.jsonl", row(OPENVINO, "mixed", 0, 1.0))
    jobs = [(job.system.name, job.measures) for job in load.jobs_left(args, done, load_table.OFFLINE)]
    assert sorted(jobs) == [
        (OPENVINO.name, ("shared",)),
        *((OURS.name, (measure,)) for measure in load_table.OFFLINE),
        (VLLM.name, ("mixed", "shared")),
    ]


def test_the_report_names_peers_and_missed_goals(tmp_path: Path) -> None:
    rows = [
        *(row(OURS, "mixed", number, 100.0 + 20 * number) for number in range(3)),
        *(row(VLLM, "mixed", number, 100.0) for number in range(3)),
        row(OPENVINO, "mixed", 0, 200.0),
        row(OURS, "mixed-50", 0, 1.0, p99=1.0),
        row(VLLM, "mixed-50", 0, 1.0, p99=1.5),
        row(OURS, "mixed-80", 0, 1.0, p99=2.0),
        row(OPENVINO, "mixed-80", 0, 1.0, p99=1.5),
        row(VLLM, "mixed-80", 0, 1.0, p99=3.0),
        row(OURS, "shared", 0, 100.0),
        row(OURS, "shared:uncached", 0, 20.0),
    ]
    text = load_table.report(results_of(tmp_path / "r.jsonl", *rows))
    halfway = "| 1.50 (goal 1, vllm w8a8) "
    assert f"| 8 bit | 1.20 (goal 1.1, vllm w8a8) {2 * halfway}| 0.75 **below** (goal 1, openvino int8) |" in text
    assert "| 5.00 (goal 4, itself without prefix cache) |" in text


def test_the_chart_has_a_line_per_measured_system(tmp_path: Path) -> None:
    rows = [row(system, name, 0, 1.0, 2.0) for system in (OURS, VLLM) for name in load_table.SHARES]
    results = results_of(tmp_path / "r.jsonl", *rows, row(LLAMA, "mixed", 0, 128.0))
    assert load_table.pictures(results) == {}  # no rates were drawn from a capacity
    load.capacity_of(results, "348m", "8 bit")
    drawn = load_table.pictures(results)
    assert list(drawn) == ["348m 8 bit"]
    labels = [text.text for text in ElementTree.fromstring(drawn["348m 8 bit"]).iter() if text.text]  # noqa: S314
    assert [name for name in ("penstock", "vllm", "llama.cpp", "openvino") if name in labels] == ["penstock", "vllm"]
    assert drawn["348m 8 bit"].count("<circle") == 8


@pytest.mark.parametrize(
    ("measure", "interface"), [("shared", "engine"), ("shared:uncached", "engine"), ("shared", "async")]
)
def test_penstock_plays_a_trace_by_the_protocol(tmp_path: Path, measure: str, interface: str) -> None:
    head = list(range(300, 380))
    traces.write(tmp_path / "shared.jsonl", [Request(0.1 * i, [*head, 400 + i], 3) for i in range(3)])
    command = [sys.executable, str(PEERS / "load_penstock.py"), str(ROOT / "demo" / "demo.psm"), measure]
    command += ["--mode", "w4a8", "--threads", "1", f"--option=traces={tmp_path}", "--option=kv-cache=int8"]
    command += [f"--option=interface={interface}"]
    environment = processes._environment(processes.Bench(ROOT, 1), PENSTOCK)
    done = subprocess.run(command, input="\n", capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["measure"], found["kv_cache"], found["num_preemptions"]) == (measure, "int8", 0)
    assert found["tokens_per_s"] > 0
    assert (found["hit_rate"] > 0.4) == (measure == "shared")
