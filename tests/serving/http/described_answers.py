"""Answers of a service at ``PENSTOCK_TEST_URL``, to requests that schemathesis makes of its description.

Pytest does not collect this file by itself: ``test_schema.py`` runs it.  ``PENSTOCK_TEST_PHASE`` is "fuzzing", for some
random requests to each operation, or "coverage", for each boundary of each field: more than ten thousand requests,
which schemathesis makes as it collects.
"""

from __future__ import annotations

import os
from typing import Any

import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from penstock.serving.http.app import operations
from penstock.serving.http.openapi import describe

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    negative_data_rejection,
]
SCHEMA = schemathesis.openapi.from_dict(describe(operations()))
SCHEMA.config.phases.coverage.enabled = os.environ["PENSTOCK_TEST_PHASE"] == "coverage"
SCHEMA.config.phases.fuzzing.enabled = not SCHEMA.config.phases.coverage.enabled


@SCHEMA.parametrize()
@settings(
    max_examples=8, deadline=None, derandomize=True, database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.filter_too_much],
)  # fmt: skip
def test_no_answer_that_is_not_described(case: Any) -> None:
    if isinstance(case.body, dict) and isinstance(case.body.get("max_tokens", 9), int):
        case.body["max_tokens"] = min(case.body.get("max_tokens", 9), 9)
    case.call_and_validate(base_url=os.environ["PENSTOCK_TEST_URL"], checks=CHECKS, timeout=600)
