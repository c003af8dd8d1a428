"""Adapters in peft's layout: what would be merged to something else is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from penstock.checkpoint.lora import Adapter
from penstock.errors import InvalidFileError, UnsupportedError
from tests.support.errors import raises

NAME = "base_model.model.a.lora_{}.weight"


def write(folder: Path, **config: Any) -> Path:
    """Write an adapter of rank 2 of the matrix a.weight [3, 4]."""
    values = {"peft_type": "LORA", "r": 2, "lora_alpha": 2}
    (folder / "adapter_config.json").write_text(json.dumps(values | config))
    tensors = {NAME.format("A"): np.ones((2, 4), np.float32), NAME.format("B"): np.ones((3, 2), np.float32)}
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("key", "value"),
    [("alora_invocation_tokens", [1, 2]), ("layer_replication", [[0, 2], [1, 3]]), ("arrow_config", {"top_k": 2}),
     ("scaled_by", 2), ("a_key_of_later", True), ("init_lora_weights", "pissa"), ("init_lora_weights", "olora")],
)  # fmt: skip
def test_a_key_that_changes_the_sum_is_refused(key: str, value: object, tmp_path: Path) -> None:
    with raises(UnsupportedError, param=key):
        Adapter.open(write(tmp_path, **{key: value}))


def test_keys_that_say_nothing_are_no_errors(tmp_path: Path) -> None:
    """Also those that say how an adapter is trained."""
    empty = {f"key_{i}": value for i, value in enumerate((None, False, [], {}, "", 0))}
    trained = {"alora_invocation_tokens": None, "layer_replication": None, "lora_dropout": 0.1, "qalora_group_size": 16,
               "init_lora_weights": "gaussian", "target_modules": ["a"], "bias": "none", "peft_version": "0.18.0",
               "runtime_config": {"ephemeral_gpu_offload": False}, "auto_mapping": {"unsloth_fixed": True},
               "layers_to_transform": [0], "task_type": "CAUSAL_LM", "inference_mode": True}  # fmt: skip
    assert "a.weight" in Adapter.open(write(tmp_path, **empty, **trained))


LAYER = "base_model.model.model.layers.3.mlp.up_proj.lora_{}.weight"


@pytest.mark.parametrize(
    ("key", "wrong", "right"),
    [("target_modules", ["v_proj", "p_proj"], ["v_proj", "up_proj"]), ("exclude_modules", ["mlp.up_proj"], ["proj"]),
     ("layers_to_transform", [0, 1], [3]), ("layers_to_transform", 1, 3), ("target_modules", ["proj"], ".*proj")],
)  # fmt: skip
def test_matrices_that_peft_leaves_out_are_refused(key: str, wrong: object, right: object, tmp_path: Path) -> None:
    targets = {"target_modules": ["up_proj"]}
    write(tmp_path, **targets | {key: wrong})
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    tensors = {LAYER.format(kind): tensors[NAME.format(kind)] for kind in "AB"}
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    with raises(InvalidFileError, param=key):
        Adapter.open(tmp_path)
    values = {"r": 2, "lora_alpha": 2, **targets, key: right}
    (tmp_path / "adapter_config.json").write_text(json.dumps(values))
    assert "model.layers.3.mlp.up_proj.weight" in Adapter.open(tmp_path)


def test_a_matrix_with_two_names_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path) / "adapter_model.safetensors"
    tensors = load_file(path)
    save_file(tensors | {NAME.format("A.default"): 2 * tensors[NAME.format("A")]}, path)
    with raises(InvalidFileError, param="a", match="lora_A once"):
        Adapter.open(tmp_path)


def test_a_sum_that_overflows_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path) / "adapter_model.safetensors"
    save_file({name: np.full_like(array, 1e30) for name, array in load_file(path).items()}, path)
    with raises(InvalidFileError, param="a.weight"):
        Adapter.open(tmp_path).add("a.weight", np.zeros((3, 4), np.float32), 0)
