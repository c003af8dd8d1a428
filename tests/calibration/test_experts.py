"""Statistics of the inputs of routed experts, and what the methods make of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.numpy import load_file

from penstock.calibration import collect
from penstock.calibration.collect import CalibrationProgram, LinearNode, linear_groups
from penstock.calibration.quantize import MIN_EXPERT_TOKENS, DataOptions, quantize_with_data
from penstock.calibration.texts import CalibrationData
from penstock.checkpoint.folder import Checkpoint
from penstock.checkpoint.gguf.imatrix import read_imatrix
from penstock.core.native import Context
from penstock.graph.export import export_bundle
from penstock.quant.matrix import concatenate_rows, quantize_rows
from penstock.quant.methods.weighted import round_weighted
from penstock.quant.product_sums import ProductSums
from penstock.quant.scheme import find_scheme
from tests.support.families import build, prompt, save

NUM_EXPERTS, COLS = 5, {"w1": 160, "w3": 160, "w2": 72}
SEQUENCES = [prompt(40), prompt(23)]
Inputs = dict[str, NDArray[np.float32]]
_W1 = "block_sparse_moe.experts.1.w1.weight"


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save("mixtral", tmp_path_factory.mktemp("experts") / "model")


def reference_inputs(folder: Path) -> Inputs:
    """The inputs [tokens, columns] of each weight of an expert: transformers routes, and numpy computes the rest."""
    seen: dict[str, list[tuple[NDArray[np.float32], NDArray[np.int64]]]] = {}
    model = build("mixtral")
    for name, module in model.named_modules():
        if name.endswith(".experts"):
            seen[name.replace("mlp", "block_sparse_moe")] = []

            def keep(module: torch.nn.Module, args: tuple[torch.Tensor, ...], own: str = name) -> None:
                del module
                rows, chosen = args[0].reshape(-1, args[0].shape[-1]).numpy(), args[1].numpy()
                seen[own.replace("mlp", "block_sparse_moe")].append((rows.copy(), chosen.copy()))

            module.register_forward_pre_hook(keep)
    with torch.no_grad():
        for ids in SEQUENCES:
            model(torch.tensor([ids]))
    weights, inputs = load_file(folder / "model.safetensors"), {}
    for name, steps in seen.items():
        for expert in range(NUM_EXPERTS):
            x = np.concatenate([rows[(chosen == expert).any(axis=1)] for rows, chosen in steps])
            gate, up = (x @ weights[f"{name}.{expert}.{part}.weight"].T for part in ("w1", "w3"))
            hidden = gate / (1 + np.exp(-gate)) * up
            inputs |= {f"{name}.{expert}.{part}.weight": x for part in ("w1", "w3")}
            inputs[f"{name}.{expert}.w2.weight"] = hidden
    return inputs


def of_weight(values: Mapping[LinearNode, ProductSums], name: str) -> ProductSums:
    return next(value for linear, value in values.items() if name in linear.names)


def test_statistics_are_those_of_the_routed_rows(mixtral: Path, tmp_path: Path) -> None:
    """Sums, maxima, counts and products of each expert, beside transformers and numpy; on any number of threads."""
    expected, found = reference_inputs(mixtral), []
    export_bundle(mixtral, tmp_path / "f32.psm", scheme="f32")
    data = CalibrationData(SEQUENCES, "test")
    for threads in (1, 3):
        with CalibrationProgram(tmp_path / "f32.psm", data, threads) as program:
            statistics = program.statistics(lambda _: None)
            routed = [linear for linear in program.linears if linear.expert >= 0]
            hessians = program.hessians(routed, lambda _: None)
            found.append(b"".join(own.squares.tobytes() for own in statistics.weights.values()))
            shared = shared_by_layers(routed)
            program.linears = [shared]
            merged, products_of_both = program.statistics(lambda _: None), program.hessians([shared], lambda _: None)
    assert statistics.expert_tokens == {name: len(x) for name, x in expected.items()}
    assert len(set(statistics.expert_tokens.values())) > 3
    assert sum(len(x) for name, x in expected.items() if "layers.0" in name and "w2" in name) == 2 * 63
    for name, x in expected.items():
        own = statistics.weights[name]
        np.testing.assert_allclose(own.squares, np.square(x, dtype=np.float64).sum(axis=0), rtol=2e-4)
        np.testing.assert_allclose(own.maxima, np.abs(x).max(axis=0), rtol=2e-4, atol=1e-6)
        products = x.T @ x
        np.testing.assert_allclose(of_weight(hessians, name).matrix(), products, atol=2e-4 * np.abs(products).max())
    assert len(set(found)) == 1
    first, second = (expected[f"model.layers.{layer}.{_W1}"] for layer in (0, 1))
    assert merged.expert_tokens[f"model.layers.0.{_W1}"] == len(first) + len(second)
    assert merged.weights[f"model.layers.0.{_W1}"].count == len(first) + len(second)
    products = first.T @ first + second.T @ second
    np.testing.assert_allclose(products_of_both[shared].matrix(), products, atol=2e-4 * np.abs(products).max())


def shared_by_layers(linears: list[LinearNode]) -> LinearNode:
    """The linear of a network whose two layers have one weight: gate of an expert of the first layer."""
    first, second = (next(own for own in linears if f"model.layers.{layer}.{_W1}" in own.names) for layer in (0, 1))
    return replace(first, indices=first.indices + second.indices, reads=first.reads + second.reads)


def test_gate_and_up_share_a_hessian(mixtral: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    export_bundle(mixtral, tmp_path / "f32.psm", scheme="f32")
    with CalibrationProgram(tmp_path / "f32.psm", CalibrationData([prompt(9)], "test")) as program:
        linears = [linear for linear in program.linears if "w2" not in linear.names[0] and linear.expert >= 0]
        own_bytes = linears[0].hessian_bytes + 9 * linears[0].cols * 4
        monkeypatch.setattr(collect, "_HESSIAN_BYTES", 3 * own_bytes)
        groups = linear_groups(linears, 9)
        assert sorted(map(len, groups)) == [2, 6, 6, 6]
        hessians = program.hessians(groups[0], lambda _: None)
    gate, up = (of_weight(hessians, f"model.layers.0.{name}") for name in (_W1, _W1.replace("w1", "w3")))
    assert gate is up
    assert len({id(products) for products in hessians.values()}) == 3


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("texts") / "texts.jsonl"
    path.write_text("\n".join(json.dumps({"input_ids": prompt(num)}) for num in (400, 380)))
    return path


def stored(folder: Path, name: str) -> NDArray[np.int8]:
    return np.array(Checkpoint.open(folder).read(name))


def test_imatrix_weights_each_expert_by_its_own_rows(mixtral: Path, texts: Path, tmp_path: Path) -> None:
    matrix = tmp_path / "imatrix.gguf"
    options = DataOptions("imatrix", texts, 780, imatrix_out=matrix)
    report = quantize_with_data(mixtral, tmp_path / "out", "w4a8", options)
    routed = [name for name in report.expert_tokens if ".experts." in name]
    assert len(routed) == len(report.expert_tokens) == 2 * NUM_EXPERTS * 3
    assert not set(routed) & set(report.without_data)
    counts = sorted(report.expert_tokens.values())
    assert report.recipe["expert_tokens_least"] == counts[0]
    assert report.recipe["expert_tokens_median"] == int(np.median(counts))
    written, scheme = read_imatrix(matrix, "mixtral"), find_scheme("w4a8")
    checkpoint = Checkpoint.open(mixtral)
    with Context() as context:
        for name in routed[:6]:
            assert written.weights[name].count == report.expert_tokens[name]
            floats = np.array(checkpoint.read(name))
            own = round_weighted(context, floats, scheme, written.weights[name].mean_squares)
            plain = concatenate_rows(list(quantize_rows(context, scheme, floats, "f32")))
            assert own.groups is not None
            assert plain.groups is not None
            found = stored(tmp_path / "out", f"{name}_groups")
            assert (found == own.groups).mean() > 0.995, "the sums in the file are float32"
            assert (found == plain.groups).mean() < 0.98


def test_experts_with_few_tokens_fall_back_by_name(mixtral: Path, tmp_path: Path) -> None:
    """GPTQ needs as many tokens as columns, weighting ``MIN_EXPERT_TOKENS``; the report names who saw fewer."""
    options = DataOptions("gptq", data=CalibrationData([prompt(162)], "test"))
    report = quantize_with_data(mixtral, tmp_path / "out", "w4a8", options)
    tokens = report.expert_tokens
    weighted = {name for name, count in tokens.items() if MIN_EXPERT_TOKENS <= count < COLS[name.split(".")[-2]]}
    plain = {name for name, count in tokens.items() if count < MIN_EXPERT_TOKENS}
    assert weighted
    assert set(report.without_gptq) == weighted
    assert {name for name in report.without_data if ".experts." in name} == plain
    assert len(weighted) + len(plain) < len(tokens)


@pytest.mark.parametrize("step", ["smooth", "awq"])
def test_the_recipe_names_what_scales_left(step: str, mixtral: Path, tmp_path: Path) -> None:
    """A norm before attention takes scales of q, k and v; the one before a router takes none, for its experts."""
    options = DataOptions(f"{step}+imatrix", data=CalibrationData([prompt(162)], "test"))
    report = quantize_with_data(mixtral, tmp_path / "out", "w4a8", options)
    left = report.recipe[f"without_{step}"]
    layers = build("mixtral").config.num_hidden_layers
    for kind in ("w1", "w2", "w3"):
        assert f"layers.*.block_sparse_moe.experts.*.{kind} ({layers * NUM_EXPERTS})" in left.split(", ")
    assert "q_proj" not in left
    assert "gate" not in left  # the router keeps its floats
    assert report.recipe["without_data"].count("lm_head (1)") == 1
    assert Checkpoint.open(tmp_path / "out").stored_config.values["quantization_config"]["recipe"] == report.recipe
