"""Damaged configs of every family, pooling files and folders of other tools: a PenstockError or a sound result."""

from __future__ import annotations

import json
import random
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers

from penstock.checkpoint.folder import Checkpoint
from penstock.checkpoint.pooling.files import make_pooling_head, pooling_files
from penstock.config import ConfigReader
from penstock.errors import PenstockError
from penstock.models.registry import find_network
from tests.support.encoders import DEBERTA_V3, sentence_transformer
from tests.support.families import FAMILIES, sizes_of
from tests.support.file_damage import count_refusals, mutate, num_mutants
from tests.support.gguf_experts import EXPERT_FAMILIES
from tests.support.gguf_gemma import GEMMA_FAMILIES
from tests.support.gguf_hybrids import HYBRID_FAMILIES
from tests.support.gguf_models import FAMILIES as GGUF_MODELS
from tests.support.gguf_models import eps_of, gguf_arrays, random_model, write_gguf
from tests.support.quantized_folders import (
    BITNET,
    FLOAT4,
    NVFP4,
    awq_layer,
    float4_layer,
    float8_layer,
    gptq_layer,
    integer_layer,
    packed_layer,
    ternary_layer,
    write_folders,
)

ENCODERS = (
    *("bert", "roberta", "distilbert", "modernbert", "eurobert", "nomic_bert", "t5", "umt5"),
    *("mpnet", "electra", "albert", "deberta-v2"),
)
ROWS = {row[0]: name for name, row in reversed(FAMILIES.items())}
"""The first row of each model_type."""
NESTED = {"gemma3": "gemma3_text", "gemma3n": "gemma3n_text", "gemma4": "gemma4_text", "qwen3_5": "qwen3_5_text"}
"""Folders that read images too, with the model_type of text_config."""


def config_of(model_type: str) -> dict[str, Any]:
    """Return the values of a config that is read."""
    if model_type in NESTED:
        return {"text_config": config_of(NESTED[model_type])}
    if model_type in ROWS:
        return {key: value for key, value in sizes_of(ROWS[model_type]).items() if not key.startswith("_")}
    own = DEBERTA_V3 if model_type == "deberta-v2" else {}
    return json.loads(transformers.AutoConfig.for_model(model_type, **own).to_json_string())


TYPES = (*ROWS, *ENCODERS, *NESTED)
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}
GROUP = {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}}
PACKED = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": GROUP}}
CHANNEL = {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "int", "strategy": "channel"}}
INTEGERS = PACKED | {"format": "int-quantized", "config_groups": {"group_0": CHANNEL}}
FOLDERS = {
    "gptq": (GPTQ, gptq_layer), "awq": (AWQ, awq_layer), "fp8": (FP8, partial(float8_layer, block=128)),
    "packed": (PACKED, partial(packed_layer, sym=False)), "integers": (INTEGERS, integer_layer),
    "modelopt": (NVFP4, float4_layer), "float4": (FLOAT4, partial(float4_layer, divisor=True)),
    "bitnet": (BITNET, ternary_layer),
}  # fmt: skip
GGUF_FAMILIES = {**GGUF_MODELS, **EXPERT_FAMILIES, **HYBRID_FAMILIES, **GEMMA_FAMILIES}
QUICK = ("qwen35", "gpt-oss", "granitehybrid", "lfm2", "gpt2")


@pytest.mark.parametrize("model_type", TYPES)
def test_damaged_configs_of_a_family_are_refused_or_read(model_type: str) -> None:
    network = find_network(model_type)

    def use(data: bytes) -> None:
        network.Config.read(ConfigReader.parse(data))

    count = max(1, num_mutants(10_000) // len(TYPES))
    data = json.dumps({**config_of(model_type), "model_type": model_type}).encode()
    use(data)
    assert count_refusals(11, count, data, use) > count // 3


@pytest.mark.parametrize("model_type", TYPES)
def test_mutated_values_of_a_family_are_refused_or_read(model_type: str) -> None:
    """Configs that are still JSON, with one to three values of another kind or size."""
    network, rng = find_network(model_type), random.Random(model_type)
    sound = config_of(model_type)
    others = (None, True, False, 0, 1, -1, 3, 1 << 31, 1 << 62, 0.5, -1.5, 1e300, "", "x", [], [1], ["x"], {}, {"x": 1})
    refused, count = 0, max(1, num_mutants(10_000) // len(TYPES))
    for _ in range(count):
        values = {"model_type": model_type, **sound}
        for key in rng.sample([*sound], min(len(sound), rng.randint(1, 3))):
            inner = values[key]
            if isinstance(inner, dict) and inner and rng.random() < 0.7:
                values[key] = {**inner, rng.choice([*inner]): rng.choice(others)}
            else:
                values[key] = rng.choice(others)
        message = ""
        try:
            network.Config.read(ConfigReader(values))
        except PenstockError as error:
            message = str(error)
        assert message.isprintable()
        refused += bool(message)
    assert refused > count // 3


POOLING_FILES = (
    "modules.json", "config_sentence_transformers.json", "1_Pooling/config.json", "2_Dense/config.json",
    "2_Dense/model.safetensors",
)  # fmt: skip


@pytest.mark.parametrize("name", POOLING_FILES)
def test_damaged_pooling_files_are_refused_or_read(tmp_path: Path, name: str) -> None:
    sentence_transformer(tmp_path, "pooling_mode_cls_token", has_dense=True)
    checkpoint = Checkpoint.open(tmp_path)
    sound = (tmp_path / name).read_bytes()

    def use(data: bytes) -> None:
        (tmp_path / name).write_bytes(data)
        pooling_files(tmp_path)
        make_pooling_head(tmp_path, checkpoint.config, checkpoint)

    use(sound)
    count = max(1, num_mutants(1000) // len(POOLING_FILES))
    assert count_refusals(12, count, sound, use) > count // 4


@pytest.mark.parametrize("method", FOLDERS)
def test_damaged_quantized_folders_are_refused_or_sound(tmp_path: Path, method: str) -> None:
    quantization, layer = FOLDERS[method]
    folder, _ = write_folders(tmp_path, quantization, partial(layer, np.random.default_rng(1)))
    weights, config = folder / "model.safetensors", folder / "config.json"
    files, rng, refused = {weights: weights.read_bytes(), config: config.read_bytes()}, random.Random(method), 0
    header_len = 8 + int.from_bytes(files[weights][:8], "little")
    count = max(1, num_mutants(300) // len(FOLDERS))
    for _ in range(count):
        changed = rng.choice([weights, config])
        if changed is weights:
            data = mutate(files[weights][:header_len], rng) + files[weights][header_len:]
        else:
            data = mutate(files[config], rng)
        changed.write_bytes(data)
        message = ""
        try:
            checkpoint = Checkpoint.open(folder)
            for name in checkpoint.tensors:
                if checkpoint.has_rows(name):
                    checkpoint.read_rows(name)
                elif checkpoint.block_scheme(name) is not None:
                    checkpoint.read_blocks(name)
        except PenstockError as error:
            message = str(error)
        assert message.isprintable()
        refused += bool(message)
        changed.write_bytes(files[changed])
    assert refused > count // 4


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.long) for name in GGUF_FAMILIES]
)
def test_damaged_gguf_files_of_a_family_are_refused_or_read(tmp_path: Path, name: str) -> None:
    family, path = GGUF_FAMILIES[name], tmp_path / "model.gguf"
    model = random_model(family)
    write_gguf(path, family.arch, gguf_arrays(family, model), eps_of(model) | dict(family.keys))
    sound = path.read_bytes()
    head = sound[: sound.rindex(b"blk.") + 256]

    def use(data: bytes) -> None:
        path.write_bytes(data + sound[len(head) :])
        checkpoint = Checkpoint.open(path)
        for tensor, info in checkpoint.tensors.items():
            assert checkpoint.read(tensor).nbytes == info.num_bytes
        checkpoint.side_files()
        find_network(checkpoint.config.str("model_type")).Config.read(checkpoint.config)

    use(head)
    count = max(1, num_mutants(5000) // len(GGUF_FAMILIES))
    assert count_refusals(13, count, head, use) > count // 3
