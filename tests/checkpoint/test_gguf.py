"""GGUF files: the values of every element type, and models that equal the folders that they were made from."""

from __future__ import annotations

import json
import math
import random
import resource
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import (
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from penstock import LLM
from penstock.checkpoint.folder import Checkpoint
from penstock.checkpoint.gguf.element_types import ELEMENT_TYPES, dequantize
from penstock.checkpoint.sentencepiece import merges
from penstock.checkpoint.tokenizer_file import LibraryTokenizer
from penstock.errors import InvalidFileError, PenstockError, UnsupportedError
from tests.support.errors import raises
from tests.support.file_damage import mutate, num_mutants
from tests.support.gguf_files import METADATA, gguf_bytes, llama_file, llama_tensors, text_metadata

IDS = [3, 5, 7, 11, 13]
UNKNOWN_TO_GGUF = ("Q1_0", "Q2_0")  # whose values test_gguf_blocks has
QUANTIZED = [
    number for number, kind in ELEMENT_TYPES.items() if kind.values is not None and kind.name not in UNKNOWN_TO_GGUF
]
SIZES = {"vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
         "head_dim": 16}  # fmt: skip
MODELS = {
    "llama": (LlamaConfig, LlamaForCausalLM, gguf.MODEL_ARCH.LLAMA),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, gguf.MODEL_ARCH.QWEN2),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, gguf.MODEL_ARCH.QWEN3),
    "phi3": (Phi3Config, Phi3ForCausalLM, gguf.MODEL_ARCH.PHI3),
    "granite": (GraniteConfig, GraniteForCausalLM, gguf.MODEL_ARCH.GRANITE),
}
EXTRA: dict[str, dict[str, Any]] = {
    "phi3": {"pad_token_id": 0, "sliding_window": 4, "_attn_implementation": "eager"},
    "granite": {"attention_multiplier": 0.3, "embedding_multiplier": 2.0, "logits_scaling": 1.5,
                "residual_multiplier": 0.5},
}  # fmt: skip


def save(tmp_path: Path, data: bytes) -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("number", QUANTIZED)
def test_values_of_quantized_types_equal_those_of_gguf(number: int) -> None:
    kind = ELEMENT_TYPES[number]
    other = gguf.GGMLQuantizationType(number)
    assert (other.name, gguf.GGML_QUANT_SIZES[other]) == (kind.name, (kind.block_len, kind.block_bytes))
    data = np.random.default_rng(number).integers(0, 256, (3000, kind.block_bytes), dtype=np.uint8)
    with np.errstate(all="ignore"):
        expected = gguf.dequantize(data, other).reshape(-1)
    values = dequantize(kind, data.reshape(-1))
    nan = np.isnan(expected)
    assert np.array_equal(np.isnan(values), nan)
    assert np.array_equal(values.view(np.uint32)[~nan], expected.view(np.uint32)[~nan])


def small_model(name: str) -> PreTrainedModel:
    torch.manual_seed(1)
    config_class, model_class, _ = MODELS[name]
    return model_class(config_class(**SIZES, **EXTRA.get(name, {}), tie_word_embeddings=name == "qwen3")).eval()


def in_pairs(array: np.ndarray, num_heads: int) -> np.ndarray:
    """Return rows as llama.cpp's converter stores them: adjacent pairs instead of halves."""
    shape = (num_heads, 2, len(array) // num_heads // 2, *array.shape[1:])
    return np.ascontiguousarray(array.reshape(shape).swapaxes(1, 2)).reshape(array.shape)


def write_model(path: Path, name: str, model: PreTrainedModel, kind: gguf.GGMLQuantizationType) -> None:
    writer = gguf.GGUFWriter(path, name)
    writer.add_block_count(2)
    writer.add_context_length(128)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_key_length(16)
    writer.add_value_length(16)
    writer.add_layer_norm_rms_eps(model.config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    if name == "phi3":
        writer.add_sliding_window(4)
    if name == "granite":
        writer.add_attention_scale(0.3)
        writer.add_embedding_scale(2.0)
        writer.add_logit_scale(1.5)
        writer.add_residual_scale(0.5)
    names = gguf.get_tensor_name_map(MODELS[name][2], 2)
    for key, tensor in model.state_dict().items():
        if key == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        array = tensor.float().numpy()
        for part, num_heads in (("q_proj", 4), ("k_proj", 2)):
            if name in ("llama", "granite") and part in key:
                array = in_pairs(array, num_heads)
        is_float = array.ndim == 1
        data = array if is_float else gguf.quantize(array, kind)
        writer.add_tensor(names.get_name(key, (".weight", ".bias")), data, raw_dtype=None if is_float else kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("name", MODELS)
def test_a_float_model_has_the_logits_of_its_original(tmp_path: Path, name: str) -> None:
    model, path = small_model(name), tmp_path / "model.gguf"
    write_model(path, name, model, gguf.GGMLQuantizationType.F32)
    with torch.no_grad():
        expected = model(torch.tensor([IDS])).logits[0].numpy()
    with LLM(path, mode="eager") as llm:
        assert np.abs(llm.logits(IDS) - expected).max() < 1e-4


def test_a_q8_0_model_is_computed_with_its_exact_values(tmp_path: Path) -> None:
    model, path = small_model("llama"), tmp_path / "model.gguf"
    write_model(path, "llama", model, gguf.GGMLQuantizationType.Q8_0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                packed = gguf.quantize(parameter.numpy(), gguf.GGMLQuantizationType.Q8_0)
                parameter.copy_(torch.from_numpy(gguf.dequantize(packed, gguf.GGMLQuantizationType.Q8_0)))
        expected = model(torch.tensor([IDS])).logits[0].numpy()
    with LLM(path, scheme="f32", use_cache=False) as llm:
        assert llm.info.scheme == "f32"
        assert np.abs(llm.logits(IDS) - expected).max() < 1e-4


def test_a_split_model_equals_the_whole_one(tmp_path: Path) -> None:
    tensors = {name: (0, array.shape, array.tobytes()) for name, array in llama_tensors(300).items()}
    whole = Checkpoint.open(save(tmp_path, gguf_bytes(METADATA, tensors)))
    names = sorted(tensors)
    for number, part in enumerate((names[:7], names[7:])):
        keys = {"split.no": number, "split.count": 2, "split.tensors.count": len(names)}
        data = gguf_bytes({**(METADATA if number == 0 else {}), **keys}, {name: tensors[name] for name in part})
        (tmp_path / f"m-{number + 1:05d}-of-00002.gguf").write_bytes(data)
    split = Checkpoint.open(tmp_path / "m-00001-of-00002.gguf")
    assert set(split.tensors) == set(whole.tensors)
    assert all(np.array_equal(split.read(name), whole.read(name)) for name in whole.tensors)
    assert [stamp.name for stamp in split.files] == ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"]
    with pytest.raises(InvalidFileError, match=r"the first of 2 files, m-00001-of-00002\.gguf"):
        Checkpoint.open(tmp_path / "m-00002-of-00002.gguf")


def test_llama_3_factors_become_its_rope_scaling(tmp_path: Path) -> None:
    wanted = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
              "original_max_position_embeddings": 8192}  # fmt: skip
    theta, half = 500000.0, 8
    scaled = LlamaConfig(**SIZES, rope_theta=theta, rope_scaling=dict(wanted))
    frequencies = LlamaForCausalLM(scaled).model.rotary_emb.inv_freq.numpy()
    factors = (theta ** -(np.arange(half) / half) / frequencies).astype(np.float32)
    tensors = {name: (0, array.shape, array.tobytes()) for name, array in llama_tensors(300).items()}
    tensors["rope_freqs.weight"] = (0, (half,), factors.tobytes())
    metadata = {**METADATA, "llama.rope.freq_base": theta}
    checkpoint = Checkpoint.open(save(tmp_path, gguf_bytes(metadata, tensors)))
    assert checkpoint.config.values["rope_scaling"] == wanted
    tensors["rope_freqs.weight"] = (0, (half,), (factors * 1.01).astype(np.float32).tobytes())
    with raises(UnsupportedError, param="rope_freqs.weight"):
        Checkpoint.open(save(tmp_path, gguf_bytes(metadata, tensors)))


@pytest.mark.parametrize(
    ("factors", "message"),
    [
        ([1.0] * 7, "expected 8 numbers, one for each pair of dimensions, got 7"),
        ([1.0] * 9, "expected 8 numbers, one for each pair of dimensions, got 9"),
        ([1.0] * 7 + [0.0], "expected finite numbers above 0, got 0"),
        ([1.0] * 7 + [-8.0], "expected finite numbers above 0, got -8"),
        ([1.0] * 7 + [math.nan], "expected finite numbers above 0, got nan"),
        ([1.0] * 7 + [math.inf], "expected finite numbers above 0, got inf"),
    ],
)
def test_factors_of_positions_are_checked(tmp_path: Path, factors: list[float], message: str) -> None:
    tensors = {name: (0, array.shape, array.tobytes()) for name, array in llama_tensors(300).items()}
    tensors["rope_freqs.weight"] = (0, (len(factors),), np.array(factors, np.float32).tobytes())
    with raises(InvalidFileError, param="rope_freqs.weight", match=message):
        Checkpoint.open(save(tmp_path, gguf_bytes(METADATA, tensors)))


@pytest.mark.parametrize(
    ("found", "missing"),
    [
        ("rope_factors_long.weight", "rope_factors_short.weight"),
        ("rope_factors_short.weight", "rope_factors_long.weight"),
    ],
)
def test_longrope_needs_both_of_its_tables(tmp_path: Path, found: str, missing: str) -> None:
    tensors = {name: (0, array.shape, array.tobytes()) for name, array in llama_tensors(300).items()}
    tensors[found] = (0, (8,), np.ones(8, np.float32).tobytes())
    with raises(InvalidFileError, param=missing):
        Checkpoint.open(save(tmp_path, gguf_bytes(METADATA, tensors)))
    tensors[found] = (0, (8,), np.zeros(8, np.float32).tobytes())
    with raises(InvalidFileError, param=found, match="got 0"):
        Checkpoint.open(save(tmp_path, gguf_bytes(METADATA, tensors)))


def test_a_factor_without_a_type_is_linear(tmp_path: Path) -> None:
    for key in ("llama.rope.scaling.factor", "llama.rope.scale_linear"):
        checkpoint = Checkpoint.open(save(tmp_path, llama_file({key: 2.0})))
        assert checkpoint.config.values["rope_scaling"] == {"rope_type": "linear", "factor": 2.0}
    linear = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0}
    with raises(UnsupportedError, param="llama.rope.scaling.attn_factor"):
        Checkpoint.open(save(tmp_path, llama_file({**linear, "llama.rope.scaling.attn_factor": 3.0})))


def test_the_tokenizer_merges_by_scores(tmp_path: Path) -> None:
    files = Checkpoint.open(save(tmp_path, llama_file(text_metadata()))).side_files()
    tokenizer = LibraryTokenizer(files["tokenizer.json"])
    texts = text_metadata()["tokenizer.ggml.tokens"]
    ids = tokenizer.encode("ab aé</s>")
    assert [texts[i] for i in ids] == ["<s>", "\u2581ab", "\u2581a", "<0xC3>", "<0xA9>", "</s>"]
    assert tokenizer.decode(ids) == "ab aé"
    assert json.loads(files["generation_config.json"]) == {"eos_token_id": [2], "bos_token_id": 1}
    assert json.loads(files["tokenizer_config.json"])["chat_template"] == "{{ messages[0].content }}"


def test_too_many_merges_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merges, "MAX_MERGES", 3)
    with raises(
        InvalidFileError,
        param="tokenizer.ggml.tokens",
        match=r"gguf: tokenizer\.ggml\.tokens: expected pieces with at most 3",
    ):
        Checkpoint.open(save(tmp_path, llama_file(text_metadata()))).side_files()


@pytest.mark.parametrize(
    ("changed", "field", "message"),
    [
        (
            {"general.architecture": "gpt9"},
            "general.architecture",
            r"expected one of llama, qwen2, qwen3, phi3, granite, .*, lfm2, .*, qwen3next, .*, got",
        ),
        (
            {"llama.attention.clamp_kqv": 1.0},
            "llama.attention.clamp_kqv",
            r"llama\.attention\.clamp_kqv is not supported",
        ),
        ({"general.architecture": "qwen2", "qwen2.expert_count": 8}, "qwen2.expert_count", r"expected 0"),
        (
            {"llama.rope.scaling.type": "dynamic"},
            "llama.rope.scaling.type",
            "expected none, linear, yarn or longrope, got",
        ),
        (
            {"tokenizer.ggml.model": "rwkv", "tokenizer.ggml.tokens": ["a"]},
            "tokenizer.ggml.model",
            "gpt2, llama, bert, t5 or gemma4, got 'rwkv'",
        ),
        ({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": ["a"]}, "tokenizer.ggml.pre", "expected one of"),
    ],
)
def test_unknown_values_are_refused_by_name(tmp_path: Path, changed: dict[str, Any], field: str, message: str) -> None:
    with raises(UnsupportedError, param=field, match=message):
        Checkpoint.open(save(tmp_path, llama_file(changed))).side_files()


def test_keys_that_change_nothing_are_passed_over(tmp_path: Path) -> None:
    keys = {"llama.tensor_data_layout": "Meta AI original pth", "llama.rope.scaling.finetuned": False}
    found = Checkpoint.open(save(tmp_path, llama_file({**keys, "quantize.imatrix.file": "x"}))).config
    assert found.values == Checkpoint.open(save(tmp_path, llama_file())).config.values


@pytest.mark.parametrize(
    ("number", "found", "instead"),
    [(16, "IQ2_XXS", "Q2_K"), (17, "IQ2_XS", "Q2_K"), (22, "IQ2_S", "Q2_K"), (18, "IQ3_XXS", "Q3_K_M"),
     (21, "IQ3_S", "Q3_K_M"), (19, "IQ1_S", "Q2_K"), (29, "IQ1_M", "Q2_K"), (40, "NVFP4", "Q4_K_M"),
     (31, "Q4_0_4_4", "Q4_0"), (99, "type 99", "")],
)  # fmt: skip
def test_an_unknown_element_type_is_refused_by_name(tmp_path: Path, number: int, found: str, instead: str) -> None:
    """Such a tensor is never turned into float32: the error says which type of file to use."""
    data = gguf_bytes(METADATA, {"token_embd.weight": (number, (300, 256), bytes(64))})
    remedy = f"llama-quantize ORIGINAL\\.gguf NEW\\.gguf {instead}`" if instead else ""
    with raises(UnsupportedError, param="token_embd.weight", match=rf"got {found}.*{remedy}"):
        Checkpoint.open(save(tmp_path, data))


def _damage(tmp_path: Path, seed: int, rounds: int) -> int:
    """Open damaged files; return how many were refused.  The allocation of 1 GiB fails."""
    data, rng, refused = llama_file(text_metadata()), random.Random(seed), 0
    header_len = data.index(b"token_embd.weight") + 2048
    limits = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30), limits[1]))
    try:
        for _ in range(rounds):
            path, message = save(tmp_path, mutate(data[:header_len], rng) + data[header_len:]), ""
            try:
                checkpoint = Checkpoint.open(path)
                for name, info in checkpoint.tensors.items():
                    assert checkpoint.read(name).nbytes == info.num_bytes
                checkpoint.side_files()
            except PenstockError as error:
                message = str(error)
                refused += 1
            assert message.isprintable()
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
    return refused


def test_damaged_files_are_refused_or_sound(tmp_path: Path) -> None:
    assert _damage(tmp_path, 1, 2000) > 1000


@pytest.mark.long
def test_many_damaged_files_are_refused_or_sound(tmp_path: Path) -> None:
    count = num_mutants(10_000)
    assert _damage(tmp_path, 2, count) > count // 2
