"""Embeddings in int8 that are not the output head: their folders, bundles and ranks, and the models without one."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from penstock.calibration.ptq import PTQ
from penstock.calibration.quantize import DataOptions, quantize_with_data
from penstock.calibration.texts import CalibrationData
from penstock.checkpoint.convert import Conversion
from penstock.checkpoint.folder import Checkpoint
from penstock.checkpoint.quantize import quantize_checkpoint
from penstock.cli.main import main
from penstock.errors import InvalidArgumentError
from penstock.graph.bundle import read_graph
from penstock.graph.export import export_bundle
from penstock.graph.unpack_bundle import unpack_bundle
from penstock.llm.llm import LLM
from penstock.models.loader import load_network
from penstock.quant.ptq_config import PTQConfig, PTQMode
from penstock.quant.scheme import quantizing_scheme
from penstock.runtime.convert import convert
from penstock.runtime.eager import EagerProgram
from penstock.runtime.export_ranks import export_ranks
from penstock.runtime.program import ProgramLimits
from penstock.sharding.write import shard_folder
from tests.models.steps import relative_error, run_whole
from tests.support.bundle_weights import weights_of
from tests.support.errors import raises
from tests.support.sharded_folders import strategy_of
from tests.support.tiny_llama import VOCAB, write_tiny_llama

TABLE = "model.embed_tokens.weight"
IDS = list(range(5, 45))


def logits(path: Path, **options: object) -> np.ndarray:
    with LLM(path, kv_cache="f32", use_cache=False, **options) as llm:
        return np.asarray(llm.logits(IDS))


def rounded(folder: Path, scheme: str) -> tuple[Path, Path]:
    """Return a folder with an int8 embedding, and one whose embedding has the same values as floats."""
    source, out, floats = write_tiny_llama(folder / "model"), folder / "int8", folder / "floats"
    quantize_checkpoint(source, out, scheme, embedding="int8")
    tensors = load_file(source / "model.safetensors")
    integers, scales = Checkpoint.open(out).read(TABLE), Checkpoint.open(out).read(f"{TABLE}_scale")
    tensors[TABLE] = integers.astype(np.float32) * scales[:, None]
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    quantize_checkpoint(source, floats, scheme)
    return out, floats


@pytest.mark.parametrize("scheme", ["w8a8", "w8a16", "w4a8", "w4a8_h32"])
def test_rows_are_the_integers_times_their_scales(tmp_path: Path, scheme: str) -> None:
    out, floats = rounded(tmp_path, scheme)
    integers, scales = Checkpoint.open(out).read(TABLE), Checkpoint.open(out).read(f"{TABLE}_scale")
    assert integers.dtype == np.int8
    assert np.abs(integers.astype(int)).max(axis=1).tolist() == [127] * VOCAB
    values = np.abs(integers.astype(np.float32) * scales[:, None] - Checkpoint.open(floats).read(TABLE))
    assert values.max() == 0
    expected = logits(floats)
    assert np.array_equal(logits(out), expected)
    program = EagerProgram(out, threads=1, limits=ProgramLimits(64, 64, context_len=128, kv_layout="f32"))
    found = run_whole(program, IDS)
    program.close()
    assert relative_error(found, expected) < 1e-5


def test_bundles_and_their_folders_keep_the_integers(tmp_path: Path) -> None:
    out, floats = rounded(tmp_path, "w4a8")
    bundle, again = tmp_path / "out.psm", tmp_path / "again"
    export_bundle(out, bundle)
    layouts = {part.name: own.layout.name for own in read_graph(bundle)[0].weights.values() for part in own.parts}
    assert layouts[TABLE] == "T16_I8"
    unpack_bundle(bundle, again)
    for name in (TABLE, f"{TABLE}_scale"):
        assert np.array_equal(Checkpoint.open(again).read(name), Checkpoint.open(out).read(name))
    expected = logits(floats)
    assert np.array_equal(logits(bundle), expected)
    assert np.array_equal(logits(again), expected)


def test_ranks_have_rows_of_the_integers(tmp_path: Path) -> None:
    out = rounded(tmp_path, "w4a8")[0]
    export_bundle(out, tmp_path / "whole.psm")
    export_ranks(tmp_path / "whole.psm", tmp_path / "bundles", 2)
    shard_folder(out, tmp_path / "cut", strategy_of(out, 2))
    for rank in range(2):
        export_bundle(tmp_path / "cut", tmp_path / f"{rank}.psm", rank=rank)
        assert weights_of(tmp_path / f"{rank}.psm") == weights_of(tmp_path / "bundles" / f"rank_{rank}.psm")


def test_a_network_is_filled_with_the_values(tmp_path: Path) -> None:
    out, floats = rounded(tmp_path, "w8a8")
    network = load_network(write_tiny_llama(tmp_path / "original"))
    PTQ(PTQConfig(mode=PTQMode.DEPLOY)).load_checkpoint(out, network)
    embedding = network.get_submodule("model.embed_tokens")
    assert np.array_equal(embedding.weight.detach().numpy(), Checkpoint.open(floats).read(TABLE))


def test_methods_with_data_round_it_to_nearest(tmp_path: Path) -> None:
    source = write_tiny_llama(tmp_path / "model")
    ids = np.random.default_rng(0).integers(0, VOCAB, (4, 64))
    data = CalibrationData([own.tolist() for own in ids], "random")
    quantize_with_data(source, tmp_path / "data", "w4a8", DataOptions("imatrix", data=data, embedding="int8"))
    quantize_checkpoint(source, tmp_path / "nearest", "w4a8", embedding="int8")
    tables = [Checkpoint.open(tmp_path / name).read(TABLE) for name in ("data", "nearest")]
    assert np.array_equal(*tables)


def test_other_formats_have_the_same_values(tmp_path: Path) -> None:
    source, out, file = write_tiny_llama(tmp_path / "model"), tmp_path / "int8", tmp_path / "out.gguf"
    quantize_checkpoint(source, out, quantizing_scheme("w4a8", exportable=True), embedding="int8")
    convert(out, file, Conversion())
    folder, written = Checkpoint.open(out), {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    values = folder.read(TABLE).astype(np.float32) * folder.read(f"{TABLE}_scale")[:, None]
    table = written["token_embd.weight"]
    assert table.tensor_type.name == "Q8_0"
    assert np.array_equal(gguf.dequantize(table.data, table.tensor_type), values)
    quantize_checkpoint(source, tmp_path / "w8a8", "w8a8", embedding="int8")
    convert(tmp_path / "w8a8", tmp_path / "compressed", Conversion(format="compressed-tensors"))
    compressed = Checkpoint.open(tmp_path / "compressed").tensors[TABLE]
    assert (compressed.dtype, compressed.shape) == ("f32", folder.tensors[TABLE].shape)  # as readers expect it


def test_a_model_without_one_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_tiny_llama(tmp_path / "model", tied=True)
    with raises(InvalidArgumentError, param="embedding"):
        quantize_checkpoint(source, tmp_path / "out", "w4a8", embedding="int8")
    with raises(InvalidArgumentError, param="embedding"):
        quantize_checkpoint(write_tiny_llama(tmp_path / "own"), tmp_path / "out", "w4a8", embedding="int4")
    command = ["quantize", str(source), str(tmp_path / "out"), "--scheme", "w4a8", "--embedding", "int8"]
    assert main(command) == 2
    assert main([*command, "--budget", "5bits"]) == 2
    assert capsys.readouterr().err.count("embedding: expected") == 2
    assert not (tmp_path / "out").exists()
