"""Servables over both protocols, with stub methods: gRPC by Triton's client, cancellation, limits."""

from __future__ import annotations

import asyncio
import json
import logging

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
from grpc_health.v1 import health_pb2
from tritonclient.utils import InferenceServerException

from penstock.serving import admission
from penstock.serving.proto import oip_pb2 as pb
from penstock.serving.settings import GatewayLimits, GatewaySettings
from penstock.tensors import DTYPES
from tests.support.grpc_client import SERVICE, Stream, call, channel, refused, trailers
from tests.support.http_service import KEY, SECONDS, Service, until
from tests.support.stub_methods import EVERY_DATATYPE, StubMethods

X, Y = np.array([[1, 2], [3, 4]], np.float32), np.array([[5, 6], [7, 9]], np.float32)
BODY = {"inputs": [{"name": "x", "datatype": "INT32", "shape": [1], "data": [5]}]}


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    admins = tmp_path_factory.mktemp("keys") / "admins"
    admins.write_text(KEY + "\n")
    admins.chmod(0o600)
    limits = GatewayLimits(body_bytes=16 << 20)
    found = Service({}, GatewaySettings(grpc_port=0, admin_keys_file=admins, limits=limits), methods=StubMethods())
    yield found
    found.close()


@pytest.fixture
def client(service):
    with triton.InferenceServerClient(service.grpc_address) as found:
        yield found


@pytest.fixture
def gated(service):
    """The method that echoes, which answers no request until its gate is opened."""
    (method,) = service.methods.versions["echo"]
    method.gate = gate = service.do(_event())
    yield method
    service.loop.call_soon_threadsafe(gate.set)
    method.gate = None


async def _event() -> asyncio.Event:
    return asyncio.Event()


def tensor(name: str, array: np.ndarray, datatype: str = "FP32") -> triton.InferInput:
    found = triton.InferInput(name, list(array.shape), datatype)
    found.set_data_from_numpy(array)
    return found


def sums() -> list[triton.InferInput]:
    return [tensor("x", X), tensor("y", Y)]


def code_of(error: InferenceServerException) -> str:
    return error.status().removeprefix("StatusCode.")


def test_methods_over_grpc(client):
    outputs = [triton.InferRequestedOutput(name) for name in ("difference", "sum")]
    result = client.infer("sums.both", sums(), outputs=outputs, request_id="mine")
    assert np.array_equal(result.as_numpy("sum"), X + Y)
    response = result.get_response()
    assert (response.model_name, response.model_version, response.id) == ("sums.both", "2", "mine")
    assert [one.name for one in response.outputs] == ["difference", "sum"]
    assert client.infer("sums", sums(), model_version="stable").get_response().model_version == "1"
    assert client.is_server_ready()
    assert client.is_model_ready("sums", "2")
    found = client.get_model_metadata("sums")
    assert (list(found.versions), [list(one.shape) for one in found.inputs]) == (["1", "2"], [[-1, 2]] * 2)
    assert list(client.get_server_metadata().extensions) == [
        "model_configuration", "model_repository", "parameters", "schedule_policy", "statistics"
    ]  # fmt: skip
    for name, version in (("nobody", ""), ("sums", "9"), ("sums.other", "")):
        with pytest.raises(InferenceServerException) as error:
            client.infer(name, sums(), model_version=version)
        assert code_of(error.value) == "NOT_FOUND"


def test_configuration_over_grpc(client):
    found = client.get_model_config("sums", as_json=True)["config"]
    assert found["dynamic_batching"] == {
        "preferred_batch_size": [4, 8], "max_queue_delay_microseconds": "2000",
        "default_queue_policy": {"allow_timeout_override": True, "max_queue_size": 100},
    }  # fmt: skip
    assert found["version_policy"] == {"all": {}}
    message = client.get_model_config("sums", "1").config
    assert [(one.name, one.data_type, list(one.dims)) for one in message.input] == [("x", 11, [2]), ("y", 11, [2])]
    assert (message.max_batch_size, message.instance_group[0].count, message.instance_group[0].kind) == (64, 2, 2)
    with pytest.raises(InferenceServerException) as error:
        client.get_model_config("nobody")
    assert code_of(error.value) == "NOT_FOUND"


@pytest.mark.parametrize("datatype", [name for name in DTYPES if name != "BF16"])
def test_every_datatype_over_grpc(service, client, datatype):
    array = EVERY_DATATYPE[datatype]
    assert np.array_equal(client.infer("echo", [tensor("x", array, datatype)]).as_numpy("x"), array)
    field = {"BYTES": "bytes", "BOOL": "bool", "FP32": "fp32", "FP64": "fp64", "INT64": "int64", "UINT64": "uint64"}
    name = field.get(datatype, "uint" if datatype.startswith("U") else "int")
    if datatype == "FP16":
        return
    message = pb.ModelInferRequest(model_name="echo")
    one = message.inputs.add(name="x", datatype=datatype, shape=array.shape)
    getattr(one.contents, f"{name}_contents").extend(array.ravel().tolist())
    call(service, SERVICE + "ModelInfer", message.SerializeToString())
    seen = service.methods.versions["echo"][0].seen[-1].inputs["x"].array
    assert (seen.dtype, np.array_equal(seen, array), seen.flags.writeable) == (DTYPES[datatype], True, False)


def test_arrays_of_more_than_a_language_model_takes(service, client):
    """A servable's tensors are bounded by the body, and are not made lists of."""
    array = np.arange(3 << 20, dtype=np.int8).reshape(3, 1 << 20)
    assert np.array_equal(client.infer("echo", [tensor("x", array, "INT8")]).as_numpy("x"), array)
    head = json.dumps({"inputs": [{"name": "x", "datatype": "INT8", "shape": [3, 1 << 20],
                                   "parameters": {"binary_data_size": array.size}}],
                       "parameters": {"binary_data_output": True}}).encode()  # fmt: skip
    status, headers, data = service.ask(
        "POST", "/v2/models/echo/infer", head + array.tobytes(), {"Inference-Header-Content-Length": str(len(head))}
    )
    assert status == 200
    assert data[int(headers["inference-header-content-length"]) :] == array.tobytes()


def test_a_stream_of_requests_to_methods(service, client):
    """Side by side with what goes wrong, each with one response, which is its last."""
    stream = Stream(client)
    for i in range(10):
        stream.ask([tensor("x", np.full((1, 2), i, np.int32), "INT32")], f"r{i}", "echo")
    stream.ask([tensor("x", X)], "short", "sums")
    found = {}
    for _ in range(11):
        result, error = stream.next()
        if error is None:
            response = result.get_response()
            assert response.parameters["triton_final_response"].bool_param
            found[response.id] = result.as_numpy("x").tolist()
        else:
            assert "y is missing" in error.message()
    assert found == {f"r{i}": [[i, i]] for i in range(10)}
    client.stop_stream()


def test_statistics_and_index_over_grpc(service, client):
    client.infer("sums", sums())
    (found,) = client.get_inference_statistics("sums", "2").model_stats
    (told,) = json.loads(service.ask("GET", "/v2/models/sums/versions/2/stats")[2])["model_stats"]
    assert (found.name, found.version) == ("sums.both", "2")
    assert (found.inference_count, found.execution_count) == (told["inference_count"], told["execution_count"])
    assert found.inference_stats.success.ns == told["inference_stats"]["success"]["ns"] > 0
    assert [one.batch_size for one in found.batch_stats] == [one["batch_size"] for one in told["batch_stats"]]
    names = [(one.name, one.state) for one in client.get_model_repository_index().models]
    assert ("sums", "READY") in names
    error = refused(service, SERVICE + "RepositoryIndex", pb.RepositoryIndexRequest(
        repository_name="other").SerializeToString())  # fmt: skip
    assert (error.code(), trailers(error)["error-param"]) == (grpc.StatusCode.INVALID_ARGUMENT, "repository_name")


def test_changes_over_grpc_want_an_admins_key(service, client):
    admin = {"authorization": f"Bearer {KEY}"}
    before = len(service.methods.changes)
    for change in (client.load_model, client.unload_model):
        with pytest.raises(InferenceServerException) as error:
            change("zeros")
        assert code_of(error.value) == "PERMISSION_DENIED"
        assert len(service.methods.changes) == before
    client.unload_model("zeros", headers=admin)
    assert not client.is_model_ready("zeros")
    client.load_model("zeros", headers=admin, config='{"labels": {"stable": 1}}')
    assert client.is_model_ready("zeros")
    assert service.methods.changes[before:] == [("unload", "zeros", None), ("load", "zeros", {"labels": {"stable": 1}})]
    with pytest.raises(InferenceServerException, match="Files are not accepted"):
        client.load_model("zeros", headers=admin, config="{}", files={"file:1/servable.py": b"import os"})


def test_a_disconnected_client_is_cancelled(service, gated):
    """Over either protocol, while the method is at work."""
    before = gated.num_cancelled
    with service.connect() as connection:
        data = json.dumps(BODY).encode()
        connection.sendall(b"POST /v2/models/echo/infer HTTP/1.1\r\nHost: localhost\r\n"
                           b"Content-Length: %d\r\n\r\n" % len(data) + data)  # fmt: skip
        until(lambda: service.num_open == 1)
    until(lambda: gated.num_cancelled == before + 1)
    num_seen = len(gated.seen)
    with service.connect() as connection:  # the second of two that came together
        connection.sendall(b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\n"
                           b"POST /v2/models/echo/infer HTTP/1.1\r\nHost: localhost\r\n"
                           b"Content-Length: %d\r\n\r\n" % len(data) + data)  # fmt: skip
        until(lambda: len(gated.seen) == num_seen + 1)
    until(lambda: gated.num_cancelled == before + 2)
    message = pb.ModelInferRequest(model_name="echo")
    message.inputs.add(name="x", datatype="INT32", shape=[1]).contents.int_contents.append(5)
    with channel(service) as found:
        rpc = found.unary_unary(SERVICE + "ModelInfer").future(message.SerializeToString(), timeout=SECONDS)
        until(lambda: service.num_open == 1)
        rpc.cancel()
        until(lambda: gated.num_cancelled == before + 3)
    until(lambda: service.num_open == 0)


def test_deadlines_and_priorities_reach_the_method(service, client):
    client.infer("echo", [tensor("x", X)], timeout=5_000_000, priority=3)
    seen = service.methods.versions["echo"][0].seen[-1]
    assert (0 < seen.deadline_s <= 5, seen.priority, dict(seen.parameters)) == (True, 3, {})
    client.infer("echo", [tensor("x", X)], client_timeout=40.0)
    assert 0 < service.methods.versions["echo"][0].seen[-1].deadline_s < 60  # the clocks of gRPC are not one
    service.post("/v2/models/echo/infer", **BODY, parameters={"timeout": 2_000_000, "priority": -1})
    seen = service.methods.versions["echo"][0].seen[-1]
    assert (seen.deadline_s, seen.priority) == (2.0, -1)
    service.post("/v2/models/echo/infer", **BODY)
    assert service.methods.versions["echo"][0].seen[-1].deadline_s == service.gateway.settings.limits.request_s


def test_open_requests_of_methods_are_limited():
    service = Service({}, GatewaySettings(limits=GatewayLimits(num_open=1)), methods=StubMethods())
    try:
        service.loop.call_soon_threadsafe(setattr, service.gateway.admission, "num_open", 1)
        until(lambda: service.num_open == 1)
        status, headers, data = service.ask("POST", "/v2/models/echo/infer", BODY)
        assert (status, headers["retry-after"], json.loads(data)["code"]) == (429, "1", "too_many_requests")
        assert service.ask("GET", "/v2/health/live")[0] == 200
        service.loop.call_soon_threadsafe(setattr, service.gateway.admission, "num_open", 0)
    finally:
        service.close()


def test_a_service_that_drains_takes_no_requests(service):
    service.loop.call_soon_threadsafe(setattr, service.models, "is_draining", True)
    until(lambda: service.models.is_draining)
    try:
        for method, path, body in (
            ("GET", "/v2/health/ready", None), ("GET", "/health/ready", None),
            ("GET", "/v2/models/echo/ready", None), ("POST", "/v2/models/echo/infer", BODY),
        ):  # fmt: skip
            assert service.ask(method, path, body)[0] == 503
    finally:
        service.loop.call_soon_threadsafe(setattr, service.models, "is_draining", False)
    until(lambda: not service.models.is_draining)
    assert service.ask("GET", "/v2/health/ready")[0] == 200


def test_metrics_and_log_of_a_method(service, caplog):
    with caplog.at_level(logging.INFO, "penstock.serving"):
        service.ask("POST", "/v2/models/echo/infer", BODY, {"X-Request-Id": "of-echo"})
        until(lambda: [one for one in caplog.records if one.facts.get("request_id") == "of-echo"])
    facts = next(one.facts for one in caplog.records if one.facts.get("request_id") == "of-echo")
    assert (facts["model"], facts["version"], facts["status"]) == ("echo.it", "1", 200)
    text = service.ask("GET", "/metrics")[2].decode()
    assert 'handler="/v2/models/{model}/infer",status="200"' in text


def test_a_whole_answer_goes_out_in_one_piece(service):
    """Head and body: two would be two calls of the system, and two packets."""
    data = json.dumps(BODY).encode()
    with service.connect() as connection:
        for _ in range(3):  # of one connection
            connection.sendall(b"POST /v2/models/echo/infer HTTP/1.1\r\nHost: localhost\r\n"
                               b"Content-Length: %d\r\n\r\n" % len(data) + data)  # fmt: skip
            answer = connection.recv(65536)
            head, _, body = answer.partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200 ")
            assert json.loads(body)["outputs"][0]["data"] == [5]


def test_health_counts_servables(service):
    """Over both protocols a service of servables only is ready."""
    check, answer = "/grpc.health.v1.Health/Check", health_pb2.HealthCheckResponse

    def status(name: str) -> int:
        return answer.FromString(call(service, check, health_pb2.HealthCheckRequest(service=name).SerializeToString()))

    assert service.ask("GET", "/health/ready")[0] == 200
    assert status("").status == status("echo.it").status == answer.SERVING
    assert (
        refused(service, check, health_pb2.HealthCheckRequest(service="nobody").SerializeToString()).code()
        is grpc.StatusCode.NOT_FOUND
    )
    service.methods.unloaded.add("odd")
    assert status("odd.it").status == answer.NOT_SERVING
    service.methods.unloaded.clear()


def test_a_request_without_a_model_finds_none(service):
    assert service.refused("/v1/completions", prompt="x")[1]["code"] == "model_not_found"


def test_a_method_that_ignores_its_deadline_is_ended(service, gated, monkeypatch):
    """As over HTTP, whose gateway limits the time of each handler."""
    monkeypatch.setattr(admission, "_GRACE_S", 0.1)
    before = gated.num_cancelled
    message = pb.ModelInferRequest(model_name="echo.it")
    message.inputs.add(name="x", datatype="INT32", shape=[1]).contents.int_contents.append(5)
    message.parameters["timeout"].int64_param = 1000
    assert refused(service, SERVICE + "ModelInfer", message.SerializeToString()).code().name == "DEADLINE_EXCEEDED"
    until(lambda: gated.num_cancelled == before + 1)
