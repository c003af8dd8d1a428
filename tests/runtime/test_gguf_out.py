"""``penstock convert FOLDER OUT.gguf``: files that the gguf package and Penstock read as what was written."""

from __future__ import annotations

import json
import re
from pathlib import Path

import gguf
import numpy as np
import pytest
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from penstock import LLM
from penstock.checkpoint.convert import Conversion
from penstock.checkpoint.folder import Checkpoint
from penstock.checkpoint.gguf.imatrix import read_imatrix, write_imatrix
from penstock.checkpoint.gguf.k_blocks import quantize_q4_k, quantize_q6_k
from penstock.checkpoint.gguf.tokenizer_out import tokenizer_metadata
from penstock.checkpoint.gguf.writer import quantize_q8_0
from penstock.checkpoint.tokenizer_file import LibraryTokenizer
from penstock.errors import InvalidArgumentError, InvalidFileError, UnsupportedError
from penstock.models.mapped import open_mapped
from penstock.quant.input_statistics import InputStatistics, WeightInputs
from penstock.quant.methods.weighted import normalized
from penstock.runtime.convert import convert
from tests.support.errors import raises
from tests.support.families import prompt, save
from tests.support.gguf_blocks import DEMO_FOLDER
from tests.support.gguf_models import FAMILIES as GGUF_FAMILIES
from tests.support.gguf_models import random_model

NAMES = (
    "llama", "gemma2", "phi3", "qwen2_moe", "mistral", "qwen2", "qwen3", "olmo2", "granite", "gemma", "gemma3_text",
    "smollm3", "mixtral", "qwen3_moe", "olmoe", "granitemoe",
)  # fmt: skip
Kind = gguf.GGMLQuantizationType


def save_published(name: str, folder: Path) -> Path:
    """Save a network of the family that has what GGUF has no key for as the published models have it."""
    if name == "qwen3_moe":
        random_model(GGUF_FAMILIES["qwen3moe"]).save_pretrained(folder)
        return folder
    save(name, folder)
    if name == "olmoe":
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"norm_topk_prob": False, "clip_qkv": None}))
    return folder


@pytest.mark.parametrize("name", [*NAMES[:3], *(pytest.param(name, marks=pytest.mark.long) for name in NAMES[3:])])
def test_a_float_file_has_the_logits_of_its_folder(tmp_path: Path, name: str) -> None:
    folder = save_published(name, tmp_path / "folder")
    if name.startswith("gemma"):  # what a file has no key for is as in the published models
        config = json.loads((folder / "config.json").read_text())
        removed = ("layer_types", "sliding_window_pattern", "attn_logit_softcapping" if "3" in name else "")
        config = {key: value for key, value in config.items() if key not in removed}
        (folder / "config.json").write_text(json.dumps(config | {"query_pre_attn_scalar": config["head_dim"]}))
    report = convert(folder, tmp_path / "out.gguf", Conversion("f32"))
    logits = []
    for path in (folder, tmp_path / "out.gguf"):
        with LLM(path, scheme="f32", mode="eager") as llm:
            logits.append(llm.logits([token % 300 for token in prompt(20)]))
    assert np.array_equal(logits[0], logits[1])
    assert (report.num_files, report.num_bytes) == (1, (tmp_path / "out.gguf").stat().st_size)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "out.gguf"]


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["f16", "bf16", "q8_0"])
def test_tensors_are_those_that_gguf_makes(tmp_path: Path, dtype: str) -> None:
    convert(DEMO_FOLDER, tmp_path / "out.gguf", Conversion(dtype))
    reader = gguf.GGUFReader(tmp_path / "out.gguf")
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 100)
    source = load_file(DEMO_FOLDER / "model.safetensors")
    for key, values in source.items():
        tensor = tensors[names.get_name(key, (".weight",))]
        kind = Kind[dtype.upper()] if values.ndim == 2 else Kind.F32
        assert tensor.tensor_type == kind
        if not key.endswith(("q_proj.weight", "k_proj.weight")):
            expected = gguf.quantize(values.float().numpy(), kind)
            assert np.array_equal(tensor.data.view(np.uint8).reshape(-1), expected.view(np.uint8).reshape(-1))
    assert len(tensors) == len(source)
    assert reader.fields["general.file_type"].contents() == {"f16": 1, "bf16": 32, "q8_0": 7}[dtype]


def test_blocks_of_q8_0_are_those_of_the_reference() -> None:
    rng = np.random.default_rng(1)
    rows = rng.normal(0, 1, (50, 64)).astype(np.float32) * rng.choice([0, 1e-9, 1, 1e4], (50, 64)).astype(np.float32)
    rows[0] = 0
    rows[1, :32] = np.arange(-15.5, 16.5)  # ties
    assert np.array_equal(quantize_q8_0(rows), gguf.quantize(rows, Kind.Q8_0))


ERRORS = {"q4_k": (quantize_q4_k, 0.0715, 0.0835), "q6_k": (quantize_q6_k, 0.0178, 0.0217)}
"""The relative error of llama.cpp's own blocks of normal and of Student's t values (5 degrees of freedom)."""


@pytest.mark.parametrize("name", ERRORS)
def test_blocks_of_k_types_are_near_the_values(name: str) -> None:
    quantize, *limits = ERRORS[name]
    rng, kind = np.random.default_rng(0), Kind[name.upper()]
    for values, limit in zip((rng.normal(size=(64, 512)), rng.standard_t(5, (64, 512))), limits, strict=True):
        rows = (values * 0.02).astype(np.float32)
        blocks = quantize(rows)
        own = gguf.dequantize(blocks, kind)
        assert blocks.shape == (64, 2 * {"q4_k": 144, "q6_k": 210}[name])
        assert np.linalg.norm(own - rows) < limit * np.linalg.norm(rows)
        assert np.array_equal(quantize(rows[3:5]), blocks[3:5])


@pytest.mark.parametrize("name", ERRORS)
def test_unusual_values_of_k_types(name: str) -> None:
    quantize, kind = ERRORS[name][0], Kind[name.upper()]
    rows = np.zeros((4, 256), np.float32)
    rows[1], rows[2] = 0.5, -0.25
    rows[3, 7] = 1e-9
    assert np.abs(gguf.dequantize(quantize(rows), kind) - rows).max() < 5e-3
    for wrong in (np.nan, np.inf, 1e30):
        rows[2, 5] = wrong
        with raises(InvalidArgumentError, param="dtype"):
            quantize(rows)


@pytest.mark.parametrize("dtype", ["q4_k", "q6_k"])
def test_k_types_are_those_of_matrices_with_whole_blocks(tmp_path: Path, dtype: str) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 288, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(**sizes, vocab_size=300, num_hidden_layers=1, head_dim=64)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    convert(tmp_path / "model", tmp_path / "out.gguf", Conversion(dtype))
    kinds = {tensor.name: tensor.tensor_type for tensor in gguf.GGUFReader(tmp_path / "out.gguf").tensors}
    own = Kind[dtype.upper()]
    assert kinds["blk.0.attn_q.weight"] == kinds["token_embd.weight"] == own
    assert kinds["output.weight"] == Kind.Q6_K
    assert kinds["blk.0.ffn_down.weight"] == Kind.Q8_0
    assert kinds["blk.0.attn_norm.weight"] == Kind.F32
    logits = []
    for path in (tmp_path / "model", tmp_path / "out.gguf"):
        with LLM(path, scheme="f32", mode="eager") as llm:
            logits.append(llm.logits([1, 5, 9, 200]))
    assert np.abs(logits[0] - logits[1]).max() < 0.2 * np.abs(logits[0]).max()


@pytest.mark.parametrize("name", ERRORS)
def test_errors_of_columns_count_by_their_weights(name: str) -> None:
    quantize, kind = ERRORS[name][0], Kind[name.upper()]
    rng = np.random.default_rng(0)
    rows, weights = rng.normal(size=(32, 512)).astype(np.float32), rng.lognormal(0, 2, 512).astype(np.float32)
    plain, weighted = (gguf.dequantize(quantize(rows, own), kind) for own in (None, weights))
    errors = [((own - rows) ** 2 * weights).sum() for own in (plain, weighted)]
    assert errors[1] < 0.8 * errors[0]
    assert np.array_equal(quantize(rows, np.ones(512, np.float32)), quantize(rows))


def test_an_importance_matrix_weights_the_columns(tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 4}
    LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=300, num_hidden_layers=1)).save_pretrained(tmp_path / "model")
    name = "model.layers.0.self_attn.q_proj.weight"
    inputs = WeightInputs(np.random.default_rng(0).lognormal(0, 2, 256), 7)
    for file, own in (("own", inputs), ("narrow", WeightInputs(inputs.squares[:128], 7))):
        write_imatrix(tmp_path / f"{file}.gguf", InputStatistics({name: own}, 7, "ab", "texts.txt"), "llama")
    convert(tmp_path / "model", tmp_path / "out.gguf", Conversion("q4_k", imatrix=tmp_path / "own.gguf"))
    written = {tensor.name: tensor.data for tensor in gguf.GGUFReader(tmp_path / "out.gguf").tensors}
    stored = load_file(tmp_path / "model" / "model.safetensors")
    read = read_imatrix(tmp_path / "own.gguf", "llama").weights[name]
    for part, weights in (("q", normalized(read.mean_squares)), ("o", None)):
        rows = stored[f"model.layers.0.self_attn.{part}_proj.weight"].float().numpy()
        own = written["blk.0.attn_q.weight" if part == "q" else "blk.0.attn_output.weight"]
        if part == "q":  # llama.cpp's order of the rows of a head
            rows = rows.reshape(4, 2, 32, 256).swapaxes(1, 2).reshape(256, 256)
        assert np.array_equal(own, quantize_q4_k(rows, weights)), part
    with raises(InvalidFileError, param="imatrix"):
        convert(tmp_path / "model", tmp_path / "no.gguf", Conversion("q4_k", imatrix=tmp_path / "narrow.gguf"))
    assert not (tmp_path / "no.gguf").exists()
    for dtype in (None, "f32", "q8_0"):
        with raises(InvalidArgumentError, param="imatrix"):
            Conversion(dtype, imatrix=tmp_path / "own.gguf")


def test_tokenizer_files_are_read_leniently() -> None:
    names = ("tokenizer.json", "tokenizer_config.json")
    files = {name: (DEMO_FOLDER / name).read_bytes() for name in names}
    vocab_size = len(json.loads(files["tokenizer.json"])["model"]["vocab"])
    expected = tokenizer_metadata(files, vocab_size)
    lenient = {name: b'{"other": Infinity, "other": NaN, ' + data.lstrip()[1:] for name, data in files.items()}
    assert tokenizer_metadata(lenient | {"chat_template.json": b'{"a": Infinity}'}, vocab_size) == expected


def test_the_tokenizer_of_the_folder_is_kept(tmp_path: Path) -> None:
    convert(DEMO_FOLDER, tmp_path / "out.gguf", Conversion())
    files = Checkpoint.open(tmp_path / "out.gguf").side_files()
    text = (DEMO_FOLDER / "valid.txt").read_text()[:3000] + "<|end|> 1234 x"
    ids = [LibraryTokenizer(data).encode(text) for data in
           (files["tokenizer.json"], (DEMO_FOLDER / "tokenizer.json").read_bytes())]  # fmt: skip
    assert ids[0] == ids[1]
    own = json.loads((DEMO_FOLDER / "generation_config.json").read_text())["eos_token_id"]
    eos = json.loads(files["generation_config.json"])["eos_token_id"]
    assert own in (eos, eos[0])


@pytest.mark.parametrize(
    ("conversion", "out", "param"),
    [
        (Conversion(layout="split"), "out.gguf", "layout"),
        (Conversion(max_file_mb=1), "out.gguf", "max_file_mb"),
        (Conversion("q8_0"), "out", "dtype"),
    ],
)
def test_options_of_other_forms_are_refused(tmp_path: Path, conversion: Conversion, out: str, param: str) -> None:
    with raises(InvalidArgumentError, param=param):
        convert(DEMO_FOLDER, tmp_path / out, conversion)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("changed", "param"),
    [
        ({"model_type": "phi"}, "model_type"),
        ({"model_type": "smollm3", "no_rope_layers": [1, 0]}, "no_rope_layers"),
        ({"sliding_window": 8, "model_type": "mistral"}, "sliding_window"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64,
                           "beta_fast": 16.0}}, "rope_parameters"),
    ],
)  # fmt: skip
def test_what_a_file_cannot_say_is_refused(tmp_path: Path, changed: dict[str, object], param: str) -> None:
    folder = save("llama", tmp_path / "folder")
    config = json.loads((folder / "config.json").read_text())
    config.pop("rope_parameters", None)
    (folder / "config.json").write_text(json.dumps(config | changed))
    with raises(UnsupportedError, param=param):
        convert(folder, tmp_path / "out.gguf", Conversion())
    assert not (tmp_path / "out.gguf").exists()


@pytest.mark.parametrize(
    ("name", "param"), [("qwen3_moe_renormalised", "mlp_only_layers"), ("olmoe", "norm_topk_prob")]
)
def test_experts_that_a_file_cannot_say_are_refused(tmp_path: Path, name: str, param: str) -> None:
    with raises(UnsupportedError, param=param):
        convert(save(name, tmp_path / "folder"), tmp_path / "out.gguf", Conversion())


def test_a_limit_of_queries_is_refused(tmp_path: Path) -> None:
    folder = save("olmoe", tmp_path / "folder")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"norm_topk_prob": False}))
    with raises(UnsupportedError, param="clip_qkv", match=r"null for a GGUF file, got 0\.9"):
        convert(folder, tmp_path / "out.gguf", Conversion())


def test_experts_and_fused_rows_are_those_that_gguf_reads(tmp_path: Path) -> None:
    """The package reads one tensor for all experts, and one for queries, keys and values."""
    for name, stored, parameters in (
        ("qwen2_moe", "blk.1.ffn_down_exps.weight", [f"mlp.experts.{i}.down_proj" for i in range(7)]),
        ("phi3", "blk.1.attn_qkv.weight", ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]),
    ):
        folder, out = save(name, tmp_path / name), tmp_path / f"{name}.gguf"
        convert(folder, out, Conversion("f16"))
        source = open_mapped(folder)
        values = [source.read(f"model.layers.1.{parameter}.weight") for parameter in parameters]
        expected = np.stack(values) if name == "qwen2_moe" else np.concatenate(values)
        reader = gguf.GGUFReader(out)
        (tensor,) = (tensor for tensor in reader.tensors if tensor.name == stored)
        assert np.array_equal(tensor.data, expected.astype(np.float16))
        arch = reader.fields["general.architecture"].contents()
        names = {gguf.TENSOR_NAMES[kind] for kind in gguf.MODEL_TENSORS[{v: k for k, v in
                 gguf.MODEL_ARCH_NAMES.items()}[arch]]}  # fmt: skip
        found = {re.sub(r"blk\.\d+", "blk.{bid}", tensor.name.rpartition(".")[0]) for tensor in reader.tensors}
        assert found <= names
