"""The core built for AArch64 by Debian's cross compiler and run by qemu's user emulation: the bits of this machine.

With g++-aarch64-linux-gnu and qemu-user installed; ``PENSTOCK_AARCH64=long`` (``make check-neon``) builds every level
and takes more tokens and texts.
"""

from __future__ import annotations

import json
import os
import random
import re
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.core.tokenizer import TOKENIZER_SEGMENT
from tests.support.tiny_graph import tiny_graph, write_bundle
from tests.support.tokenizer_kinds import KINDS, segment_of, text_of
from tests.system_packages import skip_reason

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "demo" / "demo.psm"
PROMPT = "def read(path):\n    "
LONG = os.environ.get("PENSTOCK_AARCH64") == "long"
STEPS = [(12, 4), (300, 8)] if LONG else [(12, 3)]  # of a prompt and of tokens behind it; the second has two partitions
NUM_TEXTS = 4000 if LONG else 60
CPUS = {"cortex-a53": "neon", "max": "neon_dot"}  # qemu's name to the level that the core takes there
MISSING = skip_reason("aarch64-linux-gnu-g++", "qemu-aarch64")

pytestmark = [pytest.mark.long, pytest.mark.skipif(bool(MISSING), reason=MISSING)]

Command = Callable[..., str]


def emulated(cpu: str, *words: object) -> list[str]:
    return ["qemu-aarch64", "-L", "/usr/aarch64-linux-gnu", "-cpu", cpu, *map(str, words)]


@pytest.fixture(scope="module")
def arm(bundles: dict[str, Path], command: Command, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The prefix of an installed cross build."""
    build = tmp_path_factory.mktemp("arm")
    options = [f"-DCMAKE_TOOLCHAIN_FILE={ROOT}/core/package/aarch64-linux-gnu.cmake"]
    if not LONG:
        options += [
            f"-DPENSTOCK_OPS_FROM={';'.join(map(str, bundles.values()))}",
            "-DPENSTOCK_KV_LAYOUTS=f32;bf16;int8;int4",
            "-DPENSTOCK_LEVELS=neon;neon_dot",
            "-DPENSTOCK_DEV=OFF",
        ]
    command("cmake", "-S", ROOT, "-B", build, *options)
    command("cmake", "--build", build, "-j", "2")
    command("cmake", "--install", build, "--prefix", build / "prefix")
    return build / "prefix"


def step_check(compiler: str, prefix: Path, command: Command, folder: Path) -> Path:
    """core/tools/check/step_check.cpp with the installed shared library."""
    (library,) = prefix.glob("lib*/**/libpenstock.so")
    source = ROOT / "core" / "tools" / "check" / "step_check.cpp"
    flags = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", f"-I{prefix}/include"]
    out = folder / "step_check"
    command(compiler, *flags, source, "-o", out, library, f"-Wl,-rpath,{library.parent}")
    return out


@pytest.fixture(scope="module")
def native_check(installed: Path, command: Command, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return step_check("c++", installed, command, tmp_path_factory.mktemp("native_check"))


@pytest.fixture(scope="module")
def arm_check(arm: Path, command: Command, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return step_check("aarch64-linux-gnu-g++", arm, command, tmp_path_factory.mktemp("arm_check"))


def test_installed_files_are_for_aarch64(arm: Path, command: Command) -> None:
    (library,) = arm.glob("lib*/**/libpenstock.so.*.*.*")
    for path in (library, arm / "bin" / "penstock-lite"):
        assert re.search(r"Machine: +AArch64", command("readelf", "-h", path))
        loads = re.findall(r"^ +LOAD .*?(0x[0-9a-f]+)$", command("readelf", "-lW", path), re.MULTILINE)
        assert loads
        assert all(int(align, 16) >= 1 << 16 for align in loads)  # systems have pages of up to 64 KiB
    limit = 1_000_000 if LONG else 500_000
    assert library.stat().st_size < limit
    assert "-lpenstock" in next(arm.glob("lib*/**/penstock.pc")).read_text()


@pytest.mark.parametrize("cpu", CPUS)
@pytest.mark.parametrize("scheme", ["f32", "w8a8", "w4a8"])
def test_logits_are_this_machines_bits(
    scheme: str, cpu: str, bundles: dict[str, Path], native_check: Path, arm_check: Path, command: Command
) -> None:
    """Of a prompt in chunks, steps with two requests, greedy and drawn tokens, with every type of keys and values."""
    for prompt, steps in STEPS:
        if scheme == "f32" and prompt > 100:
            continue  # minutes
        wanted = command(native_check, bundles[scheme], prompt, steps)
        assert wanted.count("\n") == 4 * (steps + 1)
        words = emulated(cpu, arm_check, bundles[scheme], prompt, steps)
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        assert done.stderr == f"level {CPUS[cpu]}\n"
        assert done.stdout == wanted


@pytest.mark.parametrize("cpu", CPUS)
def test_penstock_lite_prints_the_same(cpu: str, arm: Path, lite: Path, command: Command) -> None:
    options = ("--json", "--max-tokens", 12)
    for drawn in (
        ("--temperature", 0),
        ("--temperature", 0.9, "--seed", 7, "--kv-cache", "int8"),
        ("--temperature", 0.9, "--seed", 7, "--kv-cache", "int4"),
    ):
        wanted = json.loads(command(lite, DEMO, PROMPT, *options, *drawn))
        found = json.loads(command(*emulated(cpu, arm / "bin" / "penstock-lite", DEMO, PROMPT, *options, *drawn)))
        for field in ("token_ids", "text", "finish_reason", "num_prompt_tokens"):
            assert found[field] == wanted[field]


def test_c_example_finds_the_package(arm: Path, lite: Path, command: Command, tmp_path: Path) -> None:
    toolchain = f"-DCMAKE_TOOLCHAIN_FILE={ROOT}/core/package/aarch64-linux-gnu.cmake"
    command("cmake", "-S", ROOT / "examples" / "c", "-B", tmp_path, toolchain, f"-DPenstock_ROOT={arm}")
    command("cmake", "--build", tmp_path)
    wanted = command(lite, DEMO, PROMPT, "--temperature", 0, "--max-tokens", 8)
    for program in ("generate", "generate_static"):
        assert command(*emulated("max", tmp_path / program, DEMO, PROMPT, 8)) == wanted


def test_a_level_that_the_processor_lacks_is_refused(arm: Path) -> None:
    words = emulated("cortex-a53", arm / "bin" / "penstock-lite", DEMO, PROMPT)
    env = {**os.environ, "PENSTOCK_CPU": "neon_dot"}
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 1
    assert 'PENSTOCK_CPU: this machine lacks the instructions of level "neon_dot"' in done.stderr


def test_tokenizers_give_the_same_ids(native_check: Path, arm_check: Path, tmp_path: Path, command: Command) -> None:
    """A character is signed on x86, unsigned on ARM."""
    for kind, make in KINDS.items():
        tokenizer = make()
        path = write_bundle(tmp_path / "a.psm", tiny_graph("w8a8"), segments={TOKENIZER_SEGMENT: segment_of(tokenizer)})
        added = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
        r = random.Random(f"aarch64 {kind}")
        texts = [text_of(r, added).encode() for _ in range(NUM_TEXTS)]
        data = b"".join(struct.pack("<I", len(text)) + text for text in texts)
        found = [
            subprocess.run(words, input=data, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True).stdout
            for words in ([str(native_check), str(path), "encode"], emulated("cortex-a53", arm_check, path, "encode"))
        ]
        assert found[0].count(b"\n") == NUM_TEXTS
        assert found[1] == found[0], kind


@pytest.mark.parametrize("processor", ["aarch64_be", "armv7-a"])
def test_other_processors_end_the_configuration(processor: str, tmp_path: Path) -> None:
    options = ("-DCMAKE_SYSTEM_NAME=Linux", f"-DCMAKE_SYSTEM_PROCESSOR={processor}")
    words = ["cmake", "-S", str(ROOT), "-B", str(tmp_path), *options, "-DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert f"expected x86_64 or a little-endian aarch64, got {processor}" in " ".join(done.stderr.split())
