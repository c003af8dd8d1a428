"""The C API's headers: few public functions, each exported and documented, one version everywhere."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from penstock.core import library, native
from penstock.version import __version__

ROOT = Path(__file__).parents[2]
PUBLIC = (ROOT / "core" / "include" / "penstock.h").read_text()
RANKS = (ROOT / "core" / "include" / "penstock_ranks.h").read_text()
DEV = (ROOT / "core" / "include" / "penstock_dev.h").read_text()
MAX_PUBLIC = 36


def functions(header: str) -> list[str]:
    code = re.sub(r"/\*.*?\*/", "", header, flags=re.DOTALL)
    return re.findall(r"^PS_API [^;(]*?\b(ps_\w+)\(", code, re.MULTILINE)


def test_public_api_stays_small() -> None:
    names = functions(PUBLIC)
    assert len(names) == len(set(names))
    assert 20 < len(names) <= MAX_PUBLIC
    assert not set(names) & {*functions(DEV), *functions(RANKS)}


def test_library_exports_what_the_headers_declare() -> None:
    lines = subprocess.run(
        ["nm", "-D", "--defined-only", str(native.library_file())], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    exported = {line.split()[-1].split("@")[0] for line in lines}
    assert exported == {*functions(PUBLIC), *functions(RANKS), *functions(DEV)}


def test_python_binds_only_functions_of_the_headers() -> None:
    assert set(library._FUNCTIONS) <= {*functions(PUBLIC), *functions(RANKS), *functions(DEV)}


def test_versions_agree() -> None:
    (version,) = re.findall(r'#define PS_VERSION "(.*)"', PUBLIC)
    (abi,) = re.findall(r"#define PS_ABI_VERSION (\d+)", PUBLIC)
    assert version == __version__ == native.version()
    assert int(abi) == library.library().ps_abi_version() == library._ABI_VERSION


def test_headers_compile_as_c_and_include_only_stdint(tmp_path: Path) -> None:
    for name, language in (
        ("penstock.h", "c"),
        ("penstock_dev.h", "c"),
        ("penstock_ranks.h", "c"),
        ("penstock.h", "c++"),
    ):
        source = tmp_path / f"includes.{language}"
        source.write_text(f'#include "{name}"\nint main(void) {{ return PS_OK; }}\n')
        standard = "-std=c99" if language == "c" else "-std=c++11"
        flags = [standard, "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-fsyntax-only", "-x", language]
        subprocess.run(["cc", *flags, "-I", str(ROOT / "core" / "include"), str(source)], check=True)
    for language, standard in (("c", "-std=c99"), ("c++", "-std=c++11")):  # with nothing before it
        flags = [standard, "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-fsyntax-only", "-x", language]
        subprocess.run(["cc", *flags, str(ROOT / "core" / "include" / "penstock_op.h")], check=True)
    assert set(re.findall(r"#include (.*)", PUBLIC)) == {"<stdint.h>"}
