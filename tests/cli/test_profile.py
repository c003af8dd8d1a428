"""``penstock profile``: rows that add up to the step, a trace of every node, a picture, and refusals by name."""

from __future__ import annotations

import itertools
import json
import re
import shutil
from dataclasses import replace
from types import SimpleNamespace
from xml.etree import ElementTree

import numpy as np
import pytest
import transformers

from penstock.bench.charts.trace import chrome_trace
from penstock.bench.measure import Bench, bench
from penstock.bench.phase_report import Row
from penstock.bench.profile import Profile, profile
from penstock.core.native import Model
from penstock.core.spans import SPAN
from penstock.errors import UnsupportedError
from tests.support.command import DEMO, FOLDER
from tests.support.encoders import build
from tests.support.errors import raises

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def profiled(tmp_path_factory):
    """The object, the trace and the picture of one run of both phases, and the text of a shorter one."""
    import contextlib
    import io

    from penstock.cli.main import main

    folder = tmp_path_factory.mktemp("profile")
    whole = ["--prompt-tokens", "700", "--context", "40", "--batch", "3", "--steps", "4"]
    texts = []
    for options in (
        [
            *whole,
            "--json",
            "--per-node",
            "--trace",
            f"{folder}/t.json",
            "--plot",
            f"{folder}/p.svg",
            "--timeline",
            f"{folder}/l.svg",
        ],
        ["--prompt-tokens", "40", "--context", "40", "--steps", "1"],
    ):
        with contextlib.redirect_stdout(io.StringIO()) as out:
            assert main(["profile", str(DEMO), *options]) == 0
        texts.append(out.getvalue())
    return json.loads(texts[0]), json.loads((folder / "t.json").read_text()), folder / "p.svg", texts[1]


@pytest.mark.long
def test_mapped_weights_take_no_copying(profiled):
    assert profiled[0]["populate_s"] == 0
    assert "weights mmap, keys" in profiled[3]


def test_rows_and_gaps_add_up_to_the_time(profiled):
    found = profiled[0]
    assert [phase["phase"] for phase in found["phases"]] == ["prefill", "decode"]
    for phase in found["phases"]:
        between = sum(phase["between"].values())
        for rows in (phase["kinds"], phase["nodes"]):
            assert sum(row["seconds"] for row in rows) + between == pytest.approx(phase["wall_s"], rel=1e-6)
        assert all(seconds >= 0 for seconds in phase["between"].values())
        assert sum(row["wait_seconds"] for row in phase["kinds"]) <= phase["between"]["waiting for other threads"]
        assert all(row["busy_seconds"] >= row["seconds"] * (1 - 1e-9) for row in phase["nodes"])
        assert phase["plain_s"] > 0
        assert set(phase["ops_per_s"]) == {"f32", "bf16", "int8"}


def test_phases_have_the_requested_size(profiled):
    prefill, decode = profiled[0]["phases"]
    assert (prefill["num_tokens"], prefill["num_steps"], prefill["num_requests"]) == (700, 2, 1)
    assert (decode["num_tokens"], decode["num_steps"], decode["num_requests"], decode["context"]) == (3, 1, 3, 40)
    assert decode["passes"] == prefill["passes"] == 4
    assert 1 <= prefill["alike"] <= 4
    assert decode["fused"] == {"silu_mul": 6}  # linears do them in their stores
    with Model.open(DEMO) as model:
        info = model.info
    assert len(decode["nodes"]) == info.num_nodes
    assert sum(row["calls"] for row in prefill["kinds"]) == 2 * (info.num_nodes - 6)
    head = next(row for row in decode["kinds"] if row["name"] == "linear lm_head")
    assert head["num_ops"] == 2 * 3 * 256 * 4096
    body = sum(row["num_ops"] for row in prefill["kinds"] if row["op"] == "linear" and row is not head)
    whole = 256 * 256 + 3 * 256 * 704  # of a layer, beside its queries, keys and values: the last has it for one token
    assert 2 * 700 * (6 * 256 * 512 + 5 * whole) <= body < 2 * 700 * 6 * (256 * 512 + whole)
    assert {row["limit"] for row in decode["kinds"]} <= {"memory", "int8", "bf16", "f32"}
    gathered = next(row for row in prefill["kinds"] if row["op"] == "gather_rows")
    assert gathered["num_bytes"] < 4096  # one row of 700, read and written


def test_the_trace_has_every_node_of_every_thread(profiled):
    found, trace = profiled[:2]
    tracks = {(e["pid"], e["tid"]): e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    for process, phase in enumerate(found["phases"], 1):
        events = [e for e in trace["traceEvents"] if e["pid"] == process and e["ph"] == "X"]
        steps = sorted((e for e in events if e["cat"] == "step"), key=lambda e: e["ts"])
        assert len(steps) == phase["num_steps"]
        for thread in range(phase["step_threads"]):
            assert tracks[process, thread + 1] == f"thread {thread}"
            mine = sorted((e for e in events if e["tid"] == thread + 1), key=lambda e: (e["ts"], e["dur"]))
            nodes = [e["args"]["node"] for e in mine if e["cat"] != "wait"]
            assert set(nodes) == {n for n, node in enumerate(phase["nodes"]) if node["op"] != "silu_mul"}
            for before, after in itertools.pairwise(mine):
                assert before["ts"] + before["dur"] <= after["ts"] + 1e-3
            for step in steps:  # a thread that came late to one step may miss the next
                inside = [e for e in mine if step["ts"] <= e["ts"] <= step["ts"] + step["dur"] and e["cat"] != "wait"]
                assert {e["args"]["node"] for e in inside} == set(nodes) or (thread > 0 and not inside)
        names = {e["name"] for e in events}
        assert "linear model.layers.0.mlp.down_proj" in names
        assert "model.layers.5.self_attn.attention" in names


def test_the_roofline_has_limits_and_a_point_per_kind(profiled):
    found, _, path, _ = profiled
    root = ElementTree.fromstring(path.read_text())  # noqa: S314 - our own
    width, height = float(root.get("width")), float(root.get("height"))
    texts = [(float(t.get("x")), float(t.get("y")), t.text) for t in root.iter(f"{SVG}text")]
    everything = " | ".join(text for *_, text in texts)
    for word in ("prefill: 700 tokens", "decode: batch 3, context 40", "memory ", "int8 ", "operations per byte"):
        assert word in everything
    for x, y, text in texts:
        assert 0 < x < width, text
        assert 0 < y < height, text
    points = list(root.iter(f"{SVG}title"))
    shown = [row["name"] for phase in found["phases"] for row in phase["kinds"]
             if row["num_ops"] and row["seconds"] >= 0.002 * phase["wall_s"]]  # fmt: skip
    assert len(points) == len(shown) > 8
    for name in shown:
        assert name.removeprefix("linear ") in everything


def test_the_timeline_has_phases_threads_and_ops(profiled):
    root = ElementTree.fromstring((profiled[2].parent / "l.svg").read_text())  # noqa: S314 - our own
    texts = [one.text for one in root.iter(f"{SVG}text")]
    assert any(text.startswith("prefill, 700 tokens, step 1 of 2: ") for text in texts)
    assert any(text.startswith("decode, batch 3, step 1 of ") for text in texts)
    assert {"linear", "attention", "thread 0", "ms"} <= set(texts)
    titles = [one.text for one in root.iter(f"{SVG}title")]
    assert any(re.fullmatch(r"model\.layers\.0\.mlp\.down_proj: [\d.,]+ us", title) for title in titles)


def test_the_table_names_kinds_and_fits(profiled, penstock_command):
    text = profiled[3]
    for word in ("linear gate|up", "attention", "kv_append", "waiting for other threads", "between ops", "100.0%"):
        assert text.count(word) == 2, word
    for columns, most in (("80", 80), ("120", 120)):
        args = ("profile", DEMO, "--phase", "decode", "--context", 4, "--steps", 1)
        done = penstock_command(*args, "--per-node", COLUMNS=columns)
        assert done.returncode == 0, done.stderr
        table = done.stdout.split("\n\n")[2].splitlines()
        assert max(map(len, table)) <= most
        assert any(line.startswith("linear 5.mlp.down ") for line in table)
        assert ("waits" in table[0]) == (columns == "120")


@pytest.mark.long
def test_a_folder_in_a_scheme_with_copied_weights(penstock_command):
    args = ("--scheme", "w4a8", "--phase", "prefill", "--prompt-tokens", 20, "--steps", 1, "--json")
    done = penstock_command("profile", FOLDER, *args, "--weights", "huge", "--kv-cache", "int8", "--threads", 1)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["scheme"], found["weights"], found["kv_cache"], found["num_threads"]) == ("w4a8", "huge", "int8", 1)
    assert found["populate_s"] > 0
    assert [phase["phase"] for phase in found["phases"]] == ["prefill"]
    (phase,) = found["phases"]
    assert "nodes" not in phase
    assert phase["fused"] == {"silu_mul": 6}  # gate and up are multiplied where they are made
    assert "silu_mul" not in {row["op"] for row in phase["kinds"]}
    assert (phase["passes"], phase["alike"], phase["step_threads"]) == (1, 1, 1)


def test_an_encoder_decoder_is_measured(tmp_path):
    build(transformers.AutoModelForSeq2SeqLM, "t5", decoder_start_token_id=0).save_pretrained(tmp_path / "model")
    report = bench(Bench(tmp_path / "model", threads=1, prompt_tokens=16, new_tokens=8, batches=(1, 3)))
    assert min(report.first_token_s, *report.decode_tokens_per_s.values()) > 0


def test_an_encoder_has_no_decode(tmp_path):
    build(transformers.AutoModel, "bert").save_pretrained(tmp_path / "model")
    settings = Profile(tmp_path / "model", threads=1, steps=1, prompt_tokens=50)
    (phase,) = profile(settings).phases
    assert (phase.phase, phase.num_tokens) == ("prefill", 50)
    for changes, param in (({"phases": ("decode",)}, "phase"), ({"batch": 2}, "batch"), ({"context": 9}, "context")):
        with raises(UnsupportedError, param=param, match="expected prefill only"):
            profile(replace(settings, **changes))


@pytest.mark.long
def test_default_sizes_fit_a_short_context(penstock_command, tmp_path):
    short = tmp_path / "short"
    shutil.copytree(FOLDER, short)
    config = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 96}))
    done = penstock_command("profile", short, "--steps", 1, "--json")
    assert done.returncode == 0, done.stderr
    prefill, decode = json.loads(done.stdout)["phases"]
    assert (prefill["num_tokens"], decode["context"]) == (96, 95)


def test_tracks_have_the_numbers_of_the_threads_that_walked():
    noted = np.zeros(3, SPAN)
    noted["node"], noted["thread"] = [-1, 0, 0], [0, 0, 2]
    row = Row("layer", "linear")
    phase = SimpleNamespace(phase="decode", spans=[noted], nodes=[row], num_steps=1, step_threads=2)
    events = chrome_trace(SimpleNamespace(network="net", scheme="bf16", phases=[phase]))["traceEvents"]
    named = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert named == {0: "step", 1: "thread 0", 3: "thread 2"}
    assert {event["tid"] for event in events if event["ph"] == "X"} == {0, 1, 3}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--phase", "decode", "--prompt-tokens", "9"], "--prompt-tokens requires the phase prefill, not decode"),
        (["--phase", "prefill", "--batch", "2"], "--batch requires the phase decode, not prefill"),
        (["--phase", "prefill", "--context", "2"], "--context requires the phase decode"),
        (["--batch", "0"], "batch: expected an integer from 1"),
        (["--steps", "-1"], "steps: expected an integer from 0"),
        (["--steps", "10001"], "--steps: expected at most 10,000, got 10,001"),
        (["--context", "1024"], "--context 1024 plus one token is more than"),
        (
            ["--phase", "prefill", "--prompt-tokens", "1025"],
            "--prompt-tokens 1025 is more than the model's context of 1024",
        ),
        (["--plot", "p.png"], "--plot: p.png: expected a name that ends in .svg"),
        (["--timeline", "p.png"], "--timeline: p.png: expected a name that ends in .svg"),
        (["--trace", "/nowhere/t.json"], "/nowhere/t.json: no such folder"),
        (["--scheme", "w4a8"], "scheme: expected 'w8a8'"),
        (["--network", "a.py:Net"], "network: expected none for the bundle"),
    ],
)
def test_unsupported_profile_options_are_refused(penstock_inline, options, message):
    done = penstock_inline("profile", DEMO, *options)
    assert (done.returncode, done.stdout) == (1 if "no such" in message else 2, "")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
