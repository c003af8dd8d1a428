"""``/metrics`` in Prometheus' text format, with vLLM's metric names, so that its dashboards work.

Latencies are measured in the gateway: from the arrival of a request until a delta of its answer is passed to the
connection.  The engines' counters come from their statistics.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Final

from penstock.engine.stats import STEP_TOKENS
from penstock.serving.history import History

if TYPE_CHECKING:
    from penstock.engine.stats import EngineStats
    from penstock.llm.backend import Models
    from penstock.servables.lifecycle.repository import ServableRepository

__all__ = ["CONTENT_TYPE", "WINDOW", "Metrics", "ModelMetrics"]

WINDOW: Final = 1000
"""The number of latest values that the percentiles of ``/status`` are computed from."""
CONTENT_TYPE: Final = b"text/plain; version=0.0.4; charset=utf-8"
_SHORT: Final = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0)
_TOKEN: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0)
_LONG: Final = (0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 20.0, 40.0, 60.0, 120.0, 480.0, 1920.0)
_COUNTS: Final = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5)
_FEW: Final = (1.0, 2.0, 5.0, 10.0, 20.0)

_HISTOGRAMS: Final[dict[str, tuple[str, tuple[float, ...]]]] = {
    "time_to_first_token_seconds": ("Time from arrival to the first token.", _SHORT),
    "inter_token_latency_seconds": ("Time between the tokens of an answer.", _TOKEN),
    "request_time_per_output_token_seconds": ("Mean time between the tokens of an answer.", _TOKEN),
    "e2e_request_latency_seconds": ("Time from arrival to the last token.", _LONG),
    "request_queue_time_seconds": ("Time in the engine's queue, until the first step.", _LONG),
    "request_prefill_time_seconds": ("Time from the first step to the first token.", _LONG),
    "request_decode_time_seconds": ("Time from the first token to the last.", _LONG),
    "request_inference_time_seconds": ("Time from the first step to the last token.", _LONG),
    "request_prompt_tokens": ("Number of tokens of a prompt.", _COUNTS),
    "request_generation_tokens": ("Number of tokens of an answer.", _COUNTS),
    "request_max_num_generation_tokens": ("Number of tokens of the longest answer to a prompt.", _COUNTS),
    "request_params_max_tokens": ("The max_tokens of a request.", _COUNTS),
    "request_params_n": ("The n of a request: its number of answers.", _FEW),
}


class _Histogram:
    """Counts values by upper bound."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds, self.counts, self.total = bounds, [0] * (len(bounds) + 1), 0.0

    def add(self, value: float, times: int = 1) -> None:
        """Count a value ``times`` times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def lines(self, name: str, labels: str) -> Iterable[str]:
        """Return the lines of the text format: cumulative counts, sum and count."""
        cumulative = 0
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            cumulative += count
            le = "+Inf" if bound == float("inf") else repr(bound)
            yield f'{name}_bucket{{{labels}{"," if labels else ""}le="{le}"}} {cumulative}'
        yield f"{name}_sum{{{labels}}} {self.total!r}"
        yield f"{name}_count{{{labels}}} {cumulative}"


class ModelMetrics:
    """The counts and latencies of one model's requests, as the gateway measures them."""

    def __init__(self) -> None:
        self.histograms = {name: _Histogram(bounds) for name, (_, bounds) in _HISTOGRAMS.items()}
        self._first_token = self.histograms["time_to_first_token_seconds"]
        self._between = self.histograms["inter_token_latency_seconds"]
        self._latest: dict[str, deque[float]] = {
            name: deque(maxlen=WINDOW) for name in ("first_token_s", "between_tokens_s", "e2e_s")
        }
        self._latest_between = self._latest["between_tokens_s"]
        self.followers: list[list[dict[str, float]]] = []
        """Lists that get the times of each request that ends."""
        self.prompt_tokens = 0
        self.output_tokens = 0
        self.finished: Counter[str] = Counter()
        self.last_ended_ms = 0

    def first_token(self, seconds: float) -> None:
        """Record the time to the first token of a request."""
        self._first_token.add(seconds)
        self._latest["first_token_s"].append(seconds)

    def between(self, seconds: float, num_tokens: int) -> None:
        """Record ``num_tokens`` that arrived together, ``seconds`` after the previous ones."""
        self._between.add(seconds / num_tokens, num_tokens)
        self._latest_between.append(seconds / num_tokens)

    def percentiles(self, name: str) -> dict[str, float] | None:
        """Return the median and the 99th percentile of the latest values, or None if there are none."""
        values = sorted(self._latest[name])
        if not values:
            return None
        return {"p50": values[len(values) // 2], "p99": values[min(len(values) - 1, len(values) * 99 // 100)]}

    def record_prompt(self, num_prompt: int, num_output: int, seconds: float, timings: Mapping[str, float]) -> None:
        """Record a prompt whose answers are complete.

        ``num_output``: tokens of all its answers.  ``seconds``: since arrival.  ``timings``: measured by the engine.
        """
        note = self.histograms
        note["e2e_request_latency_seconds"].add(seconds)
        self._latest["e2e_s"].append(seconds)
        self.last_ended_ms = time.time_ns() // 1_000_000
        note["request_prompt_tokens"].add(num_prompt)
        note["request_generation_tokens"].add(num_output)
        if timings:
            decode_s = max(0.0, timings["total_s"] - timings["first_token_s"])
            note["request_queue_time_seconds"].add(timings["queued_s"])
            note["request_prefill_time_seconds"].add(timings["prefill_s"])
            note["request_decode_time_seconds"].add(decode_s)
            note["request_inference_time_seconds"].add(timings["prefill_s"] + decode_s)
            for follower in self.followers:
                follower.append(
                    {
                        "prompt_tokens": num_prompt,
                        "output_tokens": num_output,
                        "total_s": seconds,
                        "queue_s": timings["queued_s"],
                        "prefill_s": timings["prefill_s"],
                        "decode_s": decode_s,
                        "service_s": max(0.0, seconds - timings["total_s"]),
                    }
                )
            if timings["per_token_s"]:
                note["request_time_per_output_token_seconds"].add(timings["per_token_s"])
        self.prompt_tokens += num_prompt
        self.output_tokens += num_output

    def note_request(self, n: int, max_tokens: int | None, longest: int) -> None:
        """Record the parameters of a request, and the number of tokens of its longest answer."""
        note = self.histograms
        note["request_params_n"].add(n)
        note["request_max_num_generation_tokens"].add(longest)
        if max_tokens is not None:
            note["request_params_max_tokens"].add(max_tokens)


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


class Metrics:
    """All metrics of the service.  Labels never contain a client's input, so routes and models bound the size."""

    def __init__(self, models: Models) -> None:
        self.started = time.perf_counter()
        self._models = models
        self._of_model: dict[str, ModelMetrics] = {}
        self._http: Counter[tuple[str, str, int]] = Counter()
        self._http_seconds: dict[str, _Histogram] = {}
        self._grpc: Counter[tuple[str, str]] = Counter()
        self._grpc_seconds: dict[str, _Histogram] = {}
        self.servables: ServableRepository | None = None
        self.history = History(models, self.started)

    def of_model(self, name: str) -> ModelMetrics:
        """Return the metrics of a loaded model."""
        metrics = self._of_model.get(name)
        if metrics is None:
            metrics = self._of_model[name] = ModelMetrics()
        return metrics

    def http(self, method: str, route: str, status: int, seconds: float) -> None:
        """Record an answered HTTP request."""
        self._http[(method if route != "none" else "", route, status)] += 1
        histogram = self._http_seconds.get(route)
        if histogram is None:
            histogram = self._http_seconds[route] = _Histogram(_LONG)
        histogram.add(seconds)

    def grpc(self, path: str, code: str, seconds: float) -> None:
        """Record an answered gRPC request, by the path of its method and the name of its code."""
        self._grpc[path, code] += 1
        histogram = self._grpc_seconds.get(path)
        if histogram is None:
            histogram = self._grpc_seconds[path] = _Histogram(_LONG)
        histogram.add(seconds)

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format 0.0.4."""
        out: list[str] = []
        served = self._models.list()
        figures = {model.name: model.figures() for model in served}
        names = [model.name for model in served]
        labels = {name: f'model_name="{_escaped(name)}",engine="0"' for name in {*names, *self._of_model}}
        self._engines(out, {labels[name]: engine for name, engine in figures.items() if engine is not None})
        for name, (note, _) in _HISTOGRAMS.items():
            _head(out, f"vllm:{name}", "histogram", note)
            for model, of_model in self._of_model.items():
                out += of_model.histograms[name].lines(f"vllm:{name}", labels[model])
        _head(out, "vllm:prompt_tokens_total", "counter", "Number of prompt tokens.")
        out += [
            f"vllm:prompt_tokens_total{{{labels[name]}}} {counts.prompt_tokens}"
            for name, counts in self._of_model.items()
        ]
        _head(out, "vllm:generation_tokens_total", "counter", "Number of generated tokens.")
        out += [
            f"vllm:generation_tokens_total{{{labels[name]}}} {counts.output_tokens}"
            for name, counts in self._of_model.items()
        ]
        _head(out, "vllm:request_success_total", "counter", "Number of finished answers, by reason.")
        for name, counts in self._of_model.items():
            for reason in ("stop", "length", "abort", "error"):
                line = (
                    f'vllm:request_success_total{{{labels[name]},finished_reason="{reason}"}} {counts.finished[reason]}'
                )
                out.append(line)
        self._service(out)
        if self.servables is not None:
            from penstock.servables.lifecycle.report import metric_lines

            out += metric_lines(self.servables)
        return ("\n".join(out) + "\n").encode()

    def _engines(self, out: list[str], figures: Mapping[str, EngineStats]) -> None:
        rows = (
            ("num_requests_running", "gauge", "Number of running requests.", "num_running"),
            ("num_requests_waiting", "gauge", "Number of waiting requests.", "num_waiting"),
            ("kv_cache_usage_perc", "gauge", "Fraction of KV cache pages in use, from 0 to 1.", "page_use"),
            ("num_preemptions_total", "counter", "Number of preempted requests.", "num_preemptions"),
            (
                "prefix_cache_queries_total",
                "counter",
                "Prompt tokens looked up in the prefix cache.",
                "num_prompt_tokens",
            ),
            (
                "prefix_cache_hits_total",
                "counter",
                "Prompt tokens found in the prefix cache.",
                "num_cached_tokens",
            ),
        )
        for name, kind, note, field in rows:
            _head(out, f"vllm:{name}", kind, note)
            out += [f"vllm:{name}{{{labels}}} {getattr(engine, field)}" for labels, engine in figures.items()]
        _head(out, "vllm:iteration_tokens_total", "histogram", "Number of tokens computed in a step.")
        for labels, engine in figures.items():
            steps = _Histogram(tuple(map(float, STEP_TOKENS)))
            steps.counts = [engine.num_steps_by.get(name, 0) for name in (*map(str, STEP_TOKENS), "")]
            steps.total = float(engine.num_step_tokens)
            out += steps.lines("vllm:iteration_tokens_total", labels)
        _head(out, "penstock:steps_total", "counter", "Number of engine steps.")
        out += [f"penstock:steps_total{{{labels}}} {engine.num_steps}" for labels, engine in figures.items()]

    def _service(self, out: list[str]) -> None:
        _head(out, "penstock:model_ready", "gauge", "1 if the model accepts requests, else 0.")
        for backend in self._models.list():
            out.append(f'penstock:model_ready{{model_name="{_escaped(backend.name)}"}} {int(backend.is_ready)}')
        _head(out, "penstock:workers_wanted", "gauge", "Number of workers that should run.")
        for backend in self._models.list():
            out.append(f'penstock:workers_wanted{{model_name="{_escaped(backend.name)}"}} {backend.num_wanted()}')
        _head(out, "penstock:workers_ready", "gauge", "Number of workers that accept requests.")
        for backend in self._models.list():
            num_ready = sum(worker.status == "ready" for worker in backend.workers())
            out.append(f'penstock:workers_ready{{model_name="{_escaped(backend.name)}"}} {num_ready}')
        by_role: Counter[tuple[str, str]] = Counter()
        for backend in self._models.list():
            for worker in backend.workers():
                if worker.role:
                    by_role[backend.name, worker.role] += worker.status == "ready"
        if by_role:
            _head(out, "penstock:workers_ready_by_role", "gauge", "Number of workers of a role that accept requests.")
        for (name, role), num_ready in by_role.items():
            out.append(f'penstock:workers_ready_by_role{{model_name="{_escaped(name)}",role="{role}"}} {num_ready}')
        _head(out, "penstock:worker_restarts_total", "counter", "Number of worker crashes and hangs, by cause.")
        for backend in self._models.list():
            for cause, count in backend.deaths().items():
                labels = f'model_name="{_escaped(backend.name)}",cause="{cause}"'
                out.append(f"penstock:worker_restarts_total{{{labels}}} {count}")
        note = "Number of requests whose worker was lost, by what came of them."
        _head(out, "penstock:lost_worker_requests_total", "counter", note)
        for backend in self._models.list():
            for outcome, count in backend.lost_requests().items():
                labels = f'model_name="{_escaped(backend.name)}",outcome="{outcome}"'
                out.append(f"penstock:lost_worker_requests_total{{{labels}}} {count}")
        _head(
            out,
            "http_requests_total",
            "counter",
            "HTTP requests by route and status. 499: the client disconnected.",
        )
        for (method, route, status), count in self._http.items():
            out.append(f'http_requests_total{{method="{method}",handler="{route}",status="{status}"}} {count}')
        _head(out, "http_request_duration_seconds", "histogram", "Time from arrival to the end of the response.")
        for route, histogram in self._http_seconds.items():
            out += histogram.lines("http_request_duration_seconds", f'handler="{route}"')
        _head(
            out,
            "grpc_server_handled_total",
            "counter",
            "gRPC requests by method and code, including each of a stream.",
        )
        for (path, code), count in self._grpc.items():
            out.append(f'grpc_server_handled_total{{{_grpc_labels(path)},grpc_code="{code}"}} {count}')
        _head(out, "grpc_server_handling_seconds", "histogram", "Time from arrival to the end of the response.")
        for path, histogram in self._grpc_seconds.items():
            out += histogram.lines("grpc_server_handling_seconds", _grpc_labels(path))


def _grpc_labels(path: str) -> str:
    service, _, method = path.removeprefix("/").rpartition("/")
    return f'grpc_service="{service}",grpc_method="{method}"'


def _head(out: list[str], name: str, kind: str, note: str) -> None:
    out += [f"# HELP {name} {note}", f"# TYPE {name} {kind}"]
