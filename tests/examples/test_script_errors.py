"""An error in a network script names the script's line, in eager mode and in graph mode."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from penstock import LLM, SamplingParams
from penstock.errors import InvalidFileError, PenstockError, UnsupportedError
from penstock.graph.export import export_bundle
from penstock.runtime.build import build_in_child
from penstock.runtime.eager import EagerProgram
from penstock.runtime.program import ProgramLimits
from tests.models.steps import run_whole
from tests.support.errors import raises
from tests.support.my_network import CONFIG, SCRIPT, SPEC, folder, tensors

pytestmark = pytest.mark.usefixtures("cold_exports")

__all__ = ["folder", "tensors"]

NORM = "self.norm1(x)"
LIMITS = ProgramLimits(96, 2, max_rows=96, num_pages=6, context_len=96)


def write(path: Path, old: str, new: str) -> int:
    """Write the example's script with a mistake; return the mistake's line."""
    text = SCRIPT.read_text()
    assert text.count(old) >= 1, old
    path.write_text(text.replace(old, new, 1))
    return text[: text.index(old)].count("\n") + 1


def run_eager(folder: Path, script: Path) -> None:
    program = EagerProgram(folder, limits=LIMITS, network=f"{script}:Net")
    run_whole(program, [1, 2, 3])


def run_graph(folder: Path, script: Path) -> None:
    export_bundle(folder, script.with_suffix(".psm"), network=f"{script}:Net")


MISTAKES = {
    "syntax": ("class Net(nn.Module):", "class Net(nn.Module)", "SyntaxError: expected ':'"),
    "import": ("from penstock import nn", "import no_such; from penstock import nn", "ModuleNotFoundError: No module"),
    "config": ('reader.int("width")', 'int(reader["width"])', "TypeError: 'ConfigReader' object is not"),
    "attribute": (NORM, "self.nrm1(x)", r"AttributeError: .* Did you mean 'norm1'\?"),
    "shape": (NORM, "self.norm1(x).view(-1, 7)", "(Runtime|Value)Error: "),
    "layer": (NORM, "self.norm1(x[:, :40])", "layer_norm"),
}


@pytest.mark.parametrize("run", [run_eager, run_graph])
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_named_by_line(mistake: str, run: object, folder: Path, tmp_path: Path) -> None:
    old, new, expected = MISTAKES[mistake]
    line = write(tmp_path / "net.py", old, new)
    with raises(PenstockError, match=rf"^\S*net\.py:{line}: .*{expected}") as raised:
        run(folder, tmp_path / "net.py")  # type: ignore[operator]
    assert len(str(raised.value).removeprefix(str(tmp_path))) < 200
    assert raised.value.__cause__ is not None


def test_a_mistake_in_a_helper_names_its_file(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "my_helper.py").write_text("def scale(x):\n    return x * undefined\n")
    write(tmp_path / "net.py", "q, k, v = ", "from my_helper import scale; x = scale(x); q, k, v = ")
    with pytest.raises(InvalidFileError, match=r"my_helper\.py:2: NameError: .*'undefined'"):
        run_eager(folder, tmp_path / "net.py")


OPERATIONS = {
    "number": (f"{NORM} * 2.0", r"aten\.mul\.Tensor in module blocks\.0 .* two tensors .* or an op of your own"),
    "tanh": (f"{NORM}.tanh()", r"aten\.tanh\.default .* an op of penstock\.nn, or an op of your own \(docs/guides/cus"),
    "branch": (f"{NORM} if x.sum() > 0 else x", "branches on the value of a tensor"),
}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_an_operation_without_an_op_is_named_by_line(operation: str, folder: Path, tmp_path: Path) -> None:
    new, expected = OPERATIONS[operation]
    line = write(tmp_path / "net.py", NORM, new)
    with raises(UnsupportedError, match=rf"^\S*net\.py:{line}: .*{expected}"):
        run_graph(folder, tmp_path / "net.py")


def run_one_row(folder: Path, script: Path) -> None:
    with LLM(folder, mode="eager", network=f"{script}:Net") as llm:
        llm.generate([1, 2, 3], SamplingParams(max_tokens=1))


@pytest.mark.parametrize("run", [run_one_row, run_graph])
def test_forgotten_output_rows_are_named(run: object, folder: Path, tmp_path: Path) -> None:
    write(tmp_path / "net.py", "self.norm(x), batch.output_rows)", "self.norm(x))")
    with raises(PenstockError, match=r"float32 .*, 103\].* batch\.output_rows"):
        run(folder, tmp_path / "net.py")  # type: ignore[operator]


def test_a_layer_of_pytorch_is_named(folder: Path, tmp_path: Path) -> None:
    write(tmp_path / "net.py", "self.up = nn.Linear", "import torch; self.up = torch.nn.Linear")
    with raises(UnsupportedError, param="blocks.0.up.weight", match=r"got torch\.nn\.\S*Linear"):
        run_eager(folder, tmp_path / "net.py")


def test_the_export_process_sends_its_traceback(folder: Path, tmp_path: Path) -> None:
    line = write(tmp_path / "net.py", "self.norm1(x)", "self.nrm1(x)")
    with pytest.raises(InvalidFileError, match=rf"net\.py:{line}: AttributeError") as raised:
        build_in_child(folder, tmp_path / "out.psm", network=f"{tmp_path}/net.py:Net")
    assert "in module_getattr_wrapper" in str(raised.value.__cause__)


def test_many_missing_tensors_are_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    save_file({"head.weight": np.zeros((103, 48), np.float32)}, tmp_path / "model.safetensors")
    with raises(InvalidFileError, param="blocks.0.down.bias", match=r"lacks .*'blocks\.0\.\S+', .* \d+ more"):
        EagerProgram(tmp_path, limits=LIMITS, network=SPEC)


def test_a_forgotten_network_is_hinted_at(folder: Path, tmp_path: Path) -> None:
    config = {key: value for key, value in CONFIG.items() if key != "model_type"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    with raises(InvalidFileError, param="model_type", match=r"llama, .* --network FILE\.py:CLASS"):
        EagerProgram(tmp_path, limits=LIMITS)
