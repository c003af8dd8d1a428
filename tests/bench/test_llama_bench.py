"""The figures of bench in llama-bench's form, joules, and shares of a file's bytes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest

from penstock.bench.measure import Bench, Report, bench
from penstock.bench.open_model import stored_weights
from penstock.cli.measure.llama_bench import markdown_table
from penstock.graph.bundle import read_graph
from penstock.graph.export import export_bundle
from penstock.runtime.energy import EnergyMeter
from tests.support.command import DEMO
from tests.support.gguf_mixes import write_mix

REPORT = Report("qwen2", "q5_0", "avx2", 2, 512, 128, model_bytes=491400064, num_parameters=630167424,
                prefill_runs=[400.0, 410.0, 420.0], generation_runs=[20.0, 21.0])  # fmt: skip


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_the_table_has_the_columns_of_llama_bench() -> None:
    head, rule, prefill, generation = markdown_table(REPORT)
    assert cells(head) == ["model", "size", "params", "backend", "threads", "test", "t/s"]
    assert {cell.strip("-") for cell in cells(rule)} == {"", ":"}
    assert cells(prefill) == ["qwen2 Q5_0", "468.64 MiB", "630.17 M", "CPU", "2", "pp512", "410.00 ± 10.00"]
    assert cells(generation)[-2:] == ["tg128", "20.50 ± 0.71"]
    assert len({len(line) for line in (head, rule, prefill, generation)}) == 1


def test_joules_are_a_column_where_they_are_counted() -> None:
    lines = markdown_table(replace(REPORT, joules_per_token={"prefill": 0.125, "generation": 3.5}))
    assert [cells(line)[-1] for line in lines if "--" not in line] == ["J/token", "0.12", "3.50"]


def zone(folder: Path, name: str, label: str, energy: str) -> Path:
    path = folder / name
    path.mkdir(exist_ok=True)
    (path / "name").write_text(f"{label}\n")
    (path / "energy_uj").write_text(f"{energy}\n")
    (path / "max_energy_range_uj").write_text("1000000000\n")
    return path


def test_each_processor_counts_once_and_past_a_wrap(tmp_path: Path) -> None:
    for name, label in (("intel-rapl:0", "package-0"), ("intel-rapl:1", "package-1"), ("intel-rapl:0:0", "core"),
                        ("intel-rapl:2", "psys")):  # fmt: skip
        zone(tmp_path, name, label, "900000000")
    meter = EnergyMeter(tmp_path)
    zone(tmp_path, "intel-rapl:0", "package-0", "902000000")
    zone(tmp_path, "intel-rapl:1", "package-1", "1000000")
    zone(tmp_path, "intel-rapl:0:0", "core", "950000000")
    assert meter.joules() == pytest.approx(2 + 101)


def test_nothing_is_counted_without_readable_zones(tmp_path: Path) -> None:
    assert EnergyMeter(tmp_path / "none").joules() is None
    (zone(tmp_path, "intel-rapl:0", "package-0", "1") / "energy_uj").unlink()
    assert EnergyMeter(tmp_path).joules() is None


def test_a_report_has_the_repetitions() -> None:
    report = bench(Bench(DEMO, batches=(1,), prompt_tokens=20, new_tokens=4, threads=1))
    assert len(report.prefill_runs) == len(report.generation_runs) == 3
    assert report.first_token_s == pytest.approx(20 / np.median(report.prefill_runs))
    assert report.file_bytes_per_token == report.weight_bytes_per_token > 0
    assert report.model_bytes > 0


def test_shares_of_a_gguf_file_count_its_own_bytes(tmp_path: Path) -> None:
    path, bundle = tmp_path / "model.gguf", tmp_path / "model.psm"
    write_mix(path, 640, "Q4_K_M")
    shares = {}
    for scheme in (None, "f32", "w8a8"):
        export_bundle(path, bundle, scheme=scheme)
        shares[scheme] = stored_weights(path, read_graph(bundle)[0]).share
        assert stored_weights(bundle, read_graph(bundle)[0]).share == 1.0
    tensors = sum(int(tensor.n_bytes) for tensor in gguf.GGUFReader(path).tensors)
    assert stored_weights(path, read_graph(bundle)[0]).num_bytes == tensors
    assert 0.9 < shares[None] <= 1.0
    assert shares["f32"] < 0.25
    assert shares["w8a8"] < 1.0
