"""The Open Inference Protocol over gRPC, seen by Triton's own client; answers are those of /v1/completions."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.grpc import model_config_pb2
from tritonclient.grpc import service_pb2 as published

from penstock import __version__
from penstock.llm.llm import LLM
from penstock.serving.proto import oip_pb2 as pb
from penstock.serving.settings import GatewaySettings
from tests.support.command import DEMO
from tests.support.grpc_client import Stream, streaming, tensor, text_of
from tests.support.http_service import SECONDS, Service, until

PROMPT = "def add(a, b):"
GREEDY = {"max_tokens": 12, "temperature": 0.0}


@pytest.fixture(scope="module")
def demo():
    service = Service({"demo": LLM(DEMO)}, GatewaySettings(grpc_port=0))
    yield service
    service.close()


@pytest.fixture
def client(demo):
    with triton.InferenceServerClient(demo.grpc_address) as found:
        yield found


def test_our_messages_are_the_published_ones():
    """Names, numbers and types of every message and method that is built, as Triton's client has them; of the
    configuration, which is only told, some fields.
    """
    configuration = model_config_pb2.DESCRIPTOR.message_types_by_name
    for name, message in pb.DESCRIPTOR.message_types_by_name.items():
        is_part = name in configuration
        _is_same(message, (configuration if is_part else published.DESCRIPTOR.message_types_by_name)[name], is_part)
    (types,), theirs = pb.DESCRIPTOR.enum_types_by_name.values(), model_config_pb2.DataType
    assert {one.name: one.number for one in types.values} == dict(theirs.items())
    (ours,), (theirs,) = pb.DESCRIPTOR.services_by_name.values(), published.DESCRIPTOR.services_by_name.values()
    assert ours.full_name == theirs.full_name == "inference.GRPCInferenceService"
    for method in ours.methods:
        other = theirs.methods_by_name[method.name]
        assert (method.input_type.full_name, method.output_type.full_name) == (
            other.input_type.full_name, other.output_type.full_name
        )  # fmt: skip
        assert (method.client_streaming, method.server_streaming) == (other.client_streaming, other.server_streaming)


def _is_same(ours, theirs, is_part: bool) -> None:
    assert ours.full_name == theirs.full_name
    own, wanted = (
        {one.name: (one.number, one.type, one.is_repeated, one.containing_oneof and one.containing_oneof.name)
         for one in message.fields}
        for message in (ours, theirs)
    )  # fmt: skip
    assert own == ({name: wanted[name] for name in own} if is_part else wanted)
    for kind in ours.enum_types:
        assert kind.values_by_name.keys() == theirs.enum_types_by_name[kind.name].values_by_name.keys()
    for nested in ours.nested_types:
        _is_same(nested, theirs.nested_types_by_name[nested.name], is_part)


def test_server_and_models(client):
    assert client.is_server_live()
    assert client.is_server_ready()
    assert (client.get_server_metadata().name, client.get_server_metadata().version) == ("penstock", __version__)
    assert client.is_model_ready("demo")
    assert client.is_model_ready("demo", "1")
    found = client.get_model_metadata("demo")
    assert (found.name, list(found.versions), found.platform) == ("demo", ["1"], "penstock")
    assert [(one.name, one.datatype, list(one.shape)) for one in found.inputs] == [("text_input", "BYTES", [-1])]
    assert "text_output" in [one.name for one in found.outputs]


def test_an_answer_is_that_of_completions(demo, client):
    expected = demo.post("/v1/completions", prompt=PROMPT, **GREEDY)
    result = client.infer("demo", [tensor("text_input", [PROMPT])], parameters=GREEDY, request_id="mine")
    (choice,), usage = expected["choices"], expected["usage"]
    assert text_of(result) == [choice["text"]]
    assert [one.decode() for one in result.as_numpy("finish_reason")] == [choice["finish_reason"]]
    assert result.as_numpy("num_prompt_tokens").tolist() == [usage["prompt_tokens"]]
    assert result.as_numpy("num_output_tokens").tolist() == [usage["completion_tokens"]]
    ids = result.as_numpy("output_ids").tolist()
    assert demo.post("/detokenize", tokens=ids[0])["prompt"] == choice["text"]
    response = result.get_response()
    assert (response.model_name, response.model_version, response.id) == ("demo", "1", "mine")


def test_token_ids_of_either_width(demo, client):
    ids = demo.post("/tokenize", prompt=PROMPT)["tokens"]
    expected = demo.post("/v1/completions", prompt=ids, **GREEDY)["choices"][0]["text"]
    for datatype in ("INT32", "INT64"):
        for shaped in (ids, [ids]):
            result = client.infer("demo", [tensor("input_ids", shaped, datatype)], parameters=GREEDY)
            assert text_of(result) == [expected]
            assert result.as_numpy("text_output").ndim == np.ndim(shaped)


def test_several_prompts_and_answers_have_a_row_each(demo, client):
    prompts = [PROMPT, "class Stack:", "import"]
    asked = {"max_tokens": 5, "temperature": 0.8, "seed": 7, "n": 2}
    expected = [one["text"] for one in demo.post("/v1/completions", prompt=prompts, **asked)["choices"]]
    result = client.infer("demo", [tensor("text_input", prompts)], parameters=asked)
    assert text_of(result) == expected
    assert result.as_numpy("index").tolist() == [*range(6)]
    assert result.as_numpy("output_ids").shape == (6, 5)
    result = client.infer("demo", [tensor("text_input", [[one] for one in prompts])], parameters=asked)
    assert result.as_numpy("text_output").shape == (6, 1)


def test_sampling_as_inputs_and_as_parameters(demo, client):
    """The same request in both forms, and as JSON."""
    asked = {
        "max_tokens": 24,
        "temperature": 0.75,
        "top_k": 20,
        "seed": 3,
        "repetition_penalty": 1.25,
        "stop": ["\n\n"],
    }
    expected = demo.post("/v1/completions", prompt=PROMPT, logit_bias={"265": -100}, **asked)["choices"][0]["text"]
    kinds = {
        "temperature": "FP64",
        "repetition_penalty": "FP32",
        "seed": "UINT64",
        "top_k": "INT8",
        "max_tokens": "INT64",
    }
    inputs = [tensor("text_input", [PROMPT]), tensor("stop", asked["stop"], "BYTES")]
    inputs += [tensor(name, [asked[name]], kind) for name, kind in kinds.items()]
    inputs.append(tensor("logit_bias", ['{"265": -100}'], "BYTES"))
    assert text_of(client.infer("demo", inputs)) == [expected]
    parameters = {**asked, "stop": asked["stop"][0], "logit_bias": '{"265": -100}'}
    assert text_of(client.infer("demo", [tensor("text_input", [PROMPT])], parameters=parameters)) == [expected]
    assert demo.post("/v1/completions", prompt=PROMPT, **asked)["choices"][0]["text"] != expected


def test_only_the_outputs_that_are_asked_for_come(client):
    wanted = [triton.InferRequestedOutput("finish_reason"), triton.InferRequestedOutput("text_output")]
    response = client.infer("demo", [tensor("text_input", ["x"])], outputs=wanted, parameters=GREEDY).get_response()
    assert [one.name for one in response.outputs] == ["finish_reason", "text_output"]
    assert len(response.raw_output_contents) == 2


def test_a_stream_of_pieces(demo):
    """Ids are echoed, requests run side by side, and the last response of each says that it is."""
    prompts = {"a": PROMPT, "b": "class Stack:", "c": "import"}
    asked = {**GREEDY, "ignore_eos": True}
    with streaming(demo) as stream:
        for name, prompt in prompts.items():
            stream.ask([tensor("text_input", [prompt])], name, "demo", **asked)
        found = stream.answers(3)
    for name, prompt in prompts.items():
        expected = demo.post("/v1/completions", prompt=prompt, **asked)
        assert "".join(text_of(one)[0] for one in found[name]) == expected["choices"][0]["text"]
        reasons = [one.as_numpy("finish_reason")[0].decode() for one in found[name]]
        assert reasons == [""] * (len(reasons) - 1) + ["length"]
        last = [one.get_response().parameters["triton_final_response"].bool_param for one in found[name]]
        assert last == [False] * (len(last) - 1) + [True]
        assert sum(one.as_numpy("num_output_tokens")[0] for one in found[name]) == 12


def test_pieces_of_a_long_answer_come_one_after_another(demo):
    asked = {"max_tokens": 400, "temperature": 0.0, "ignore_eos": True}  # a short answer may come in one piece
    with streaming(demo) as stream:
        stream.ask([tensor("text_input", [PROMPT])], "long", "demo", **asked)
        pieces = stream.answers(1)["long"]
    assert len(pieces) > 1
    assert sum(one.as_numpy("num_output_tokens")[0] for one in pieces) == 400


def test_a_stream_of_whole_answers_and_of_several(demo):
    expected = [one["text"] for one in demo.post("/v1/completions", prompt=[PROMPT, "import"], **GREEDY)["choices"]]
    with streaming(demo) as stream:
        stream.ask([tensor("text_input", [PROMPT, "import"])], "whole", **GREEDY, stream=False)
        ((whole,),) = stream.answers(1).values()
        assert text_of(whole) == expected
        stream.ask([tensor("text_input", [PROMPT, "import"])], "pieces", **GREEDY)
        pieces = stream.answers(1)["pieces"]
    for index in (0, 1):
        mine = [one for one in pieces if one.as_numpy("index").tolist() == [index]]
        assert "".join(text_of(one)[0] for one in mine) == expected[index]


def test_a_wrong_request_of_a_stream_leaves_the_others(demo):
    with streaming(demo) as stream:
        stream.ask([tensor("text_input", ["x"])], "wrong", nonsense=1)
        result, error = stream.next()
        assert result is None
        assert "nonsense" in str(error)
        stream.ask([tensor("text_input", ["x"])], "right", **GREEDY)
        assert stream.answers(1)["right"]


def test_a_request_that_is_cancelled_ends_in_the_engine(demo):
    done = threading.Event()
    with triton.InferenceServerClient(demo.grpc_address) as client:
        long = {"max_tokens": 900, "ignore_eos": True}
        running = client.async_infer(
            "demo", [tensor("text_input", ["x"])], lambda result, error: done.set(), parameters=long
        )
        until(lambda: demo.num_open == 1)
        running.cancel()
        assert done.wait(SECONDS)
    until(lambda: demo.num_open == 0)
    until(lambda: demo.models.list()[0].figures().num_running == 0)


def test_a_stream_that_is_left_ends_its_requests(demo):
    client = triton.InferenceServerClient(demo.grpc_address)
    stream = Stream(client)
    for _ in range(3):
        stream.ask([tensor("text_input", ["x"])], max_tokens=900, ignore_eos=True)
    until(lambda: demo.num_open == 3)
    stream.next()
    client.stop_stream(cancel_requests=True)
    client.close()
    until(lambda: demo.num_open == 0)
    until(lambda: demo.models.list()[0].figures().num_running == 0)


def test_timeouts(demo, client):
    """A client's deadline is the request's, and so is the parameter of Triton's name, in microseconds."""
    long = {"max_tokens": 1000, "ignore_eos": True}
    for options in ({"client_timeout": 0.05}, {"timeout": 2000}):
        with pytest.raises(triton.InferenceServerException) as found:
            client.infer("demo", [tensor("text_input", ["x"] * 200)], parameters=long, **options)
        assert found.value.status() == "StatusCode.DEADLINE_EXCEEDED"
    until(lambda: demo.num_open == 0)
    until(lambda: demo.models.list()[0].figures().num_running == 0)
