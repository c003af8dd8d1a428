"""Folders that store a tied tensor under another name only, or twice: they are read as transformers reads them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from penstock import LLM
from penstock.checkpoint.folder import Checkpoint
from penstock.checkpoint.pooling.logit_score import token_layer
from penstock.checkpoint.quantize import quantize_checkpoint
from penstock.errors import InvalidFileError
from penstock.graph.export import export_bundle
from penstock.graph.strategy import capture_model, make_strategy
from penstock.models.gguf_out import write_gguf
from penstock.models.loader import load_network
from penstock.models.mapped import open_mapped
from penstock.sharding.folder import ShardedFolder
from penstock.sharding.source import open_whole
from penstock.sharding.write import merge_folder, shard_folder
from tests.support import families
from tests.support.errors import raises
from tests.support.invariant_checkpoints import write_checkpoint
from tests.support.sharded_folders import strategy_of

TENSORS = "model.safetensors"
_T5 = {"vocab_size": 90, "d_model": 16, "d_kv": 8, "d_ff": 20, "num_layers": 1, "num_heads": 2}
_BERT = {"vocab_size": 90, "hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 1, "num_attention_heads": 2}
_ENCODER, _DECODER = "encoder.embed_tokens.weight", "decoder.embed_tokens.weight"


def change(folder: Path, *, remove: str = "", **added: str | torch.Tensor) -> Path:
    """Add tensors, which may be copies of others, and remove one; names are written with __ for dots."""
    tensors = load_file(folder / TENSORS)
    for name, value in added.items():
        tensor = tensors[value] if isinstance(value, str) else value
        tensors[name.replace("__", ".")] = tensor.clone()
    tensors.pop(remove, None)
    save_file(tensors, folder / TENSORS, {"format": "pt"})
    return folder


def is_equal(first: torch.nn.Module, second: torch.nn.Module) -> bool:
    others = dict(second.named_parameters())
    return all(torch.equal(own, others.pop(name)) for name, own in first.named_parameters()) and not others


@pytest.mark.parametrize("name", ["llama_tied_one_kv_head", "gpt2", "bloom", "gemma2", "falcon_new", "lfm2"])
def test_an_embedding_that_is_missing_is_the_tied_head(name: str, tmp_path: Path) -> None:
    families.save(name, tmp_path)
    embedding = families.build(name)._tied_weights_keys["lm_head.weight"]
    expected = load_network(tmp_path)
    change(tmp_path, remove=embedding, lm_head__weight=embedding)
    assert is_equal(load_network(tmp_path), expected)
    assert is_equal(transformers.AutoModelForCausalLM.from_pretrained(tmp_path), families.build(name))
    mapped = open_mapped(tmp_path)
    assert not set(mapped.tensors) - mapped.redundant_names() - {name for name, _ in expected.named_parameters()}


@pytest.mark.parametrize("tie", [False, None])
def test_a_head_is_no_embedding_where_nothing_is_tied(tie: bool | None, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", tie_word_embeddings=False)
    config = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": tie}
    (folder / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    change(folder, remove="model.embed_tokens.weight")
    with raises(InvalidFileError, param="model.embed_tokens.weight"):
        load_network(folder)
    change(folder, remove="lm_head.weight", model__embed_tokens__weight="lm_head.weight")
    with raises(InvalidFileError, param="lm_head.weight"):  # transformers makes a random one
        load_network(folder)


def test_a_bare_model_has_no_head_to_take_the_embedding_from(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", tie_word_embeddings=True, architectures=["LlamaModel"])
    change(folder, remove="model.embed_tokens.weight", lm_head__weight="model.embed_tokens.weight")
    with raises(InvalidFileError, param="lm_head.weight"):
        load_network(folder)


def head_only(folder: Path) -> Path:
    write_checkpoint(folder, tie_word_embeddings=True)
    return change(folder, remove="model.embed_tokens.weight", lm_head__weight="model.embed_tokens.weight")


@pytest.mark.long
def test_a_folder_with_only_the_head_runs_and_is_converted(tmp_path: Path) -> None:
    whole, folder = write_checkpoint(tmp_path / "whole", tie_word_embeddings=True), head_only(tmp_path / "model")
    write_gguf(folder, tmp_path / "model.gguf", "f32", lambda *_: None)
    quantize_checkpoint(open_mapped(folder), tmp_path / "quantized", "w8a16")
    quantize_checkpoint(whole, tmp_path / "expected", "w8a16")
    assert (tmp_path / "quantized" / TENSORS).read_bytes() == (tmp_path / "expected" / TENSORS).read_bytes()
    shard_folder(folder, tmp_path / "ranks", strategy_of(folder, 2))
    assert ShardedFolder.open(tmp_path / "ranks").config.bool("tie_word_embeddings")
    merge_folder(tmp_path / "ranks", tmp_path / "merged")
    assert (tmp_path / "merged" / TENSORS).read_bytes() == (folder / TENSORS).read_bytes()

    def logprobs(path: Path, **options: int) -> list[float]:
        with LLM(path, use_cache=False, **options) as llm:  # type: ignore[arg-type]
            return [token.logprob for token in llm.score([3, 5, 8, 13]).logprobs if token is not None]

    expected = logprobs(whole)
    for path in (folder, tmp_path / "model.gguf"):
        assert logprobs(path) == expected
    assert np.allclose(logprobs(folder, tensor_parallel_size=2), expected, atol=1e-4)


def test_a_score_of_logits_reads_the_only_head(tmp_path: Path) -> None:
    whole, folder = write_checkpoint(tmp_path / "whole", tie_word_embeddings=True), head_only(tmp_path / "model")
    layers = [token_layer(stored.config, stored, 3, 5) for stored in map(Checkpoint.open, (whole, folder))]
    assert np.array_equal(layers[0].weight, layers[1].weight)


@pytest.mark.parametrize(
    "stored", [("lm_head.weight",), (_ENCODER,), (_DECODER, "lm_head.weight"), (_ENCODER, _DECODER)]
)
def test_the_table_of_t5_may_have_any_of_its_names(stored: tuple[str, ...], tmp_path: Path) -> None:
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**_T5))
    model.save_pretrained(tmp_path)
    expected = load_network(tmp_path)
    change(tmp_path, remove="shared.weight", **dict.fromkeys(stored, "shared.weight"))
    assert is_equal(load_network(tmp_path), expected)
    assert is_equal(transformers.T5ForConditionalGeneration.from_pretrained(tmp_path), model)


def test_a_second_table_of_t5_must_be_equal(tmp_path: Path) -> None:
    transformers.T5ForConditionalGeneration(transformers.T5Config(**_T5)).save_pretrained(tmp_path)
    assert load_network(change(tmp_path, encoder__embed_tokens__weight="shared.weight"))
    change(tmp_path, encoder__embed_tokens__weight=torch.ones(90, 16))
    with raises(InvalidFileError, param="encoder.embed_tokens.weight"):  # transformers does not tie it
        load_network(tmp_path)


def test_the_head_of_a_masked_language_model_is_its_embedding(tmp_path: Path) -> None:
    model = transformers.BertForMaskedLM(transformers.BertConfig(**_BERT))
    model.save_pretrained(tmp_path)
    expected = load_network(tmp_path)
    words = "bert.embeddings.word_embeddings.weight"
    change(tmp_path, remove=words, cls__predictions__decoder__weight=words)
    assert is_equal(load_network(tmp_path), expected)
    assert is_equal(transformers.BertForMaskedLM.from_pretrained(tmp_path), model)


@pytest.mark.parametrize(("kind", "head"), [("Bert", "cls__predictions"), ("Roberta", "lm_head")])
def test_the_bias_of_a_masked_head_may_have_either_name(kind: str, head: str, tmp_path: Path) -> None:
    model = getattr(transformers, f"{kind}ForMaskedLM")(getattr(transformers, f"{kind}Config")(**_BERT))
    own = f"{head.replace('__', '.')}.bias"
    torch.nn.init.normal_(dict(model.named_parameters())[own])
    model.save_pretrained(tmp_path)
    expected = load_network(tmp_path)
    change(tmp_path, remove=own, **{f"{head}__decoder__bias": own})
    assert is_equal(load_network(tmp_path), expected)
    assert is_equal(type(model).from_pretrained(tmp_path), model)


@pytest.mark.parametrize("name", ["gpt2", "gemma2", "bloom"])
def test_a_family_ties_without_the_key(name: str, tmp_path: Path) -> None:
    families.save(name, tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    assert values.pop("tie_word_embeddings", True)
    (tmp_path / "config.json").write_text(json.dumps(values))
    expected, embedding = load_network(tmp_path), families.build(name)._tied_weights_keys["lm_head.weight"]
    assert is_equal(load_network(change(tmp_path, lm_head__weight=embedding)), expected)
    assert is_equal(load_network(change(tmp_path, remove=embedding)), expected)


def test_an_equal_head_may_have_another_name(tmp_path: Path) -> None:
    config = transformers.GPTNeoXConfig(**_BERT, tie_word_embeddings=True)
    transformers.GPTNeoXForCausalLM(config).save_pretrained(tmp_path)
    expected = load_network(tmp_path)
    embedding = next(name for name in load_file(tmp_path / TENSORS) if name.endswith("embed_in.weight"))
    change(tmp_path, embed_out__weight=embedding)
    assert is_equal(load_network(tmp_path), expected)
    change(tmp_path, remove=embedding)
    assert is_equal(load_network(tmp_path), expected)


def shard(folder: Path, out: Path) -> ShardedFolder:
    shard_folder(folder, out, make_strategy(capture_model(open_whole(folder)), 2))
    return ShardedFolder.open(out)


@pytest.mark.parametrize("kind", ["GPT2", pytest.param("Gemma3", marks=pytest.mark.long)])
def test_ranks_of_a_folder_with_an_equal_head(kind: str, tmp_path: Path) -> None:
    if kind == "GPT2":
        config = transformers.GPT2Config(vocab_size=90, n_embd=16, n_inner=20, n_layer=1, n_head=2, n_positions=32)
        model = transformers.GPT2LMHeadModel(config)
    else:
        model = transformers.Gemma3ForCausalLM(
            transformers.Gemma3TextConfig(**_BERT, head_dim=8, num_key_value_heads=2)
        )
    model.save_pretrained(tmp_path / "model")
    embedding = model._tied_weights_keys["lm_head.weight"]
    cut = shard(change(tmp_path / "model", lm_head__weight=embedding), tmp_path / "cut")
    head = cut.strategy.parameters["lm_head.weight"]
    assert (head.cut, head.name) == ("same", embedding)
    assert "lm_head.weight" not in cut.rank(0).tensors
    assert export_bundle(cut.folder, tmp_path / "0.psm", rank=0).num_weights


@pytest.mark.parametrize("is_equal_to", [False, True])
def test_ranks_of_a_folder_whose_head_is_not_read(is_equal_to: bool, tmp_path: Path) -> None:
    transformers.BertModel(transformers.BertConfig(**_BERT)).save_pretrained(tmp_path / "model")
    words = "embeddings.word_embeddings.weight"
    head: str | torch.Tensor = words if is_equal_to else torch.ones(90, 16)
    cut = shard(change(tmp_path / "model", cls__predictions__decoder__weight=head), tmp_path / "cut")
    expected = ("same", words) if is_equal_to else ("owner", "")
    again = make_strategy(capture_model(cut), 1)
    for strategy in (cut.strategy, again):
        own = strategy.parameters["cls.predictions.decoder.weight"]
        assert (own.cut, own.name) == expected


def test_ranks_of_a_folder_with_another_head(tmp_path: Path) -> None:
    config = transformers.GPTNeoXConfig(**_BERT, tie_word_embeddings=True)
    transformers.GPTNeoXForCausalLM(config).save_pretrained(tmp_path / "model")
    change(tmp_path / "model", embed_out__weight=torch.ones(90, 16))
    cut = shard(tmp_path / "model", tmp_path / "cut")
    assert cut.strategy.parameters["embed_out.weight"].cut == "rows"
    assert not cut.config.bool("tie_word_embeddings")
    assert not cut.rank(0).config.bool("tie_word_embeddings")
