"""Bare encoders and classifiers against transformers: vectors by the files of sentence-transformers, and logits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from penstock import LLM
from penstock.engine.options import RequestOptions
from penstock.errors import InvalidArgumentError, PenstockError, UnsupportedError
from penstock.runtime.program import ProgramLimits
from tests.models.steps import relative_error
from tests.support.errors import raises
from tests.support.families import prompt

LIMITS = ProgramLimits(96, 3, num_pages=16, context_len=96)
_SMALL: dict[str, Any] = {"vocab_size": 1003, "hidden_size": 80, "intermediate_size": 100, "num_hidden_layers": 2}
_SMALL |= {"num_attention_heads": 5, "num_key_value_heads": 5, "max_position_embeddings": 100, "pad_token_id": 0}
_SMALL |= {"initializer_range": 0.1}

BARE: dict[str, dict[str, Any]] = {
    "bert": {},
    "roberta": {},
    "xlm-roberta": {"type_vocab_size": 1},
    "modernbert": {"local_attention": 14},
    "qwen3": {"head_dim": 16},
}


def build(kind: type, model_type: str, **changes: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(model_type, **(_SMALL | changes))
    model = kind.from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.copy_((0.0 if name.endswith("bias") else 1.0) + 0.2 * torch.randn_like(parameter))
    return model


def hidden_rows(model: Any, ids: list[int]) -> np.ndarray:
    with torch.no_grad():
        rows: np.ndarray = (
            model(torch.tensor([ids]), attention_mask=torch.ones(1, len(ids))).last_hidden_state[0].numpy()
        )
    return rows


def write_tokenizer(folder: Path) -> None:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "the", "cat", "sat", "on", "mat", "##s", "query", ":"]
    tokenizer = Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))  # noqa: S106
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))


@pytest.mark.parametrize("name", BARE)
def test_embeddings_of_bare_models(name: str, tmp_path: Path) -> None:
    model = build(transformers.AutoModel, name, **BARE[name])
    model.save_pretrained(tmp_path)
    rows = hidden_rows(model, prompt(70))
    expected = {"mean": rows.mean(0), "auto": rows.mean(0), "cls": rows[0], "last": rows[-1], "max": rows.max(0)}
    with LLM(tmp_path, mode="eager", limits=LIMITS) as llm:
        for pooling, vector in expected.items():
            assert relative_error(llm.embed(prompt(70), pooling).vector, vector) < 1e-4
        with raises(UnsupportedError, param="model"):
            llm.generate(prompt(5), max_tokens=1)
        with raises(UnsupportedError, param="model"):
            llm.logits(prompt(5))


def sentence_transformer(folder: Path, mode: str, *, has_dense: bool) -> tuple[Any, dict[str, np.ndarray]]:
    """Write a BERT with the files of sentence-transformers, and return the model and the dense layer."""
    model = build(transformers.AutoModel, "bert")
    model.save_pretrained(folder)
    write_tokenizer(folder)
    random = np.random.default_rng(5)
    dense = {"linear.weight": random.normal(size=(30, 80)), "linear.bias": random.normal(size=30)}
    dense = {name: array.astype(np.float32) for name, array in dense.items()}
    modules = ["Transformer", "Pooling", *(["Dense"] if has_dense else []), "Normalize"]
    paths = ["", *(f"{i}_{kind}" for i, kind in enumerate(modules) if i)]
    listed = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (kind, path) in enumerate(zip(modules, paths, strict=True))
    ]
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "1_Pooling").mkdir()
    modes = {"word_embedding_dimension": 80, "pooling_mode_mean_tokens": False, mode: True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(modes))
    if has_dense:
        (folder / "2_Dense").mkdir()
        activation = "torch.nn.modules.activation.Tanh"
        sizes = {"in_features": 80, "out_features": 30, "bias": True, "activation_function": activation}
        (folder / "2_Dense" / "config.json").write_text(json.dumps(sizes))
        save_file(dense, folder / "2_Dense" / "model.safetensors")
    prompts = {"prompts": {"query": "query: ", "plain": ""}, "default_prompt_name": "query"}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    return model, dense


def test_files_of_sentence_transformers(tmp_path: Path) -> None:
    model, dense = sentence_transformer(tmp_path, "pooling_mode_cls_token", has_dense=True)
    query, plain = [2, 10, 11, 4, 5, 9, 3], [2, 4, 5, 9, 3]  # "query: the cats", "the cats"

    def vector(ids: list[int], dimensions: int = 30) -> np.ndarray:
        row = np.tanh(dense["linear.weight"] @ hidden_rows(model, ids)[0] + dense["linear.bias"])[:dimensions]
        unit: np.ndarray = row / np.linalg.norm(row)
        return unit

    with LLM(tmp_path, limits=LIMITS) as llm:
        assert llm.embed("The cats").token_ids == query
        assert relative_error(llm.embed("The cats").vector, vector(query)) < 1e-4
        for one, ids in zip(llm.embed(["the cats", plain], prompt_name="plain"), (plain, plain), strict=True):
            assert relative_error(one.vector, vector(ids)) < 1e-4
        assert relative_error(llm.embed(plain, dimensions=7).vector, vector(plain, 7)) < 1e-4
        assert relative_error(llm.embed(plain, "last").vector, hidden_rows(model, plain)[-1]) < 1e-4
        with raises(InvalidArgumentError, param="prompt_name", match=r"one of plain, query; got 'x'"):
            llm.embed("the", prompt_name="x")
        with raises(InvalidArgumentError, param="dimensions"):
            llm.embed(plain, dimensions=31)
        with raises(UnsupportedError, param="model"):
            llm.classify("the")


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "mode": ("1_Pooling/config.json", {"pooling_mode_weightedmean_tokens": True}, "pooling_mode_weightedmean_tokens"),
    "two": ("1_Pooling/config.json", {"pooling_mode_cls_token": True}, "pooling_mode_mean_tokens"),
    "prompt": ("1_Pooling/config.json", {"include_prompt": False}, "include_prompt"),
    "activation": ("2_Dense/config.json", {"activation_function": "torch.nn.modules.activation.Elu"}, ""),
    "sizes": ("2_Dense/config.json", {"out_features": 31}, "out_features"),
    "default": ("config_sentence_transformers.json", {"default_prompt_name": "none"}, "default_prompt_name"),
    "case": ("sentence_bert_config.json", {"do_lower_case": True}, "do_lower_case"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_other_files_are_refused_by_name(case: str, tmp_path: Path) -> None:
    sentence_transformer(tmp_path, "pooling_mode_mean_tokens", has_dense=True)
    name, changes, param = REFUSED[case]
    path = tmp_path / name
    path.write_text(json.dumps((json.loads(path.read_text()) if path.exists() else {}) | changes))
    with raises(PenstockError, param=param or "activation_function"):
        LLM(tmp_path, mode="eager", limits=LIMITS)


CLASSIFIERS: dict[str, dict[str, Any]] = {
    "bert": {"num_labels": 3},
    "roberta": {"num_labels": 2, "problem_type": "multi_label_classification"},
    "modernbert": {"num_labels": 1, "classifier_pooling": "mean", "norm_bias": True, "classifier_bias": True},
    "qwen3": {"num_labels": 2, "head_dim": 16},
}


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_classes_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    model = build(transformers.AutoModelForSequenceClassification, name, **CLASSIFIERS[name])
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        logits = model(torch.tensor([prompt(70)]), attention_mask=torch.ones(1, 70)).logits[0].double()
    is_apart = len(logits) == 1 or name == "roberta"
    scores = (logits.sigmoid() if is_apart else logits.softmax(0)).numpy()
    with LLM(tmp_path, mode="eager", limits=LIMITS) as llm:
        found = llm.classify([prompt(70), prompt(3)])[0]
        assert relative_error(found.logits, logits.numpy()) < 1e-4
        assert relative_error(found.scores, scores) < 1e-4
        assert found.label == f"LABEL_{scores.argmax()}"
        assert found.score == found.scores.max()
        with raises(UnsupportedError, param="embed"):
            llm.embed(prompt(3))


def test_documents_are_ranked(tmp_path: Path) -> None:
    model = build(transformers.AutoModelForSequenceClassification, "bert", num_labels=1)
    model.save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    query, documents = "the cat", ["the mats", "sat on the mat", "cats"]
    ends = [[4, 8, 9, 3], [6, 7, 4, 8, 3], [5, 9, 3]]
    expected = []
    for end in ends:
        ids, types = [2, 4, 5, 3, *end], [0] * 4 + [1] * len(end)
        with torch.no_grad():
            logit = model(torch.tensor([ids]), token_type_ids=torch.tensor([types])).logits[0, 0]
        expected.append(float(logit.sigmoid()))
    with LLM(tmp_path, limits=LIMITS) as llm:
        ranked = llm.rerank(query, documents)
        assert [one.index for one in ranked] == sorted(range(3), key=lambda i: -expected[i])
        for one in ranked:
            assert abs(one.score - expected[one.index]) < 1e-5
            assert one.document == documents[one.index]
        pair = llm.classify((query, documents[1]))
        assert abs(pair.score - expected[1]) < 1e-5
        assert [one.index for one in llm.rerank(query, documents, top_n=1)] == [ranked[0].index]
        long = "the " * 200
        with raises(InvalidArgumentError, param="prompt", match=r"prompts\[1\]: "):
            llm.rerank(query, ["the", long])
        cut = llm.rerank(query, [long], options=RequestOptions(truncate_prompt=True))
        assert (cut[0].num_tokens, cut[0].index) == (96, 0)
