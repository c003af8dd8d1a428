"""penstock-lite and the example in C on a general network: files of numpy in, files of numpy out."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from penstock.core.native import Context, Model
from penstock.core.predict import NetworkProgram
from penstock.graph.ir import Symbol
from tests.support.general_graphs import NetworkBuilder, mixed_inputs, mixed_network

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
Command = Callable[..., str]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("arrays")
    mixed_network().write(folder / "net.psm")
    for name, array in zip(("x", "image"), mixed_inputs(5, 2), strict=True):
        np.save(folder / f"{name}.npy", array)
    return folder


def test_outputs_are_those_of_python(lite: Path, folder: Path, command: Command) -> None:
    with Model.open(folder / "net.psm") as model, Context(1) as context, NetworkProgram(model, context) as program:
        expected = program.predict(mixed_inputs(5, 2))
    outputs = ("--output", folder / "0.npy", "--output", f"table={folder / '3.npy'}")
    command(
        lite, folder / "net.psm", "--input", f"image={folder / 'image.npy'}", f"--input=x={folder / 'x.npy'}", *outputs
    )
    for at in (0, 3):
        found = np.load(folder / f"{at}.npy", allow_pickle=False)
        assert found.dtype == expected[at].dtype
        assert np.array_equal(found, expected[at])
    text = command(lite, folder / "net.psm", "--input", folder / "x.npy", "--input", folder / "image.npy", "--bench")
    assert "table <i8 [1, 2, 3]: 0 1 2 3 4 5\n" in text
    assert "flat <f4 [20, 2, 4]:" in text


@pytest.mark.parametrize(
    ("words", "status"),
    [
        ([], 2), (["--input", "x.npy"], 2), (["--input", "y=x.npy"], 2), (["--input", "x=none.npy"], 1),
        (["--input", "x=double.npy"], 1), (["--input", "x=fortran.npy"], 1), (["--input", "x=short.npy"], 1),
        (["--input", "x=text.npy"], 1), (["prompt", "--input", "x.npy"], 2), (["prompt"], 1),
        (["--input", "image.npy", "--input", "image.npy"], 1),
    ],
)  # fmt: skip
def test_errors_are_one_line(lite: Path, folder: Path, words: list[str], status: int) -> None:
    x = mixed_inputs(5, 2)[0]
    np.save(folder / "double.npy", x.astype(np.float64))
    np.save(folder / "fortran.npy", np.asfortranarray(x))
    (folder / "short.npy").write_bytes((folder / "x.npy").read_bytes()[:-1])
    (folder / "text.npy").write_bytes(b"text" * 40)
    done = subprocess.run([lite, "net.psm", *words], cwd=folder, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (status, ""), done
    assert done.stderr.startswith("penstock-lite: ")
    assert done.stderr.count("\n") == 1


def test_the_example_in_c_runs_a_network(installed: Path, command: Command, tmp_path: Path) -> None:
    b = NetworkBuilder(Symbol("N", 1, 9))
    x = b.input("x", "N,4")
    b.output(b.node("add", [x, x], "twice"), "N,4")
    b.write(tmp_path / "net.psm")
    np.arange(8, dtype=np.float32).tofile(tmp_path / "x.raw")
    (library,) = installed.glob("lib*/**/libpenstock.a")
    source = ROOT / "examples" / "c" / "predict.c"
    strict = ["-std=c99", "-Wall", "-Wextra", "-Wno-missing-field-initializers", "-Wpedantic", "-Werror"]
    program = tmp_path / "predict"
    command("cc", *strict, source, "-I", installed / "include", library, "-lpthread", "-lm", "-ldl", "-o", program)
    assert command(program, tmp_path / "net.psm", tmp_path / "x.raw", 2, 4) == "twice [2, 4]: 0 2 4 6 8 10 12 14\n"
    assert command(program, tmp_path / "net.psm", "-", 1, 4) == "twice [1, 4]: 0 0 0 0\n"
