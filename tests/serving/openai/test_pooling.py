"""The routes /pooling, /classify and /predict of encoders with and without heads: what transformers computes."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock import LLM
from tests.support.encoders import LIMITS
from tests.support.http_service import Service
from tests.support.text_tasks import assert_close, write_folder

KINDS = {
    "classes": ("ForSequenceClassification", {"num_labels": 3}),
    "tokens": ("ForTokenClassification", {"num_labels": 5}),
    "answers": ("ForQuestionAnswering", {}),
    "plain": ("", {}),
}
TEXTS = ["The cats sat on the mat.", "microsoft in new york"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Any, Any]]:
    folders = {name: tmp_path_factory.mktemp(name) for name in KINDS}
    return {
        name: (folders[name], *write_folder(folders[name], kind, **changes)) for name, (kind, changes) in KINDS.items()
    }


@pytest.fixture(scope="module")
def service(models: dict[str, tuple[Path, Any, Any]]) -> Iterator[Service]:
    made = Service({name: LLM(folder, mode="eager", limits=LIMITS) for name, (folder, _, _) in models.items()})
    yield made
    made.close()


def theirs(models: dict[str, tuple[Path, Any, Any]], name: str, text: Any, pair: Any = None) -> Any:
    _, model, tokenizer = models[name]
    with torch.no_grad():
        return model(**tokenizer(text, pair, return_tensors="pt"))


def pooled(service: Service, model: str, **body: Any) -> list[Any]:
    return [one["data"] for one in service.post("/pooling", model=model, **body)["data"]]


def test_tokens_have_the_classes_of_transformers(service: Service, models: Any) -> None:
    logits = [theirs(models, "tokens", text).logits[0] for text in TEXTS]
    found = service.post("/pooling", model="tokens", input=TEXTS)
    assert (found["object"], found["model"]) == ("list", "tokens")
    assert found["usage"]["prompt_tokens"] == sum(map(len, logits))
    assert [(one["index"], one["object"]) for one in found["data"]] == [(0, "pooling"), (1, "pooling")]
    scores = [one.softmax(-1).tolist() for one in logits]
    assert_close([one["data"] for one in found["data"]], scores)
    for task in ("token_classify", "encode"):
        assert_close(pooled(service, "tokens", input=TEXTS[0], task=task), scores[:1])
    assert_close(pooled(service, "tokens", input=TEXTS, use_activation=False), [one.tolist() for one in logits])
    (text,) = pooled(service, "tokens", input=TEXTS[1], encoding_format="base64")
    values = np.frombuffer(base64.b64decode(text), "<f4").reshape(-1, 5)
    assert np.allclose(values, np.float32(scores[1]), atol=1e-5)
    assert service.refused("/classify", model="tokens", input="the")[1]["param"] == "model"


def test_answers_have_the_logits_of_their_ends(service: Service, models: Any) -> None:
    """A question and its context are one prompt of token ids."""
    _, _, tokenizer = models["answers"]
    expected = theirs(models, "answers", "who sat ?")
    ends = torch.stack((expected.start_logits[0], expected.end_logits[0]), -1)
    ids = tokenizer("who sat ?")["input_ids"]
    assert_close(pooled(service, "answers", input=ids), [ends.tolist()])


def test_classes_of_texts_by_each_route(service: Service, models: Any) -> None:
    logits = [theirs(models, "classes", text).logits[0] for text in TEXTS]
    scores = [one.softmax(-1).tolist() for one in logits]
    for task in (None, "classify", "score"):
        assert_close(pooled(service, "classes", input=TEXTS, task=task), scores)
    for name in ("use_activation", "activation", "softmax"):
        found = service.post("/classify", model="classes", input=TEXTS, **{name: False})["data"]
        assert_close([one["probs"] for one in found], [one.tolist() for one in logits])
    assert_close([one["probs"] for one in service.post("/classify", model="classes", input=TEXTS)["data"]], scores)
    refused = service.refused("/pooling", model="classes", input="a", use_activation=True, softmax=False)
    assert refused[1]["param"] == "softmax"


def test_predictions_are_those_of_the_pipeline(service: Service, models: Any) -> None:
    """In the format of text-embeddings-inference: the likeliest class first, pairs, lists of lists."""
    labels = models["classes"][1].config.id2label

    def best_first(text: str, pair: str | None = None, is_raw: bool = False) -> list[dict[str, Any]]:
        logits = theirs(models, "classes", text, pair).logits[0]
        scores = (logits if is_raw else logits.softmax(-1)).tolist()
        order = sorted(range(len(scores)), key=lambda i: -scores[i])
        return [{"score": scores[i], "label": labels[i]} for i in order]

    def predict(inputs: Any, **fields: Any) -> Any:
        return service.post("/predict", model="classes", inputs=inputs, **fields)

    first, second = TEXTS
    assert_close(predict(first), best_first(first))
    assert_close(predict([first, second]), best_first(first, second))
    assert_close(predict([[first], [first, second]]), [best_first(first), best_first(first, second)])
    assert_close(predict(first, raw_scores=True), best_first(first, is_raw=True))
    _, _, tokenizer = models["classes"]
    long = "the cat " * 100
    assert service.refused("/predict", model="classes", inputs=long)[1]["param"] == "inputs"
    ids = tokenizer(long, truncation=True, max_length=96)["input_ids"]
    (scores,) = pooled(service, "classes", input=ids)
    cut = predict(long, truncate=True, truncation_direction="Right")
    assert_close(sorted(one["score"] for one in cut), sorted(scores))
    assert service.refused("/predict", model="classes", inputs=["a", "b", "c"])[1]["param"] == "inputs"
    assert service.refused("/predict", model="classes", inputs="a", truncation_direction="Left")[0] == 400
    (rows,) = service.post("/predict", model="plain", inputs="a")  # of the tokens, as feature_extraction
    assert len(rows) == len(models["plain"][2]("a")["input_ids"])
    assert_close(predict(first, parameters={"top_k": 1}), best_first(first)[:1])
    assert_close(predict({"text": first, "text_pair": second}), best_first(first, second))
    raw = best_first(first, is_raw=True)
    assert_close(predict(first, parameters={"function_to_apply": "none"}), raw)
    for fields, param in (
        ({"parameters": {"stride": 1}}, "parameters.stride"),
        ({"parameters": {"top_k": 0}}, "parameters.top_k"),
        ({"parameters": {"function_to_apply": "none"}, "raw_scores": True}, "raw_scores"),
    ):
        assert service.refused("/predict", model="classes", inputs="a", **fields)[1]["param"] == param


def test_vectors_of_texts_and_of_tokens(service: Service, models: Any) -> None:
    rows = theirs(models, "plain", TEXTS[0]).last_hidden_state[0]
    unit = rows / rows.norm(dim=-1, keepdim=True)
    for task in ("token_embed", "encode"):
        assert_close(pooled(service, "plain", input=TEXTS[0], task=task), [unit.tolist()])
    assert_close(pooled(service, "plain", input=TEXTS[0], task="token_embed", normalize=False), [rows.tolist()])
    expected = service.post("/v1/embeddings", model="plain", input=TEXTS)["data"]
    assert pooled(service, "plain", input=TEXTS) == [one["embedding"] for one in expected]
    short = service.post("/v1/embeddings", model="plain", input=TEXTS, dimensions=7)["data"]
    assert pooled(service, "plain", input=TEXTS, task="embed", dimensions=7) == [one["embedding"] for one in short]


@pytest.mark.parametrize(
    ("model", "body", "param"),
    [
        ("plain", {"input": "a", "task": "classify"}, "task"),
        ("tokens", {"input": "a", "task": "embed"}, "task"),
        ("classes", {"input": "a", "task": "token_classify"}, "task"),
        ("tokens", {"input": "a", "dimensions": 3}, "dimensions"),
        ("tokens", {"input": ["the cat " * 40] * 110}, "input"),
        ("tokens", {"input": ""}, "input"),
        ("tokens", {"input": "a", "encoding_format": "bytes"}, "encoding_format"),
        ("tokens", {"messages": [{"role": "user", "content": "a"}], "input": "a"}, "messages"),
    ],
)  # fmt: skip
def test_other_requests_are_refused_by_field(service: Service, model: str, body: Any, param: str) -> None:
    status, error = service.refused("/pooling", model=model, **body)
    assert (status, error["param"]) == (400, param)
