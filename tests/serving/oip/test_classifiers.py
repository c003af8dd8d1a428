"""Classifiers in the Open Inference Protocol: their signature, and what Triton's clients get for texts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException

from penstock import LLM, pipeline
from penstock.serving.settings import GatewaySettings
from tests.support.encoders import LIMITS
from tests.support.http_service import Service
from tests.support.text_tasks import assert_close, write_folder

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "classes": ("ForSequenceClassification", {"num_labels": 3}),
    "tokens": ("ForTokenClassification", {"num_labels": 2}),
    "answers": ("ForQuestionAnswering", {}),
}
TEXTS = ["The cats sat on the mat.", "microsoft in new york"]
QUESTION, CONTEXT = "who sat?", "The cats sat on the mat."


@pytest.fixture(scope="module")
def llms(tmp_path_factory: pytest.TempPathFactory) -> dict[str, LLM]:
    found = {}
    for name, (kind, changes) in KINDS.items():
        write_folder(folder := tmp_path_factory.mktemp(name), kind, **changes)
        found[name] = LLM(folder, mode="eager", limits=LIMITS)
    return found


@pytest.fixture(scope="module")
def offline(llms: dict[str, LLM]) -> dict[str, Any]:
    classify = pipeline("text-classification", llms["classes"], top_k=None)
    answer = pipeline("question-answering", llms["answers"])
    return {
        "classes": classify(TEXTS),
        "pairs": classify([{"text": text, "text_pair": CONTEXT} for text in TEXTS], function_to_apply="none"),
        "tokens": pipeline("ner", llms["tokens"])(TEXTS, aggregation_strategy="simple", ignore_labels=["LABEL_1"]),
        "answers": answer(question=[QUESTION] * 2, context=[CONTEXT, TEXTS[1]], max_answer_len=3),
    }


@pytest.fixture(scope="module")
def service(llms: dict[str, LLM], offline: dict[str, Any]) -> Iterator[Service]:
    found = Service(llms, GatewaySettings(grpc_port=0))
    yield found
    found.close()


@pytest.fixture(scope="module", params=["http", "grpc"])
def client(request: pytest.FixtureRequest, service: Service) -> Iterator[Any]:
    """Triton's client, and its class of inputs."""
    if request.param == "http":
        with triton.InferenceServerClient(service.url.removeprefix("http://")) as found:
            yield found, triton
    else:
        with triton_grpc.InferenceServerClient(service.grpc_address) as found:
            yield found, triton_grpc


def infer(client: Any, model: str, parameters: Any = None, **texts: list[str]) -> Any:
    found, kinds = client
    inputs = []
    for name, values in texts.items():
        inputs.append(kinds.InferInput(name, [len(values)], "BYTES"))
        inputs[-1].set_data_from_numpy(np.array(values, object))
    return found.infer(model, inputs, parameters=parameters, timeout=60_000_000)


def test_signatures_are_served(service: Service) -> None:
    expected = {
        "classes": (["text_input"], [("scores", "FP32", [-1, 3]), ("label", "BYTES", [-1])]),
        "tokens": (["text_input"], [("entities", "BYTES", [-1])]),
        "answers": (
            ["question", "context"],
            [("answer", "BYTES", [-1]), ("score", "FP32", [-1]), ("start", "INT32", [-1]), ("end", "INT32", [-1])],
        ),
    }
    for model, (inputs, outputs) in expected.items():
        found = json.loads(service.ask("GET", f"/v2/models/{model}")[2])
        assert [(one["name"], one["datatype"], one["shape"]) for one in found["outputs"]] == outputs
        assert [one["name"] for one in found["inputs"]] == inputs
        config = json.loads(service.ask("GET", f"/v2/models/{model}/config")[2])
        assert [(one["name"], one["dims"]) for one in config["output"]] == [(one[0], one[2]) for one in outputs]
        assert config["model_transaction_policy"] == {"decoupled": False}


def test_texts_have_the_scores_of_the_pipeline(client: Any, offline: dict[str, Any]) -> None:
    found = infer(client, "classes", text_input=TEXTS)
    scores, labels = found.as_numpy("scores"), found.as_numpy("label")
    for row, label, expected in zip(scores, labels, offline["classes"], strict=True):
        assert label.decode() == expected[0]["label"]
        assert_close(row.tolist(), [one["score"] for one in sorted(expected, key=lambda one: str(one["label"]))])
    found = infer(client, "classes", {"function_to_apply": "none"}, text_input=TEXTS, text_pair=[CONTEXT] * 2)
    for row, expected in zip(found.as_numpy("scores"), offline["pairs"], strict=True):
        assert_close(row.tolist(), [one["score"] for one in sorted(expected, key=lambda one: str(one["label"]))])


def test_entities_and_answers_are_those_of_pipelines(client: Any, offline: dict[str, Any]) -> None:
    options = {"aggregation_strategy": "simple", "ignore_labels": "LABEL_1"}
    found = infer(client, "tokens", options, text_input=TEXTS)
    assert_close([json.loads(value) for value in found.as_numpy("entities")], offline["tokens"])
    found = infer(client, "answers", {"max_answer_len": 3}, question=[QUESTION] * 2, context=[CONTEXT, TEXTS[1]])
    columns = {name: found.as_numpy(name).tolist() for name in ("score", "start", "end", "answer")}
    columns["answer"] = [value.decode() for value in columns["answer"]]
    rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    assert_close(rows, offline["answers"])


def test_a_stream_has_one_response(service: Service, offline: dict[str, Any]) -> None:
    results: list[Any] = []
    with triton_grpc.InferenceServerClient(service.grpc_address) as client:
        client.start_stream(lambda result, error: results.append(error or result))
        given = triton_grpc.InferInput("text_input", [2], "BYTES")
        given.set_data_from_numpy(np.array(TEXTS, object))
        client.async_stream_infer("tokens", [given], parameters={"aggregation_strategy": "simple"})
        client.stop_stream()
    (result,) = results
    assert len(result.as_numpy("entities")) == 2


@pytest.mark.parametrize(
    ("model", "inputs", "parameters", "param"),
    [
        ("classes", {"text_input": ["a"], "other": ["b"]}, {}, "other"),
        ("classes", {"text_input": ["a", "b"], "text_pair": ["b"]}, {}, "text_pair"),
        ("classes", {"text_input": [""]}, {}, "text_input"),
        ("classes", {"text_input": ["a"]}, {"top_k": 1}, "top_k"),
        ("classes", {"text_input": ["a"]}, {"stride": 1}, "stride"),
        ("classes", {"text_input": ["a"]}, {"max_tokens": 1}, "max_tokens"),
        ("tokens", {"text_input": ["a"]}, {"aggregation_strategy": "any"}, "aggregation_strategy"),
        ("answers", {"question": ["a"]}, {}, "context"),
        ("answers", {"text_input": ["a"]}, {}, "text_input"),
    ],
)
def test_wrong_inputs_are_named(
    model: str, inputs: dict[str, list[str]], parameters: dict[str, Any], param: str, service: Service
) -> None:
    tensors = [
        {"name": name, "datatype": "BYTES", "shape": [len(values)], "data": values} for name, values in inputs.items()
    ]
    body = {"inputs": tensors, "parameters": parameters}
    status, _, data = service.ask("POST", f"/v2/models/{model}/infer", body)
    assert (status, json.loads(data)["param"]) == (400, param)


def test_an_unknown_output_is_refused(client: Any) -> None:
    found, kinds = client
    given = kinds.InferInput("text_input", [1], "BYTES")
    given.set_data_from_numpy(np.array(["a"], object))
    with pytest.raises(InferenceServerException):
        found.infer("classes", [given], outputs=[kinds.InferRequestedOutput("text_output")])
    one = found.infer("classes", [given], outputs=[kinds.InferRequestedOutput("label")])
    assert one.as_numpy("label").tolist()
    assert one.as_numpy("scores") is None
