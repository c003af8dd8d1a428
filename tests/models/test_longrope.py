"""Longrope's long table against transformers, for texts beyond the context that the model was first trained with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from penstock import LLM
from tests.models.steps import relative_error
from tests.support.encoders import LIMITS, build
from tests.support.families import prompt

LATENT = {"q_lora_rank": 20, "kv_lora_rank": 24, "qk_nope_head_dim": 10, "qk_rope_head_dim": 16, "v_head_dim": 12}
NETWORKS: dict[str, dict[str, Any]] = {
    "phi3": {"original_max_position_embeddings": 32},
    "minicpm3": LATENT | {"num_key_value_heads": 5},
}


@pytest.mark.parametrize("name", NETWORKS)
def test_the_long_table_is_that_of_transformers(name: str, tmp_path: Path) -> None:
    rope: dict[str, Any] = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 32}
    rope |= {"short_factor": [1.0 + i for i in range(8)], "long_factor": [2.0 + 3 * i for i in range(8)]}
    model = build(transformers.AutoModelForCausalLM, name, rope_parameters=rope, **NETWORKS[name])
    model.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"planned_context_len": 96}))
    with torch.no_grad():
        expected = model(torch.tensor([prompt(70)])).logits[0].numpy()
    with LLM(tmp_path, mode="eager", limits=LIMITS) as llm:
        assert relative_error(llm.logits(prompt(70)), expected) < 1e-4
