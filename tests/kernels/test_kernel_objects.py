"""The kernels against their references under the sanitizers, and what each level's object file may contain."""

import platform
import re
from pathlib import Path

import pytest

from tests.support.builds import build, run, tool

pytestmark = pytest.mark.long

X86 = platform.machine() in ("x86_64", "AMD64")
ATTENTION = re.compile(r"attend<|attention\(|page_step<|scores<|weigh")

# Machines of the AVX-512 level multiply bf16 or not: it has a table for each, and the products a file of their own.
DOTS = ["attention_bf16_dot", "attention_part_bf16_dot", "linear_bf16_dot", "peak_bf16_dot", "round_rows_bf16_dot"]
DOTS = [f"ps::{name}" for name in [*DOTS, "dot_pairs"]] if X86 else []
STORE = ["ps::prefetch_distance_bf16_dot", "ps::store_bf16_dot"] if X86 else []
TABLES = ["ps::kernels_amx", "ps::kernels_avx512", "ps::kernels_avx512_bf16", "ps::kernels_avx512_short_prefetch"]
# Tile registers, too, are in a file of their own, and their table with those of the level that the rest is of.
TILES = [
    "linear_bf16_amx",
    "linear_integer_amx",
    "linear_panel_bytes_amx",
    "peak_amx",
    "quantize_rows_amx",
    "round_rows_bf16_amx",
]
TILES = [f"ps::{name}" for name in TILES] if X86 else []
EXPORTS = {"avx512": [*TABLES, *STORE], "avx512_bf16": DOTS, "amx": TILES}


@pytest.mark.parametrize("words", [["--part"], pytest.param([], marks=pytest.mark.exhaustive)], ids=["part", "whole"])
def test_kernels_match_the_reference_under_sanitizers(sanitized_build: Path, words: list[str]) -> None:
    """Every kernel of every level that runs here; ``--part`` leaves out numbers of rows, which take minutes."""
    build(sanitized_build, "kernel_check")
    (program,) = (path for path in sanitized_build.rglob("kernel_check") if path.is_file())
    output = run(program, *words)
    assert "generic" in output.splitlines()[0]
    assert output.splitlines()[-1] == "0 failures"


@pytest.fixture(scope="module")
def objects(release_build: Path) -> dict[str, Path]:
    paths = {
        level: f"CMakeFiles/penstock_objects.dir/core/kernels/levels/{level}.cpp.o"
        for level in ("generic", "avx2", "avx512", "avx512_bf16", "amx", "neon", "neon_dot")
    }
    build(release_build, "penstock_objects")
    return {level: release_build / path for level, path in paths.items()}


def functions(path: Path) -> dict[str, str]:
    """Name of each function to its instructions."""
    text = run(tool("objdump"), "-d", "-C", "--no-show-raw-insn", str(path))
    parts = re.split(r"^[0-9a-f]+ <(.*)>:$", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def instructions(code: dict[str, str], name: str | re.Pattern[str]) -> str:
    found = "\n".join(text for function, text in code.items() if re.search(name, function))
    assert found, f"no function matches {name!r}"
    return found


def test_no_kernel_object_defines_a_weak_symbol(objects: dict[str, Path]) -> None:
    for level, path in objects.items():
        weak = [line for line in run(tool("nm"), "-C", str(path)).splitlines() if re.search(r" [VvWwu] ", line)]
        assert not weak, f"{level}: {weak}"


def test_kernel_objects_export_only_their_table(objects: dict[str, Path]) -> None:
    for level, path in objects.items():
        lines = run(tool("nm"), "-C", "--defined-only", "--extern-only", str(path)).splitlines()
        names = [re.split(r" [A-Z] ", line)[-1].split("(")[0] for line in lines]
        assert sorted(names) == sorted(EXPORTS.get(level, [f"ps::kernels_{level}"]))


@pytest.mark.skipif(not X86, reason="x86 levels")
def test_generic_level_has_only_baseline_instructions(objects: dict[str, Path]) -> None:
    text = "\n".join(functions(objects["generic"]).values())
    assert "xmm" in text
    assert not re.search(r"\b[yz]mm|\bvfn?m(add|sub)|\tv\w+ .*xmm", text)


@pytest.mark.skipif(not X86, reason="x86 levels")
def test_avx2_level_holds_its_own_instructions(objects: dict[str, Path]) -> None:
    code = functions(objects["avx2"])
    assert not re.search(r"%zmm|%k[0-7]\b", "\n".join(code.values()))
    for kernel in ("dot8<", "dot4_by_groups<"):
        assert re.search(r"vpmaddubsw.*ymm", instructions(code, kernel))
    for name in ("LinearFloat", ATTENTION):
        assert re.search(r"vfmadd\w+ps.*ymm", instructions(code, name))


@pytest.mark.skipif(not X86, reason="x86 levels")
def test_avx512_level_holds_its_own_instructions(objects: dict[str, Path]) -> None:
    code = functions(objects["avx512"])
    for kernel in ("dot8<", "dot4<", "dot4_by_groups<"):
        assert re.search(r"vpdpbusd.*zmm", instructions(code, kernel))
    for name in ("LinearFloat", ATTENTION):
        assert re.search(r"vfmadd\w+ps.*zmm", instructions(code, name))
    assert not re.search("vdpbf16ps|tmm", "\n".join(code.values()))


@pytest.mark.skipif(not X86, reason="x86 levels")
def test_amx_level_multiplies_tiles(objects: dict[str, Path]) -> None:
    code = functions(objects["amx"])
    assert "tdpbssd" in instructions(code, "run<.*Integers, 2, 2>")
    assert "tdpbf16ps" in instructions(code, "run<.*Halves, 2, 2>")
    for name in ("linear_tiles<.*Integers", "linear_tiles<.*Halves"):
        text = instructions(code, name)
        assert text.count("ldtilecfg") == text.count("tilerelease") == 1  # a caller's thread is left as it was


@pytest.mark.skipif(not X86, reason="x86 levels")
def test_bf16_products_are_dot_products(objects: dict[str, Path]) -> None:
    code = functions(objects["avx512_bf16"])
    for name in ("block<12, 2>", "attend<.*KvBf16|scores<.*KvBf16", "weigh<.*KvBf16", "weigh<.*KvInt[48]"):
        assert re.search(r"vdpbf16ps.*zmm", instructions(code, name))
