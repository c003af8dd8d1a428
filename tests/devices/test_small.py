"""Builds for small devices: what they hold, what they refuse, how many bytes they take; and memory at work."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import platform
import re
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from penstock import LLM, SamplingParams
from tests.support.stated_sizes import stated_size
from tests.support.tiny_graph import tiny_graph, write_bundle

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "demo" / "demo.psm"
TABLES = 103_432
"""Bytes of the demo model's tokenizer.bin."""
PARTS = ("weight_bytes", "temporary_bytes", "scratch_bytes", "kv_bytes", "logits_bytes", "tokenizer_bytes")
PROMPT = "def read(path):\n    "

Command = Callable[..., str]


@pytest.fixture(scope="module")
def small(command: Command, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the demo model needs, for one level."""
    build = tmp_path_factory.mktemp("small")
    found = command("cmake", "-S", ROOT, "-B", build, f"-DPENSTOCK_OPS_FROM={DEMO}", "-DPENSTOCK_LEVELS=generic")
    assert "attention silu_mul gather_rows with w8a8; keys and values bf16" in found
    command("cmake", "--build", build, "-j", "2")
    return build


def exported(library: Path) -> str:
    done = subprocess.run(["nm", "-D", "--defined-only", library], capture_output=True, text=True, check=True)
    return done.stdout


def refusal(program: Path, *words: object) -> str:
    done = subprocess.run([program, *map(str, words)], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    return done.stderr


@pytest.mark.long
def test_libraries_are_small(installed: Path, small: Path) -> None:
    (whole,) = installed.glob("lib*/**/libpenstock.so.3.*")
    assert whole.stat().st_size < 2_500_000
    (library,) = small.glob("libpenstock.so.3.*")
    assert library.stat().st_size < 300_000
    assert (small / "penstock-lite").stat().st_size < 330_000
    if platform.machine() == "x86_64":
        row = "demo bundle, `generic` only"
        assert whole.stat().st_size == stated_size("every level")
        assert library.stat().st_size == stated_size(row)
        assert (small / "penstock-lite").stat().st_size == stated_size(row, 1)
    assert "ps_program_create_flagged" in exported(whole)  # of penstock_dev.h, which a small build leaves out by itself
    assert "ps_program_create_flagged" not in exported(library)
    assert "ps_program_create" in exported(library)


@pytest.mark.long
@pytest.mark.skipif(platform.machine() != "x86_64", reason="AVX2 is of x86-64")
def test_a_small_library_with_avx2_is_small(command: Command, tmp_path: Path) -> None:
    command("cmake", "-S", ROOT, "-B", tmp_path, f"-DPENSTOCK_OPS_FROM={DEMO}", "-DPENSTOCK_LEVELS=avx2")
    command("cmake", "--build", tmp_path, "-j", "2", "--target", "penstock")
    (library,) = tmp_path.glob("libpenstock.so.3.*")
    assert library.stat().st_size < 300_000
    assert library.stat().st_size == stated_size("demo bundle, AVX2 only")


@pytest.mark.long
def test_a_library_of_one_level_with_all_ops_is_under_1_mb(command: Command, tmp_path: Path) -> None:
    command("cmake", "-S", ROOT, "-B", tmp_path, "-DPENSTOCK_LEVELS=generic")
    command("cmake", "--build", tmp_path, "-j", "2", "--target", "penstock")
    (library,) = tmp_path.glob("libpenstock.so.*.*")
    assert library.stat().st_size < 1_000_000


@pytest.mark.long
def test_small_build_makes_the_same_tokens(small: Path, command: Command) -> None:
    with LLM(DEMO) as llm:
        for options, sampling in ((("--temperature", 0), {"temperature": 0.0}), (("--seed", 3), {"seed": 3})):
            wanted = llm.generate(PROMPT, SamplingParams(max_tokens=48, **sampling))
            words = (DEMO, PROMPT, "--json", "--max-tokens", 48, *options)
            found = json.loads(command(small / "penstock-lite", *words))
            assert (found["token_ids"], found["text"]) == (list(wanted.token_ids), wanted.text)


@pytest.mark.long
def test_features_left_out_of_a_small_build_are_refused(small: Path, tmp_path: Path) -> None:
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
    assert 'PENSTOCK_CPU: expected one of generic, got "avx2"' in done.stderr


@pytest.mark.long
def test_wrong_bundles_levels_and_layouts_end_the_configuration(tmp_path: Path) -> None:
    (tmp_path / "bad.psm").write_bytes(DEMO.read_bytes()[:3000])
    for option, message in (  # in one folder, where the compiler is examined once
        ("-DPENSTOCK_OPS_FROM=bad.psm", f"{tmp_path}/bad.psm: header.file_bytes"),
        (f"-DPENSTOCK_OPS_FROM={tmp_path}/none.psm", "none.psm: No such file"),
        ("-DPENSTOCK_LEVELS=sse9", "has no level sse9"),
        ("-DPENSTOCK_LEVELS=amx", "expected avx512 with amx"),
        (f"-DPENSTOCK_OPS_FROM={DEMO};-DPENSTOCK_KV_LAYOUTS=f64", "expected f32, bf16, int8 or int4, got f64"),
        ("-DPENSTOCK_KV_LAYOUTS=int8", "PENSTOCK_KV_LAYOUTS: expected with PENSTOCK_OPS_FROM"),
    ):  # fmt: skip
        command = ["cmake", "-S", str(ROOT), "-B", str(tmp_path / "build"), "-U", "PENSTOCK_*", *option.split(";")]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
        assert done.returncode != 0
        assert message in " ".join(done.stderr.split())


@contextlib.contextmanager
def waiting(program: Path, room: int, *words: object) -> Iterator[subprocess.Popen[bytes]]:
    """The program, once it has written about ``room`` bytes and waits to write more."""
    reader, writer = os.pipe()
    size = fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
    os.write(writer, b"x" * (size - room))
    process = subprocess.Popen(list(map(str, (program, *words))), stdout=writer)
    try:
        before, now = -1, 0
        while now <= size - room or now != before:
            time.sleep(0.1)
            assert process.poll() is None
            before, now = now, int.from_bytes(fcntl.ioctl(reader, termios.FIONREAD, b"    "), sys.byteorder)
        yield process
    finally:
        process.kill()
        process.wait()
        os.close(reader)
        os.close(writer)


def resident(pid: int) -> tuple[int, int]:
    """Bytes in memory of the bundle, and of all else; of the system's libraries, which every process shares, those that
    this one wrote to."""
    bundle = rest = 0
    name = ""
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        words = line.split()
        if not words[0].endswith(":"):
            name = words[-1]
        elif words[0] == "Rss:" and name == str(DEMO):
            bundle += int(words[1]) * 1024
        elif words[0] == ("Anonymous:" if re.search(r"/lib(64)?/.*\.so|\[v", name) else "Rss:"):
            rest += int(words[1]) * 1024
    return bundle, rest


@pytest.mark.long
@pytest.mark.parametrize("build", ["whole", "small"])
def test_memory_at_work_is_the_plan_and_little_more(build: str, lite: Path, small: Path, command: Command) -> None:
    """The plan has weights and tokenizer tables; beside it are the program, stacks, the graph as it is read: 1.45 MB.

    Kernels of AVX-512 have larger tables and tiles on their stacks: 0.2 MB more than those of AVX2.
    The kernel maps what else of the bundle it has at hand; such pages are the page cache's.
    """
    program = lite if build == "whole" else small / "penstock-lite"
    words = (DEMO, PROMPT, "--ignore-eos", "--max-tokens", 400, "--temperature", 0)
    found = json.loads(command(program, *words, "--bench", "--json"))
    memory = found["memory"]
    assert memory["tokenizer_bytes"] == TABLES
    mapped = memory["weight_bytes"] + TABLES
    private_plan = memory["plan_bytes"] - mapped
    most = private_plan + (1_450_000 if build == "whole" else 600_000)
    assert memory["private_dirty_bytes"] < most
    with waiting(program, len(found["text"].encode()) * 9 // 10, *words) as process:
        bundle, rest = resident(process.pid)
    assert mapped * 0.98 < bundle < DEMO.stat().st_size + 4096
    assert private_plan * 0.5 < rest < most


def test_the_plan_that_inspect_prints_has_the_tokenizers_tables(command: Command) -> None:
    plan = json.loads(command(sys.executable, "-m", "penstock", "inspect", DEMO, "--json"))["plan"]
    assert plan["tokenizer_bytes"] == TABLES
    assert plan["total_bytes"] == sum(plan[name] for name in plan if name in PARTS)
