"""GGUF files of embedding models and rerankers have the vectors and the scores of the models they were made from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    BertConfig,
    BertModel,
    NomicBertConfig,
    NomicBertModel,
    PreTrainedModel,
    XLMRobertaConfig,
    XLMRobertaForSequenceClassification,
)

from penstock import LLM
from penstock.checkpoint.folder import Checkpoint
from penstock.errors import InvalidFileError, UnsupportedError
from tests.support.errors import raises
from tests.support.gguf_files import text_metadata
from tests.support.gguf_models import Family, gguf_arrays, random_model, write_gguf

ARCH = gguf.MODEL_ARCH.QWEN3
IDS = [3, 5, 7, 11, 13]
PROMPT = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n<Instruct>: Given a web search query, retrieve relevant passages that answer the query\n"
    "<Query>: {query}\n<Document>: {document}<|im_end|>\n"
    "<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
"""What llama.cpp's converter writes."""
RERANK = {"pooling_type": 4, "classifier.output_labels": ["yes", "no"], "tokenizer.chat_template.rerank": PROMPT}
FAMILY = Family("Qwen3", ARCH, {"tie_word_embeddings": True, "max_position_embeddings": 1024})


def save(path: Path, keys: dict[str, Any], answers: np.ndarray | None = None) -> PreTrainedModel:
    """Write a file of a random model, with the rows of the answers of a reranker; return the model."""
    model = random_model(FAMILY)
    arrays = gguf_arrays(FAMILY, model)
    if answers is not None:
        arrays["cls.output.weight"] = answers
    sizes = {"attention.layer_norm_rms_epsilon": model.config.rms_norm_eps, "context_length": 1024}
    write_gguf(path, ARCH, arrays, {**sizes, **text_metadata(), **keys})
    return model


def hidden_rows(model: PreTrainedModel, ids: list[int]) -> np.ndarray:
    with torch.no_grad():
        return model.model(torch.tensor([ids])).last_hidden_state[0].double().numpy()


def test_vectors_are_pooled_as_the_file_says(tmp_path: Path) -> None:
    for kind, pooled in ((1, lambda rows: rows.mean(0)), (2, lambda rows: rows[0]), (3, lambda rows: rows[-1])):
        path = tmp_path / f"{kind}.gguf"
        model = save(path, {"pooling_type": kind})
        expected = pooled(hidden_rows(model, IDS))
        with LLM(path, mode="eager") as llm:
            found = np.array(llm.embed(IDS).vector)
        assert np.abs(found - expected / np.linalg.norm(expected)).max() < 1e-5


GEMMA = Family(
    "Gemma3",
    gguf.MODEL_ARCH.GEMMA_EMBEDDING,
    {"sliding_window": 4, "query_pre_attn_scalar": 16, "layer_types": ["sliding_attention", "full_attention"],
     "use_bidirectional_attention": True},
    {"attention.sliding_window": 4, "rope.freq_base": 1e6, "attention.sliding_window_pattern": [True, False],
     "attention.layer_norm_rms_epsilon": 1e-6, "pooling_type": 1},
    plus=1.0,
)  # fmt: skip
DENSE = {"dense_2_feat_in": 64, "dense_2_feat_out": 96, "dense_3_feat_in": 96, "dense_3_feat_out": 64}


def save_gemma(path: Path, keys: dict[str, Any]) -> tuple[PreTrainedModel, list[np.ndarray]]:
    """Write the file of an EmbeddingGemma with its linears; return the model and the linears."""
    model, random = random_model(GEMMA), np.random.default_rng(3)
    linears = [random.normal(size=shape).astype(np.float32) for shape in ((96, 64), (64, 96))]
    arrays = gguf_arrays(GEMMA, model) | {"dense_2.weight": linears[0], "dense_3.weight": linears[1]}
    write_gguf(path, GEMMA.arch, arrays, {**GEMMA.keys, **keys, **text_metadata()})
    return model, linears


def test_an_embedding_gemma_gives_the_vectors_of_its_original(tmp_path: Path) -> None:
    ids = [*IDS, *range(20, 40)]
    model, linears = save_gemma(tmp_path / "model.gguf", DENSE)
    expected = linears[1] @ (linears[0] @ hidden_rows(model, ids).mean(0))
    with LLM(tmp_path / "model.gguf", mode="eager") as llm:
        found = np.array(llm.embed(ids).vector)
    assert np.abs(found - expected / np.linalg.norm(expected)).max() < 1e-5


@pytest.mark.parametrize(
    ("keys", "field", "message"),
    [
        ({"dense_3_feat_out": 63}, "gemma-embedding.dense_3_feat_out", r"expected 64, as dense_3\.weight has, got 63"),
        (
            {"pooling_type": 0},
            "gemma-embedding.pooling_type",
            r"expected 1 \(mean\), 2 \(cls\) or 3 \(last\) beside dense_2",
        ),
    ],
)
def test_linears_of_the_head_are_checked(tmp_path: Path, keys: dict[str, Any], field: str, message: str) -> None:
    save_gemma(tmp_path / "model.gguf", keys)
    with raises(InvalidFileError, param=field, match=message):
        Checkpoint.open(tmp_path / "model.gguf").side_files()


def test_a_reranker_scores_the_answer_yes(tmp_path: Path) -> None:
    answers = np.random.default_rng(1).normal(size=(2, 64)).astype(np.float32)
    path = tmp_path / "model.gguf"
    model, documents = save(path, RERANK, answers), ["ab", "b a b", "aab"]
    made = Checkpoint.open(path).made_files
    assert made is not None
    assert made.names() == list(made.make())
    with LLM(path, mode="eager") as llm:
        ranked = {found.index: found.score for found in llm.rerank("a", documents)}
        for index, document in enumerate(documents):
            prompt = PROMPT.replace("{query}", "a").replace("{document}", document)
            logits = answers @ hidden_rows(model, llm.tokenizer.encode(prompt, add_special_tokens=False))[-1]
            assert abs(ranked[index] - 1 / (1 + np.exp(logits[1] - logits[0]))) < 1e-5


@pytest.mark.parametrize(
    ("change", "answers", "param", "error"),
    [
        ({"pooling_type": 7}, 2, "qwen3.pooling_type", UnsupportedError),
        ({"classifier.output_labels": ["no", "yes"]}, 2, "qwen3.classifier.output_labels", UnsupportedError),
        ({"tokenizer.chat_template.rerank": "{query}"}, 2, "tokenizer.chat_template.rerank", UnsupportedError),
        ({}, 3, "cls.output.weight", InvalidFileError),
        ({}, None, "cls.output.weight", InvalidFileError),
    ],
)
def test_other_heads_are_refused(
    tmp_path: Path, change: dict[str, Any], answers: int | None, param: str | None, error: type[Exception]
) -> None:
    rows = None if answers is None else np.zeros((answers, 64), np.float32)
    save(tmp_path / "model.gguf", RERANK | change, rows)
    with raises(error, param=param):
        Checkpoint.open(tmp_path / "model.gguf").side_files()


def save_encoder(path: Path, model: PreTrainedModel, keys: dict[str, Any], skipped: int = 0) -> None:
    """Write the file of a BERT, or of a RoBERTa whose first ``skipped`` positions are those of padding."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.2 + ("LayerNorm.weight" in name))
    names, arrays = gguf.get_tensor_name_map(gguf.MODEL_ARCH.BERT, 2), {}
    for key, tensor in model.state_dict().items():
        plain = key.removeprefix("roberta.")
        if not plain.startswith("pooler."):
            array = tensor.numpy()[skipped:] if plain.startswith("embeddings.position") else tensor.numpy()
            arrays[names.get_name(plain, (".weight", ".bias"))] = array
    write_encoder(path, "bert", arrays, keys)


def write_encoder(path: Path, arch: str, arrays: dict[str, np.ndarray], keys: dict[str, Any]) -> None:
    """Write a file of the sizes in ENCODER."""
    writer = gguf.GGUFWriter(path, arch)
    sizes = {"block_count": 2, "context_length": 40, "embedding_length": 64, "feed_forward_length": 96,
             "attention.head_count": 4, "attention.layer_norm_epsilon": 1e-5, "attention.causal": False}  # fmt: skip
    kinds = {int: writer.add_uint32, float: writer.add_float32, bool: writer.add_bool, list: writer.add_array}
    for key, value in (sizes | keys).items():
        kinds[type(value)](f"{arch}.{key}", value)
    for name, array in arrays.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


ENCODER = {"vocab_size": 90, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
           "num_attention_heads": 4, "layer_norm_eps": 1e-5}  # fmt: skip


def test_a_bert_gives_the_vectors_of_its_original(tmp_path: Path) -> None:
    torch.manual_seed(3)
    model = BertModel(BertConfig(**ENCODER, max_position_embeddings=40)).eval()
    save_encoder(tmp_path / "model.gguf", model, {"pooling_type": 2})
    with torch.no_grad():
        expected = model(torch.tensor([IDS])).last_hidden_state[0, 0].numpy()
    with LLM(tmp_path / "model.gguf", mode="eager") as llm:
        found = llm.embed(IDS).vector
    assert np.abs(found - expected / np.linalg.norm(expected)).max() < 1e-5


def test_a_roberta_scores_as_its_original(tmp_path: Path) -> None:
    torch.manual_seed(4)
    config = XLMRobertaConfig(**ENCODER, max_position_embeddings=42, type_vocab_size=1, num_labels=1, pad_token_id=1)
    model = XLMRobertaForSequenceClassification(config).eval()
    save_encoder(tmp_path / "model.gguf", model, {"pooling_type": 4}, skipped=2)
    with torch.no_grad():
        expected = torch.sigmoid(model(torch.tensor([IDS])).logits[0]).numpy()
    with LLM(tmp_path / "model.gguf", mode="eager") as llm:
        found = llm.classify(IDS)
    assert np.abs(found.scores - expected).max() < 1e-5


def test_a_nomic_bert_gives_the_vectors_of_its_original(tmp_path: Path) -> None:
    torch.manual_seed(5)
    config = NomicBertConfig(**ENCODER, max_position_embeddings=40, rope_parameters={"rope_type": "default",
                             "rope_theta": 1e3})  # fmt: skip
    model, path = NomicBertModel(config).eval(), tmp_path / "model.gguf"
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.2 + ("norm" in name.lower() and name.endswith("weight")))
    model.save_pretrained(tmp_path / "folder")
    names, arrays = gguf.get_tensor_name_map(gguf.MODEL_ARCH.NOMIC_BERT, 2), {}
    for key, tensor in load_file(tmp_path / "folder" / "model.safetensors").items():
        if not key.startswith("pooler."):
            arrays[names.get_name(key, (".weight", ".bias"))] = tensor.numpy()
    keys = {"attention.causal": False, "attention.layer_norm_epsilon": 1e-5, "pooling_type": 1, "rope.freq_base": 1e3,
            "context_length": 40}  # fmt: skip
    write_encoder(path, "nomic-bert", arrays, keys)
    with torch.no_grad():
        expected = model(torch.tensor([IDS])).last_hidden_state[0].mean(0).numpy()
    with LLM(path, mode="eager") as llm:
        found = llm.embed(IDS).vector
    assert np.abs(found - expected / np.linalg.norm(expected)).max() < 1e-5


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"pooling_type": 4}, "expected a matrix cls.weight, got none"),
        ({"rope.freq_base": 1e4}, "bert.rope.freq_base is not supported"),
        ({"attention.causal": True}, "bert.attention.causal: expected false"),
    ],
)
def test_encoders_that_are_not_exact_are_refused(tmp_path: Path, keys: dict[str, Any], message: str) -> None:
    model = BertModel(BertConfig(**ENCODER, max_position_embeddings=40))
    save_encoder(tmp_path / "model.gguf", model, keys)
    with pytest.raises((InvalidFileError, UnsupportedError), match=message):
        Checkpoint.open(tmp_path / "model.gguf").side_files()
