"""What KServe's clients send and Triton's do not: the model's name in the body, sizes beside raw contents."""

from __future__ import annotations

import pytest

from penstock.api_errors import FieldError
from penstock.errors import InvalidFileError
from penstock.llm.llm import LLM
from penstock.serving.oip.messages import read_message
from penstock.serving.proto import oip_pb2 as pb
from tests.support.command import DEMO
from tests.support.errors import raises
from tests.support.http_service import Service

PROMPT = "def add(a, b):"


@pytest.fixture(scope="module")
def service():
    found = Service({"demo": LLM(DEMO)})
    yield found
    found.close()


def body(**more) -> dict:
    inputs = [{"name": "text_input", "datatype": "BYTES", "shape": [1], "data": [PROMPT], "parameters": {}}]
    return {"inputs": inputs, "parameters": {"max_tokens": 4, "temperature": 0.0}, **more}


@pytest.mark.parametrize("told", [{"model_name": "demo"}, {"model_name": "demo", "model_version": None}])
def test_a_body_can_repeat_the_models_name(service, told):
    expected = service.post("/v1/completions", prompt=PROMPT, max_tokens=4, temperature=0)["choices"][0]["text"]
    outputs = service.post("/v2/models/demo/infer", **body(**told))["outputs"]
    assert next(one["data"] for one in outputs if one["name"] == "text_output") == [expected]


def test_the_version_of_the_path_can_be_repeated(service):
    service.post("/v2/models/demo/versions/1/infer", **body(model_name="demo", model_version="1"))


@pytest.mark.parametrize("told", [{"model_name": "other"}, {"model_version": "2"}])
def test_a_body_that_names_another_model_is_refused(service, told):
    status, _, found = service.ask("POST", "/v2/models/demo/infer", body(**told))
    assert status == 400
    assert next(iter(told)).encode() in found


def message(size: int | None, raw: bytes = b"\3\0\0\0abc") -> pb.ModelInferRequest:
    found = pb.ModelInferRequest(model_name="demo", raw_input_contents=[raw])
    one = found.inputs.add(name="text_input", datatype="BYTES", shape=[1])
    if size is not None:
        one.parameters["binary_data_size"].int64_param = size
    return found


def test_sizes_beside_raw_contents_are_those_of_the_contents():
    for size in (None, 7):
        assert read_message(message(size)).inputs["text_input"].array.tolist() == [b"abc"]
    with raises(FieldError, param="text_input", match="binary_data_size is 8"):
        read_message(message(8))
    typed = message(3, b"")
    typed.ClearField("raw_input_contents")
    typed.inputs[0].contents.bytes_contents.append(b"abc")
    with raises((FieldError, InvalidFileError), param="text_input", match="binary_data_size"):
        read_message(typed)
