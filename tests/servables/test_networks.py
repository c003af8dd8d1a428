"""Bundles of general networks as models of servables: batches, signatures as clients see them, and refusals."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tritonclient.http
from onnx import TensorProto, helper

from penstock.cli.main import make_parser
from penstock.env import keep_log_format
from penstock.errors import InvalidArgumentError, InvalidFileError, UnsupportedError
from penstock.graph.general.draft import Draft
from penstock.graph.general.lower import write_network
from penstock.graph.general.sizes import symbol
from penstock.graph.ir import DType
from penstock.servables.api.declare import collect_declarations, model
from penstock.servables.process.model_engines import open_engine
from tests.support.command import DEMO
from tests.support.errors import raises
from tests.support.onnx_models import save
from tests.support.servable_folders import Host, run, serving, write
from tests.support.serve_command import serving as served

MATRIX = np.random.default_rng(3).normal(size=(3, 2)).astype(np.float32)
SERVABLE = """
    network = servable.model("net.psm", batch_size=4)
    padded = servable.model("four.psm", inputs={"rows": "FP32[-1,3]", "shift": "INT64[]"},
                            outputs={"moved": "FP32[-1,2]"}, batch_size=4, padded_sizes=(4,))

    @servable.method(inputs=network.inputs, outputs=network.outputs)
    def free(rows, shift):
        return network(rows, shift)

    @servable.method(inputs=padded.inputs, outputs=padded.outputs)
    def fours(rows, shift):
        return padded(rows, shift)
"""


def bundle(path: Path, batch: int | None = None) -> Path:
    """Rows [B, L, 3] times a matrix, plus a whole number for each instance."""
    draft = Draft("rows")
    size = symbol("B", 1, 1 << 20) if batch is None else batch
    rows = draft.input("rows", DType.F32, (size, symbol("L", 2, 64), 3))
    shift = draft.input("shift", DType.I64, (size,))
    number = draft.add("reshape", draft.add("cast", shift, dtype="f32"), sizes=(size, 1, 1))
    draft.output("moved", draft.add("binary", draft.add("matmul", rows, draft.constant(MATRIX)), number, kind="add"))
    write_network(draft, path)
    return path


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("networks")
    folder = write(root, "rows", SERVABLE)
    bundle(folder / "1" / "net.psm")
    bundle(folder / "1" / "four.psm", 4)
    return root


@pytest.fixture(scope="module")
def host(root: Path) -> Iterator[Host]:
    found = Host(root)
    yield found
    found.close()


def instances(count: int, length: int) -> dict[str, np.ndarray]:
    rows = np.random.default_rng(length).normal(size=(count, length, 3)).astype(np.float32)
    return {"rows": rows, "shift": np.arange(count)}


@pytest.mark.parametrize("method", ["free", "fours"])
def test_instances_of_bundles_share_batches(host: Host, method: str) -> None:
    """Split, together and alone: the same bits, and only instances of equal shapes share a batch."""
    given = instances(9, 5)
    found = host.ask(f"rows.{method}", **given)["moved"]
    np.testing.assert_allclose(found, given["rows"] @ MATRIX + given["shift"][:, None, None], rtol=1e-5, atol=1e-5)
    alone = [{name: array[n : n + 1] for name, array in given.items()} for n in range(9)]
    other = instances(1, 2)
    *together, last = host.gather(f"rows.{method}", *alone, other)
    assert np.concatenate([one["moved"] for one in together]).tobytes() == found.tobytes()
    assert last["moved"].shape == (1, 2, 2)
    statistics = host.servables.find("rows.free").statistics
    assert method != "free" or statistics.batch_sizes[4][0] >= 2


@pytest.mark.long
def test_triton_sees_the_signature_of_a_bundle(root: Path, tmp_path: Path) -> None:
    client = tritonclient.http.InferenceServerClient
    with served(root, cwd=tmp_path) as (_, url, _), client(url.removeprefix("http://")) as triton:
        told = triton.get_model_metadata("rows.free")
        assert [(one["name"], one["datatype"], one["shape"]) for one in told["inputs"]] == [
            ("rows", "FP32", [-1, -1, 3]),
            ("shift", "INT64", [-1]),
        ]
        assert [(one["name"], one["shape"]) for one in told["outputs"]] == [("moved", [-1, -1, 2])]
        given = instances(2, 4)
        tensors = [tritonclient.http.InferInput("rows", [2, 4, 3], "FP32"),
                   tritonclient.http.InferInput("shift", [2], "INT64")]  # fmt: skip
        for tensor, array in zip(tensors, given.values(), strict=True):
            tensor.set_data_from_numpy(array)
        found = triton.infer("rows.free", tensors).as_numpy("moved")
        assert found.shape == (2, 4, 2)


def test_bundle_that_differs_from_declaration_is_refused(tmp_path: Path) -> None:
    text = SERVABLE.replace('"INT64[]"', '"INT32[]"')
    folder = write(tmp_path, "rows", text)
    bundle(folder / "1" / "net.psm")
    bundle(folder / "1" / "four.psm", 4)

    async def work() -> None:
        with pytest.raises(InvalidFileError, match="input shift is INT64, not INT32"):
            async with serving(tmp_path):
                pass

    run(work)


def test_language_model_is_no_network() -> None:
    with collect_declarations(DEMO.parent):
        with raises(UnsupportedError, param="path"):
            model(DEMO.name)
        with raises(UnsupportedError, param="model", match=r"servable\.language_model"):
            open_engine(DEMO, 1)


def test_only_bundles_have_types_themselves(tmp_path: Path) -> None:
    with collect_declarations(tmp_path):
        with raises(InvalidArgumentError, param="inputs"):
            model("net.onnx")
        with raises(InvalidArgumentError, param="outputs"):
            model("net.onnx", inputs={"x": "FP32[3]"})


def test_onnx_runs_without_onnx_runtime(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Penstock runs what it reads; ONNX Runtime, only if it is installed, runs the rest."""
    kinds = {"float": TensorProto.FLOAT, "double": TensorProto.DOUBLE}
    for name, kind in kinds.items():
        ports = [helper.make_tensor_value_info(one, kind, ["n", 2]) for one in ("x", "y")]
        graph = helper.make_graph([helper.make_node("Neg", ["x"], ["y"])], name, ports[:1], ports[1:])
        save(graph, tmp_path / f"{name}.onnx")
    engine = open_engine(tmp_path / "double.onnx", 1)
    assert engine.inputs[0].datatype == "FP64"
    assert "double.onnx: ONNX Runtime" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    engine = open_engine(tmp_path / "float.onnx", 1)
    (found,) = engine.run({"x": np.array([[1, 2]], np.float32)}, ["y"])
    assert (found.tolist(), engine.outputs[0].shape) == ([[-1, -2]], (-1, 2))
    with raises(UnsupportedError, param="x"):
        open_engine(tmp_path / "double.onnx", 1)


@pytest.mark.parametrize("command", ["serve", "run", "chat", "bench", "embed", "plan"])
def test_commands_for_language_models_refuse_networks(tmp_path: Path, command: str) -> None:
    path = str(bundle(tmp_path / "net.psm"))
    rest = {"run": ["text"], "embed": [os.devnull]}
    args = make_parser([command]).parse_args([command, path, *rest.get(command, [])])
    with keep_log_format(), raises(UnsupportedError, param="model", code="general_network"):
        args.run(args)
