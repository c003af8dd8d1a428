"""A user's own op, examples/custom_op: the same bits in eager mode, a graph, penstock.lite and penstock-lite."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.devices.conftest import Command

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "custom_op"
OP = "example::squared_relu"
CONFIG = {"model_type": "mine", "vocab_size": 103, "max_position_embeddings": 96, "width": 48}
CONFIG |= {"num_layers": 2, "num_heads": 3}

# A library stays for as long as its process lives, so each test has a process of its own.
MAKE = """
import json, sys, torch
from safetensors.numpy import save_file
from penstock.config import ConfigReader
from penstock.models.registry import load_network_script
folder, spec, config = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
script = load_network_script(spec)
network = script.Network(script.Config.read(ConfigReader(config)))
generator = torch.Generator().manual_seed(0)
def values(name, shape):
    shift = 1.0 if name.endswith("scale") or ("norm" in name and name.endswith("weight")) else 0.0
    return (torch.randn(shape, generator=generator) * (0.3 if len(shape) == 1 else shape[1] ** -0.5) + shift).numpy()
save_file({name: values(name, p.shape) for name, p in network.named_parameters()}, f"{folder}/model.safetensors")
open(f"{folder}/config.json", "w").write(json.dumps(config))
"""
COMPARE = """
import sys
import numpy as np, torch
import penstock
from penstock import LLM, lite
from penstock.errors import InvalidArgumentError, UnsupportedError
folder, bundle, library, spec = sys.argv[1:]
ids = [5, 1, 77, 102, 3, 3, 40]
with LLM(folder, mode="eager", network=spec) as llm:
    plain = llm.logits(ids)  # the PyTorch function: no library is loaded
try:
    LLM(bundle)
except UnsupportedError as error:
    assert "needs the op example::squared_relu, version 1" in str(error) and "penstock.load_ops" in str(error), error
else:
    raise AssertionError("opened without its op")
context = lite.Context(ops=[library])
penstock.load_ops(library)  # the same again changes nothing
op = torch.ops.example.squared_relu
x, scale = torch.randn(37, 96) * 3, torch.randn(48)
x[3, 4] = torch.nan
for rows, columns in ((slice(0, 37), slice(0, 48)), (slice(0, 0), slice(0, 48)), (slice(0, 1), slice(48, 96))):
    for one in (scale, None):  # strided rows, none, one; with and without a scale
        found = op(x[rows, columns], one, limit=4.5)
        square = torch.clamp(torch.clamp(x[rows, columns], min=0.0).square(), max=4.5)
        assert found.numpy().tobytes() == (square if one is None else square * one).numpy().tobytes()
try:
    op(x.view(37, 2, 48), scale, limit=1.0)
except InvalidArgumentError as error:
    assert str(error) == "[example::squared_relu] x: expected f32 [rows, columns], got dtype 1 with 3 dims", error
else:
    raise AssertionError("three dims")
logits = []
ways = ("eager", folder, {"network": spec}), ("graph", bundle, {}), ("graph", bundle, {"threads": 1})
for mode, what, options in ways:
    with LLM(what, mode=mode, **options) as llm:
        logits.append(llm.logits(ids))
for found in logits:
    assert np.isfinite(found).all() and found.tobytes() == plain.tobytes()
model = lite.Model()
model.build_from_file(bundle, lite.ModelType.PENSTOCK, context)
inputs = model.get_inputs()
model.resize(inputs, [[1, len(ids)], [1], [1]])
inputs = model.get_inputs()
for tensor, value in zip(inputs, ([ids], [len(ids)], [1])):
    tensor.set_data_from_numpy(np.array(value, np.int32))
assert model.predict(inputs)[0].get_data_to_numpy().tobytes() == plain[-1:].tobytes()
with LLM(bundle) as llm:
    print(*llm.generate(ids, penstock.SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)).token_ids)
"""


def run(*words: object, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **(env or {})}
    return subprocess.run(list(map(str, words)), capture_output=True, text=True, check=False, env=environment)


@pytest.fixture(scope="module")
def libraries(installed: Path, command: Command, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The example's library, as its CMake file builds it; and such that are wrong."""
    folder = tmp_path_factory.mktemp("ops")
    command("cmake", "-S", EXAMPLE, "-B", folder, f"-DCMAKE_PREFIX_PATH={installed}")
    command("cmake", "--build", folder)
    text = (EXAMPLE / "squared_relu.c").read_text()
    changes = {
        "newer": ('sizeof(ps_op), 1, "example', 'sizeof(ps_op), 2, "example'),
        "schema": ("(Tensor x, Weight? scale", "(Tensor x, State scale"),
        "abi": ("PS_OP_ABI_VERSION, 1", "PS_OP_ABI_VERSION + 1, 1"),
        "none": ("penstock_ops(void)", "other_ops(void)"),
        "fails": (
            "(void)error; /* nothing can fail */",
            'if (end) { snprintf(error->text, 256, "no\\nmore"); return 4; }',
        ),
        "wide": ("shapes->outputs[0] = *x;", "shapes->outputs[0] = *x; shapes->outputs[0].dims[1].offset += 1;"),
    }
    for name, (old, new) in changes.items():
        assert old in text
        (folder / f"{name}.c").write_text(text.replace(old, new))
        words = ("-shared", "-fPIC", f"-I{ROOT}/core/include", folder / f"{name}.c", "-o", folder / f"{name}.so")
        command("cc", "-std=c99", "-O1", "-ffp-contract=off", *words)
    (library,) = folder.glob("libsquared_relu.so")
    return {"good": library, **{name: folder / f"{name}.so" for name in changes}}


@pytest.fixture(scope="module")
def folder(command: Command, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mine")
    command(sys.executable, "-c", MAKE, folder, f"{EXAMPLE}/network.py:Net", json.dumps(CONFIG))
    return folder


@pytest.fixture(scope="module")
def bundle(folder: Path, libraries: dict[str, Path], command: Command) -> Path:
    out = folder / "mine.psm"
    words = ("--network", f"{EXAMPLE}/network.py:Net", "--ops", libraries["good"])
    command(sys.executable, "-m", "penstock", "export", folder, out, *words)
    return out


def test_the_same_bits_everywhere(
    folder: Path, bundle: Path, libraries: dict[str, Path], lite: Path, command: Command
) -> None:
    """PyTorch's function, the kernel in eager mode, the graph, penstock.lite, and the program without Python."""
    wanted = command(sys.executable, "-c", COMPARE, folder, bundle, libraries["good"], f"{EXAMPLE}/network.py:Net")
    ids = "5 1 77 102 3 3 40"
    words = ("--ids", "--temperature", 0, "--max-tokens", 16, "--ignore-eos")
    assert command(lite, bundle, ids, *words, "--ops", libraries["good"]) == wanted
    by_environment = run(lite, bundle, ids, *words, env={"PENSTOCK_OPS": str(libraries["good"])})
    assert by_environment.returncode == 1, "the program loads what its command line names alone"


def test_wrong_libraries_are_refused_with_a_reason(
    bundle: Path, libraries: dict[str, Path], lite: Path, tmp_path: Path
) -> None:
    (tmp_path / "text.so").write_text("no library")
    needs = f"ops[6]: the file needs the op {OP}, version 1"
    for name, message in {
        "": f"{needs}, which is none of this library's: load the shared library that has it (ps_ops_load, penstock-",
        "newer": f"{needs}, and {libraries['newer']} has version 2",
        "schema": 'ops[0]: schema: expected an argument of type Tensor or Weight, got "State scale, *',
        "abi": "library: expected version 1 of penstock_op.h and 24 bytes, got version 2 and 24 bytes",
        "none": "expected a library with the function penstock_ops (penstock_op.h), got none",
        "fails": f"nodes[11] (blocks.0.activation): {OP}: no more",
        "wide": f"nodes[11] ({OP} blocks.0.activation): outputs[0]: inferred f32 [T, 193], the file says f32 [T, 192]",
        "none.so": "--ops: none.so: No such file or directory",
        str(tmp_path / "text.so"): "text.so: file too short",
    }.items():
        words = ("--ops", libraries.get(name, name)) if name else ()
        done = run(lite, bundle, "1 2 3", "--ids", "--max-tokens", 4, *words)
        assert done.returncode == (2 if done.stderr.startswith("penstock-lite: --ops: ") else 1)
        assert message in done.stderr, done.stderr
    done = run(lite, bundle, "1 2", "--ids", "--ops", libraries["good"], "--ops", libraries["newer"])
    assert f"--ops: {libraries['newer']}: {OP}: version 1 is loaded already, from {libraries['good']}" in done.stderr
    done = run(sys.executable, "-m", "penstock", "inspect", bundle, "--ops", libraries["abi"])
    assert done.returncode == 2
    assert done.stderr.startswith("penstock: --ops: ")
    assert "got version 2" in done.stderr
    done = run(sys.executable, "-m", "penstock", "inspect", bundle, env={"PENSTOCK_OPS": str(libraries["good"])})
    assert done.returncode == 0, done.stderr
    assert OP in done.stdout
