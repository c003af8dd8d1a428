"""Output heads in blocks of Q6_K: their folders and bundles, ranks, mixes, and the models that cannot have one."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from penstock.calibration.budget import Budget
from penstock.calibration.bundle import open_calibrated
from penstock.calibration.collect import CalibrationProgram
from penstock.calibration.divergence import MeanDivergence
from penstock.calibration.judge import Judge
from penstock.calibration.levels import make_levels
from penstock.calibration.mixed import MixedOptions, quantize_mixed
from penstock.calibration.ptq import PTQ
from penstock.calibration.quantize import DataOptions, quantize_with_data
from penstock.calibration.texts import CalibrationData
from penstock.checkpoint.folder import Checkpoint
from penstock.checkpoint.gguf.element_types import q6_k_values
from penstock.checkpoint.gguf.k_blocks import quantize_q6_k
from penstock.checkpoint.quantize import quantize_checkpoint
from penstock.errors import InvalidArgumentError, InvalidFileError, UnsupportedError
from penstock.graph.bundle import read_graph
from penstock.graph.export import export_bundle
from penstock.graph.unpack_bundle import unpack_bundle
from penstock.llm.llm import LLM
from penstock.models.loader import load_network
from penstock.quant.ptq_config import PTQConfig, PTQMode
from penstock.quant.round_to_nearest import RoundToNearest
from penstock.runtime.eager import EagerProgram
from penstock.runtime.export_ranks import export_ranks
from penstock.runtime.program import ProgramLimits
from penstock.sharding.write import shard_folder
from tests.models.steps import relative_error, run_whole
from tests.support.bundle_weights import weights_of
from tests.support.errors import raises
from tests.support.sharded_folders import strategy_of
from tests.support.tiny_llama import VOCAB, write_tiny_llama

COLS, ROW_BYTES = 256, 210
HEADS = {True: "model.embed_tokens.weight", False: "lm_head.weight"}
IDS = list(range(5, 45))


def quantized(folder: Path, tied: bool, scheme: str = "w4a8") -> Path:
    """Return a folder of a tiny model with a head in blocks; the original lies beside it."""
    out = folder / "quantized"
    quantize_checkpoint(write_tiny_llama(folder / "model", tied=tied, hidden=COLS), out, scheme, head="q6_k")
    return out


def logits(path: Path, scheme: str | None = None) -> np.ndarray:
    with LLM(path, scheme=scheme, kv_cache="f32", use_cache=False) as llm:
        return np.asarray(llm.logits(IDS))


@pytest.mark.parametrize("tied", [True, False])
def test_a_folder_and_its_bundle_have_the_blocks(tmp_path: Path, tied: bool) -> None:
    out, name = quantized(tmp_path, tied), HEADS[tied]
    folder, source = Checkpoint.open(out), Checkpoint.open(tmp_path / "model")
    assert (folder.mixed_schemes or {})[name] == folder.block_scheme(name) == "q6_k"
    assert folder.tensors[name].shape == (VOCAB, ROW_BYTES)
    assert folder.logical_shape(name) == (VOCAB, COLS)
    assert folder.stored_bytes(name) == VOCAB * ROW_BYTES
    assert relative_error(q6_k_values(folder.read_blocks(name)), source.read(name)) < 0.03
    export_bundle(out, tmp_path / "out.psm")
    graph = read_graph(tmp_path / "out.psm")[0]
    layouts = {part.name: own.layout.name for own in graph.weights.values() for part in own.parts}
    assert [own for own, layout in layouts.items() if layout == "T16_Q6_K"] == [name]
    with raises(UnsupportedError, param="path"):
        unpack_bundle(tmp_path / "out.psm", tmp_path / "unpacked")


@pytest.mark.parametrize("tied", [True, False])
def test_eager_mode_and_a_bundle_compute_the_same(tmp_path: Path, tied: bool) -> None:
    out = quantized(tmp_path, tied, "w8a8")
    limits = ProgramLimits(max_tokens=64, max_rows=64, context_len=128, kv_layout="f32")
    program = EagerProgram(out, threads=1, limits=limits)
    found, expected = run_whole(program, IDS), logits(out)
    program.close()
    assert relative_error(found, expected) < 1e-5
    if not tied:  # the layers are the same
        assert relative_error(expected, logits(tmp_path / "model", "w8a8")) < 0.05


def test_weights_of_columns_lower_their_error() -> None:
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((70, 2 * COLS)).astype(np.float32)
    weights = np.exp(2 * rng.standard_normal(2 * COLS)).astype(np.float32)
    nearest, weighted = quantize_q6_k(rows), quantize_q6_k(rows, weights)
    errors = [(weights * np.square(q6_k_values(blocks) - rows)).sum(axis=1) for blocks in (nearest, weighted)]
    assert errors[1].mean() < 0.95 * errors[0].mean()
    assert quantize_q6_k(rows, np.ones_like(weights)).tobytes() == nearest.tobytes()


def test_methods_with_data_weight_the_columns_of_the_head(tmp_path: Path) -> None:
    """Inputs are those of transformers, and products with them have a smaller error than by round to nearest."""
    from transformers import AutoModelForCausalLM

    source, name = write_tiny_llama(tmp_path / "model", tied=False, hidden=COLS), HEADS[False]
    rng = np.random.default_rng(0)
    tensors = load_file(source / "model.safetensors")
    tensors["model.norm.weight"] = np.exp(rng.standard_normal(COLS)).astype(np.float32)
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    ids = rng.integers(0, VOCAB, (4, 64))
    data = CalibrationData([own.tolist() for own in ids], "random")
    with torch.no_grad():
        network = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
        x = network.model(torch.from_numpy(ids)).last_hidden_state.reshape(-1, COLS).numpy()
    with open_calibrated(source, 1) as (bundle, _), CalibrationProgram(bundle, data, 1) as program:
        statistics = program.statistics(lambda _: None)
    assert statistics.heads[name].mean_squares == pytest.approx(np.square(x).mean(axis=0), rel=0.05)
    report = quantize_with_data(source, tmp_path / "data", "w4a8", DataOptions("imatrix", data=data, head="q6_k"))
    assert report.without_data == ()
    quantize_with_data(source, tmp_path / "nearest", "w4a8", DataOptions("smooth", data=data, head="q6_k"))
    blocks = [Checkpoint.open(tmp_path / own).read_blocks(name) for own in ("nearest", "data")]
    errors = [np.square(x @ (q6_k_values(own) - tensors[name]).T).mean() for own in blocks]
    assert errors[1] < 0.97 * errors[0]
    assert blocks[0].tobytes() == quantize_q6_k(tensors[name]).tobytes()


@pytest.mark.long
def test_gptq_rounds_the_layers_beside_blocks(tmp_path: Path) -> None:
    source, name = write_tiny_llama(tmp_path / "model", tied=True, hidden=COLS), HEADS[True]
    ids = np.random.default_rng(0).integers(0, VOCAB, (8, 64))
    data = CalibrationData([own.tolist() for own in ids], "random")
    for head in (None, "q6_k"):
        quantize_with_data(source, tmp_path / str(head), "w4a8", DataOptions("gptq", data=data, head=head))
    plain, found = (load_file(tmp_path / own / "model.safetensors") for own in ("None", "q6_k"))
    assert [own for own in found if found[own].tobytes() != plain[own].tobytes()] == [name]


def test_ranks_have_rows_of_the_blocks(tmp_path: Path) -> None:
    out = quantized(tmp_path, tied=True)
    export_bundle(out, tmp_path / "whole.psm")
    export_ranks(tmp_path / "whole.psm", tmp_path / "bundles", 2)
    shard_folder(out, tmp_path / "cut", strategy_of(out, 2))
    for rank in range(2):
        export_bundle(tmp_path / "cut", tmp_path / f"{rank}.psm", rank=rank)
        assert weights_of(tmp_path / f"{rank}.psm") == weights_of(tmp_path / "bundles" / f"rank_{rank}.psm")


def test_a_network_gets_the_values_of_the_blocks(tmp_path: Path) -> None:
    out, name = quantized(tmp_path, tied=False), HEADS[False]
    network = load_network(tmp_path / "model")
    PTQ(PTQConfig(mode=PTQMode.DEPLOY)).load_checkpoint(out, network)
    blocks = Checkpoint.open(out).read_blocks(name)
    head = network.get_submodule("lm_head")
    assert (head.scheme, head.packed_weight.dtype) == ("q6_k", torch.uint8)
    assert torch.equal(head.weight, torch.from_numpy(q6_k_values(blocks)))


@pytest.mark.parametrize(("method", "tied"), [("rtn", True), ("rtn", False), ("imatrix", True), ("imatrix", False)])
def test_a_configuration_has_the_head_of_the_command(method: str, tied: bool, tmp_path: Path) -> None:
    """A network, its folder, and a network that the folder fills without the configuration have the same bytes."""
    source = write_tiny_llama(tmp_path / "model", tied=tied, hidden=COLS)
    ids = np.random.default_rng(0).integers(0, VOCAB, (8, 64)).tolist()
    recovery = "none" if method == "rtn" else method
    config = PTQConfig(weight_dtype="int4", act_dtype="int8", precision_recovery=recovery, algo_args={"head": "q6_k"})
    network, ptq = load_network(source), PTQ(config)
    ptq.apply(network, datasets=None if method == "rtn" else ids)
    ptq.convert(network)
    ptq.save(tmp_path / "saved")
    if method == "rtn":
        quantize_checkpoint(source, tmp_path / "command", "w4a8", head="q6_k")
    else:
        (tmp_path / "texts.jsonl").write_text("\n".join(json.dumps({"input_ids": own}) for own in ids))
        options = DataOptions(method, tmp_path / "texts.jsonl", head="q6_k")
        quantize_with_data(source, tmp_path / "command", "w4a8", options)
    saved, expected = (load_file(tmp_path / own / "model.safetensors") for own in ("saved", "command"))
    assert {own: value.tobytes() for own, value in saved.items()} == {
        own: value.tobytes() for own, value in expected.items()
    }
    assert Checkpoint.open(tmp_path / "saved").block_scheme(HEADS[tied]) == "q6_k"
    filled = load_network(source)
    PTQ(PTQConfig(mode=PTQMode.DEPLOY)).load_checkpoint(tmp_path / "saved", filled)
    packed = [
        {own: value.numpy().tobytes() for own, value in each.named_buffers() if own.endswith("packed_weight")}
        for each in (filled, network)
    ]
    assert packed[0] == packed[1]
    assert filled.get_submodule(HEADS[tied].removesuffix(".weight")).scheme == "q6_k"
    assert logits(tmp_path / "saved").tobytes() == logits(tmp_path / "command").tobytes()


def test_heads_of_a_configuration_that_fit_nothing_are_refused(tmp_path: Path) -> None:
    with raises(InvalidArgumentError, param="algo_args.head"):
        PTQConfig(algo_args={"head": "q4_k"})
    config = PTQConfig(algo_args={"head": "q6_k"})
    network = load_network(write_tiny_llama(tmp_path / "model", tied=True))
    with raises(InvalidArgumentError, param="algo_args.head"):
        RoundToNearest(config).apply(network)
    before = network.get_parameter(HEADS[True]).clone()
    with raises(InvalidArgumentError, param="head"):  # its columns are no whole blocks
        PTQ(config).apply(network)
    assert torch.equal(network.get_parameter(HEADS[True]), before)


def test_a_mix_chooses_blocks_for_the_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Divergences are made up: a head of 4 bits costs most, one in blocks nothing."""
    source, name = write_tiny_llama(tmp_path / "model", tied=True, hidden=COLS), HEADS[True]

    def divergence(judge: Judge, checkpoint: Checkpoint) -> MeanDivergence:
        schemes = checkpoint.mixed_schemes or {}
        return MeanDivergence(0.001 * list(schemes.values()).count("w4a8") + 0.5 * (schemes[name] == "w4a8"), 0.0, 1.0)

    monkeypatch.setattr(Judge, "divergence", divergence)
    report = quantize_mixed(source, tmp_path / "out", "w4a8", MixedOptions(Budget(bits=5.1), num_tokens=512))
    head = next(unit for unit in report.units if unit.layer == "head")
    assert head.costs == pytest.approx({"w8a8": 0.0, "w4a8": 0.501, "q6_k": 0.0})
    assert head.scheme == "q6_k"
    assert report.counts()["q6_k"] == 1
    assert report.bits <= 5.1
    assert Checkpoint.open(tmp_path / "out").block_scheme(name) == "q6_k"
    export_bundle(tmp_path / "out", tmp_path / "out.psm")
    graph = read_graph(tmp_path / "out.psm")[0]
    assert sum(weight.num_bytes for weight in graph.weights.values()) == report.num_bytes


def test_rows_that_are_not_whole_blocks_have_none(tmp_path: Path) -> None:
    source = write_tiny_llama(tmp_path / "model")
    with raises(InvalidArgumentError, param="head"):
        quantize_checkpoint(source, tmp_path / "out", "w4a8", head="q6_k")
    with raises(InvalidArgumentError, param="head"):
        quantize_checkpoint(source, tmp_path / "out", "w4a8", head="q4_k")
    (tmp_path / "work").mkdir()
    levels = make_levels(
        source, Checkpoint.open(source), tmp_path / "work", ("w4a8", "w8a8"), "rtn", (CalibrationData([], ""), 1)
    )
    assert levels.schemes_of([HEADS[False]]) == ("w4a8", "w8a8")


def test_damaged_blocks_are_refused(tmp_path: Path) -> None:
    out, name = quantized(tmp_path, tied=False), HEADS[False]
    tensors, config = load_file(out / "model.safetensors"), json.loads((out / "config.json").read_text())
    for damaged in (tensors[name][:, 1:], tensors[name].view(np.int8)):
        save_file(tensors | {name: np.ascontiguousarray(damaged)}, out / "model.safetensors")
        with raises(InvalidFileError, param=name):
            Checkpoint.open(out)
    save_file(tensors, out / "model.safetensors")
    config["quantization_config"]["schemes"][name] = "q5_k"
    (out / "config.json").write_text(json.dumps(config))
    with raises(InvalidFileError):
        Checkpoint.open(out)
