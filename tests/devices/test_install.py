"""``cmake --install``: headers, both libraries, and how pkg-config and CMake find them; the examples built that way."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import tokenizers

from penstock import LLM, SamplingParams
from penstock.core.tokenizer import TOKENIZER_SEGMENT
from tests.support.tiny_graph import VOCAB, tiny_graph, write_bundle
from tests.support.tokenizer_kinds import segment_of
from tests.system_packages import skip_reason

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "demo" / "demo.psm"
PROMPT = "def read(path):\n    "

Command = Callable[..., str]


@pytest.fixture(scope="module")
def answer() -> str:
    with LLM(DEMO) as llm:
        return llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=32)).text + "\n"


def library_folder(prefix: Path) -> Path:
    return next(prefix.glob("lib*/**/libpenstock.a")).parent


def test_installed_files(installed: Path) -> None:
    libraries = library_folder(installed)
    names = {path.relative_to(installed).as_posix() for path in installed.rglob("*") if not path.is_dir()}
    folder = libraries.relative_to(installed).as_posix()
    assert names == {
        "include/penstock.h",
        "include/penstock_op.h",
        "include/penstock_ranks.h",
        "bin/penstock-lite",
        *(f"{folder}/libpenstock{end}" for end in (".a", ".so", ".so.3", ".so.3.0.1.0")),
        f"{folder}/pkgconfig/penstock.pc",
        *(f"{folder}/cmake/Penstock/Penstock{end}.cmake" for end in ("Config", "ConfigVersion", "Targets")),
        f"{folder}/cmake/Penstock/PenstockTargets-release.cmake",
    }  # fmt: skip


@pytest.mark.parametrize("language", ["c", "cpp"])
def test_examples_built_by_find_package(
    language: str, installed: Path, command: Command, tmp_path: Path, answer: str
) -> None:
    command("cmake", "-S", ROOT / "examples" / language, "-B", tmp_path, f"-DCMAKE_PREFIX_PATH={installed}")
    command("cmake", "--build", tmp_path)
    for program in ("generate", "generate_static"):
        assert command(tmp_path / program, DEMO, PROMPT, 32) == answer
        needed = command("readelf", "-d", tmp_path / program)
        assert ("libpenstock.so.3" in needed) == (program == "generate")


@pytest.mark.skipif(bool(skip_reason("pkg-config")), reason=skip_reason("pkg-config"))
def test_examples_built_by_pkg_config(installed: Path, command: Command, tmp_path: Path, answer: str) -> None:
    libraries = library_folder(installed)
    env = {**os.environ, "PKG_CONFIG_PATH": str(libraries / "pkgconfig")}
    flags = command("pkg-config", "--cflags", "--libs", "penstock", env=env).split()
    source = ROOT / "examples" / "c" / "generate.c"
    strict = ["-std=c99", "-Wall", "-Wextra", "-Wno-missing-field-initializers", "-Wpedantic", "-Werror"]
    command("cc", *strict, source, *flags, "-o", tmp_path / "shared")
    assert command(tmp_path / "shared", DEMO, PROMPT, 32, env={**env, "LD_LIBRARY_PATH": str(libraries)}) == answer
    # One file that needs nothing of the machine but its kernel.
    static = command("pkg-config", "--cflags", "--libs", "--static", "penstock", env=env).split()
    command("cc", *strict, "-static", source, *static, "-o", tmp_path / "static")
    assert command(tmp_path / "static", DEMO, PROMPT, 32) == answer
    assert "NEEDED" not in command("readelf", "-d", tmp_path / "static")


def test_c_example_writes_texts_of_any_length(installed: Path, lite: Path, command: Command, tmp_path: Path) -> None:
    """Of a tokenizer whose tokens are 3,000 bytes each."""
    vocab = {"a": 0, **{"b" * 3000 + chr(0x4E + token % 40) + "c" * (token // 40): token for token in range(1, VOCAB)}}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokenizer.decoder = tokenizers.decoders.ByteLevel()  # type: ignore[assignment]
    path = write_bundle(tmp_path / "long.psm", tiny_graph(), segments={TOKENIZER_SEGMENT: segment_of(tokenizer)})
    command("cmake", "-S", ROOT / "examples" / "c", "-B", tmp_path, f"-DCMAKE_PREFIX_PATH={installed}")
    command("cmake", "--build", tmp_path, "--target", "generate")
    wanted = command(lite, path, "a", "--temperature", 0, "--max-tokens", 4)
    assert len(wanted) > 6000
    assert command(tmp_path / "generate", path, "a", 4) == wanted


def test_examples_name_what_is_wrong(installed: Path, command: Command, tmp_path: Path) -> None:
    command("cmake", "-S", ROOT / "examples" / "cpp", "-B", tmp_path, f"-DCMAKE_PREFIX_PATH={installed}")
    command("cmake", "--build", tmp_path, "--target", "generate")
    done = subprocess.run([tmp_path / "generate", "none.psm", "x"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == "none.psm: No such file or directory\n"
