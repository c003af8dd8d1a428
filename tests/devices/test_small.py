"""Builds for small devices: what they hold, what they refuse, how many bytes they take; and memory at work."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.core.tiny_graph import tiny_graph, write_bundle

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "demo" / "demo.psm"
PROMPT = "def read(path):\n    "

Command = Callable[..., str]


@pytest.fixture(scope="module")
def small(command: Command, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the demo model needs, for one level."""
    build = tmp_path_factory.mktemp("small")
    options = (f"-DPENSTOCK_OPS_FROM={DEMO}", "-DPENSTOCK_LEVELS=generic", "-DPENSTOCK_DEV=OFF")
    found = command("cmake", "-S", ROOT, "-B", build, *options)
    assert "attention silu_mul gather_rows with w8a8; keys and values bf16" in found
    command("cmake", "--build", build, "-j", "2")
    return build


def refusal(program: Path, *words: object) -> str:
    done = subprocess.run([program, *map(str, words)], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    return done.stderr


def test_libraries_are_small(installed: Path, small: Path) -> None:
    (whole,) = installed.glob("lib*/**/libpenstock.so.3.*")
    assert whole.stat().st_size < 1_000_000
    (library,) = small.glob("libpenstock.so.3.*")
    assert library.stat().st_size < 250_000
    assert (small / "penstock-lite").stat().st_size < 270_000


def test_small_build_makes_the_same_tokens(small: Path, lite: Path, command: Command) -> None:
    for options in (("--temperature", 0), ("--temperature", 0.8, "--seed", 3)):
        wanted = json.loads(command(lite, DEMO, PROMPT, "--json", *options))
        found = json.loads(command(small / "penstock-lite", DEMO, PROMPT, "--json", *options))
        assert (found["token_ids"], found["text"]) == (wanted["token_ids"], wanted["text"])


def test_what_a_small_build_leaves_out_is_refused_by_name(small: Path, tmp_path: Path) -> None:
    program = small / "penstock-lite"
    path = write_bundle(tmp_path / "f32.psm", tiny_graph())
    assert "scheme: this build leaves out f32: build it with this bundle in PENSTOCK_OPS_FROM" in refusal(
        program, path, "1", "--ids"
    )
    graph = tiny_graph("w8a8")
    nodes = [node for node in graph.nodes if node.op == "silu_mul"]
    for node in nodes:
        node.op = "mul"
    path = write_bundle(tmp_path / "mul.psm", graph)
    assert "this build leaves out mul.1: build it with this bundle" in refusal(program, path, "1", "--ids")
    message = refusal(program, DEMO, "x", "--kv-cache", "int8")
    assert "kv_layout: this build leaves out int8: build it with PENSTOCK_KV_LAYOUTS=int8" in message
    done = subprocess.run(
        [program, DEMO, "x"], capture_output=True, text=True, check=False, env={"PENSTOCK_CPU": "avx2"}
    )
    assert 'PENSTOCK_CPU: expected one of generic, found "avx2"' in done.stderr


def test_wrong_bundles_levels_and_layouts_end_the_configuration(tmp_path: Path) -> None:
    (tmp_path / "bad.psm").write_bytes(DEMO.read_bytes()[:3000])
    for number, (option, message) in enumerate((
        ("-DPENSTOCK_OPS_FROM=bad.psm", f"{tmp_path}/bad.psm: header.file_bytes"),
        (f"-DPENSTOCK_OPS_FROM={tmp_path}/none.psm", "none.psm: No such file"),
        ("-DPENSTOCK_LEVELS=sse9", "has no level sse9"),
        (f"-DPENSTOCK_OPS_FROM={DEMO};-DPENSTOCK_KV_LAYOUTS=f64", "expected f32, bf16 or int8, found f64"),
        ("-DPENSTOCK_KV_LAYOUTS=int8", "PENSTOCK_KV_LAYOUTS: expected with PENSTOCK_OPS_FROM"),
    )):  # fmt: skip
        command = ["cmake", "-S", str(ROOT), "-B", str(tmp_path / f"build{number}"), *option.split(";")]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
        assert done.returncode != 0
        assert message in " ".join(done.stderr.split())


def test_memory_at_work_is_weights_plan_and_little_more(lite: Path, command: Command) -> None:
    """What the process wrote to is the plan, the thread stacks and under a megabyte."""
    memory = json.loads(command(lite, DEMO, PROMPT, "--bench", "--json", "--max-tokens", 200))["memory"]
    plan = memory["plan_bytes"] - memory["weight_bytes"]
    assert memory["private_dirty_bytes"] < plan + 1_000_000
    assert memory["pss_bytes"] < memory["plan_bytes"] + 1_000_000 + 1_000_000  # its own code and the C library's
