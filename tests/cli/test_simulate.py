"""``penstock simulate``: one JSON object on standard output, progress on standard error, errors in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.cli.main import main


def write_trace(path: Path, num_requests: int = 20) -> str:
    lines = (
        {"time": number / 10, "segments": [["system", 200], [f"user {number}", 50]], "output_tokens": 8}
        for number in range(num_requests)
    )
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def test_the_answer_is_one_object(tmp_path, capsys) -> None:
    trace = write_trace(tmp_path / "trace.jsonl")
    assert main(["simulate", trace, "--replicas", "3", "--policy", "least-loaded", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["requests"], report["replicas"], report["policy"]) == (20, 3, "least-loaded")
    assert isinstance(report["prefilled_tokens"], int)
    assert isinstance(report["cached_tokens"], int)
    assert report["prefilled_tokens"] + report["cached_tokens"] == 20 * 250
    assert report["costs"]["model"] == "348M w8a8"
    for name in ("ttft", "tpot", "e2e"):
        assert 0 < report[name]["p50"] <= report[name]["p90"] <= report[name]["p99"]


def test_the_table_names_the_costs_and_two_ranks_are_faster(tmp_path, capsys) -> None:
    trace = write_trace(tmp_path / "trace.jsonl")
    assert main(["simulate", trace, "--tp", "2", "--pages", "64"]) == 0
    assert "1 replica of 2 ranks, prefix; costs of 348M w8a8" in capsys.readouterr().out
    p50 = []
    for tp in ("1", "2"):
        assert main(["simulate", trace, "--tp", tp, "--json"]) == 0
        p50.append(json.loads(capsys.readouterr().out)["e2e"]["p50"])
    assert p50[1] < p50[0]


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["--replicas", "2,x"], "replicas: expected numbers or MIN..MAX, separated by commas"),
        (["--policy", "prefix,best"], "policy: expected one of"),
        (["--replicas", "0"], "replicas: expected an integer from 1"),
        (["--tp", "99"], "tp: expected an integer from 1 to 64"),
        (["--pages", "0"], "num_pages: expected an integer from 1"),
        (["--max-requests", "64", "--max-tokens", "32"], "--max-tokens: expected at least --max-requests"),
        (["--costs", "none.json"], "none.json: No such file or directory"),
        (["--mtbf", "-1"], "mtbf_s: expected"),
        (["--restart", "nan"], "restart_s: expected"),
        (["--seed", "-1"], "seed: expected"),
        (["--replicas", "3..x"], "replicas: expected N or MIN..MAX"),
        (["--replicas", "3..2"], "replicas: expected an integer from 3"),
        (["--replicas", "1..2", "--mtbf", "5"], "mtbf_s: expected 0"),
        (["--replicas", "1..2", "--scale-down-seconds", "0"], "down_after_s: expected"),
        (["--start-seconds", "-1"], "start_s: expected"),
    ],
)
def test_bad_options_are_named(options: list[str], error: str, tmp_path, capsys) -> None:
    assert main(["simulate", write_trace(tmp_path / "trace.jsonl"), *options]) in (1, 2)
    assert error in capsys.readouterr().err


def test_a_bad_line_is_named(tmp_path, capsys) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"time": 0, "segments": [["a", 10]], "output_tokens": 0}\n')
    assert main(["simulate", str(path)]) == 1
    captured = capsys.readouterr()
    assert "trace.jsonl: line 1: output_tokens: expected an integer from 1" in captured.err
    assert captured.out == ""


def test_measured_costs_are_read(tmp_path, capsys) -> None:
    costs = tmp_path / "costs.json"
    demo = str(Path(__file__).parents[2] / "demo" / "demo.psm")
    assert main(["bench", demo, "-p", "40", "-n", "4", "--batch", "1,2", "--costs", str(costs)]) == 0
    assert set(json.loads(costs.read_text())["decode_step_s"]) == {"1", "2"}
    capsys.readouterr()
    assert main(["simulate", write_trace(tmp_path / "trace.jsonl"), "--costs", str(costs), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["costs"]["model"].startswith("demo.psm ")
    assert main(["bench", demo, "--online", "--costs", str(costs)]) == 2
    assert "--costs cannot be combined with --online" in capsys.readouterr().err


def test_simulations_are_compared(tmp_path, capsys) -> None:
    command = ["simulate", write_trace(tmp_path / "trace.jsonl"), "--replicas", "2,3", "--policy", "prefix,round-robin"]
    svg = tmp_path / "policies.svg"
    assert main([*command, "--json", "--svg", str(svg)]) == 0
    runs = json.loads(capsys.readouterr().out)["runs"]
    expected = [(2, "prefix"), (2, "round-robin"), (3, "prefix"), (3, "round-robin")]
    assert [(run["replicas"], run["policy"]) for run in runs] == expected
    picture = svg.read_text()
    assert "round-robin: " in picture
    assert " % at 3 replicas" in picture
    assert main(command) == 0
    table = capsys.readouterr().out.splitlines()
    assert [tuple(line.split()[:2]) for line in table[-4:]] == [(str(number), name) for number, name in expected]


def test_a_chart_that_cannot_be_written_is_an_error(tmp_path, capsys) -> None:
    trace, svg = write_trace(tmp_path / "trace.jsonl"), tmp_path / "none" / "policies.svg"
    assert main(["simulate", trace, "--svg", str(svg)]) == 1
    assert f"--svg {svg}: No such file" in capsys.readouterr().err


def test_a_number_that_follows_the_load(tmp_path, capsys) -> None:
    trace = write_trace(tmp_path / "trace.jsonl")
    assert main(["simulate", trace, "--replicas", "0..3", "--scale-queue-seconds", "0.01", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["requests"] == 20
    assert 1 <= report["replicas"] <= 3
    assert report["replica_seconds"] > 0
