"""What ``penstock predict`` and a ``Predictor`` refuse, and by which name."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import numpy as np
import pytest

from penstock.cli.parser import CommandParser
from penstock.cli.run import predict
from penstock.core.predict import network_outputs
from penstock.errors import InvalidArgumentError, PenstockError
from penstock.lite.network import FreeTensor
from penstock.networks.predictor import open_predictor
from tests.support.general_graphs import mixed_inputs, mixed_network


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("predict")
    mixed_network().write(path / "net.psm")
    np.save(path / "x.npy", np.full((3, 32), np.nan, np.float32))
    np.savez(path / "x.npz", x=np.zeros((3, 32), np.float32))
    (path / "empty.npy").write_bytes(b"")
    (path / "zip.npy").write_bytes(b"PK\x03\x04 and no more")
    with (path / "huge.npy").open("wb") as file:
        np.lib.format.write_array_header_1_0(file, {"descr": "<f4", "fortran_order": False, "shape": (10**12, 1)})
    return path


def run(folder: Path, *options: str) -> int:
    parser = CommandParser()
    predict.add_parser(parser.add_subparsers())
    args = parser.parse_args(["predict", str(folder / "net.psm"), "--threads", "1", *options])
    return predict.run(args)


@pytest.mark.parametrize(
    ("options", "param"),
    [
        (["--input", "x={}/empty.npy"], "input"),
        (["--input", "x={}/zip.npy"], "input"),
        (["--input", "x={}/huge.npy"], "input"),
        (["--input", "x={}/x.npz"], "input"),
        (["--input", "x={}/x.npy", "--input", "x={}/x.npy"], "input"),
        (["--input", "x={}/x.npy", "--size", "N=4"], "size"),
        (["--input", "x={}/x.npy", "--size", "M=3"], "size"),
        (["--size", "N=4", "--size", "N=4"], "size"),
        (["--size", "N=999999999999"], "size"),
        (["--size", "N=0"], "size"),
        (["--output", "{}/result.txt"], "output"),
        (["--output", "{}/result.npy"], "output"),
    ],
)
def test_refuses_by_name(folder: Path, options: list[str], param: str) -> None:
    with pytest.raises(PenstockError) as error:
        run(folder, *(option.format(folder) for option in options))
    assert error.value.param == param


def test_numbers_that_json_lacks_are_null(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--input", f"x={folder}/x.npy", "--size", "N=3", "--json", "--output", str(folder / "result.npz")]
    assert run(folder, *options) == 0
    outputs = json.loads(capsys.readouterr().out)["outputs"]
    assert any(summary["mean"] is None for summary in outputs.values())
    assert zipfile.is_zipfile(folder / "result.npz")
    with np.load(folder / "result.npz") as written:
        assert set(written) == set(outputs)


def test_outputs_have_any_name(tmp_path: Path) -> None:
    predict._write(tmp_path / "result.npz", {"file": np.arange(3)})
    with np.load(tmp_path / "result.npz") as written:
        assert written["file"].tolist() == [0, 1, 2]


def test_predictors_refuse_what_is_no_array_or_size(folder: Path) -> None:
    with open_predictor(folder / "net.psm", threads=1) as predictor:
        for call in (
            lambda: predictor.run(None),  # type: ignore[arg-type]
            lambda: predictor.profile(mixed_inputs(2, 1), 0),
            lambda: predictor._program.prepare([(1 << 70, 32), (2, 2, 16)]),
        ):
            with pytest.raises(InvalidArgumentError):
                call()
        tensor = FreeTensor(network_outputs(predictor._model)[0])
    before = tensor.shape
    with pytest.raises(InvalidArgumentError):
        tensor.set_data_from_numpy(np.full((2, 32), 1e300))
    assert tensor.shape == before
    tensor.set_data_from_numpy(np.ones((2, 32), np.float32))
    assert tensor.shape == [2, 32]
