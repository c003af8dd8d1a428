"""The example op of CONTRIBUTING.md, added to a copy of the tree as the document says."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import penstock

ROOT = Path(__file__).parents[2]
STEP = re.compile(r"`([\w/.]+)`:\n\n```diff\n(.*?)```", re.DOTALL)
COPIED = ("CMakeLists.txt", "pyproject.toml", "core", "src", "tests/__init__.py", "tests/ops", "tests/support")

MAKE = """
import json, sys, torch
from safetensors.numpy import save_file
from penstock.config import ConfigReader
from penstock.models.registry import load_network_script
folder, spec, config = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
script = load_network_script(spec)
network = script.Network(script.Config.read(ConfigReader(config)))
torch.manual_seed(0)
tensors = {name: (torch.randn(p.shape) * 0.2).numpy() for name, p in network.named_parameters()}
save_file(tensors, f"{folder}/model.safetensors")
open(f"{folder}/config.json", "w").write(json.dumps(config))
"""
COMPARE = """
import sys
from penstock import LLM
from penstock.core.native import op_schemas
from penstock.graph.export import export_bundle
from penstock.ops.table import OPS
folder, spec, bundle = sys.argv[1:]
assert op_schemas()[: len(OPS)] == [f"{op.name}.{op.version} {op.schema}" for op in OPS]
export_bundle(folder, bundle, network=spec)
logits = []
eager, graph = ({"mode": mode, "network": spec} for mode in ("eager", "graph"))
for what, options in (folder, eager), (folder, graph), (bundle, {}):
    with LLM(what, **options) as llm:
        logits.append(llm.logits([5, 1, 77, 102, 3, 3, 40]))
assert len({found.tobytes() for found in logits}) == 1
"""
CONFIG = {"model_type": "mine", "vocab_size": 103, "max_position_embeddings": 96, "width": 48}
CONFIG |= {"num_layers": 2, "num_heads": 3}


WALK = (ROOT / "CONTRIBUTING.md").read_text().partition("## An op, step by step")[2]


def steps() -> list[tuple[str, str]]:
    """The files that the walk-through changes, and their diffs."""
    return STEP.findall(WALK)


def changed(text: str, diff: str) -> str:
    for hunk in diff.split("@@\n"):
        lines = hunk.splitlines(keepends=True)
        old, new = ("".join(line[1:] or "\n" for line in lines if line[0] in kinds) for kinds in (" -", " +"))
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


def test_an_op_of_contributing_touches_four_files() -> None:
    found = steps()
    assert len(found) == len({name for name, _ in found}) == 4
    for name, diff in found:
        assert "sigmoid" in changed((ROOT / name).read_text(), diff)


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tree with the op, built for the instruction level that every machine has.

    Kernels have the same bits with -O1, which compiles them in a fraction of the time.
    """
    tree = tmp_path_factory.mktemp("tree")
    for name in COPIED:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy2
        (tree / name).parent.mkdir(exist_ok=True)
        options = {"ignore": shutil.ignore_patterns("*.so", "__pycache__")} if copy is shutil.copytree else {}
        copy(ROOT / name, tree / name, **options)
    for name, diff in steps():
        (tree / name).write_text(changed((tree / name).read_text(), diff))
    beside = Path(sys.executable).parent / "cmake"
    cmake = str(beside) if beside.exists() else "cmake"
    configure, build = (commands := block("sh").splitlines()[0].split(" && "))
    run(tree, *command_words(configure, cmake), "-DPENSTOCK_LEVELS=generic", "-DPENSTOCK_KERNEL_OPTIMIZATION=-O1")
    run(tree, *command_words(build, cmake))
    assert len(commands) == 2
    shutil.copy2(tree / "build" / "dev" / "libpenstock.so", tree / "src" / "penstock" / "core" / "libpenstock.so")
    return tree


def block(language: str) -> str:
    """The block of the walk-through that says how to use the op, or how to build it."""
    (text,) = re.findall(rf"```{language}\n(.*?)```", WALK, re.DOTALL)
    return text


def command_words(line: str, program: str) -> list[str]:
    """The words of a command of the document, with another program of that name."""
    return [program, *line.split()[1:]]


def test_the_lines_that_use_an_op_run() -> None:
    use = block("python").replace("ops.sigmoid(x)", "ops.mul(x, x)")
    names: dict[str, Any] = {"x": torch.ones(2, 3)}
    exec(use, names)  # noqa: S102 - the document's own lines
    assert names["y"].equal(names["x"])
    assert penstock.ops.call.ops is names["ops"]
    assert penstock.nn.Module


def run(tree: Path, *words: object) -> str:
    env = {**os.environ, "PYTHONPATH": f"{tree / 'src'}{os.pathsep}{tree}", "PENSTOCK_CACHE_DIR": str(tree / "cache")}
    done = subprocess.run(
        list(map(str, words)), cwd=tree, env=env, capture_output=True, text=True, check=False, timeout=900
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.long
def test_an_added_op_passes_the_op_tests(tree: Path) -> None:
    words = block("sh").splitlines()[1].split(".venv/bin/pytest ")[1].split()
    assert words[-2:] == ["-k", "sigmoid"]
    words[-1:] = ["sigmoid and not sigmoid_mul or every_op", "-p", "no:cacheprovider"]
    assert "6 passed" in run(tree, sys.executable, "-m", "pytest", *words)


@pytest.mark.long
def test_an_added_op_agrees_in_eager_graph_and_file(tree: Path) -> None:
    folder, spec = tree / "mine", f"{tree / 'mine_network.py'}:Net"
    folder.mkdir()
    script = (ROOT / "examples" / "my_network.py").read_text()
    changes = {
        'nn.gelu(self.up(self.norm2(x)), "tanh")': "ops.sigmoid(self.up(self.norm2(x)))",
        "from penstock import nn\n": f"from penstock import nn\n{block('python').splitlines()[0]}\n",
    }
    for old, new in changes.items():
        assert script.count(old) == 1
        script = script.replace(old, new)
    (tree / "mine_network.py").write_text(script)
    run(tree, sys.executable, "-c", MAKE, folder, spec, json.dumps(CONFIG))
    run(tree, sys.executable, "-c", COMPARE, folder, spec, tree / "mine.psm")
