"""OpenTelemetry traces: a span per request, and below it its time in the queue, in prefill and in decode.

Names are those of vLLM and of OpenTelemetry's semantic conventions for generative AI.  Spans are created from the
request's RequestTrace when it has ended, and sent by a thread of the SDK.  If the collector is down, spans are lost;
requests are not affected.
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
from penstock.extras import install_command
from penstock.serving.operations import GRPC
from penstock.serving.request_trace import RequestTrace
from penstock.version import __version__

if TYPE_CHECKING:
    from penstock.serving.call import Call
    from penstock.serving.operations import Endpoint

__all__ = ["Traces", "check_endpoint"]

_HEADERS: Final = ("traceparent", "tracestate")
_KINDS: Final = {
    "complete": "text_completion", "chat": "chat", "embed": "embeddings",
    **{f"{name}{version}": "text_completion" for name in ("infer", "generate", "generate_stream")
       for version in ("", "_version")},
}  # fmt: skip
"""The operations that have spans, and their names in the conventions."""
_REQUEST_FIELDS: Final = ("max_tokens", "temperature", "top_p", "n")
_EXPORT_S: Final = 5.0
_CLOSE_S: Final = 5.0


def check_endpoint(endpoint: str) -> str:
    """Return the URL that spans are sent to, with OTLP's default path if it has none.  Raises InvalidArgumentError."""
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise InvalidArgumentError(
            f"otlp_traces_endpoint must be an OTLP/HTTP URL such as http://localhost:4318/v1/traces, not {endpoint!r}",
            param="otlp_traces_endpoint",
        )
    return endpoint if parts.path.strip("/") else parts._replace(path="/v1/traces").geturl()


class Traces:
    """Sends spans to an OTLP collector.  The OTEL_... environment variables apply, except where ``endpoint`` overrides.

    Raises UnsupportedError if OpenTelemetry is not installed.
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
                f"otlp_traces_endpoint requires OpenTelemetry. Run `{install_command('otel')}` ({error}).",
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
        """Return a new record for a request with these headers."""
        names = [name for name in _HEADERS if name.encode() in headers]
        return RequestTrace({name: headers[name.encode()].decode("latin-1") for name in names})

    def end(self, call: Call, trace: RequestTrace, operation: Endpoint, status: int) -> None:
        """Create the spans of a request that ended with ``status``, and add ``trace_id`` to its log line."""
        if operation.name not in _KINDS:
            return
        now_s = time.perf_counter()
        offset_ns = time.time_ns() - int(now_s * 1e9)  # converts perf_counter to wall-clock time
        span = self._tracer.start_span(
            "infer_request" if "version" in call.facts else "llm_request",
            context=self._propagator.extract(trace.carrier),
            kind=self._api.SpanKind.SERVER,
            attributes=_attributes(call, trace, operation, status, now_s),
            start_time=int(call.arrived * 1e9) + offset_ns,
        )
        call.facts["trace_id"] = f"{span.get_span_context().trace_id:032x}"
        if status >= 400:
            span.set_status(self._api.Status(self._api.StatusCode.ERROR, str(call.facts.get("error", status))))
        parent = self._api.set_span_in_context(span)
        for answer in trace.answers:
            for name, start_s, end_s in _parts(answer.timings):
                at = int(answer.sent * 1e9) + offset_ns
                child = self._tracer.start_span(name, context=parent, start_time=at + int(start_s * 1e9))
                child.end(at + int(end_s * 1e9))
        span.end(int(now_s * 1e9) + offset_ns)

    def close(self) -> None:
        """Send the remaining spans, for up to five seconds; call it outside the event loop."""
        thread = threading.Thread(target=self._provider.shutdown, name="penstock-traces", daemon=True)
        thread.start()
        thread.join(_CLOSE_S)


def _parts(timings: Mapping[str, float]) -> list[tuple[str, float, float]]:
    """Return the phases of a prompt: name, start and end, in seconds since it was submitted."""
    queued, first, total = timings["queued_s"], timings["first_token_s"], timings["total_s"]
    if not first:
        return [("queue", 0.0, queued)]
    return [("queue", 0.0, queued), ("prefill", queued, first), ("decode", first, total)]


def _protocol(operation: Endpoint, status: int) -> dict[str, Any]:
    """Return the attributes that the conventions define for HTTP and gRPC requests."""
    if operation.method == GRPC:
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


def _attributes(call: Call, trace: RequestTrace, operation: Endpoint, status: int, end_s: float) -> dict[str, Any]:
    """Return the attributes of a request's span: parameters, usage and times (seconds; the slowest of its prompts)."""
    if "version" in call.facts:  # a servable, for which there are no conventions
        own = {"penstock.servable": call.facts["model"], "penstock.servable.version": call.facts["version"]}
        error = {"error.type": str(status)} if status >= 400 else {}
        return {**own, **error, "penstock.request.id": call.request_id, **_protocol(operation, status)}
    attributes: dict[str, Any] = {
        "gen_ai.operation.name": _KINDS[operation.name],
        "gen_ai.provider.name": "penstock",
        "gen_ai.request.id": call.request_id,
        "gen_ai.latency.e2e": end_s - call.arrived,
        **_protocol(operation, status),
    }
    if status >= 400:
        attributes["error.type"] = str(status)
    if "model" in call.facts:
        attributes["gen_ai.request.model"] = attributes["gen_ai.response.model"] = call.facts["model"]
    fields = {f"gen_ai.request.{name}": getattr(call.body, name, None) for name in _REQUEST_FIELDS}
    attributes |= {name: value for name, value in fields.items() if value is not None}
    for names, fact in (
        (("prompt_tokens", "input_tokens"), "prompt_tokens"),
        (("completion_tokens", "output_tokens"), "completion_tokens"),
    ):
        if fact in call.facts:
            attributes |= {f"gen_ai.usage.{name}": call.facts[fact] for name in names}
    if trace.answers:
        attributes["gen_ai.usage.num_sequences"] = sum(answer.num_answers for answer in trace.answers)
        firsts = [answer.sent - call.arrived + answer.timings["first_token_s"] for answer in trace.answers]
        prefills = [answer.timings["prefill_s"] for answer in trace.answers]
        decodes = [max(0.0, answer.timings["total_s"] - answer.timings["first_token_s"]) for answer in trace.answers]
        attributes |= {
            "gen_ai.latency.time_in_queue": max(answer.timings["queued_s"] for answer in trace.answers),
            "gen_ai.latency.time_to_first_token": min(firsts),
            "gen_ai.latency.time_in_model_prefill": max(prefills),
            "gen_ai.latency.time_in_model_decode": max(decodes),
            "gen_ai.latency.time_in_model_inference": max(map(sum, zip(prefills, decodes, strict=True))),
        }
    return attributes
