"""Mixed precision: sensitivities of a tiny model, budgets, and folders whose weights have several schemes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.calibration.budget import Budget
from penstock.calibration.judge import Judge
from penstock.calibration.mixed import MixedOptions, MixedReport, quantize_mixed
from penstock.checkpoint.folder import Checkpoint
from penstock.errors import InvalidArgumentError
from penstock.graph.bundle import read_graph
from penstock.graph.export import export_bundle
from tests.support.errors import raises
from tests.support.tiny_llama import LOUD, write_tiny_llama

TOKENS = 512


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny") / "model")


class StopError(Exception):
    pass


@pytest.fixture(scope="module")
def mixed(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, MixedReport, int]:
    """A folder that was written in two runs, the first of which was stopped, and the measurements of the second."""
    out, count = tmp_path_factory.mktemp("mixed") / "out", 0
    options = MixedOptions(Budget(bits=7.4), num_tokens=TOKENS)
    measure = Judge.divergence

    def counted(self: Judge, checkpoint: Checkpoint) -> object:
        nonlocal count
        count += 1
        if count == 6:
            raise StopError
        return measure(self, checkpoint)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Judge, "divergence", counted)
        with pytest.raises(StopError):
            quantize_mixed(tiny, out, "w4a8", options)
        assert not out.exists()
        report = quantize_mixed(tiny, out, "w4a8", options)
    return out, report, count - 6


def test_try(mixed: tuple[Path, MixedReport, int]) -> None:
    print(mixed)
