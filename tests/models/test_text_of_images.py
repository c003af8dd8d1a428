"""Folders whose model reads images too: the text of Gemma 3 runs, in the names of its releases."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import save_file

from penstock.config import ConfigReader
from penstock.errors import InvalidFileError
from penstock.hub.memory_need import ModelShape
from penstock.models.mapped import open_mapped
from penstock.models.registry import find_network
from penstock.runtime.eager import EagerProgram
from penstock.runtime.program import ProgramLimits
from tests.models.steps import relative_error, run_whole
from tests.support.errors import raises
from tests.support.families import prompt

TEXT = {
    "vocab_size": 1003, "hidden_size": 160, "intermediate_size": 200, "num_hidden_layers": 3, "head_dim": 24,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "sliding_window": 20,
    "sliding_window_pattern": 3, "query_pre_attn_scalar": 20, "rope_scaling": {"rope_type": "linear", "factor": 8.0},
}  # fmt: skip
IMAGES = {"hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 1, "num_attention_heads": 2,
          "image_size": 28, "patch_size": 14}  # fmt: skip
LIMITS = ProgramLimits(64, 1, 64, 4, 128)
NAMES = {
    "first release": (("model.language_model.", "language_model.model."), ("model.vision_tower.", "vision_tower."),
                      ("model.multi_modal_projector.", "multi_modal_projector.")),
    "transformers 5": (),
}  # fmt: skip


def network_of(tied: bool) -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    text = {**TEXT, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "tie_word_embeddings": tied,
            "rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}}  # fmt: skip
    config = transformers.Gemma3Config(
        text_config=text, vision_config=IMAGES, mm_tokens_per_image=4, tie_word_embeddings=tied
    )
    network = transformers.Gemma3ForConditionalGeneration(config).float().eval()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.1)
    return network


@pytest.mark.parametrize(("names", "tied"), [("first release", True), ("first release", False),
                                             ("transformers 5", True)])  # fmt: skip
def test_a_folder_of_gemma_3_is_read_for_text(names: str, tied: bool, tmp_path: Path) -> None:
    network = network_of(tied)
    tensors = dict(network.state_dict())
    head = tensors.pop("lm_head.weight")
    for own, stored in NAMES[names]:
        tensors = {name.replace(own, stored, 1) if name.startswith(own) else name: t for name, t in tensors.items()}
    if not tied:
        tensors["language_model.lm_head.weight"] = head
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    config = {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"], "text_config": TEXT,
              "vision_config": IMAGES, "tie_word_embeddings": tied}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    token_ids = prompt(40)
    with torch.no_grad():
        expected = network(input_ids=torch.tensor([token_ids])).logits[0].numpy()
    program = EagerProgram(tmp_path, threads=1, limits=LIMITS)
    assert relative_error(run_whole(program, token_ids), expected) < 1e-4
    program.close()
    unread = open_mapped(tmp_path).redundant_names()
    assert any("vision_tower" in name for name in unread)
    assert all("vision_tower" in name or "multi_modal_projector" in name for name in unread)


def test_missing_sizes_are_those_of_transformers() -> None:
    published = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024,
                 "model_type": "gemma3_text", "rope_scaling": {"factor": 8.0, "rope_type": "linear"}}  # fmt: skip
    reader = ConfigReader({"model_type": "gemma3", "text_config": published, "dtype": "bfloat16"})
    own, theirs = find_network("gemma3").Config.read(reader), transformers.Gemma3TextConfig(**published)
    assert own.vocab_size == theirs.vocab_size
    assert own.context_len == theirs.max_position_embeddings
    sizes = (own.decoder.num_heads, own.decoder.num_kv_heads, own.decoder.head_dim, own.score_divisor)
    assert sizes == (
        theirs.num_attention_heads, theirs.num_key_value_heads, theirs.head_dim, theirs.query_pre_attn_scalar
    )  # fmt: skip
    assert [window > 0 for window in own.decoder.windows] == [kind[0] == "s" for kind in theirs.layer_types]
    assert ModelShape.of(reader, 1 << 30).num_kv_heads == 4


def test_a_folder_without_text_config_is_refused() -> None:
    with raises(InvalidFileError, param="text_config"):
        find_network("gemma3").Config.read(ConfigReader({"model_type": "gemma3"}))
