"""``/openapi.json`` is exact: it describes what is checked, and nothing else comes back."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from penstock.api_errors import CODES
from penstock.engine.params import SamplingParams
from penstock.errors import InvalidArgumentError
from penstock.sampling_fields import SAMPLING_FIELDS
from penstock.serving.http.app import operations
from penstock.serving.http.openapi import describe
from penstock.serving.openai.bodies import CompletionRequest
from tests.support.command import ROOT
from tests.support.errors import raises
from tests.support.marks import mostly_long


@pytest.mark.parametrize("phase", mostly_long(["fuzzing", "coverage"], "fuzzing"))
def test_no_answer_that_is_not_described(demo, phase):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment |= {"PENSTOCK_TEST_URL": demo.url, "PENSTOCK_TEST_PHASE": phase}
    options = ("-p", "no:cacheprovider", "-p", "schemathesis")  # whose plugin pyproject.toml leaves out elsewhere
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, Path(__file__).with_name("described_answers.py")],
        capture_output=True, text=True, check=False, cwd=ROOT, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-20000:] + done.stderr[-4000:]
    assert f"{len(operations())} passed" in done.stdout, done.stdout


def test_the_description_is_served(demo):
    assert json.loads(demo.ask("GET", "/openapi.json")[2]) == describe(operations())


@pytest.mark.parametrize(
    "row",
    [row for row in SAMPLING_FIELDS if row.is_common and row.kind in ("integer", "number")],
    ids=lambda row: row.name,
)
def test_bounds_are_the_engines(row):
    """What the table lets in the engine takes, and what the engine would take it lets in."""
    name, (low, high) = row.name, row.json_bounds or row.bounds
    low = {"top_k": 0, "max_tokens": 1, "thinking_token_budget": 0}.get(
        name, low
    )  # the gateway makes 0 of -1, and an echo of 0
    together = {"max_tokens": 2**31 - 1} if name == "min_tokens" else {}
    for value in (low, high):
        SamplingParams(**{name: value} | together)
    for value in (low - 1, high + (1 if name != "seed" else 2**63 + 1)):
        with raises(InvalidArgumentError, param=name):
            SamplingParams(**{name: value} | together)


def test_every_field_of_the_engine_is_known():
    assert set(SamplingParams.__dataclass_fields__) <= set(CompletionRequest.__struct_fields__)


def test_every_status_is_in_the_table_of_codes():
    for operation in operations():
        assert set(operation.statuses) <= set(CODES)


def test_metrics_are_prometheus(demo):
    demo.post("/v1/completions", prompt="def add(a, b):", max_tokens=5)
    demo.events("/v1/completions", prompt="def add(a, b):", max_tokens=5, n=2)
    demo.ask("GET", "/nowhere\x7f".replace("\x7f", "%22%0A"))
    status, headers, data = demo.ask("GET", "/metrics")
    assert (status, headers["content-type"]) == (200, "text/plain; version=0.0.4; charset=utf-8")
    families = {one.name: one for one in text_string_to_metric_families(data.decode())}
    kinds = {
        "vllm:num_requests_running": "gauge",
        "vllm:num_requests_waiting": "gauge",
        "vllm:kv_cache_usage_perc": "gauge",
        "vllm:prefix_cache_queries": "counter",
        "vllm:prefix_cache_hits": "counter",
        "vllm:num_preemptions": "counter",
        "vllm:prompt_tokens": "counter",
        "vllm:generation_tokens": "counter",
        "vllm:request_success": "counter",
        "vllm:time_to_first_token_seconds": "histogram",
        "vllm:inter_token_latency_seconds": "histogram",
        "vllm:request_time_per_output_token_seconds": "histogram",
        "vllm:e2e_request_latency_seconds": "histogram",
        "vllm:request_queue_time_seconds": "histogram",
        "vllm:request_prefill_time_seconds": "histogram",
        "vllm:request_decode_time_seconds": "histogram",
        "vllm:request_inference_time_seconds": "histogram",
        "vllm:request_prompt_tokens": "histogram",
        "vllm:request_generation_tokens": "histogram",
        "vllm:request_max_num_generation_tokens": "histogram",
        "vllm:request_params_max_tokens": "histogram",
        "vllm:request_params_n": "histogram",
        "vllm:iteration_tokens_total": "histogram",
        "http_requests": "counter",
    }
    assert {name: families[name].type for name in kinds} == kinds
    assert all(s.labels["model_name"] == "demo" for n, f in families.items() if n.startswith("vllm") for s in f.samples)

    def value(sample_name: str, **labels: str) -> float:
        samples = [s for f in families.values() for s in f.samples if s.name == sample_name]
        return sum(s.value for s in samples if labels.items() <= s.labels.items())

    num_requests = value("vllm:e2e_request_latency_seconds_count")
    assert num_requests >= 2
    assert value("vllm:time_to_first_token_seconds_count") <= num_requests
    assert value("vllm:generation_tokens_total") == value("vllm:request_generation_tokens_sum") >= 15
    assert value("vllm:iteration_tokens_total_count") == value("penstock:steps_total") > 0
    assert value("vllm:iteration_tokens_total_sum") >= value("vllm:generation_tokens_total")
    longest = value("vllm:request_max_num_generation_tokens_sum")  # of n answers one alone
    assert 10 <= longest <= value("vllm:generation_tokens_total") - 5
    assert value("vllm:request_params_max_tokens_sum") >= 10
    assert value("vllm:request_success_total", finished_reason="length") >= 3
    assert value("http_requests_total", handler="none", status="404") >= 1
