"""The examples of servables: the network is trained and written again, and all are served and asked."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock import Client, ServiceError
from tests.support.command import DEMO, environment
from tests.support.errors import raises

FOLDER = Path(__file__).parents[2] / "examples" / "servables"
ONE = np.ones((1, 2, 2), np.float32)


@pytest.fixture(scope="module")
def example() -> dict[str, Any]:
    """What train.py defines."""
    return runpy.run_path(str(FOLDER / "digits" / "train.py"))


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """A service over the examples and the demo: its addresses by their protocols."""
    folder = tmp_path_factory.mktemp("serving")
    command = [sys.executable, "-m", "penstock", "serve", str(DEMO), str(FOLDER), "--port", "0", "--grpc-port", "0"]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment(TMPDIR=str(folder))
        )  # fmt: skip
    assert process.stdout is not None
    try:
        said = ""
        while "  try: " not in said:
            line = process.stdout.readline()
            assert line, (folder / "log").read_text()
            said += line
        grpc = re.search(r"gRPC.* at (\S+)\n", said)
        assert grpc is not None
        yield {"http": said.split()[4], "grpc": f"grpc://{grpc[1]}"}
    finally:
        process.terminate()
        process.stdout.close()
        process.wait()


@pytest.mark.long
def test_the_network_is_trained_and_written(example: dict[str, Any], tmp_path: Path) -> None:
    import onnxruntime

    weights = example["train"]()
    example["write"](weights, tmp_path / "1" / "digits.onnx")
    pictures, labels = example["digits"](is_test=True)
    for file in (tmp_path / "1" / "digits.onnx", FOLDER / "digits" / "1" / "digits.onnx"):
        session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
        (scores,) = session.run(None, {"image": pictures})
        assert np.allclose(scores.sum(axis=1), 1, atol=1e-5)
        assert (scores.argmax(axis=1) == labels).mean() > 0.95


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_digits(service: dict[str, str], example: dict[str, Any], protocol: str) -> None:
    pictures, labels = example["digits"](is_test=True)
    images = pictures * 16
    with Client(service[protocol]) as client:
        found = client.infer("digits", {"image": images})["label"]
        assert (found == labels).mean() > 0.95
        three = client.infer("digits", {"image": images}, method="classify_top3")
        assert np.array_equal(three["labels"][:, 0], found)
        assert (np.diff(three["scores"]) <= 0).all()
        alone = client.infer_many("digits", ({"image": one[None]} for one in images[:40]))
        assert np.concatenate([one["label"] for one in alone]).tolist() == found[:40].tolist()
        with raises(ServiceError, code="invalid_input", match="grey values") as caught:
            client.infer("digits", {"image": images + 1})
        assert caught.value.status == 400


def test_add_sub(service: dict[str, str]) -> None:
    with Client(service["http"]) as client:
        found = client.infer("add_sub", {"x1": 5 * ONE, "x2": 2 * ONE, "x3": 3 * ONE})
        assert found["y"].tolist() == [[[4, 4], [4, 4]]]
        with pytest.raises(ServiceError) as caught:
            client.infer("add_sub", {"x1": ONE, "x2": ONE[:, :1], "x3": ONE})
        assert (caught.value.status, caught.value.param) == (400, "x2")


def test_text(service: dict[str, str]) -> None:
    with Client(service["http"]) as client:
        found = client.infer("complete", {"code": ["    def add(a, b):\n", "def fib(n):"]})
        texts = [text.decode() for text in found["code"]]
        assert texts[0].startswith("def add(a, b):\n ")
        assert [text.count("\n") for text in texts] == found["num_lines"].tolist()
        assert all(line[0] == " " for text in texts for line in text.split("\n")[1:] if line)
        with raises(ServiceError, code="invalid_input", match="must not be empty") as caught:
            client.infer("complete", {"code": ["x", "  "]})
        assert caught.value.status == 400


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_the_client_that_asks_them_all(service: dict[str, str], protocol: str) -> None:
    command = [sys.executable, str(FOLDER / "ask.py"), service[protocol]]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=600)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "digits.classify_top1: 7"
    assert lines[1].startswith("digits.classify_top3: 7 (")
    assert lines[2] == "add_sub: [[4.0, 4.0], [4.0, 4.0]]"
    assert re.fullmatch(r"100 blurred pictures, 32 requests in flight: \d+ sevens", lines[3])
    assert lines[5] == "def add(a, b):"
    assert os.linesep.join(lines[6:]).strip()
