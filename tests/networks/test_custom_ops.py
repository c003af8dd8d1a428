"""Custom ops in general networks: of ``penstock.custom_op``, of ``torch.library``, and of other domains in ONNX."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import onnx
import pytest
import torch
from onnx import TensorProto, helper
from torch import Tensor

import penstock
from penstock.cli.main import main
from penstock.errors import InvalidArgumentError, UnsupportedError
from tests.support.errors import raises

ROOT = Path(__file__).parents[2]


@torch.library.custom_op("network_tests::squared", mutates_args=())
def squared(x: Tensor, factor: float = 2.0) -> Tensor:
    return x.clone() ** 2 * factor


@squared.register_fake
def _(x: Tensor, factor: float = 2.0) -> Tensor:
    return torch.empty_like(x)


class Squares(torch.nn.Module):
    """Calls an op of torch.library."""

    def forward(self, x: Tensor) -> Tensor:
        return squared(x.relu(), 3.0) + squared(x)  # type: ignore[no-any-return]


def decomposition(x: Tensor, factor: float = 2.0) -> Tensor:
    return x * x * factor


def test_ops_of_torch_library_are_refused_or_decomposed() -> None:
    x = torch.randn(2, 3)
    with raises(UnsupportedError, match="network_tests::squared"):
        penstock.capture(Squares(), x)
    for key in ("network_tests::squared", squared, torch.ops.network_tests.squared.default):
        network = penstock.capture(
            Squares(), x, shapes={"x": ("B", 3)}, decompositions={key: decomposition}, check=key is squared
        )
        assert [value.sizes for value in network.outputs] == [("B", "3")]
    with pytest.raises(InvalidArgumentError) as error:
        penstock.capture(Squares(), x, decompositions={"network_tests::missing": decomposition})
    assert error.value.param == "decompositions"


def onnx_file(path: Path, domain: str) -> Path:
    nodes = [helper.make_node("SquaredRelu", ["x"], ["y"], name="mine", domain=domain, limit=2.0)]
    nodes.append(helper.make_node("Neg", ["y"], ["z"]))
    x, z = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["B", 4]) for name in "xz")
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid(domain, 1)]
    onnx.save(helper.make_model(helper.make_graph(nodes, "g", [x], [z]), opset_imports=opsets, ir_version=9), str(path))
    return path


def test_other_domains_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError) as error:
        penstock.read_network(onnx_file(tmp_path / "net.onnx", "com.acme"))
    assert error.value.code == "unsupported_nodes"
    assert "com_acme::squared_relu" in str(error.value)


OPS_FILE = """
import torch, penstock
def reference(x, scale, *, limit):
    return torch.clamp(torch.clamp(x, min=0.0).square(), max=limit)
schema = "(Tensor x, Weight? scale, *, float limit) -> Tensor"
penstock.custom_op("network_tests::squares", version=1, schema=schema, reference=reference)
CUSTOM_OPS = {"com.acme::SquaredRelu": "network_tests::squares"}
"""


def test_a_script_declares_ops_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, bundle = onnx_file(tmp_path / "net.onnx", "com.acme"), tmp_path / "net.psm"
    script = tmp_path / "ops.py"
    for text, error in (("1 / 0", "ops.py:1"), ("CUSTOM_OPS = 3", "CUSTOM_OPS"), ("", "com_acme::squared_relu")):
        script.write_text(text)
        assert main(["export", str(source), str(bundle), "--custom-ops", str(script)]) != 0
        assert error in capsys.readouterr().err
    assert main(["export", str(source), str(bundle), "--custom-ops", str(tmp_path / "missing.py")]) != 0
    assert "--custom-ops" in capsys.readouterr().err
    script.write_text(OPS_FILE)
    assert main(["export", str(source), str(bundle), "--custom-ops", str(script)]) != 0  # the library is missing
    assert "the op network_tests::squares, version 1" in capsys.readouterr().err
    assert not bundle.exists()


# A library stays for as long as its process lives, so it has one of its own.
RUN = """
import sys, warnings
import torch, penstock
from torch import nn
folder, library = sys.argv[1:]
def reference(x, scale, *, limit):
    y = torch.clamp(torch.clamp(x, min=0.0).square(), max=limit)
    return y if scale is None else y * scale
schema = "(Tensor x, Weight? scale, *, float limit) -> Tensor"
op = penstock.custom_op("example::squared_relu", version=1, schema=schema, reference=reference)
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale, self.linear = nn.Parameter(torch.randn(6)), nn.Linear(6, 6)
    def forward(self, x):
        return self.linear(op(self.linear(x), self.scale, limit=2.0)).tanh()
network = penstock.capture(Net(), torch.randn(5, 6), shapes={"x": ("B", 6)})
try:
    network.compile()
except penstock.UnsupportedError as error:
    assert "example::squared_relu" in str(error)
else:
    raise AssertionError("opened without the library")
penstock.load_ops(library)
network.check().expect_passed()
for name, options in (("own", {}), ("other", {"custom_ops": {"com.acme::SquaredRelu": "example::squared_relu"}})):
    network = penstock.read_network(f"{folder}/{name}.onnx", **options)
    assert network.outputs[0].sizes == ("B", "4")
    network.check().expect_passed()
"""


@pytest.mark.long
def test_custom_ops_run_in_general_networks(tmp_path: Path) -> None:
    library = tmp_path / "libsquared_relu.so"
    source = ROOT / "examples" / "custom_op" / "squared_relu.c"
    flags = ["-O1", "-ffp-contract=off", "-shared", "-fPIC", "-I", str(ROOT / "core" / "include")]
    subprocess.run(["cc", *flags, str(source), "-o", str(library)], check=True)
    onnx_file(tmp_path / "own.onnx", "example")
    onnx_file(tmp_path / "other.onnx", "com.acme")
    command = [sys.executable, "-c", RUN, str(tmp_path), str(library)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (tmp_path / "ops.py").write_text(OPS_FILE.replace("network_tests::squares", "example::squared_relu"))
    exported = ["export", str(tmp_path / "other.onnx"), str(tmp_path / "net.psm")]
    exported += ["--custom-ops", str(tmp_path / "ops.py"), "--ops", str(library), "--check"]
    for line in (exported, ["predict", str(tmp_path / "net.psm"), "--ops", str(library), "--json"]):
        command = [sys.executable, "-m", "penstock.cli.main", *line]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
