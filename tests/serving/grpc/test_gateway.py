"""The gRPC gateway: who is let in, what a message may be, and every code that it refuses with."""

from __future__ import annotations

import json
import logging
import random
import struct
import threading
from collections.abc import Iterator

import grpc
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from penstock.api_errors import CODES
from penstock.errors import FileAccessError, QueueFullError, UnavailableError
from penstock.llm.llm import LLM
from penstock.serving.admission import Admission
from penstock.serving.grpc.listener import GrpcListener
from penstock.serving.grpc.message_bounds import MAX_FIELDS
from penstock.serving.proto import oip_pb2 as pb
from penstock.serving.proto import wire_pb2
from penstock.serving.settings import GatewayLimits, GatewaySettings
from tests.support.command import DEMO
from tests.support.errors import raises
from tests.support.grpc_client import SERVICE, call, channel, infer, infer_refused, refused, request, trailers
from tests.support.http_service import KEY, SECONDS, Service, until

OPEN = {SERVICE + "ServerLive", SERVICE + "ServerReady", "/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"}
GRPC = GatewaySettings(grpc_port=0)


@pytest.fixture(scope="module")
def demo():
    service = Service({"demo": LLM(DEMO)}, GRPC)
    yield service
    service.close()


def test_every_method_wants_the_key(locked_grpc):
    """Those of health for the service as a whole do not, as over HTTP; what is no method does."""
    methods = set(locked_grpc.grpc.gateway._methods)
    assert methods > OPEN
    for method in [*methods - OPEN, "/nobody/nothing", "/inference.GRPCInferenceService/RepositoryModelLoad"]:
        for metadata in ((), (("authorization", "Bearer wrong-wrong-wrong-wrong"),), (("authorization", KEY),)):
            error = refused(locked_grpc, method, b"", metadata)
            assert (error.code(), trailers(error)["error-code"]) == (grpc.StatusCode.UNAUTHENTICATED, "invalid_api_key")
    for method in OPEN - {"/grpc.health.v1.Health/Watch"}:
        call(locked_grpc, method, b"")
    bearer = (("authorization", f"Bearer {KEY}"),)
    assert pb.ModelInferResponse.FromString(
        call(locked_grpc, SERVICE + "ModelInfer", request().SerializeToString(), bearer)
    ).outputs
    twice = refused(locked_grpc, SERVICE + "ModelInfer", b"", bearer * 2)
    assert twice.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_health(locked_grpc):
    """The service as a whole without a key, a model's with one."""
    check, watch = "/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"
    answer = health_pb2.HealthCheckResponse
    parsed, serving = answer.FromString, answer.SERVING
    of_model = health_pb2.HealthCheckRequest(service="fake").SerializeToString()
    nobody = health_pb2.HealthCheckRequest(service="nobody").SerializeToString()
    bearer = (("authorization", f"Bearer {KEY}"),)
    assert parsed(call(locked_grpc, check, b"")).status == serving
    assert parsed(call(locked_grpc, check, of_model, bearer)).status == serving
    assert refused(locked_grpc, check, of_model).code() is grpc.StatusCode.UNAUTHENTICATED
    assert refused(locked_grpc, check, nobody, bearer).code() is grpc.StatusCode.NOT_FOUND
    with channel(locked_grpc) as found:
        seen = found.unary_stream(watch)(b"", timeout=300)
        assert parsed(next(seen)).status == serving
        locked_grpc.loop.call_soon_threadsafe(setattr, locked_grpc.models, "is_draining", True)
        assert parsed(next(seen)).status == health_pb2.HealthCheckResponse.NOT_SERVING
        seen.cancel()
        unknown = found.unary_stream(watch)(nobody, timeout=60, metadata=bearer)
        assert parsed(next(unknown)).status == answer.SERVICE_UNKNOWN
        unknown.cancel()


def test_reflection(demo):
    """gRPC's own client finds services, methods and messages."""
    with channel(demo) as found:
        database = ProtoReflectionDescriptorDatabase(found)
        services = set(database.get_services())
        assert services == {
            "inference.GRPCInferenceService", "grpc.health.v1.Health", "grpc.reflection.v1.ServerReflection"
        }  # fmt: skip
        pool = DescriptorPool(database)
        method = pool.FindServiceByName("inference.GRPCInferenceService").methods_by_name["ModelInfer"]
        assert method.input_type.fields_by_name["raw_input_contents"].number == 7
        health = pool.FindServiceByName("grpc.health.v1.Health")
        assert health.methods_by_name["Watch"].output_type.full_name == "grpc.health.v1.HealthCheckResponse"
        for name in ("inference.Nothing", wire_pb2.FromWorker.DESCRIPTOR.full_name):
            with pytest.raises(KeyError):
                pool.FindMessageTypeByName(name)


def test_methods_that_are_not_there(demo):
    error = refused(demo, SERVICE + "SystemSharedMemoryRegister", b"")
    assert (error.code(), trailers(error)["error-code"]) == (grpc.StatusCode.UNIMPLEMENTED, "unknown_method")


def _tensor(**fields) -> pb.ModelInferRequest:
    found = request()
    one = found.inputs[0]
    for name, value in fields.items():
        if name == "shape":
            one.shape[:] = value
        elif name == "raw":
            one.ClearField("contents")
            found.raw_input_contents[:] = value
        elif name == "contents":
            one.ClearField("contents")
            one.contents.MergeFrom(pb.InferTensorContents(**value))
        else:
            setattr(one, name, value)
    return found


def _with(**parameters) -> pb.ModelInferRequest:
    found = request()
    for name, value in parameters.items():
        kind = {bool: "bool_param", int: "int64_param", float: "double_param", str: "string_param"}[type(value)]
        setattr(found.parameters[name], kind, value)
    return found


def _twice() -> pb.ModelInferRequest:
    found = request()
    found.inputs.append(found.inputs[0])
    return found


def _both() -> pb.ModelInferRequest:
    found = request()
    found.raw_input_contents.append(b"\x01\0\0\0x")
    return found


def _output(name: str, **parameters) -> pb.ModelInferRequest:
    found = request()
    one = found.outputs.add(name=name)
    for key, value in parameters.items():
        one.parameters[key].int64_param = value
    return found


IDS = {"name": "input_ids", "datatype": "INT32"}
WRONG = {
    "a negative size": (_tensor(shape=[-1]), "text_input"),
    "sizes whose product overflows 64 bits": (_tensor(shape=[2**32, 2**32, 2]), "text_input"),
    "a product that wraps around to one": (_tensor(shape=[2**63 - 1, 2**63 - 1]), "text_input"),
    "too many sizes": (_tensor(shape=[1] * 17), "text_input"),
    "more elements than came": (_tensor(shape=[2]), "text_input"),
    "fewer elements than came": (_tensor(shape=[0]), "text_input"),
    "an empty list of texts": (_tensor(shape=[0], contents={}), "text_input"),
    "a cube of texts": (_tensor(shape=[1, 1, 1]), "text_input"),
    "no such datatype": (_tensor(datatype="FP8"), "text_input"),
    "text that is a number": (_tensor(datatype="INT32", contents={"int_contents": [1]}), "text_input"),
    "contents of another type": (_tensor(datatype="INT32"), "text_input"),
    "raw and typed contents": (_both(), "text_input"),
    "more raw contents than inputs": (_tensor(raw=[b"\x01\0\0\0x"] * 2), "raw_input_contents"),
    "half a length": (_tensor(raw=[b"\x01\0"]), "text_input"),
    "a length beyond the end": (_tensor(raw=[b"\xff\xff\xff\xffx"]), "text_input"),
    "bytes behind the end": (_tensor(raw=[b"\x01\0\0\0xy"]), "text_input"),
    "no text": (_tensor(raw=[b"\x02\0\0\0\xff\xfe"]), "text_input"),
    "an input twice": (_twice(), "text_input"),
    "an unknown input": (_tensor(name="text"), "text"),
    "an input without a name": (_tensor(name=""), "inputs"),
    "a token id below zero": (_tensor(**IDS, contents={"int_contents": [-1]}), "input_ids"),
    "a token id beyond the vocabulary": (_tensor(**IDS, contents={"int_contents": [10**6]}), "input_ids"),
    "ids of wrong width": (_tensor(**IDS, shape=[2], raw=[b"\1\0\0\0"]), "input_ids"),
    "ids of a wrong type": (_tensor(name="input_ids", datatype="FP32", contents={"fp32_contents": [1]}), "input_ids"),
    "a number beyond its type": (_tensor(name="top_k", datatype="INT8", contents={"int_contents": [300]}), "top_k"),
    "typed contents that do not exist": (_tensor(name="top_p", datatype="FP16", contents={}), "top_p"),
    "a flag of two": (_tensor(name="ignore_eos", datatype="BOOL", raw=[b"\2"]), "ignore_eos"),
    "an unknown parameter": (_with(nonsense=1), "nonsense"),
    "a sequence": (_with(sequence_id=1), "sequence_id"),
    "a parameter beyond its bounds": (_with(temperature=-1.0), "temperature"),
    "a parameter that is no number": (_with(temperature=float("nan")), "temperature"),
    "a parameter of a wrong type": (_with(temperature="hot"), "temperature"),
    "what completions alone have": (_with(logprobs=1), "logprobs"),
    "a stream of one answer": (_with(stream=True), "stream"),
    "a bias that is no JSON": (_with(logit_bias="{"), "logit_bias"),
    "an unknown output": (_output("logits"), "logits"),
    "an output of a parameter": (_output("text_output", classification=1), "text_output"),
    "an id without end": (request(id="x" * 2000), "id"),
}


@pytest.mark.parametrize("case", WRONG)
def test_malformed_tensors_are_refused_by_name(demo, case):
    message, field = WRONG[case]
    code, param, text = infer_refused(demo, message)
    assert (code, param.partition("[")[0]) == ("INVALID_ARGUMENT", field), text
    assert field in text or field == "raw_input_contents"


def test_models_and_versions_that_are_not_there(demo):
    for wrong, field in ((request(model_name="other"), "model"), (request(model_version="2"), "model_version")):
        assert infer_refused(demo, wrong)[:2] == ("NOT_FOUND", field)
    name = pb.ModelReadyRequest(name="../demo").SerializeToString()
    assert refused(demo, SERVICE + "ModelReady", name).code() is grpc.StatusCode.NOT_FOUND
    assert refused(demo, SERVICE + "ModelMetadata", b"").code() is grpc.StatusCode.INVALID_ARGUMENT


def test_raw_and_typed_contents_are_the_same(demo):
    raw = request()
    raw.inputs[0].ClearField("contents")
    raw.raw_input_contents.append(struct.pack("<I", 3) + b"the")
    assert infer(demo, raw) == infer(demo, request())


def test_malformed_messages_are_refused(demo):
    """Also such as would take a hundred times their size once they are parsed."""
    many = b"\x2a\x00" * (MAX_FIELDS + 1)
    deep = b"".join(b"\x22" + bytes([2]) + b"\x0a\x00" for _ in range(MAX_FIELDS))
    for data in (b"\xff", b"\x0a\x05x", b"\x0b", b"\x2a\x7f", b"\x0a\x02\xff\xfe", many, deep):
        error = refused(demo, SERVICE + "ModelInfer", data)
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "ModelInferRequest" in error.details()


def test_mutated_messages_are_answered_or_refused(demo):
    """Whatever bytes come, the gateway says OK, what is wrong, or that it does not know the model: never INTERNAL."""
    seeds = [request().SerializeToString(), _tensor(**IDS, contents={"int_contents": [5]}).SerializeToString()]
    random_ = random.Random(5)
    codes = set()
    with channel(demo) as found:
        rpc = found.unary_unary(SERVICE + "ModelInfer")
        for _ in range(400):
            data = bytearray(random_.choice(seeds))
            for _ in range(random_.randint(1, 4)):
                at = random_.randrange(len(data))
                data[at : at + random_.randint(0, 2)] = random_.randbytes(random_.randint(0, 3))
            try:
                rpc(bytes(data), timeout=300)
                codes.add("OK")
            except grpc.RpcError as error:
                codes.add(error.code().name)
    assert {"INVALID_ARGUMENT", "OK"} <= codes <= {"OK", "INVALID_ARGUMENT", "NOT_FOUND"}
    assert demo.num_open == 0


def test_every_code_of_the_table(serve, monkeypatch):
    """Errors behind the gateway come out as the table says, with retry-after where a client may come back."""
    service = serve(settings=GRPC)
    (backend,) = service.models.list()
    errors = {
        429: QueueFullError("full"), 500: ZeroDivisionError("secret"), 503: UnavailableError("away", 7.0),
        504: TimeoutError(),
    }  # fmt: skip
    for status, error in errors.items():

        async def submit(*_arguments, error=error, **_named):
            raise error

        monkeypatch.setattr(backend, "submit", submit)
        found = refused(service, SERVICE + "ModelInfer", request().SerializeToString(), (("x-request-id", "mine"),))
        assert found.code().name == CODES[status].grpc
        assert trailers(found)["x-request-id"] == "mine"
        assert ("retry-after" in trailers(found)) == CODES[status].is_retriable
        assert "secret" not in found.details()
    assert {code.grpc for code in CODES.values()} <= set(grpc.StatusCode.__members__)


def test_limits(serve):
    limits = GatewayLimits(body_bytes=4096, header_bytes=8192, num_headers=20)
    service = serve(settings=GatewaySettings(grpc_port=0, limits=limits))
    method, data = SERVICE + "ModelInfer", request().SerializeToString()
    too_large = refused(service, method, b"x" * 5000)
    too_many = refused(service, method, data, tuple((f"x-{i}", "y") for i in range(21)))
    too_long = refused(service, method, data, (("x", "y" * 10_000),))
    for error in (too_large, too_many, too_long):
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert trailers(too_many)["error-code"] == "too_many_headers"
    assert trailers(refused(service, method, b"x"))["error-code"] == "invalid_message"
    with channel(service, ("grpc.default_compression_algorithm", 2)) as found:
        rpc = found.unary_unary(method)
        assert rpc(data + b"\x1a\x00" * 500, timeout=300)
        with pytest.raises(grpc.RpcError) as error:
            rpc(data + b"\x1a\x00" * 5000, timeout=300)
    assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert error.value.details() == "The decompressed message has more than 4096 bytes."
    call(service, method, data)
    until(lambda: service.num_open == 0)


def test_open_requests_are_limited(serve):
    service = serve(settings=GatewaySettings(grpc_port=0, limits=GatewayLimits(num_open=1)))
    method, data = SERVICE + "ModelInfer", request().SerializeToString()
    service.loop.call_soon_threadsafe(setattr, service.gateway.admission, "num_open", 1)
    until(lambda: service.num_open == 1)
    full = refused(service, method, data)
    assert (full.code(), trailers(full)["retry-after"]) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "1")
    service.loop.call_soon_threadsafe(setattr, service.gateway.admission, "num_open", 0)
    until(lambda: service.num_open == 0)
    call(service, method, data)


def test_pages_of_other_hosts_are_refused(demo):
    error = refused(demo, SERVICE + "ServerLive", b"", (("origin", "http://evil.example"),))
    assert error.code() is grpc.StatusCode.PERMISSION_DENIED


def test_a_message_that_does_not_come_is_not_waited_for(serve):
    service = serve(settings=GatewaySettings(grpc_port=0, limits=GatewayLimits(body_s=0.2)))
    never = threading.Event()
    with channel(service) as found:
        late = found.stream_unary(SERVICE + "ModelInfer").future(_asks(never), timeout=SECONDS)
        assert "did not arrive" in late.exception().details()
        never.set()


def test_a_port_that_is_taken_is_refused(demo):
    """Not shared, as gRPC would have it."""
    port = int(demo.grpc_address.rpartition(":")[2])

    async def open_it() -> None:
        GrpcListener(Admission(demo.models, settings)).open()

    for host in ("127.0.0.1", "localhost"):  # a name is not bound at whichever of its addresses is free
        settings = GatewaySettings(host=host, grpc_port=port)
        with raises(FileAccessError, match=str(port)):
            demo.do(open_it())


def test_logs_and_metrics(demo, caplog):
    with caplog.at_level(logging.INFO, "penstock.serving"):
        call(demo, SERVICE + "ModelInfer", request().SerializeToString(), (("x-request-id", "abc"),))
        until(lambda: [one for one in caplog.records if getattr(one, "facts", {}).get("request_id") == "abc"])
    facts = next(one.facts for one in caplog.records if one.facts.get("request_id") == "abc")
    assert (facts["method"], facts["path"], facts["code"]) == ("gRPC", SERVICE + "ModelInfer", "OK")
    assert (facts["client"], facts["model"], facts["completion_tokens"]) == ("127.0.0.1", "demo", 2)
    json.dumps(facts)
    refused(demo, "/a{b}/c", b"")
    text = demo.ask("GET", "/metrics")[2].decode()
    labels = 'grpc_service="inference.GRPCInferenceService",grpc_method="ModelInfer",grpc_code="OK"'
    assert f"grpc_server_handled_total{{{labels}}}" in text
    assert 'grpc_method="none",grpc_code="UNIMPLEMENTED"' in text
    assert "a{b}" not in text


def test_a_service_that_stops_ends_streams(serve):
    service = serve(settings=GRPC)
    never = threading.Event()
    with channel(service) as found:
        stream = found.stream_stream(SERVICE + "ModelStreamInfer")(_asks(never, request()), timeout=300)
        assert pb.ModelStreamInferResponse.FromString(next(stream)).infer_response.outputs
        service.loop.call_soon_threadsafe(service.grpc.stop)
        with pytest.raises(grpc.RpcError) as error:
            for _ in stream:
                pass
        never.set()
        assert error.value.code() is grpc.StatusCode.UNAVAILABLE


def _asks(never: threading.Event, *requests: pb.ModelInferRequest) -> Iterator[bytes]:
    """Some requests, and no end of them."""
    yield from (one.SerializeToString() for one in requests)
    never.wait(SECONDS)


def test_a_grpc_client_that_does_not_read_is_disconnected(serve, caplog):
    """And what it asked for ends in the engine; meanwhile pieces are put together, not queued."""
    caplog.set_level(logging.INFO, "penstock.serving")
    limits = GatewayLimits(write_s=0.3)
    service = serve(settings=GatewaySettings(grpc_port=0, limits=limits), context_len=30_000, num_pages=1000)
    never = threading.Event()
    small = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1024))
    long = [request(id="x" * 1000) for _ in range(4)]
    for one in long:
        one.parameters["max_tokens"].int64_param = 25_000
        one.parameters["ignore_eos"].bool_param = True
    with channel(service, *small) as found:
        stream = found.stream_stream(SERVICE + "ModelStreamInfer")(_asks(never, *long))
        next(stream)
        until(lambda: service.num_open == 0, "the end of what nobody reads")
        until(lambda: [one for one in caplog.records if one.facts.get("gone") == "slow reader"])
        with pytest.raises(grpc.RpcError) as error:  # who reads on is told, and does not wait for ever
            for _ in stream:
                pass
        assert error.value.code() is grpc.StatusCode.ABORTED
        never.set()


def test_tls(serve, certificate):
    file, key = certificate
    service = serve(settings=GatewaySettings(grpc_port=0, tls_certificate=file, tls_key=key))
    port = service.grpc_address.rpartition(":")[2]
    trusted = grpc.ssl_channel_credentials(file.read_bytes())
    with grpc.secure_channel(f"localhost:{port}", trusted) as found:
        data = found.unary_unary(SERVICE + "ModelInfer")(request().SerializeToString(), timeout=SECONDS)
    assert pb.ModelInferResponse.FromString(data).outputs
    for other in (grpc.ssl_channel_credentials(), None):
        address = f"localhost:{port}"
        with grpc.insecure_channel(address) if other is None else grpc.secure_channel(address, other) as found:
            with pytest.raises(grpc.RpcError) as error:
                found.unary_unary(SERVICE + "ServerLive")(b"", timeout=SECONDS)
            assert error.value.code() is grpc.StatusCode.UNAVAILABLE
