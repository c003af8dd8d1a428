"""OpenTelemetry traces: a span per request, and below it its time in the queue, in prefill and in decode.

Names are vLLM's and those of OpenTelemetry's conventions for generative AI.  Spans are made when a request has ended,
of what was noted meanwhile, and sent by a thread of the SDK's; a collector that is away costs spans, never a request.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from penstock.api_errors import grpc_code
from penstock.errors import InvalidArgumentError, UnsupportedError
from penstock.serving.request_trace import RequestTrace
from penstock.version import __version__

if TYPE_CHECKING:
    from penstock.serving.call import Call
    from penstock.serving.operations import Operation

__all__ = ["Traces", "check_endpoint"]

_HEADERS: Final = ("traceparent", "tracestate")
_KINDS: Final = {
    "complete": "text_completion", "chat": "chat", "embed": "embeddings",
    **{f"{name}{version}": "text_completion" for name in ("infer", "generate", "generate_stream")
       for version in ("", "_version")},
}  # fmt: skip
"""Operations that have spans, and what the conventions call them."""
_ASKED: Final = ("max_tokens", "temperature", "top_p", "n")
_EXPORT_S: Final = 5.0
_CLOSE_S: Final = 5.0


def check_endpoint(endpoint: str) -> str:
    """The URL that spans are sent to, with OTLP's path where it has none; InvalidArgumentError."""
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise InvalidArgumentError(
            f"otlp_traces_endpoint must be OTLP's URL over HTTP, as http://localhost:4318/v1/traces, not {endpoint!r}",
            param="otlp_traces_endpoint",
        )
    return endpoint if parts.path.strip("/") else parts._replace(path="/v1/traces").geturl()


class Traces:
    """Sends spans to an OTLP collector; its environment variables (OTEL_...) hold, but for what is given here.

    UnsupportedError when OpenTelemetry is not installed.
    """

    def __init__(self, endpoint: str) -> None:
        url = check_endpoint(endpoint)
        try:
            from opentelemetry import trace
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as error:
            raise UnsupportedError(
                f"otlp_traces_endpoint needs OpenTelemetry: pip install 'penstock[otel]' ({error})",
                param="otlp_traces_endpoint",
            ) from error
        about = {SERVICE_VERSION: __version__}
        if "OTEL_SERVICE_NAME" not in os.environ:
            about[SERVICE_NAME] = "penstock"
        self._api: Any = trace
        self._propagator: Any = TraceContextTextMapPropagator()
        self._provider: Any = TracerProvider(resource=Resource.create(about), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=url, timeout=_EXPORT_S)))
        self._tracer: Any = self._provider.get_tracer("penstock.serving", __version__)

    def begin(self, headers: Mapping[bytes, bytes]) -> RequestTrace:
        """For a request with these headers."""
        names = [name for name in _HEADERS if name.encode() in headers]
        return RequestTrace({name: headers[name.encode()].decode("latin-1") for name in names})

    def end(self, call: Call, trace: RequestTrace, operation: Operation, status: int) -> None:
        """Make the spans of a request that was answered with ``status``; its ``trace_id`` goes into the log."""
        if operation.name not in _KINDS:
            return
        ended = time.perf_counter()
        offset_ns = time.time_ns() - int(ended * 1e9)  # from perf_counter to the time of day
        span = self._tracer.start_span(
            "infer_request" if "version" in call.facts else "llm_request",
            context=self._propagator.extract(trace.carrier),
            kind=self._api.SpanKind.SERVER,
            attributes=_attributes(call, trace, operation, status, ended),
            start_time=int(call.arrived * 1e9) + offset_ns,
        )
        call.facts["trace_id"] = f"{span.get_span_context().trace_id:032x}"
        if status >= 400:
            span.set_status(self._api.Status(self._api.StatusCode.ERROR, str(call.facts.get("error", status))))
        parent = self._api.set_span_in_context(span)
        for one in trace.answers:
            for name, start_s, end_s in _parts(one.timings):
                at = int(one.sent * 1e9) + offset_ns
                child = self._tracer.start_span(name, context=parent, start_time=at + int(start_s * 1e9))
                child.end(at + int(end_s * 1e9))
        span.end(int(ended * 1e9) + offset_ns)

    def close(self) -> None:
        """Send what is left, for up to five seconds; beside an event loop."""
        thread = threading.Thread(target=self._provider.shutdown, name="penstock-traces", daemon=True)
        thread.start()
        thread.join(_CLOSE_S)


def _parts(timings: Mapping[str, float]) -> list[tuple[str, float, float]]:
    """Name, begin and end of what an answer's time went to, in seconds since it was sent."""
    queued, first, total = timings["queued_s"], timings["first_token_s"], timings["total_s"]
    if not first:
        return [("queue", 0.0, queued)]
    return [("queue", 0.0, queued), ("prefill", queued, first), ("decode", first, total)]


def _protocol(operation: Operation, status: int) -> dict[str, Any]:
    """What the conventions say of HTTP's requests, and of gRPC's."""
    if operation.method == "gRPC":
        service, _, method = operation.path.removeprefix("/").rpartition("/")
        return {
            "rpc.system": "grpc", "rpc.service": service, "rpc.method": method,
            "rpc.response.status_code": grpc_code(status),
        }  # fmt: skip
    return {
        "http.request.method": operation.method,
        "http.route": operation.path,
        "http.response.status_code": status,
    }


def _attributes(call: Call, trace: RequestTrace, operation: Operation, status: int, ended: float) -> dict[str, Any]:
    """Of a request's span: what was asked, what came, how long it took (seconds; of several prompts the slowest)."""
    if "version" in call.facts:  # of a servable, of which the conventions know nothing
        own = {"penstock.servable": call.facts["model"], "penstock.servable.version": call.facts["version"]}
        error = {"error.type": str(status)} if status >= 400 else {}
        return {**own, **error, "penstock.request.id": call.request_id, **_protocol(operation, status)}
    found: dict[str, Any] = {
        "gen_ai.operation.name": _KINDS[operation.name],
        "gen_ai.provider.name": "penstock",
        "gen_ai.request.id": call.request_id,
        "gen_ai.latency.e2e": ended - call.arrived,
        **_protocol(operation, status),
    }
    if status >= 400:
        found["error.type"] = str(status)
    if "model" in call.facts:
        found["gen_ai.request.model"] = found["gen_ai.response.model"] = call.facts["model"]
    found |= {f"gen_ai.request.{name}": call.body[name] for name in _ASKED if call.body.get(name) is not None}
    for names, fact in (
        (("prompt_tokens", "input_tokens"), "prompt_tokens"),
        (("completion_tokens", "output_tokens"), "completion_tokens"),
    ):
        if fact in call.facts:
            found |= {f"gen_ai.usage.{name}": call.facts[fact] for name in names}
    if trace.answers:
        found["gen_ai.usage.num_sequences"] = sum(one.num_answers for one in trace.answers)
        firsts = [one.sent - call.arrived + one.timings["first_token_s"] for one in trace.answers]
        prefills = [one.timings["prefill_s"] for one in trace.answers]
        decodes = [max(0.0, one.timings["total_s"] - one.timings["first_token_s"]) for one in trace.answers]
        found |= {
            "gen_ai.latency.time_in_queue": max(one.timings["queued_s"] for one in trace.answers),
            "gen_ai.latency.time_to_first_token": min(firsts),
            "gen_ai.latency.time_in_model_prefill": max(prefills),
            "gen_ai.latency.time_in_model_decode": max(decodes),
            "gen_ai.latency.time_in_model_inference": max(map(sum, zip(prefills, decodes, strict=True))),
        }
    return found
