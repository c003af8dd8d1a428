"""Bare encoders and classifiers against transformers: vectors by the files of sentence-transformers, and logits."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import save_file

from penstock import LLM, AsyncLLM
from penstock.checkpoint.convert import Conversion
from penstock.checkpoint.folder import Checkpoint
from penstock.checkpoint.pooling.head import POOLING_FILE, read_pooling_head
from penstock.engine.options import RequestOptions
from penstock.errors import InvalidArgumentError, InvalidFileError, PenstockError, UnsupportedError
from penstock.llm.embed import embed
from penstock.runtime.convert import convert
from penstock.sharding.folder import ShardedFolder
from penstock.sharding.write import merge_folder, shard_folder
from tests.models.steps import relative_error
from tests.support.encoders import DEBERTA_V3, LIMITS, build, hidden_rows, sentence_transformer, write_tokenizer
from tests.support.errors import raises
from tests.support.families import prompt
from tests.support.marks import mostly_long
from tests.support.sharded_folders import strategy_of

BARE: dict[str, dict[str, Any]] = {
    "albert": {"embedding_size": 40},
    "deberta-v2": DEBERTA_V3,
    "electra": {"embedding_size": 40},
    "mpnet": {},
    "bert": {},
    "roberta": {},
    "xlm-roberta": {"type_vocab_size": 1},
    "modernbert": {"local_attention": 14},
    "qwen3": {"head_dim": 16},
    "eurobert": {"bos_token_id": 1, "eos_token_id": 2},
    "nomic_bert": {"layer_norm_eps": 1e-12},
    "gemma3_text": {
        "use_bidirectional_attention": True,
        "sliding_window": 60,  # 31 after it is saved, and 16 when it is read
        "layer_types": ["sliding_attention", "full_attention"],
        "head_dim": 16,
    },
}


@pytest.mark.parametrize("name", BARE)
def test_embeddings_of_bare_models(name: str, tmp_path: Path) -> None:
    build(transformers.AutoModel, name, **BARE[name]).save_pretrained(tmp_path)
    model = transformers.AutoModel.from_pretrained(tmp_path, attn_implementation="eager")
    rows = hidden_rows(model, prompt(70))
    expected = {"mean": rows.mean(0), "auto": rows.mean(0), "cls": rows[0], "last": rows[-1], "max": rows.max(0)}
    with LLM(tmp_path, mode="eager", limits=LIMITS) as llm:
        for pooling, vector in expected.items():
            assert relative_error(llm.embed(prompt(70), pooling).vector, vector) < 1e-4
        with raises(UnsupportedError, param="model"):
            llm.generate(prompt(5), max_tokens=1)
        with raises(UnsupportedError, param="model"):
            llm.logits(prompt(5))


@pytest.mark.long
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
        with raises(InvalidArgumentError, param="prompt_name", match=r"one of plain, query, got 'x'"):
            llm.embed("the", prompt_name="x")
        with raises(InvalidArgumentError, param="dimensions"):
            llm.embed(plain, dimensions=31)
        with raises(UnsupportedError, param="model"):
            llm.classify("the")


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "mode": ("1_Pooling/config.json", {"pooling_mode_weightedmean_tokens": True}, "pooling_mode_weightedmean_tokens"),
    "unprintable": ("1_Pooling/config.json", {"pooling_mode_\n": True}, "pooling_mode_\\n"),
    "two": ("1_Pooling/config.json", {"pooling_mode_cls_token": True}, "pooling_mode_mean_tokens"),
    "prompt": ("1_Pooling/config.json", {"include_prompt": False}, "include_prompt"),
    "activation": ("2_Dense/config.json", {"activation_function": "torch.nn.modules.activation.Elu"}, ""),
    "sizes": ("2_Dense/config.json", {"out_features": 31}, "out_features"),
    "default": ("config_sentence_transformers.json", {"default_prompt_name": "none"}, "default_prompt_name"),
    "case": ("sentence_bert_config.json", {"do_lower_case": 1}, "do_lower_case"),
    "length": ("sentence_bert_config.json", {"max_seq_length": 0}, "max_seq_length"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_other_files_are_refused_by_name(case: str, tmp_path: Path) -> None:
    sentence_transformer(tmp_path, "pooling_mode_mean_tokens", has_dense=True)
    name, changes, param = REFUSED[case]
    path = tmp_path / name
    path.write_text(json.dumps((json.loads(path.read_text()) if path.exists() else {}) | changes))
    with raises(PenstockError, param=param or "activation_function"):
        LLM(tmp_path, mode="eager", limits=LIMITS)


def test_texts_are_cut_and_lowercased(tmp_path: Path) -> None:
    model, _ = sentence_transformer(tmp_path, "pooling_mode_mean_tokens", has_dense=False)
    path = tmp_path / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    path.write_text(json.dumps(tokenizer | {"normalizer": None}))
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 5, "do_lower_case": True}))
    with LLM(tmp_path, mode="eager", limits=LIMITS) as llm:
        one = llm.embed("THE Cat sat on the mat " * 20, prompt_name="plain")
        assert one.token_ids == [2, 4, 5, 6, 3]  # [CLS] the cat sat [SEP]
        row = hidden_rows(model, one.token_ids).mean(0)
        assert relative_error(one.vector, row / np.linalg.norm(row)) < 1e-4
        assert llm.embed("the", prompt_name="plain").token_ids == [2, 4, 3]
        assert llm.embed([4] * 9).token_ids == [4] * 9
    (tmp_path / "sentence_bert_config.json").write_text("{}")
    for limit, length in ((7, 7), (10**30, 12)):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"model_max_length": limit}))
        with LLM(tmp_path, mode="eager", limits=LIMITS) as llm:
            assert len(llm.embed("the " * 10, prompt_name="plain").token_ids) == length


@pytest.mark.parametrize("kind", ["roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet"])
def test_the_file_that_cuts_texts_has_seven_names(kind: str, tmp_path: Path) -> None:
    """As in sentence-transformers, which takes the first; a bundle made before the file changes is not used again."""
    sentence_transformer(tmp_path, "pooling_mode_mean_tokens", has_dense=False)
    (tmp_path / f"sentence_{kind}_config.json").write_text(json.dumps({"max_seq_length": 5}))
    checkpoint = Checkpoint.open(tmp_path)
    head = read_pooling_head(checkpoint.side_files())
    assert head is not None
    assert head.max_text_len == 5
    assert f"sentence_{kind}_config.json" in {stamp.name for stamp in checkpoint.files}
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 7}))
    head = read_pooling_head(Checkpoint.open(tmp_path).side_files())
    assert head is not None
    assert head.max_text_len == 7


def move_first_module(folder: Path, names: tuple[str, ...]) -> list[dict[str, Any]]:
    """Give the model of a folder of sentence-transformers a folder of its own; return the modules."""
    own = folder / "0_Transformer"
    own.mkdir()
    for name in names:
        (folder / name).rename(own / name)
    modules: list[dict[str, Any]] = json.loads((folder / "modules.json").read_text())
    modules[0]["path"] = own.name
    (folder / "modules.json").write_text(json.dumps(modules))
    return modules


def test_copies_of_a_folder_whose_first_module_has_its_own(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    sentence_transformer(source, "pooling_mode_mean_tokens", has_dense=True)
    (source / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 5}))
    strategy = strategy_of(source, 2)
    names = ("config.json", "model.safetensors", "tokenizer.json", "sentence_bert_config.json")
    move_first_module(source, names)
    original = Checkpoint.open(source)
    convert(source, tmp_path / "converted", Conversion(dtype="bf16"))
    shard_folder(source, tmp_path / "cut", strategy)
    merge_folder(tmp_path / "cut", tmp_path / "merged")
    head = original.side_files()[POOLING_FILE]
    assert ShardedFolder.open(tmp_path / "cut").rank(1).side_files()[POOLING_FILE] == head
    for name, dtypes in (("converted", {"bf16"}), ("merged", {"f32"})):
        copy = Checkpoint.open(tmp_path / name)
        assert {info.dtype for info in copy.tensors.values() if info.dtype != "i64"} == dtypes
        assert copy.side_files()[POOLING_FILE] == head
        assert not (tmp_path / name / "0_Transformer").exists()


def test_an_adapter_is_added_to_the_first_module(tmp_path: Path) -> None:
    """Also to one with pickled weights, which become safetensors on the way."""
    source, adapter = tmp_path / "source", tmp_path / "adapter"
    source.mkdir()
    model, _ = sentence_transformer(source, "pooling_mode_mean_tokens", has_dense=True)
    names = ("config.json", "model.safetensors", "tokenizer.json")
    move_first_module(source, names)
    original = Checkpoint.open(source)
    name = next(name for name in original.tensors if name.endswith("layer.0.attention.self.query.weight"))
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 1, "lora_alpha": 1}))
    rows, columns = original.tensors[name].shape
    module = f"base_model.model.{name.removesuffix('.weight')}"
    pair = {"A": np.full((1, columns), 0.5, np.float32), "B": np.full((rows, 1), 0.25, np.float32)}
    save_file(
        {f"{module}.lora_{kind}.weight": array for kind, array in pair.items()}, adapter / "adapter_model.safetensors"
    )
    expected = original.read(name) + np.float32(0.125)
    for form in ("safetensors", "pickled"):
        if form == "pickled":
            (source / "0_Transformer" / "model.safetensors").unlink()
            torch.save(model.state_dict(), source / "0_Transformer" / "pytorch_model.bin")
        assert convert(source, tmp_path / form, Conversion(lora=adapter)).num_changed == 1
        copy = Checkpoint.open(tmp_path / form)
        assert np.array_equal(copy.read(name), expected)
        assert (tmp_path / form / "config.json").exists()
        assert copy.side_files()[POOLING_FILE] == original.side_files()[POOLING_FILE]


def test_the_first_module_may_have_its_own_folder(tmp_path: Path) -> None:
    plain, moved = tmp_path / "plain", tmp_path / "moved"
    for folder in (plain, moved):
        folder.mkdir()
        sentence_transformer(folder, "pooling_mode_mean_tokens", has_dense=True)
        (folder / "sentence_xlm-roberta_config.json").write_text(json.dumps({"max_seq_length": 5}))
    names = ("config.json", "model.safetensors", "tokenizer.json", "sentence_xlm-roberta_config.json")
    modules = move_first_module(moved, names)
    vectors = []
    for folder in (plain, moved):
        with LLM(folder, mode="eager", limits=LIMITS) as llm:
            vectors.append(llm.embed("the cat sat on the mat " * 20, prompt_name="plain").vector)
    assert np.array_equal(*vectors)
    stamps = {stamp.name for stamp in Checkpoint.open(moved).files}
    assert {f"0_Transformer/{name}" for name in names} <= stamps
    modules[0]["path"] = "../plain"
    (moved / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(InvalidFileError):
        Checkpoint.open(moved)


CLASSIFIERS: dict[str, dict[str, Any]] = {
    "albert": {"num_labels": 3, "embedding_size": 40},
    "deberta-v2": {"num_labels": 3, **DEBERTA_V3},
    "electra": {"num_labels": 3, "embedding_size": 40},
    "mpnet": {"num_labels": 2},
    "bert": {"num_labels": 3},
    "camembert": {"num_labels": 3},
    "distilbert": {"num_labels": 3},
    "roberta": {"num_labels": 2, "problem_type": "multi_label_classification"},
    "modernbert": {"num_labels": 1, "classifier_pooling": "mean", "norm_bias": True, "classifier_bias": True},
    "qwen3": {"num_labels": 2, "head_dim": 16},
    "eurobert": {"num_labels": 3, "bos_token_id": 1, "eos_token_id": 2, "classifier_pooling": "late"},
}


TOKEN_CLASSIFIERS: dict[str, dict[str, Any]] = {
    "albert": {"embedding_size": 40},
    "bert": {},
    "camembert": {"pad_token_id": 1},
    "deberta-v2": DEBERTA_V3,
    "distilbert": {},
    "electra": {"embedding_size": 40},
    "mpnet": {},
    "roberta": {},
    "modernbert": {"norm_bias": True, "classifier_bias": True, "classifier_pooling": "mean"},
}


@pytest.mark.parametrize("name", mostly_long(TOKEN_CLASSIFIERS, "bert", "albert", "modernbert"))
def test_logits_of_tokens_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    for kind, labels in (("TokenClassification", 5), ("QuestionAnswering", 2)):
        folder = tmp_path / kind
        model = build(getattr(transformers, f"AutoModelFor{kind}"), name, num_labels=labels, **TOKEN_CLASSIFIERS[name])
        model.save_pretrained(folder)
        with torch.no_grad():
            found = model(torch.tensor([prompt(70)]), attention_mask=torch.ones(1, 70))
        pair = (found["start_logits"], found["end_logits"]) if labels == 2 else ()
        logits = torch.stack(pair, -1)[0] if pair else found.logits[0]
        with LLM(folder, mode="eager", limits=LIMITS) as llm:
            for short in (prompt(70), prompt(3)):
                rows = embed(llm.engine, [short], "auto", None)[0].vector
                assert rows.shape == (len(short), labels)
                if len(short) == 70:
                    assert relative_error(rows, logits.numpy()) < 1e-4
            with raises(UnsupportedError, param="model"):
                llm.classify(prompt(3))


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


def test_eurobert_pools_as_its_config_says(tmp_path: Path) -> None:
    options = {"num_labels": 2, "bos_token_id": 1, "eos_token_id": 2}
    model = build(transformers.AutoModelForSequenceClassification, "eurobert", **options)
    model.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    del config["classifier_pooling"]
    for pooling in ("bos", "mean"):
        model.classifier_pooling = pooling
        with torch.no_grad():
            logits = model(torch.tensor([prompt(20)])).logits[0].numpy()
        path.write_text(json.dumps(config | {"clf_pooling": pooling}))
        with LLM(tmp_path, mode="eager", limits=LIMITS) as llm:
            assert relative_error(llm.classify(prompt(20)).logits, logits) < 1e-4
    for values in ({"clf_pooling": "max"}, {"clf_pooling": "bos", "classifier_pooling": "late"}):
        path.write_text(json.dumps(config | values))
        with raises(PenstockError, param="clf_pooling"):
            LLM(tmp_path, mode="eager", limits=LIMITS)


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

        async def ask() -> tuple[Any, Any]:
            async with AsyncLLM(llm) as front:
                return await front.rerank(query, documents), await front.classify((query, documents[1]))

        again, same = asyncio.run(ask())
        assert again == ranked
        assert same.score == pair.score
    with LLM(tmp_path, limits=LIMITS) as llm:
        long = "the " * 200
        with raises(InvalidArgumentError, param="prompt", match=r"prompts\[1\]: "):
            llm.rerank(query, ["the", long])
        cut = llm.rerank(query, [long], options=RequestOptions(truncate_prompt=True))
        assert (cut[0].num_tokens, cut[0].index) == (96, 0)
