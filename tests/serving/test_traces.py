"""Spans of requests as a collector gets them, read with OpenTelemetry's own messages."""

from __future__ import annotations

import itertools
import logging
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from penstock.errors import InvalidArgumentError, UnsupportedError
from penstock.serving.settings import GatewaySettings
from penstock.serving.traces import Traces, check_endpoint
from tests.support.errors import raises
from tests.support.grpc_client import SERVICE, call, refused, request

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Collector:
    """Takes spans over HTTP."""

    def __init__(self) -> None:
        spans = self.spans = []
        resources = self.resources = []

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                assert (self.path, self.headers["Content-Type"]) == ("/v1/traces", "application/x-protobuf")
                message = ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["Content-Length"])))
                for group in message.resource_spans:
                    resources.append(_plain(group.resource.attributes))
                    spans.extend(span for scope in group.scope_spans for span in scope.spans)
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def _plain(attributes) -> dict:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in attributes}


@pytest.fixture
def collector():
    made = Collector()
    yield made
    made.close()


def test_a_request_is_a_span_with_its_parts(serve, collector, caplog) -> None:
    caplog.set_level(logging.INFO, "penstock.serving")
    traces = Traces(collector.url)
    service = serve("fake", traces=traces)

    def ask(path: str, body: dict, flags: str = "01", status: int = 200) -> None:
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-{flags}", "X-Request-Id": "mine"} if flags else {}
        assert service.ask("POST", path, body, headers)[0] == status

    chat = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 5, "n": 2, "temperature": 0.5}
    ask("/v1/chat/completions", chat)
    ask("/v1/completions", {"prompt": [[1, 2], [3, 4]], "max_tokens": 3, "stream": True, "ignore_eos": True}, "")
    ask("/v1/completions", {"prompt": "a", "nonsense": 1}, status=400)
    ask("/v1/completions", {"prompt": "a", "max_tokens": 2}, "00")  # whose trace is not sampled
    ask("/tokenize", {"prompt": "a"})
    assert service.ask("GET", "/v1/models")[0] == 200
    service.close()
    traces.close()

    assert collector.resources[0]["service.name"] == "penstock"
    spans = collector.spans
    requests = [span for span in spans if span.name == "llm_request"]
    assert len(requests) == 3
    named, own, refused = requests
    assert (named.trace_id.hex(), named.parent_span_id.hex()) == (TRACE, PARENT)
    assert (own.parent_span_id, len(own.trace_id), own.trace_id.hex() != TRACE) == (b"", 16, True)

    parts = [span for span in spans if span.parent_span_id == named.span_id]
    assert [span.name for span in parts] == ["queue", "prefill", "decode"]
    assert named.start_time_unix_nano <= parts[0].start_time_unix_nano
    for one, following in itertools.pairwise(parts):
        assert one.start_time_unix_nano <= one.end_time_unix_nano == following.start_time_unix_nano
    assert parts[-1].start_time_unix_nano <= parts[-1].end_time_unix_nano
    assert sorted(span.name for span in spans if span.parent_span_id == own.span_id) == sorted(
        ["queue", "prefill", "decode"] * 2
    )

    told = _plain(named.attributes)
    assert told["gen_ai.usage.completion_tokens"] == told["gen_ai.usage.output_tokens"] > 0
    expected = {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.id": "mine",
        "gen_ai.request.model": "fake",
        "gen_ai.response.model": "fake",
        "gen_ai.request.max_tokens": 5,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.n": 2,
        "gen_ai.usage.num_sequences": 2,
        "http.route": "/v1/chat/completions",
        "http.response.status_code": 200,
    }
    assert {name: told[name] for name in expected} == expected
    assert 0 < told["gen_ai.latency.time_to_first_token"] <= told["gen_ai.latency.e2e"]
    for name in ("time_in_queue", "time_in_model_prefill", "time_in_model_decode", "time_in_model_inference"):
        assert 0 <= told[f"gen_ai.latency.{name}"] <= told["gen_ai.latency.e2e"]
    assert _plain(own.attributes)["gen_ai.usage.completion_tokens"] == 6
    told = _plain(refused.attributes)
    assert (told["error.type"], refused.status.code) == ("400", 2)
    assert "nonsense" in refused.status.message
    ids = [
        record.facts.get("trace_id") for record in caplog.records if record.facts.get("path", "").startswith("/v1/c")
    ]
    assert ids == [TRACE, own.trace_id.hex(), TRACE, TRACE]


def test_a_request_over_grpc_is_a_span(serve, collector) -> None:
    traces = Traces(collector.url)
    service = serve("fake", traces=traces, settings=GatewaySettings(grpc_port=0))
    metadata = (("traceparent", f"00-{TRACE}-{PARENT}-01"), ("x-request-id", "mine"))
    call(service, SERVICE + "ModelInfer", request().SerializeToString(), metadata)
    refused(service, SERVICE + "ModelInfer", request(model_name="other").SerializeToString())
    call(service, SERVICE + "ServerLive", b"")
    service.close()
    traces.close()
    named, wrong = (span for span in collector.spans if span.name == "llm_request")
    assert (named.trace_id.hex(), named.parent_span_id.hex()) == (TRACE, PARENT)
    parts = [span.name for span in collector.spans if span.parent_span_id == named.span_id]
    assert parts == ["queue", "prefill", "decode"]
    expected = {
        "gen_ai.request.id": "mine",
        "gen_ai.request.model": "fake",
        "gen_ai.usage.completion_tokens": 2,
        "rpc.system": "grpc",
        "rpc.service": "inference.GRPCInferenceService",
        "rpc.method": "ModelInfer",
        "rpc.response.status_code": "OK",
    }
    told = _plain(named.attributes)
    assert {name: told[name] for name in expected} == expected
    assert (_plain(wrong.attributes)["rpc.response.status_code"], wrong.status.code) == ("NOT_FOUND", 2)


def test_a_collector_that_is_away_costs_no_request(serve, collector) -> None:
    collector.close()
    traces = Traces(f"{collector.url}/v1/traces")
    service = serve("fake", traces=traces)
    assert service.post("/v1/completions", prompt="a", max_tokens=2)["choices"]
    service.close()
    traces.close()
    collector.__init__()  # for the fixture to close


def test_endpoints_that_cannot_be_are_refused() -> None:
    assert check_endpoint("http://h:4318") == check_endpoint("http://h:4318/") == "http://h:4318/v1/traces"
    assert check_endpoint("https://h/x/y") == "https://h/x/y"
    for wrong in ("grpc://h:4317", "h:4317", "http://", "", "/v1/traces"):
        with pytest.raises(InvalidArgumentError) as refused:
            check_endpoint(wrong)
        assert refused.value.param == "otlp_traces_endpoint"


def test_without_the_extra_it_says_so(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with raises(UnsupportedError, param="otlp_traces_endpoint", match=r"'\S*\[otel\]'"):
        Traces("http://localhost:4318")
