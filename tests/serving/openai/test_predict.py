"""The route /predict of models with heads of tokens and of answers: what the offline pipelines return."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from penstock import LLM, pipeline
from penstock.serving.openai import predict
from tests.support.encoders import LIMITS
from tests.support.http_service import Service
from tests.support.text_tasks import assert_close, write_folder

TAGS = {0: "O", 1: "B-PER", 2: "I-PER", 3: "B-LOC", 4: "I-LOC"}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "tokens": ("ForTokenClassification", {"num_labels": 5, "id2label": TAGS}),
    "answers": ("ForQuestionAnswering", {"max_len": 90}),
    "classes": ("ForSequenceClassification", {"num_labels": 3, "id2label": {0: "no", 1: "maybe", 2: "ENTAILMENT"}}),
    "words": ("ForMaskedLM", {}),
}
MASKED = "the cat [MASK] on the mat"
TARGETS = ["cat", "microsofts", "york", "cat"]
CANDIDATES = ["cat", "new york", "mats"]
TEXTS = ["The cats zzz Microsoft sat in new york.", "a cat"]
LONG = "The cats microsoft zzz sat in new york. " * 6
QUESTION, CONTEXT = "who sat?", "The cats sat on the mat in new york. " * 12


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, LLM]:
    made = {}
    for name, (kind, changes) in KINDS.items():
        folder: Path = tmp_path_factory.mktemp(name)
        write_folder(folder, kind, **changes)
        made[name] = LLM(folder, mode="eager", limits=LIMITS)
    return made


@pytest.fixture(scope="module")
def offline(models: dict[str, LLM]) -> dict[str, Any]:
    tokens = pipeline("ner", models["tokens"])
    answers = pipeline("question-answering", models["answers"])
    fill, zero_shot = pipeline("fill-mask", models["words"]), pipeline("zero-shot-classification", models["classes"])
    return {
        "filled": fill(MASKED, top_k=3),
        "targets": [fill(MASKED, targets=TARGETS, top_k=top_k) for top_k in (2, 9)],
        "most": fill(MASKED, top_k=36),
        "twice": fill(["the [MASK] sat on [MASK]", "a [MASK] cat"]),
        "rows": pipeline("feature-extraction", models["words"])(["a cat", "the cats sat"]),
        "labels": zero_shot(TEXTS[0], CANDIDATES),
        "several": zero_shot([LONG, "a cat"], CANDIDATES, multi_label=True, hypothesis_template="{} is this"),
        "entities": {
            strategy: tokens(TEXTS, aggregation_strategy=strategy) for strategy in ("none", "simple", "average")
        },
        "long": tokens(LONG, aggregation_strategy="simple", stride=4, ignore_labels=[]),
        "cut": tokens(LONG),
        "answer": answers(question=QUESTION, context=CONTEXT),
        "best": answers(question=QUESTION, context=CONTEXT, top_k=3, doc_stride=20, max_answer_len=4),
        "none": answers(question="a?", context="cats", handle_impossible_answer=True, align_to_words=False),
    }


@pytest.fixture(scope="module")
def services(models: dict[str, LLM], offline: dict[str, Any]) -> Iterator[dict[str, Service]]:
    """A service for each model, which it closes."""
    made = {name: Service({name: llm}) for name, llm in models.items()}
    yield made
    for service in made.values():
        service.close()


def test_entities_are_those_of_the_pipeline(services: dict[str, Service], offline: dict[str, Any]) -> None:
    def ask(inputs: Any, **parameters: Any) -> Any:
        return services["tokens"].post("/predict", inputs=inputs, parameters=parameters)

    for strategy, expected in offline["entities"].items():
        assert_close(ask(TEXTS, aggregation_strategy=strategy), expected)
        assert_close(ask([[TEXTS[0]], {"text": TEXTS[1]}], aggregation_strategy=strategy), expected)
    assert_close(ask(TEXTS[0]), offline["entities"]["none"][0])
    assert_close(ask(LONG), offline["cut"])
    assert_close(ask(LONG, aggregation_strategy="simple", stride=4, ignore_labels=[]), offline["long"])


def test_answers_are_those_of_the_pipeline(services: dict[str, Service], offline: dict[str, Any]) -> None:
    def ask(inputs: Any, **parameters: Any) -> Any:
        return services["answers"].post("/predict", inputs=inputs, parameters=parameters)

    asked = {"question": QUESTION, "context": CONTEXT}
    assert_close(ask(asked), offline["answer"])
    assert_close(ask([asked]), [offline["answer"]])
    assert_close(ask(asked, top_k=3, doc_stride=20, max_answer_len=4, max_question_len=9), offline["best"])
    other = {"question": "a?", "context": "cats"}
    assert_close(ask(other, handle_impossible_answer=True, align_to_words=False), offline["none"])


def test_fillings_and_rows_are_those_of_the_pipeline(services: dict[str, Service], offline: dict[str, Any]) -> None:
    def ask(inputs: Any, **parameters: Any) -> Any:
        return services["words"].post("/predict", inputs=inputs, parameters=parameters)

    assert_close(ask(MASKED, top_k=3), offline["filled"])
    assert_close([ask(MASKED, targets=TARGETS, top_k=top_k) for top_k in (2, 9)], offline["targets"])
    assert_close(ask(MASKED, top_k=36), offline["most"])
    assert_close(ask(["the [MASK] sat on [MASK]", "a [MASK] cat"]), offline["twice"])
    assert_close(ask(["a cat", "the cats sat"]), offline["rows"])
    assert_close(ask("a cat"), offline["rows"][0])


def test_masks_are_few_and_targets_are_not_logged(
    services: dict[str, Service], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(predict, "_MAX_MASKS", 1)
    assert services["words"].refused("/predict", inputs=[MASKED, "[MASK] [MASK]"])[1]["param"] == "inputs[1]"
    services["words"].post("/predict", inputs=MASKED, parameters={"targets": ["microsofts"]})
    assert not [one for one in caplog.records if "targets" in one.getMessage()]


def labelled(result: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"label": label, "score": score} for label, score in zip(result["labels"], result["scores"], strict=True)]


def test_candidates_are_those_of_the_pipeline(services: dict[str, Service], offline: dict[str, Any]) -> None:
    def ask(inputs: Any, **parameters: Any) -> Any:
        return services["classes"].post("/predict", inputs=inputs, parameters=parameters)

    assert_close(ask(TEXTS[0], candidate_labels=CANDIDATES), labelled(offline["labels"]))
    assert_close(ask([TEXTS[0]], candidate_labels=",".join(CANDIDATES)), [labelled(offline["labels"])])
    asked = {"candidate_labels": CANDIDATES, "multi_label": True, "hypothesis_template": "{} is this"}
    assert_close(ask([LONG, "a cat"], **asked), [labelled(one) for one in offline["several"]])


@pytest.mark.parametrize(
    ("model", "fields", "param"),
    [
        ("words", {"inputs": MASKED, "parameters": {"top_k": 1001}}, "parameters.top_k"),
        ("words", {"inputs": MASKED, "parameters": {"targets": []}}, "parameters.targets"),
        ("words", {"inputs": MASKED, "parameters": {"targets": [" "]}}, "parameters.targets"),
        ("words", {"inputs": "a cat", "parameters": {"targets": ["cat"]}}, "parameters.targets"),
        ("classes", {"inputs": "a", "parameters": {"truncation": True}}, "parameters.truncation"),
        ("classes", {"inputs": "a", "parameters": {"src_lang": "en", "tgt_lang": "de"}}, "parameters.src_lang"),
        ("words", {"inputs": [MASKED, "a cat"]}, "inputs[1]"),
        ("words", {"inputs": [["a", "b"]]}, "inputs[0]"),
        ("words", {"inputs": "a cat", "parameters": {"top_k": 2}}, "parameters.top_k"),
        ("words", {"inputs": MASKED, "truncate": True}, "truncate"),
        ("words", {"inputs": ["[MASK] " * 20] * 200, "parameters": {"top_k": 20}}, "inputs"),
        ("classes", {"inputs": "a", "parameters": {"candidate_labels": " , "}}, "parameters.candidate_labels"),
        *(
            (
                "classes",
                {"inputs": "a", "parameters": {"candidate_labels": "a", "hypothesis_template": template}},
                "parameters.hypothesis_template",
            )
            for template in ("b", "{:>2000000000}", "{0[x]}", "{0.__class__}", "{!r}", "{}{}", "{0}" * 17, "{")
        ),
        ("classes", {"inputs": "a", "parameters": {"candidate_labels": "a," * 257}}, "parameters.candidate_labels"),
        ("classes", {"inputs": "a", "parameters": {"candidate_labels": "cat " * 99}}, "parameters.candidate_labels"),
        ("classes", {"inputs": "a", "parameters": {"candidate_labels": "a", "top_k": 1}}, "parameters.top_k"),
        ("classes", {"inputs": "a", "parameters": {"multi_label": True}}, "parameters.multi_label"),
        ("tokens", {"inputs": "a", "parameters": {"candidate_labels": "a"}}, "parameters.candidate_labels"),
        ("tokens", {"inputs": [["a", "b"]]}, "inputs[0]"),
        ("tokens", {"inputs": {"question": "a", "context": "b"}}, "inputs[0]"),
        ("tokens", {"inputs": "a", "raw_scores": True}, "raw_scores"),
        ("tokens", {"inputs": "a", "parameters": {"stride": 4}}, "parameters.stride"),
        ("tokens", {"inputs": "a", "parameters": {"top_k": 4}}, "parameters.top_k"),
        (
            "tokens",
            {"inputs": LONG, "parameters": {"stride": 22, "aggregation_strategy": "max"}},
            "parameters.stride",
        ),
        ("answers", {"inputs": "a"}, "inputs[0].question"),
        ("answers", {"inputs": [{"question": "a", "context": ""}]}, "inputs[0].context"),
        ("answers", {"inputs": {"question": "a", "context": "b", "answer": "c"}}, "inputs.answer"),
        (
            "answers",
            {"inputs": {"question": "a", "context": "b"}, "parameters": {"doc_stride": 91}},
            "parameters.doc_stride",
        ),
    ],
)
def test_wrong_fields_are_named(model: str, fields: dict[str, Any], param: str, services: dict[str, Service]) -> None:
    status, error = services[model].refused("/predict", **fields)
    assert (status, error["param"]) == (400, param)


def test_many_windows_are_refused_first(services: dict[str, Service], monkeypatch: pytest.MonkeyPatch) -> None:
    """A stride that is almost a window makes as many windows of a text as it has tokens."""
    monkeypatch.setattr(predict, "_MAX_TOKENS", 400)
    asked = {"question": QUESTION, "context": CONTEXT}
    body, service = {"inputs": asked}, services["answers"]
    assert service.refused("/predict", **body, parameters={"doc_stride": 80})[1]["param"] == "inputs"
    assert service.post("/predict", **body)["answer"]


def test_a_long_text_is_cut_for_each_candidate(services: dict[str, Service]) -> None:
    labels = [f"a cat {number}" for number in range(26)]
    found = services["classes"].post("/predict", inputs="a cat sat " * 2000, parameters={"candidate_labels": labels})
    assert {one["label"] for one in found} == set(labels)


def test_the_client_of_hugging_face_reads_results(services: dict[str, Service], offline: dict[str, Any]) -> None:
    clients = {
        name: huggingface_hub.InferenceClient(model=f"{service.url}/predict", token="none")  # noqa: S106
        for name, service in services.items()
    }
    found = clients["tokens"].token_classification(TEXTS[0], aggregation_strategy="simple")
    expected = offline["entities"]["simple"][0]
    for one, entity in zip(found, expected, strict=True):
        assert_close({name: getattr(one, name) for name in entity}, entity)
    fillings = clients["words"].fill_mask(MASKED, top_k=3)
    assert [one.token_str for one in fillings] == [one["token_str"] for one in offline["filled"]]
    fillings = clients["words"].fill_mask(MASKED, targets=TARGETS, top_k=2)
    assert [one.token for one in fillings] == [one["token"] for one in offline["targets"][0]]
    rows = clients["words"].feature_extraction("a cat")
    assert_close(rows.tolist(), offline["rows"][0])
    candidates = clients["classes"].zero_shot_classification(TEXTS[0], CANDIDATES)
    assert [one.label for one in candidates] == offline["labels"]["labels"]
    answer: Any = clients["answers"].question_answering(question=QUESTION, context=CONTEXT)
    assert_close({name: getattr(answer, name) for name in offline["answer"]}, offline["answer"])
