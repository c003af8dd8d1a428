"""Quantized folders: the same bytes as quantizing on the fly, whole or not at all."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from penstock.checkpoint.folder import Checkpoint
from penstock.checkpoint.quantize import FLOAT_LAYERS, plan_weights, quantize_checkpoint
from penstock.config import ConfigReader
from penstock.core import native
from penstock.errors import FileAccessError, InvalidArgumentError, InvalidFileError, PenstockError, UnsupportedError
from penstock.models.families import family_modules
from penstock.models.mapped import open_mapped
from penstock.models.meta import construct_on_meta
from penstock.nn import Linear, Router
from penstock.quant.matrix import concatenate_rows, quantize_rows, stored_values
from penstock.quant.scheme import SCHEMES, default_scheme, find_scheme, quantizing_scheme
from penstock.runtime.eager import EagerProgram
from penstock.runtime.program import ProgramLimits
from tests.models.steps import run_whole
from tests.support.errors import raises
from tests.support.families import FAMILIES, build, prompt, save
from tests.support.marks import mostly_long

QUANTIZING = ("w8a16", "w8a8", "w4a16", "w4a8")


def write_checkpoint(folder: Path, dtype: type = np.float32, cols: int = 70, tied: bool = False) -> Path:
    folder.mkdir()
    rng = np.random.default_rng(1)
    names = {"model.embed_tokens.weight": (50, cols), "model.layers.0.mlp.up_proj.weight": (37, cols),
             "model.norm.weight": (cols,)}  # fmt: skip
    if not tied:
        names["lm_head.weight"] = (50, cols)
    tensors = {name: rng.standard_normal(shape).astype(dtype) for name, shape in names.items()}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "tie_word_embeddings": tied}))
    (folder / "generation_config.json").write_text('{"eos_token_id": 1}')
    return folder


@pytest.mark.parametrize("name", QUANTIZING)
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("cols", [70, 71])
def test_a_quantized_folder_packs_to_the_same_bytes(tmp_path: Path, name: str, dtype: type, cols: int) -> None:
    source = Checkpoint.open(write_checkpoint(tmp_path / "source", dtype, cols))
    quantize_checkpoint(tmp_path / "source", tmp_path / "out", name)
    folder = Checkpoint.open(tmp_path / "out")
    assert folder.scheme == name
    assert folder.dtype == source.dtype
    scheme = SCHEMES[name]
    plan = {"model.layers.0.mlp.up_proj.weight": scheme, "lm_head.weight": SCHEMES[scheme.head]}
    with native.Context(num_threads=1) as context:
        for tensor, own in plan.items():
            matrix = source.read(tensor)
            rows = len(matrix)
            at = (own.layout, rows, cols, 0, rows)
            direct = np.zeros(native.layout_bytes(own.layout, rows, cols), np.uint8)
            native.pack(context, *at, {"f32": 1, "f16": 2}[source.dtype], matrix, direct)
            again = np.zeros_like(direct)
            native.pack_quantized(context, *at, folder.read_quantized(tensor, cols), again)
            assert again.tobytes() == direct.tobytes()


def test_weights_that_are_not_linear_are_copied(tmp_path: Path) -> None:
    source = load_file(write_checkpoint(tmp_path / "source") / "model.safetensors")
    report = quantize_checkpoint(tmp_path / "source", tmp_path / "out", "w4a8")
    out = load_file(tmp_path / "out" / "model.safetensors")
    assert report.num_quantized == 2
    for name in ("model.embed_tokens.weight", "model.norm.weight"):
        assert out[name].tobytes() == source[name].tobytes()
    assert (tmp_path / "out" / "generation_config.json").read_text() == '{"eos_token_id": 1}'
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    expected = {"quant_method": "penstock", "version": 2, "scheme": "w4a8", "dtype": "f32"}
    assert config["quantization_config"] == expected


def test_a_tied_embedding_is_quantized_as_the_head(tmp_path: Path) -> None:
    quantize_checkpoint(write_checkpoint(tmp_path / "source", tied=True), tmp_path / "out", "w4a8")
    tensors = Checkpoint.open(tmp_path / "out").tensors
    assert tensors["model.embed_tokens.weight"].dtype == "i8"
    assert tensors["model.layers.0.mlp.up_proj.weight"].dtype == "u8"


def test_the_result_is_deterministic(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "source")
    for out in ("one", "two"):
        quantize_checkpoint(tmp_path / "source", tmp_path / out, "w4a16")
    for file in ("model.safetensors", "config.json"):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()


def test_refusals(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source")
    with raises(InvalidArgumentError, param="scheme", match="w8a16, w8a8, w4a16, w4a8, w8a8_h32, w4a8_h32, got 'f16'"):
        quantize_checkpoint(source, tmp_path / "out", "f16")
    with raises(InvalidArgumentError, param="out"):
        quantize_checkpoint(source, source, "w8a8")
    with pytest.raises(FileAccessError):
        quantize_checkpoint(source, tmp_path / "gone" / "out", "w8a8")
    quantize_checkpoint(source, tmp_path / "out", "w8a8")
    with raises(UnsupportedError, param="scheme"):
        quantize_checkpoint(tmp_path / "out", tmp_path / "again", "w8a8")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]


def test_a_failure_leaves_no_files(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"][3, 3] = np.nan
    save_file(tensors, source / "model.safetensors")
    with raises(PenstockError, match=r"'model\.layers\.0\.mlp\.up_proj\.weight'"):
        quantize_checkpoint(source, tmp_path / "out", "w8a8")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize("change", ["scheme", "dtype", "scale_gone", "scale_shape", "scale_nan", "cols"])
def test_damaged_quantized_folders_are_refused(tmp_path: Path, change: str) -> None:
    quantize_checkpoint(write_checkpoint(tmp_path / "source"), tmp_path / "out", "w8a8")
    file, config_file = tmp_path / "out" / "model.safetensors", tmp_path / "out" / "config.json"
    tensors, config = load_file(file), json.loads(config_file.read_text())
    name, cols = "model.layers.0.mlp.up_proj.weight", 70
    if change in ("scheme", "dtype"):
        config["quantization_config"][change] = "w2a2"
    elif change == "scale_gone":
        del tensors[f"{name}_scale"]
    elif change == "scale_shape":
        tensors[f"{name}_scale"] = np.ones(36, np.float32)
    elif change == "scale_nan":
        tensors[f"{name}_scale"][2] = math.nan
    else:
        cols = 72
    save_file(tensors, file)
    config_file.write_text(json.dumps(config))
    with pytest.raises((InvalidFileError, UnsupportedError)):
        Checkpoint.open(tmp_path / "out").read_quantized(name, cols)


@pytest.mark.parametrize("change", ["gone", "shape", "dtype", "value"])
def test_damaged_groups_are_refused(tmp_path: Path, change: str) -> None:
    quantize_checkpoint(write_checkpoint(tmp_path / "source"), tmp_path / "out", "w4a8")
    file, name = tmp_path / "out" / "model.safetensors", "model.layers.0.mlp.up_proj.weight"
    tensors = load_file(file)
    groups = tensors.pop(f"{name}_groups")
    assert groups.shape == (37, 3, 2)
    if change == "value":  # packing sees it, and names the row
        groups[5, 1, 0] = 18
    if change != "gone":
        tensors[f"{name}_groups"] = {"shape": groups[:, :2].copy(), "dtype": groups.view(np.uint8)}.get(change, groups)
    save_file(tensors, file)
    with pytest.raises((InvalidFileError, InvalidArgumentError), match="row 5" if change == "value" else "groups"):
        pack_folder(tmp_path / "out", name)


def pack_folder(folder: Path, name: str) -> None:
    rows = Checkpoint.open(folder).read_quantized(name, 70)
    with native.Context(num_threads=1) as context:
        packed = np.zeros(native.layout_bytes(SCHEMES["w4a8"].layout, 37, 70), np.uint8)
        native.pack_quantized(context, SCHEMES["w4a8"].layout, 37, 70, 0, 37, rows, packed)


def test_a_folder_of_an_older_version_says_what_to_do(tmp_path: Path) -> None:
    quantize_checkpoint(write_checkpoint(tmp_path / "source"), tmp_path / "out", "w4a8")
    file = tmp_path / "out" / "config.json"
    file.write_text(file.read_text().replace('"version": 2', '"version": 1'))
    with raises(UnsupportedError, param="quantization_config.version", match="got 1"):
        Checkpoint.open(tmp_path / "out")


def test_rows_are_quantized_the_same_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = np.random.default_rng(2).standard_normal((100, 40)).astype(np.float32)
    with native.Context(num_threads=1) as context:
        for name in ("w8a8", "w4a8"):
            whole = list(quantize_rows(context, SCHEMES[name], matrix, "f32"))
            monkeypatch.setattr("penstock.quant.matrix._PIECE_VALUES", 1)
            pieces = list(quantize_rows(context, SCHEMES[name], matrix, "f32"))
            monkeypatch.undo()
            assert len(pieces) == 7
            for part, expected in zip(concatenate_rows(pieces), whole[0], strict=True):
                assert (part is None) == (expected is None)
                assert part is None or part.tobytes() == expected.tobytes()


def test_four_bit_values_lie_two_to_a_byte() -> None:
    values = np.array([[0, 15, 8]], np.int8)
    assert stored_values(SCHEMES["w4a8"], values).tolist() == [[0x0 | 0xF << 4, 8]]


def test_schemes_are_found_by_name() -> None:
    four_bit = [scheme for scheme in SCHEMES.values() if scheme.weight_bits == 4 and scheme.quantized]
    assert {scheme.head for scheme in four_bit} == {"w8a16", "w8a8"}
    assert default_scheme("bf16") == "bf16"
    for name in ("", "w3", "W8A8"):
        with raises(InvalidArgumentError, param="scheme", match="f32"):
            find_scheme(name)
    with pytest.raises(InvalidArgumentError):
        quantizing_scheme("bf16")


@pytest.mark.parametrize("family", mostly_long(("qwen2_moe", "hunyuan_v1_moe", "lfm2"), "qwen2_moe"))
def test_routers_and_convolutions_stay_floats(family: str, tmp_path: Path) -> None:
    folder = save(family, tmp_path / family)
    quantize_checkpoint(open_mapped(folder), tmp_path / "quantized", "w8a8")
    limits = ProgramLimits(max_tokens=32, max_requests=1, max_rows=32, num_pages=2, context_len=64)
    logits = []
    for path in (folder, tmp_path / "quantized"):
        program = EagerProgram(path, scheme="w8a8", threads=1, limits=limits)
        logits.append(run_whole(program, prompt(20)).tobytes())
        program.close()
    assert logits[0] == logits[1]


@pytest.mark.parametrize("model_type", [t for t, module in family_modules().items() if ".experts." in module])
def test_every_router_is_recognised_by_name(model_type: str) -> None:
    family = next(name for name, row in FAMILIES.items() if row[0] == model_type)
    network = construct_on_meta(ConfigReader(build(family).config.to_dict())).network
    for path, layer in network.named_modules():
        if isinstance(layer, Linear):
            assert (path.rpartition(".")[2] in FLOAT_LAYERS) == isinstance(layer, Router), path


@pytest.mark.long
def test_a_router_may_be_a_module_with_a_linear(tmp_path: Path) -> None:
    checkpoint = open_mapped(save("gemma4_text_experts", tmp_path / "model"))
    plan = plan_weights(checkpoint, find_scheme("w8a8"))
    routers = {name for name in checkpoint.tensors if name.endswith(".router.proj.weight")}
    assert routers
    assert not routers & plan.keys()
