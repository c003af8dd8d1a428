"""``penstock simulate``: one JSON object on standard output, progress on standard error, errors in one line."""

from __future__ import annotations

import gzip
import json
import os
import threading
from pathlib import Path

import pytest

from penstock.cli.main import main
from penstock.cli.scale import simulate as simulate_command
from penstock.cluster.simulate import SimulationReport


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


def test_a_long_simulation_says_how_long_it_took(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(simulate_command, "_PROGRESS_EVERY", 20)
    assert main(["simulate", write_trace(tmp_path / "trace.jsonl", 19), "--json"]) == 0
    assert capsys.readouterr().err == ""
    assert main(["simulate", write_trace(tmp_path / "trace.jsonl", 20), "--json"]) == 0
    progress, took = capsys.readouterr().err.splitlines()
    assert progress.startswith("20 requests, ")
    assert took.startswith("20 requests simulated in ")


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
        (["--pages", "0"], "--pages: expected an integer from 1"),
        (["--max-requests", "64", "--max-tokens", "32"], "--max-tokens: expected at least --max-requests"),
        (["--costs", "none.json"], "none.json: No such file or directory"),
        (["--mtbf", "-1"], "--mtbf: expected a number"),
        (["--mtbf", "9", "--restart", "nan"], "--restart: expected a number"),
        (["--mtbf", "9", "--seed", "-1"], "seed: expected"),
        (["--replicas", "3..x"], "replicas: expected N or MIN..MAX"),
        (["--replicas", "3..2"], "replicas: expected MIN..MAX with MIN up to MAX, got 3..2"),
        (["--replicas", "1..2", "--mtbf", "5"], "--mtbf: expected 0 if"),
        (["--replicas", "1..2", "--scale-down-seconds", "0"], "--scale-down-seconds: expected a number"),
        (["--replicas", "1..2", "--start-seconds", "-1"], "--start-seconds: expected a number"),
        (["--replicas", "1..2", "--scale-queue-seconds", "0"], "--scale-queue-seconds: expected a number"),
        (["--restart", "5"], "--restart requires --mtbf"),
        (["--seed", "0"], "--seed requires --mtbf"),
        (["--start-seconds", "1"], "--start-seconds requires --replicas MIN..MAX"),
        (["--replicas", "2,4", "--scale-queue-seconds", "1"], "--scale-queue-seconds requires --replicas MIN..MAX"),
        (["--prefill-workers", "1"], "decode_workers: expected an integer from 1"),
        (["--page-seconds", "1"], "--page-seconds requires --prefill-workers"),
        (["--prefill-workers", "1", "--decode-workers", "1", "--svg", "x.svg"], "svg: "),
        (["--scale-down-seconds", "9"], "--scale-down-seconds requires --replicas MIN..MAX"),
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
    measured = json.loads(costs.read_text())
    assert set(measured["decode_step_s"]) == {"1", "2"}
    assert measured["source"].startswith("penstock bench, a worker, ")
    capsys.readouterr()
    assert main(["simulate", write_trace(tmp_path / "trace.jsonl"), "--costs", str(costs), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["costs"]["model"].startswith("demo.psm ")
    assert main(["bench", demo, "--costs", str(tmp_path / "none" / "costs.json")]) == 1
    captured = capsys.readouterr()
    assert captured.out == "", "before anything is measured"
    assert "--costs" in captured.err
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
    assert report["replica_range"] == "0..3"
    assert main(["simulate", trace, "--replicas", "3,0..3", "--scale-queue-seconds", "0.01"]) == 0
    *_, header, fixed, following = (line.split() for line in capsys.readouterr().out.splitlines())
    assert (fixed[0], following[0], header[-3:]) == ("3", "0..3", ["time", "busy", "busiest"])
    assert "s" in fixed, "the replica time has its unit"
    assert main(["simulate", trace, "--replicas", "0..3"]) == 0
    assert capsys.readouterr().out.startswith("0..3 replicas (at most 1 at once) of 1 rank, prefix")


def test_roles_are_compared_with_replicas_without_them(tmp_path, capsys) -> None:
    command = ["simulate", write_trace(tmp_path / "trace.jsonl"), "--prefill-workers", "1", "--decode-workers", "2"]
    assert main([*command, "--page-seconds", "0", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["roles"], report["replicas"]) == ("1+2", 3)
    assert main([*command, "--replicas", "3"]) == 0
    *_, plain, apart = capsys.readouterr().out.splitlines()
    assert (plain.split()[0], apart.split()[0]) == ("3", "1+2")
    assert main(command) == 0
    assert "handovers" in capsys.readouterr().out


def test_a_packed_trace_is_an_error_with_the_command(tmp_path, capsys) -> None:
    (tmp_path / "trace.jsonl.gz").write_bytes(gzip.compress(Path(write_trace(tmp_path / "t.jsonl")).read_bytes()))
    assert main(["simulate", str(tmp_path / "trace.jsonl.gz")]) == 1
    assert "expected text in UTF-8. Unpack it: `gunzip -c FILE" in capsys.readouterr().err


@pytest.mark.parametrize("replicas", ["2", "2,3"])
def test_a_pipe_is_read_once(replicas: str, tmp_path, capsys) -> None:
    """Each simulation has all requests, though a pipe can be read only once."""
    trace = write_trace(tmp_path / "trace.jsonl")
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=lambda: pipe.write_bytes(Path(trace).read_bytes()), daemon=True)
    writer.start()
    assert main(["simulate", str(pipe), "--replicas", replicas, "--json"]) == 0
    writer.join(300)
    from_pipe = json.loads(capsys.readouterr().out)
    assert main(["simulate", trace, "--replicas", replicas, "--json"]) == 0
    assert from_pipe == json.loads(capsys.readouterr().out)
    assert all(run["requests"] == 20 for run in from_pipe.get("runs", [from_pipe]))


def test_a_dash_is_standard_input(penstock_command, tmp_path) -> None:
    write_trace(tmp_path / "trace.jsonl")
    text = (tmp_path / "trace.jsonl").read_text()
    done = penstock_command("simulate", "-", "--replicas", "2,3", "--json", stdin=text)
    assert done.returncode == 0, done.stderr
    assert [run["requests"] for run in json.loads(done.stdout)["runs"]] == [20, 20]
    done = penstock_command("simulate", "-", stdin="{}")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "penstock: standard input: line 1: time: expected a value, got none\n"


def test_columns_hold_long_names_and_large_numbers() -> None:
    """Every line of a table is as wide as the others, and each number ends where its column's name ends."""
    costs = {"model": "m", "machine": "n", "source": "s"}
    small = SimulationReport("prefix", 1, 1, costs, ttft={"p50": 0.1, "p90": 0.2, "p99": 0.3}, tpot={"p50": 0.01})
    large = SimulationReport("a-policy-with-a-long-name", 100_000, 1, costs, prefilled_tokens=10**13)
    large.ttft = {"mean": 1e6, "p50": 1e7, "p90": 1e8, "p99": 1e9}
    large.tpot, large.load_imbalance = {"p50": 1e5}, 12345.0
    lines = simulate_command._comparison([small, large]).splitlines()[3:]
    assert len({len(line) for line in lines[1:]}) == 1
    for name in ("p50", "p90", "p99", "computed", "busiest"):
        stop = lines[1].index(name) + len(name)
        assert all(line[stop - 1] != " " and line[stop : stop + 1] in ("", " ") for line in lines[2:]), name
    times = simulate_command._table(large).splitlines()[-4:]
    assert times[1].endswith("1,000,000,000,000.0")
    assert len({len(line) for line in times}) == 1


def test_ranks_without_the_cost_of_exchanges_are_named(tmp_path, capsys) -> None:
    trace, costs = write_trace(tmp_path / "trace.jsonl"), tmp_path / "costs.json"
    fields = {"model": "m", "machine": "n", "source": "s", "tp": 1, "prefill_token_s": 0.001, "exchange_s": 0.0}
    costs.write_text(json.dumps(fields | {"decode_step_s": {"1": 0.01}}))
    assert main(["simulate", trace, "--costs", str(costs), "--tp", "4", "--json"]) == 0
    text = "penstock: tp: the costs have no exchange_s, so the estimate for 4 ranks leaves out their exchanges\n"
    assert capsys.readouterr().err == text
    assert main(["simulate", trace, "--costs", str(costs), "--json"]) == 0
    assert main(["simulate", trace, "--tp", "4", "--json"]) == 0
    assert capsys.readouterr().err == ""
