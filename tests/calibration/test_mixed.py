"""Mixed precision: sensitivities of a tiny model, budgets, and folders whose weights have several schemes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.calibration.budget import Budget, choose_schemes, parse_size_budget, parse_speed
from penstock.calibration.divergence import MeanDivergence
from penstock.calibration.judge import Judge
from penstock.calibration.mixed import MixedOptions, MixedReport, SpeedProbe, quantize_mixed
from penstock.calibration.unfinished import Workspace
from penstock.calibration.units import WeightUnit
from penstock.checkpoint.folder import Checkpoint
from penstock.errors import InvalidArgumentError, InvalidFileError
from penstock.graph.bundle import read_graph
from penstock.graph.export import export_bundle
from penstock.graph.unpack_bundle import unpack_bundle
from tests.support.errors import raises
from tests.support.tiny_llama import write_tiny_llama

TOKENS = 512


class StopError(Exception):
    pass


class Mixed:
    """A mixed folder of a tiny model: written in two runs, the first of which was stopped."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.source, self.out, self.count = write_tiny_llama(folder / "model", tied=True), folder / "out", 0
        measure = Judge.divergence

        def counted(judge: Judge, checkpoint: Checkpoint) -> MeanDivergence:
            self.count += 1
            if self.count == 6:
                raise StopError
            return measure(judge, checkpoint)

        patch.setattr(Judge, "divergence", counted)
        with pytest.raises(StopError):
            self.make(Budget(bits=5.6))
        self.report = self.make(Budget(bits=5.6))
        self.out = self.out.rename(folder / "first")

    def make(self, budget: Budget, speed: SpeedProbe | None = None) -> MixedReport:
        """Quantize within a budget; what was measured before is known."""
        options = MixedOptions(budget, num_tokens=TOKENS)
        return quantize_mixed(self.source, self.source.with_name("out"), "w4a8", options, speed=speed)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mixed]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Workspace, "remove", lambda work: None)  # later budgets need no second measurement
        yield Mixed(tmp_path_factory.mktemp("mixed"), patch)


@pytest.fixture(autouse=True)
def _no_output(mixed: Mixed) -> Iterator[None]:
    yield
    shutil.rmtree(mixed.source.with_name("out"), ignore_errors=True)


def high_tensor(mixed: Mixed) -> str:
    """Return the name of a tensor that has the higher scheme."""
    config = json.loads((mixed.out / "config.json").read_text())
    return next(iter(config["quantization_config"]["schemes"]))


def test_a_budget_of_bits_is_kept(mixed: Mixed) -> None:
    report = mixed.report
    assert report.lowest[0] < report.bits <= 5.6 < report.highest[0]
    assert report.highest[1].mean < report.divergence.mean < report.lowest[1].mean
    assert set(report.counts()) == {"w4a8", "w8a8"}
    assert min(report.counts().values()) > 0
    assert len(report.units) == 9
    assert report.predicted == pytest.approx(report.divergence.mean, rel=0.5)


def test_a_matrix_with_large_columns_costs_more(mixed: Mixed) -> None:
    loud = next(unit for unit in mixed.report.units if (unit.layer, unit.kind) == ("1", "down_proj"))
    quiet = next(unit for unit in mixed.report.units if (unit.layer, unit.kind) == ("0", "down_proj"))
    assert loud.costs["w4a8"] > quiet.costs["w4a8"] > 0 == loud.costs["w8a8"]


def test_a_stopped_run_continues(mixed: Mixed) -> None:
    assert mixed.count == 1 + 1 + 9 + 1 + 1  # the stopped one; the highest; each unit; the mix; the lowest


def test_the_folder_has_what_was_chosen(mixed: Mixed, tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(mixed.out)
    recipe = checkpoint.config.values["quantization_config"]["recipe"]
    assert recipe == mixed.report.recipe
    high = high_tensor(mixed)
    assert (checkpoint.mixed_schemes or {})[high] == "w8a8"
    assert "w8a8" in {unit["scheme"] for unit in recipe["units"].values()}
    export_bundle(mixed.out, tmp_path / "out.psm")
    graph = read_graph(tmp_path / "out.psm")[0]
    linears = [node for node in graph.nodes if node.op == "linear"]
    own = {part.name: node.attrs["scheme"] for node in linears for part in graph.weights[node.inputs[1].name].parts}
    assert own[high] == "w8a8"
    assert set(own.values()) == {"w4a8", "w8a8"}
    assert sum(weight.num_bytes for weight in graph.weights.values()) == mixed.report.num_bytes
    unpack_bundle(tmp_path / "out.psm", tmp_path / "unpacked")
    export_bundle(tmp_path / "unpacked", tmp_path / "again.psm")
    assert (tmp_path / "again.psm").read_bytes() == (tmp_path / "out.psm").read_bytes()


def test_a_limit_of_divergence_takes_the_fewest_bytes(mixed: Mixed) -> None:
    middle = (mixed.report.lowest[1].mean + mixed.report.highest[1].mean) / 2
    report = mixed.make(Budget(max_kl=middle))
    assert report.divergence.mean <= middle
    assert report.lowest[0] < report.bits < report.highest[0]


def test_unreachable_budgets_name_the_nearest_value(mixed: Mixed) -> None:
    for budget, field, nearest in (
        (Budget(bits=1.0), "budget", f"{mixed.report.lowest[0]:.3f} bits"),
        (Budget(num_bytes=10), "budget", "bytes"),
        (Budget(max_kl=1e-9), "max_kl", f"{mixed.report.highest[1].mean:.3g}"),
        (Budget(min_speed=101.0), "min_speed", "100.0"),
    ):
        speeds = iter((100.0, 50.0))
        with raises(InvalidArgumentError, param=field, code="budget_unreachable") as caught:
            mixed.make(budget, lambda bundle, speeds=speeds: next(speeds))
        assert nearest in str(caught.value)
        assert not mixed.source.with_name("out").exists()


def test_speed_lies_between_those_of_the_ends(mixed: Mixed) -> None:
    speeds = iter((100.0, 50.0, 70.0))
    report = mixed.make(Budget(min_speed=1000 / 15), lambda bundle: next(speeds))  # in the middle of 10 and 20 ms
    assert report.speed == 70.0
    assert report.lowest[0] < report.bits <= (report.lowest[0] + report.highest[0]) / 2 + 0.01


def test_a_wrong_table_of_schemes_is_refused(mixed: Mixed, tmp_path: Path) -> None:
    config = json.loads((mixed.out / "config.json").read_text())
    shutil.copytree(mixed.out, tmp_path / "out")
    high = high_tensor(mixed)
    for name, scheme in ((high, "w4a8"), (high, "bf16"), ("model.norm.weight", "w8a8")):
        config["quantization_config"]["schemes"] = {name: scheme}
        (tmp_path / "out" / "config.json").write_text(json.dumps(config))
        with raises(InvalidFileError, param=name):
            Checkpoint.open(tmp_path / "out")


@pytest.mark.parametrize(
    ("levels", "method"),
    [(("w8a8", "w4a8"), "rtn"), (("w4a8",), "rtn"), (("w4a8", "f16"), "rtn"), (("w4a8", "f32"), "smooth")],
)
def test_levels_that_do_not_rise_are_refused(mixed: Mixed, levels: tuple[str, ...], method: str) -> None:
    options = MixedOptions(Budget(bits=5.0), method, levels=levels)
    with raises(InvalidArgumentError, param="levels"):
        quantize_mixed(mixed.source, mixed.source.with_name("out"), "w4a8", options)


@pytest.mark.long
def test_floats_and_single_tensors_can_be_mixed(mixed: Mixed, tmp_path: Path) -> None:
    options = MixedOptions(Budget(bits=11.0), "imatrix", ("w4a8", "w8a8", "f32"), "tensor", num_tokens=TOKENS)
    report = quantize_mixed(mixed.source, tmp_path / "out", "w4a8", options)
    assert len(report.units) == 15
    assert report.bits <= 11.0
    assert report.highest[1].mean < 1e-4  # keys and values are bf16 beside integers, and float32 in the original
    export_bundle(tmp_path / "out", tmp_path / "out.psm")
    graph = read_graph(tmp_path / "out.psm")[0]
    assert sum(weight.num_bytes for weight in graph.weights.values()) == pytest.approx(report.num_bytes, rel=0.02)


def test_a_budget_is_one_positive_limit() -> None:
    for limits in ({}, {"bits": 4.0, "max_kl": 0.1}, {"bits": -1.0}, {"max_kl": float("nan")}):
        with raises(InvalidArgumentError):
            Budget(**limits)
    assert parse_size_budget("4.8bits") == Budget(bits=4.8)
    assert parse_size_budget("1.5 GiB") == Budget(num_bytes=3 << 29)
    assert parse_size_budget("600MB") == Budget(num_bytes=600_000_000)
    assert parse_speed("50tok/s") == Budget(min_speed=50.0)
    for text in ("4.8", "bits", "-3bits", "4.8bitsx", ""):
        with raises(InvalidArgumentError, param="budget"):
            parse_size_budget(text)
    with raises(InvalidArgumentError, param="min_speed"):
        parse_speed("fast")


def test_a_large_unit_gets_its_room_before_small_ones() -> None:
    def unit(name: str, extra: int) -> WeightUnit:
        return WeightUnit("0", name, (f"{name}.weight",), {"w4a8": 100, "w8a8": 100 + extra})

    units = [unit("small", 10), unit("large", 95), unit("other", 40)]
    costs = {
        "0 small": {"w4a8": 0.2, "w8a8": 0.0},
        "0 large": {"w4a8": 1.0, "w8a8": 0.0},
        "0 other": {"w4a8": 0.3, "w8a8": 0.0},
    }

    def high(max_bytes: int) -> set[str]:
        chosen = choose_schemes(units, lambda own: ("w4a8", "w8a8"), costs, max_bytes)
        return {name for name, scheme in chosen.items() if scheme == "w8a8"}

    assert high(100) == {"0 large"}  # the first step of a greedy choice is the small one, which leaves no room
    assert high(105) == {"0 small", "0 large"}
    assert high(50) == {"0 small", "0 other"}
    assert high(0) == set()
    assert high(1000) == {"0 small", "0 large", "0 other"}
