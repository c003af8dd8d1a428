"""Encoders against transformers in float32: the logits of each position, eager and as a graph."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from penstock import LLM
from penstock.errors import PenstockError
from penstock.runtime.program import ProgramLimits
from tests.models.steps import relative_error
from tests.support.encoders import DEBERTA_V3
from tests.support.errors import raises
from tests.support.families import prompt
from tests.support.marks import mostly_long

LIMITS = ProgramLimits(96, 3, num_pages=16, context_len=96)
_SMALL: dict[str, Any] = {"vocab_size": 1003, "hidden_size": 80, "intermediate_size": 100, "num_hidden_layers": 3}
_SMALL |= {"num_attention_heads": 5, "max_position_embeddings": 100, "initializer_range": 0.1}
_MODERNBERT_BIASES = {f"{place}_bias": True for place in ("norm", "attention", "mlp", "classifier")}
_MODERNBERT_BIASES |= {"decoder_bias": False, "tie_word_embeddings": False, "pad_token_id": 0, "local_attention": 7}

ENCODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("bert", {}),
    "bert_untied": ("bert", {"tie_word_embeddings": False, "type_vocab_size": 3}),
    "roberta": ("roberta", {"pad_token_id": 3}),
    "xlm-roberta": ("xlm-roberta", {"type_vocab_size": 1, "tie_word_embeddings": False}),
    "camembert": ("camembert", {"pad_token_id": 1}),
    "distilbert": ("distilbert", {"hidden_dim": 100}),
    "distilbert_untied": ("distilbert", {"hidden_dim": 90, "tie_word_embeddings": False}),
    "modernbert": ("modernbert", {"local_attention": 50, "num_hidden_layers": 4, "pad_token_id": 0}),
    "eurobert": ("eurobert", {"num_key_value_heads": 1, "pad_token_id": 0}),
    "mpnet": ("mpnet", {"num_hidden_layers": 2}),
    "mpnet_untied": ("mpnet", {"tie_word_embeddings": False}),
    "electra": ("electra", {"embedding_size": 40, "hidden_act": "gelu_new"}),
    "electra_wide": ("electra", {"embedding_size": 80, "tie_word_embeddings": False}),
    "albert": ("albert", {"embedding_size": 40, "num_hidden_groups": 2, "inner_group_num": 2}),
    "albert_one_group": ("albert", {"embedding_size": 100, "hidden_act": "gelu", "tie_word_embeddings": False}),
    "deberta-v2": ("deberta-v2", DEBERTA_V3),
    "deberta-v2_one": ("deberta-v2", {"relative_attention": True, "pos_att_type": "c2p", "max_relative_positions": 24}),
    "deberta-v2_apart": ("deberta-v2", DEBERTA_V3 | {"share_att_key": False, "position_biased_input": True}),
    "deberta-v2_p2c": ("deberta-v2", DEBERTA_V3 | {"pos_att_type": ["p2c"], "norm_rel_ebd": "none", "legacy": False}),
    "deberta-v2_conv": ("deberta-v2", DEBERTA_V3 | {"conv_kernel_size": 3, "conv_act": "gelu"}),
    "deberta-v2_wide_conv": ("deberta-v2", DEBERTA_V3 | {"conv_kernel_size": 5, "position_biased_input": True}),
    "modernbert_biases": ("modernbert", _MODERNBERT_BIASES),
}
QUICK = {row[0]: name for name, row in reversed(ENCODERS.items())}.values()
"""The first row of each model_type."""


def build(name: str) -> transformers.PreTrainedModel:
    model_type, changes = ENCODERS[name]
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(model_type, **(_SMALL | changes))
    model = transformers.AutoModelForMaskedLM.from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                shift = 0.0 if parameter_name.endswith("bias") else 1.0
                parameter.copy_(shift + 0.2 * torch.randn_like(parameter))
    return model


@pytest.mark.parametrize("name", mostly_long(ENCODERS, *QUICK))
def test_logits_match_transformers(name: str, tmp_path: Path) -> None:
    model = build(name)
    model.save_pretrained(tmp_path)
    for mode in ("graph", "eager"):
        with LLM(tmp_path, mode=mode, limits=LIMITS) as llm:
            for length in (1, 70, 96):
                ids = prompt(length)
                with torch.no_grad():
                    expected = model(torch.tensor([ids]), attention_mask=torch.ones(1, length)).logits[0].numpy()
                assert relative_error(llm.logits(ids), expected) < 1e-4


def test_a_convolution_reads_no_neighbour_of_a_batch(tmp_path: Path) -> None:
    """Requests of one step, one behind another, are what transformers computes of a batch with padding."""
    model = build("deberta-v2_conv")
    model.save_pretrained(tmp_path)
    lengths = (1, 5, 30, 2)
    ids, mask = torch.zeros(len(lengths), 30, dtype=torch.int64), torch.zeros(len(lengths), 30, dtype=torch.int64)
    for row, length in enumerate(lengths):
        ids[row, :length], mask[row, :length] = torch.tensor(prompt(length)) + row, 1
    with torch.no_grad():
        rows = model.deberta(ids, attention_mask=mask).last_hidden_state
    expected = [rows[row, :length].mean(0).numpy() for row, length in enumerate(lengths)]
    for mode in ("graph", "eager"):
        with LLM(tmp_path, mode=mode, limits=ProgramLimits(96, 4, num_pages=16, context_len=96)) as llm:
            found = llm.embed([ids[row, :length].tolist() for row, length in enumerate(lengths)], "mean")
            for own, row in zip(found, expected, strict=True):
                assert relative_error(own.vector, row) < 1e-4


@pytest.mark.parametrize(("key", "value"), [("conv_kernel_size", 4), ("conv_groups", 5), ("conv_act", "silu")])
def test_other_convolutions_are_refused_by_name(key: str, value: object, tmp_path: Path) -> None:
    build("deberta-v2_conv").save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    with raises(PenstockError, param=key):
        LLM(tmp_path, mode="eager", limits=LIMITS)


def test_a_kernel_of_another_size_is_refused(tmp_path: Path) -> None:
    build("deberta-v2_conv").save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"conv_kernel_size": 1}))
    with raises(PenstockError, param="deberta.encoder.conv.conv.weight", match="shape"):
        LLM(tmp_path, mode="eager", limits=LIMITS)


@pytest.mark.parametrize("kind", ["BertForMaskedLM", "BertForPreTraining", "BertModel"])
def test_norms_may_be_named_gamma_and_beta(kind: str, tmp_path: Path) -> None:
    """As in the first published models, such as bert-base-uncased, which have a table of positions in their files."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model("bert", **_SMALL)
    model = getattr(transformers, kind)(config).float().eval()
    model.save_pretrained(tmp_path)
    ends = (("LayerNorm.weight", "LayerNorm.gamma"), ("LayerNorm.bias", "LayerNorm.beta"))
    tensors = load_file(tmp_path / "model.safetensors")
    for own, other in ends:
        tensors = {name.replace(own, other): value for name, value in tensors.items()}
    prefix = "" if kind == "BertModel" else "bert."
    tensors[f"{prefix}embeddings.position_ids"] = torch.arange(100)[None]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with torch.no_grad():
        answer = model(torch.tensor([prompt(70)]), output_hidden_states=True)
    for mode in ("graph", "eager"):
        with LLM(tmp_path, mode=mode, limits=LIMITS) as llm:
            vector = answer.hidden_states[-1][0].mean(0).numpy()
            assert relative_error(llm.embed(prompt(70), "mean").vector, vector) < 1e-4
            if kind != "BertModel":
                logits = answer.logits if kind == "BertForMaskedLM" else answer.prediction_logits
                assert relative_error(llm.logits(prompt(70)), logits[0].numpy()) < 1e-4


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_act", "relu"),
        ("position_embedding_type", "relative_key"),
        ("is_decoder", True),
        ("architectures", ["BertForMultipleChoice"]),
        ("hidden_size", 81),
    ],
)
def test_other_values_are_refused_by_name(key: str, value: object, tmp_path: Path) -> None:
    build("bert").save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    with raises(PenstockError, param=key):
        LLM(tmp_path, mode="eager", limits=LIMITS)
