"""Everything but eager mode and networks of users runs where PyTorch is not installed, with the same results."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.support.families import FAMILIES, save
from tests.support.gguf_experts import EXPERT_FAMILIES
from tests.support.gguf_gemma import GEMMA_FAMILIES
from tests.support.gguf_hybrids import HYBRID_FAMILIES
from tests.support.gguf_models import FAMILIES as GGUF_FAMILIES
from tests.support.gguf_models import eps_of, gguf_arrays, random_model, write_gguf
from tests.support.quantized_folders import (
    AWQ,
    FP8,
    GPTQ,
    INTEGERS,
    PACKED,
    awq_layer,
    compressed,
    float8_layer,
    gptq_layer,
    integer_layer,
    packed_layer,
    write_folders,
)
from tests.support.torchless import ROOT, answer, make_environment

DEMO = ROOT / "demo" / "model"
FLOATS = compressed("float-quantized", num_bits=8, type="float", strategy="tensor")
FOREIGN: dict[str, tuple[dict[str, Any], Callable[..., Any]]] = {
    "awq": (AWQ, awq_layer),
    "gptq": (GPTQ, gptq_layer),
    "gptq in 8 bits": (GPTQ | {"bits": 8}, partial(gptq_layer, bits=8)),
    "packed": (PACKED, packed_layer),
    "integers": (INTEGERS, integer_layer),
    "floats": (FLOATS, partial(float8_layer, end="weight_scale")),
    "fp8": (FP8, partial(float8_layer, block=128)),
}
FILES = {**GGUF_FAMILIES, **EXPERT_FAMILIES, **HYBRID_FAMILIES, **GEMMA_FAMILIES}
FIRST_OF_ARCHITECTURES = {family.arch: name for name, family in reversed(FILES.items())}
FIRST_OF_TYPES = {row[0]: name for name, row in reversed(FAMILIES.items())}
SOME = {"folders": ["llama_tied_one_kv_head"], "files": ["gemma3"], "foreign": ["awq", "fp8"]}
ALL = {
    "folders": list(FIRST_OF_TYPES.values()),
    "files": list(FIRST_OF_ARCHITECTURES.values()),
    "foreign": list(FOREIGN),
}


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment without PyTorch."""
    return make_environment(tmp_path_factory.mktemp("environment") / "env")


def run_there(python: Path, models: list[Path], commands: list[list[str]], folder: Path) -> dict[str, Any]:
    work = {"models": [str(path) for path in models], "commands": commands, "out": str(folder / "out.psm")}
    done = subprocess.run(
        [python, ROOT / "tests" / "support" / "torchless.py"],
        input=json.dumps(work), capture_output=True, text=True, check=False, cwd=folder,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["present"] == []
    return found


def written(rows: dict[str, list[str]], folder: Path) -> Iterator[Path]:
    """The models of the rows."""
    for name in rows["folders"]:
        yield save(name, folder / name)
    for name in rows["files"]:
        family, model, path = FILES[name], random_model(FILES[name]), folder / f"{name}.gguf"
        kind = gguf.GGMLQuantizationType.F32
        write_gguf(path, family.arch, gguf_arrays(family, model), {**eps_of(model), **family.keys}, kind)
        yield path
    for name in rows["foreign"]:
        section, layer = FOREIGN[name]
        yield write_folders(folder / name, section, partial(layer, np.random.default_rng(1)))[0]


@pytest.mark.parametrize(
    "rows", [pytest.param(SOME, id="some"), pytest.param(ALL, id="all", marks=pytest.mark.long)]
)  # fmt: skip
def test_models_answer_as_with_pytorch(rows: dict[str, list[str]], python: Path, tmp_path: Path) -> None:
    models = list(written(rows, tmp_path))
    found = run_there(python, models, [], tmp_path)["models"]
    assert len(rows["files"]) >= 20 or rows is SOME
    for path in models:
        assert found[str(path)] == answer(path, tmp_path / "expected.psm"), path.name


QUICK_COMMANDS = [
    ["convert", "pickled", "converted"], ["quantize", "model", "quantized", "--scheme", "w8a8"],
    ["inspect", "model"], ["plan", "model", "--no-probe"],
]  # fmt: skip
COMMANDS = [
    *QUICK_COMMANDS, ["convert", "model", "half", "--dtype", "f16"], ["convert", "model", "model.gguf"],
    ["convert", "model", "model.psm"], ["inspect", "model.psm"], ["shard", "model", "cut", "--tp", "1"],
    ["export", "model", "own.psm", "--scheme", "w4a8"], ["run", str(DEMO), "Hi", "--max-tokens", "2"],
]  # fmt: skip


@pytest.mark.parametrize(
    "runs", [pytest.param(QUICK_COMMANDS, id="some"), pytest.param(COMMANDS, id="all", marks=pytest.mark.long)]
)
def test_commands_run_or_say_what_they_need(runs: list[list[str]], python: Path, tmp_path: Path) -> None:
    model, pickled, script = save("llama_tied_one_kv_head", tmp_path / "model"), tmp_path / "pickled", tmp_path / "n.py"
    shutil.copytree(model, pickled, ignore=shutil.ignore_patterns("*.safetensors"))
    tensors = load_file(model / "model.safetensors")
    torch.save(tensors, pickled / "pytorch_model.bin")
    script.write_text("from penstock.models.decoders.llama import Config, Network as Net\n")
    network = ["--network", f"{script}:Net"]
    refused = [
        ["run", str(DEMO), "Hi", "--mode", "eager"], ["plan", "model", "--no-probe", *network],
        ["export", "model", "script.psm", *network], ["shard", "model", "cut again", "--tp", "1", *network],
    ]  # fmt: skip
    doctor, *rest = run_there(python, [], [["doctor"], *runs, *refused], tmp_path)["commands"]
    assert "penstock[torch]" in doctor["out"]
    assert [row for row in rest[: len(runs)] if row["status"]] == []
    for words, row in zip(refused, rest[len(runs) :], strict=True):
        assert row["status"], words
        assert "penstock[torch]" in row["error"], words
        assert row["error"].count("\n") == 1, row["error"]
    converted = load_file(tmp_path / "converted" / "model.safetensors")
    assert converted.keys() == tensors.keys()
    assert all(torch.equal(converted[name], tensor) for name, tensor in tensors.items())
