"""Causal rerankers against transformers: the probability of "yes" at the last token of the prompt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from penstock import LLM
from penstock.engine.options import RequestOptions
from penstock.errors import InvalidArgumentError, PenstockError, UnsupportedError
from penstock.runtime.program import ProgramLimits
from tests.support.encoders import build, write_tokenizer
from tests.support.errors import raises

LIMITS = ProgramLimits(600, 3, num_pages=64, context_len=600)
QUERY, DOCUMENTS = "where is the cat?", ["dogs bark", "the cat sat on the mat", "yes"]
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
PREFIX = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
SUFFIX = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
TEMPLATE = (
    "{% set found = messages | selectattr('role', 'eq', 'system') | map(attribute='content') | list %}"
    "<|im_start|>{{ found[0] if found else 'default' }}\n"
    "Q {{ messages | selectattr('role', 'eq', 'query') | map(attribute='content') | first }}\n"
    "D {{ messages | selectattr('role', 'eq', 'document') | map(attribute='content') | first }}<|im_end|>"
    "{% if add_generation_prompt %}<think>{% endif %}"
)


def write_folder(folder: Path, **config: Any) -> Any:
    """Write a tiny qwen3 with a byte tokenizer that has the tokens "yes" and "no", and return the network."""
    changes = {"vocab_size": 300, "max_position_embeddings": 700, "head_dim": 16, "num_key_value_heads": 1}
    model = build(transformers.AutoModelForCausalLM, "qwen3", **changes)
    model.save_pretrained(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*alphabet, "ye", "yes", "no"])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("y", "e"), ("ye", "s"), ("n", "o")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return model


def write_modules(folder: Path, tokens: dict[str, int | None], **files: dict[str, Any]) -> None:
    kinds = ["base.modules.transformer.Transformer", "cross_encoder.modules.logit_score.LogitScore"]
    listed = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.{kind}"}
        for i, (kind, path) in enumerate(zip(kinds, ("", "1_LogitScore"), strict=True))
    ]
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "1_LogitScore").mkdir(exist_ok=True)
    (folder / "1_LogitScore" / "config.json").write_text(json.dumps(tokens))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    for name, values in files.items():
        (folder / f"{name}.json").write_text(json.dumps(values))


def logits_of(folder: Path, model: Any, *texts: str, max_len: int = 600) -> torch.Tensor:
    """Return the logits at the last token of a text: prefix, what is cut to fit, and suffix."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    prefix, middle, suffix = ([*tokenizer.encode(text).ids] for text in (*texts, *[""] * (3 - len(texts))))
    ids = prefix + middle[: max_len - len(prefix) - len(suffix)] + suffix
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([ids])).logits[0, -1].double()
    return logits


@pytest.mark.parametrize("mode", ["eager", pytest.param("graph", marks=pytest.mark.long)])
def test_qwen3_reranker_is_as_its_card_says(mode: str, tmp_path: Path) -> None:
    model = write_folder(tmp_path, is_original_qwen3_reranker=True)

    def expected(document: str, instruction: str = INSTRUCTION) -> float:
        middle = f"<Instruct>: {instruction}\n<Query>: {QUERY}\n<Document>: {document}"
        logits = logits_of(tmp_path, model, PREFIX, middle, SUFFIX)
        return float(logits[[258, 257]].softmax(0)[1])

    with LLM(tmp_path, mode=mode, limits=LIMITS) as llm:
        for one in llm.rerank(QUERY, DOCUMENTS):
            assert abs(one.score - expected(DOCUMENTS[one.index])) < 1e-5
        one = llm.rerank(QUERY, DOCUMENTS[:1], instruction="Find dogs")[0]
        assert abs(one.score - expected(DOCUMENTS[0], "Find dogs")) < 1e-5
        long = "mat " * 200
        with raises(InvalidArgumentError, param="prompt", match=r"prompts\[0\]: "):
            llm.rerank(QUERY, [long])
        one = llm.rerank(QUERY, [long], options=RequestOptions(truncate_prompt=True))[0]
        assert (one.num_tokens, abs(one.score - expected(long)) < 1e-5) == (600, True)
        with raises(InvalidArgumentError, param="query", match="prompts\\[0\\]: query"):
            llm.rerank(long, ["mat"], options=RequestOptions(truncate_prompt=True))
        assert len(llm.generate("yes", max_tokens=2).token_ids) == 2


@pytest.mark.parametrize("false_token", [258, None])
def test_logit_score_of_sentence_transformers(false_token: int | None, tmp_path: Path) -> None:
    model = write_folder(tmp_path)
    write_modules(
        tmp_path,
        {"true_token_id": 257, "false_token_id": false_token},
        sentence_bert_config={
            "transformer_task": "text-generation",
            "modality_config": {"message": {"method": "forward", "format": "flat"}},
            "processing_kwargs": {"chat_template": {"add_generation_prompt": True}},
        },
        config_sentence_transformers={
            "prompts": {"web": "find"},
            "default_prompt_name": "web",
            "activation_fn": "torch.nn.modules.linear.Identity",
        },
    )
    with LLM(tmp_path, mode="eager", limits=LIMITS) as llm:
        for one in llm.rerank(QUERY, DOCUMENTS):
            text = f"<|im_start|>find\nQ {QUERY}\nD {one.document}<|im_end|><think>"
            logits = logits_of(tmp_path, model, text)
            value = logits[257] - (0 if false_token is None else logits[258])
            assert abs(one.score - float(value)) < 1e-4


CHANGES: dict[str, tuple[str, dict[str, Any]]] = {
    "architectures": ("config.json", {"architectures": ["GraniteForCausalLM"]}),
    "true_token_id": ("1_LogitScore/config.json", {"true_token_id": 300}),
    "module_input_name": ("1_LogitScore/config.json", {"module_input_name": "logits"}),
    "format": ("sentence_bert_config.json", {"modality_config": {"message": {"format": "auto"}}}),
    "tools": ("sentence_bert_config.json", {"processing_kwargs": {"chat_template": {"tools": []}}}),
    "text": ("sentence_bert_config.json", {"processing_kwargs": {"text": {"max_length": 3}}}),
    "activation_fn": ("config_sentence_transformers.json", {"activation_fn": "torch.nn.Sigmoid"}),
}


def test_unknown_values_are_refused_by_name(tmp_path: Path) -> None:
    write_folder(tmp_path)
    write_modules(tmp_path, {"true_token_id": 257}, sentence_bert_config={}, config_sentence_transformers={})
    for param, (name, changes) in CHANGES.items():
        path, before = tmp_path / name, (tmp_path / name).read_text()
        path.write_text(json.dumps(json.loads(before) | changes))
        with raises(PenstockError, param=param):
            LLM(tmp_path, mode="eager", limits=LIMITS)
        path.write_text(before)


def test_a_token_that_is_missing_is_named(tmp_path: Path) -> None:
    write_folder(tmp_path, is_original_qwen3_reranker=True, classifier_from_token=["no", "maybe"])
    with raises(PenstockError, param="classifier_from_token", match="'maybe'"):
        LLM(tmp_path, mode="eager", limits=LIMITS)


def test_only_a_causal_reranker_takes_an_instruction(tmp_path: Path) -> None:
    build(transformers.AutoModelForSequenceClassification, "bert", num_labels=1).save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    limits = ProgramLimits(96, 3, num_pages=16, context_len=96)
    with LLM(tmp_path, mode="eager", limits=limits) as llm, raises(UnsupportedError, param="instruction"):
        llm.rerank("cat", ["mat"], instruction="Find cats")
