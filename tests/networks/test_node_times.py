"""The times of a network's nodes, by ``Predictor.profile`` and ``penstock predict --profile``."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from penstock.cli.main import main
from penstock.networks.node_times import by_op
from penstock.networks.predictor import open_predictor
from tests.support.general_graphs import mixed_inputs, mixed_network


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mixed_network().write(tmp_path_factory.mktemp("profile") / "mixed.psm")


def test_each_node_has_a_time(path: Path) -> None:
    with open_predictor(path, threads=2) as predictor:
        inputs = mixed_inputs(123, 5)
        before = predictor.run(inputs)
        times = predictor.profile(inputs, runs=3)
        after = predictor.run(inputs)
    assert all(a.tobytes() == b.tobytes() for a, b in zip(before, after, strict=True))
    assert all(item.milliseconds >= 0 for item in times)
    assert sum(item.milliseconds for item in times) > 0
    assert times == sorted(times, key=lambda item: -item.milliseconds)
    sums = by_op(times)
    assert sum(item.count for item in sums) == len(times)
    np.testing.assert_allclose(sum(i.milliseconds for i in sums), sum(i.milliseconds for i in times))


def test_predict_prints_the_times(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["predict", str(path), "--runs", "2", "--profile", "--threads", "1"]
    assert main(command) == 0
    assert "slowest nodes" in capsys.readouterr().out
    assert main([*command, "--json"]) == 0
    nodes = json.loads(capsys.readouterr().out)["nodes"]
    assert {"op", "name", "milliseconds", "count"} == set(nodes[0])
