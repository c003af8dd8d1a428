"""PTQ on networks: apply, convert, save and reload, with data and without, as penstock quantize writes it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

import penstock
from penstock import PTQ, BackendTarget, PTQConfig, PTQMode, RoundToNearest, load_network
from penstock.calibration import ptq as ptq_module
from penstock.calibration.quantize import DataOptions, quantize_with_data
from penstock.cli.main import main
from penstock.errors import InvalidArgumentError, InvalidFileError, UnsupportedError
from penstock.graph.export import export_bundle
from penstock.lite.open_model import ModelType, OpenModel
from penstock.quant.ptq_config import check_blacklist
from tests.support.errors import raises
from tests.support.invariant_checkpoints import write_checkpoint

IDS = np.random.default_rng(0).integers(0, 259, (2, 160)).tolist()


@dataclass
class Saved:
    source: Path
    folder: Path
    network: torch.nn.Module


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("ptq") / "model")


@pytest.fixture(scope="module")
def saved(source: Path) -> Saved:
    """A network that AWQ and GPTQ quantized, and its folder."""
    network = load_network(source)
    config = PTQConfig(
        mode=PTQMode.QUANTIZE,
        backend=BackendTarget.CPU,
        weight_dtype="int4",
        act_dtype="int8",
        kvcache_dtype="int8",
        outliers_suppression="awq",
        precision_recovery="gptq",
        algo_args={"calibration_tokens": 320, "threads": 1, "smooth_alpha": [0.25, 0.5]},
    )
    ptq = PTQ(config)
    ptq.apply(network, datasets=[{"input_ids": np.array(IDS)}])
    ptq.convert(network)
    ptq.save(source.parent / "saved")
    return Saved(source, source.parent / "saved", network)


def tensors(folder: Path) -> dict[str, bytes]:
    return {name: value.tobytes() for name, value in load_file(folder / "model.safetensors").items()}


def packed(network: torch.nn.Module) -> dict[str, bytes]:
    buffers = network.named_buffers()
    return {name: value.numpy().tobytes() for name, value in buffers if name.endswith("packed_weight")}


def test_methods_with_data_save_what_the_command_writes(saved: Saved, tmp_path: Path) -> None:
    texts = tmp_path / "datasets.jsonl"
    texts.write_text("\n".join(json.dumps({"input_ids": ids}) for ids in IDS))
    options = DataOptions("awq+gptq", texts, 320, 1)
    options = DataOptions("awq+gptq", texts, 320, 1, arguments=options.arguments.of({"smooth_alpha": (0.25, 0.5)}))
    report = quantize_with_data(saved.source, tmp_path / "out", "w4a8", options)
    assert tensors(saved.folder) == tensors(tmp_path / "out")
    section = json.loads((saved.folder / "config.json").read_text())["quantization_config"]
    assert section["recipe"] == report.recipe
    assert (section["scheme"], section["kv_cache"]) == ("w4a8", "int8")


def test_a_folder_opens_with_its_own_types(saved: Saved, tmp_path: Path) -> None:
    for mode in ("graph", "eager"):
        with penstock.LLM(saved.folder, mode=mode, context_len=64, max_requests=1) as llm:
            assert llm.engine.program.info.scheme == "w4a8"
            assert llm.engine.program.limits.kv_layout == "int8"
    with penstock.LLM(saved.folder, kv_cache="f32", context_len=64, max_requests=1) as llm:
        assert llm.engine.program.limits.kv_layout == "f32"
    export_bundle(saved.folder, tmp_path / "saved.psm")
    opened = OpenModel(tmp_path / "saved.psm", ModelType.PENSTOCK, None, None)
    assert opened.config.kv_cache == "int8"
    opened.close()


def test_a_network_is_filled_without_the_configuration(saved: Saved) -> None:
    network = load_network(saved.source)
    ptq = PTQ(PTQConfig(mode="DEPLOY"))
    assert ptq.convert(ptq.apply(network)) is network
    assert not packed(network)
    ptq.load_checkpoint(saved.folder, network)
    assert packed(network) == packed(saved.network)
    for name, value in saved.network.named_parameters():
        assert torch.equal(dict(network.named_parameters())[name], value), name


def test_the_class_of_the_documents_takes_the_configuration(source: Path, tmp_path: Path) -> None:
    config = PTQConfig(weight_quant_dtype="int8", kvcache_quant_dtype="int8")
    algorithms: list[Any] = [RoundToNearest(config), PTQ(config)]
    for number, algorithm in enumerate(algorithms):
        network = load_network(source)
        algorithm.apply(network)
        algorithm.convert(network)
        algorithm.save(tmp_path / str(number))
    assert tensors(tmp_path / "0") == tensors(tmp_path / "1")
    section = json.loads((tmp_path / "1" / "config.json").read_text())["quantization_config"]
    assert (section["scheme"], section["kv_cache"]) == ("w8a16", "int8")


@pytest.mark.parametrize(("method", "rotation"), [("rtn", "r1r2"), ("smooth", "r1"), ("smooth", "r2")])
def test_rotations_are_those_of_the_command(method: str, rotation: str, source: Path, tmp_path: Path) -> None:
    words, datasets, arguments = ["--rotate", rotation], None, {}
    if method == "smooth":
        texts = tmp_path / "datasets.jsonl"
        texts.write_text("\n".join(json.dumps({"input_ids": ids}) for ids in IDS))
        words += ["--method", "smooth", "--smooth-keys", "--calibration", str(texts), "--calibration-tokens", "320"]
        datasets, arguments = texts, {"smooth_keys": True, "calibration_tokens": 320}
    assert main(["quantize", str(source), str(tmp_path / "command"), "--scheme", "w8a8", *words]) == 0
    config = PTQConfig(
        act_dtype="int8", outliers_suppression=method if datasets else None, algo_args={"rotate": rotation} | arguments
    )
    network, ptq = load_network(source), PTQ(config)
    ptq.convert(ptq.apply(network, datasets=datasets))
    ptq.save(tmp_path / "saved")
    assert tensors(tmp_path / "saved") == tensors(tmp_path / "command")
    assert tensors(tmp_path / "saved") != tensors(source)


def test_a_tied_head_cannot_be_rotated_in_place(tmp_path: Path) -> None:
    network = load_network(write_checkpoint(tmp_path / "model", tie_word_embeddings=True))
    before = {name: value.clone() for name, value in network.named_parameters()}
    with raises(UnsupportedError, param="algo_args.rotate"):
        PTQ(PTQConfig(algo_args={"rotate": "r1"})).apply(network)
    assert all(torch.equal(before[name], value) for name, value in network.named_parameters())


def test_a_failed_rotation_leaves_the_network_as_it_was(source: Path) -> None:
    network = load_network(source)
    before = {name: value.clone() for name, value in network.named_parameters()}
    config = PTQConfig(act_dtype="int8", outliers_suppression="smooth", algo_args={"rotate": "r1"})
    with raises(InvalidArgumentError, param="datasets"):
        PTQ(config).apply(network, datasets=3)
    with raises(InvalidArgumentError, param="calibration"):
        PTQ(config).apply(network, datasets=[[259] * 300])
    with raises(InvalidArgumentError, param="algo_args.rotate"):
        RoundToNearest(PTQConfig(algo_args={"rotate": "r1"})).apply(network)
    with (
        pytest.MonkeyPatch.context() as patch,
        raises(InvalidArgumentError, param="calibration", code="too_few_tokens"),
    ):
        patch.setattr(ptq_module, "rotate_checkpoint", None)  # too few tokens are noticed before it
        PTQ(config).apply(network, datasets=[[7] * 200])
    assert all(torch.equal(before[name], value) for name, value in network.named_parameters())


@pytest.mark.filterwarnings("default:network_helper")
def test_misuse_is_refused(source: Path, saved: Saved, tmp_path: Path) -> None:
    network: Any = load_network(source)
    with raises(InvalidArgumentError, param="config"):
        PTQ(None)  # type: ignore[arg-type]
    with raises(InvalidArgumentError, param="config"):
        RoundToNearest(PTQConfig(precision_recovery="gptq")).apply(network)
    with raises(InvalidArgumentError, param="datasets"):
        PTQ(PTQConfig()).apply(network, datasets=["text"])
    smooth = PTQ(PTQConfig(outliers_suppression="smooth"))
    for datasets, param in ((3, "datasets"), ([3], "datasets[0]"), ([[[]]], "datasets[0]")):
        with raises(InvalidArgumentError, param=param):
            smooth.apply(network, datasets=datasets)
    with raises(InvalidArgumentError, param="calibration"):
        smooth.apply(network, datasets=[[259] * 300])
    with raises(InvalidFileError, param="calibration"):
        smooth.apply(network, datasets=[{"other": 1}])
    with raises(InvalidArgumentError, param="mode"):
        smooth.load_checkpoint(saved.folder, network)
    with raises(InvalidArgumentError, param="path"):
        PTQ(PTQConfig(mode="deploy")).load_checkpoint(source, network)
    other = load_network(write_checkpoint(tmp_path / "other", hidden_size=48))
    with raises(InvalidFileError):
        PTQ(PTQConfig(mode="deploy")).load_checkpoint(saved.folder, other)
    with pytest.warns(UserWarning, match="network_helper"):
        PTQ(PTQConfig()).apply(network, object())


@pytest.mark.parametrize("recovery", [pytest.param(None, marks=pytest.mark.long), "imatrix"])
def test_layers_of_the_blacklist_keep_their_floats(recovery: str | None, source: Path, tmp_path: Path) -> None:
    config = PTQConfig(
        weight_dtype="int4",
        act_dtype="int8",
        precision_recovery=recovery,
        opname_blacklist=["layers.1.mlp.down_proj", "k_proj"],
        algo_args={"calibration_tokens": 256, "threads": 1} if recovery else None,
    )
    network, ptq = load_network(source), PTQ(config)
    ptq.apply(network, datasets=IDS if recovery else None)
    ptq.convert(network)
    ptq.save(tmp_path / "saved")
    floats, found = (load_file(folder / "model.safetensors") for folder in (source, tmp_path / "saved"))
    names = {"model.layers.1.mlp.down_proj.weight", *(f"model.layers.{i}.self_attn.k_proj.weight" for i in (0, 1))}
    assert {n for n, value in found.items() if n.endswith("proj.weight") and value.dtype == np.float32} == names
    for name in names:
        assert found[name].tobytes() == floats[name].tobytes()
    logits = []
    for mode in ("graph", "eager"):
        with penstock.LLM(tmp_path / "saved", mode=mode, context_len=64, max_requests=1) as llm:
            logits.append(llm.logits(IDS[0][:20]))
    np.testing.assert_array_equal(logits[0], logits[1])
    again = load_network(source)
    PTQ(PTQConfig(mode="deploy")).load_checkpoint(tmp_path / "saved", again)
    assert packed(again) == packed(network)


def test_a_blacklist_of_one_expert_is_refused() -> None:
    names = [f"layers.0.mlp.experts.{i}.{p}_proj.weight" for i in (0, 1) for p in ("gate", "up", "down")]
    check_blacklist(names, ["experts", "down_proj"])
    for part in ("experts.0", "gate_proj"):
        with raises(InvalidArgumentError, param="opname_blacklist"):
            check_blacklist(names, [part])
    with pytest.warns(UserWarning, match="router"):
        check_blacklist(names, ["router"])
