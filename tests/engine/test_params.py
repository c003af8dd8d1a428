"""Every field of a request is checked, and the error names it."""

from __future__ import annotations

import math

import numpy as np
import pytest

from penstock.engine.request import ResolvedSampling, SamplingParams
from penstock.errors import InvalidArgumentError


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", 2.5),
        ("max_tokens", True),
        ("max_tokens", "8"),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", "hot"),
        ("temperature", True),
        ("top_k", -1),
        ("top_k", 1.0),
        ("top_k", 2**31),
        ("top_p", 0),
        ("top_p", 1.01),
        ("top_p", math.nan),
        ("seed", -1),
        ("seed", 2**64),
        ("seed", 1.5),
        ("stop", 7),
        ("stop", [""]),
        ("stop", ["a", 1]),
        ("stop", ["x"] * 65),
        ("stop", "x" * 5000),
        ("ignore_eos", 1),
        ("ignore_eos", "yes"),
    ],
)
def test_a_bad_field_is_refused_by_name(field, value):
    with pytest.raises(InvalidArgumentError, match=rf"^{field} must be"):
        SamplingParams(**{field: value})


def test_numbers_of_numpy_are_numbers():
    params = SamplingParams(max_tokens=np.int64(8), temperature=np.float32(0.5), top_k=np.uint8(3), seed=np.int32(7))
    assert params == SamplingParams(max_tokens=8, temperature=0.5, top_k=3, seed=7)
    assert (type(params.top_k), type(params.temperature)) == (int, float)
    with pytest.raises(InvalidArgumentError, match="temperature"):
        SamplingParams(temperature=np.float32("nan"))


def test_an_unknown_field_is_refused_by_name():
    with pytest.raises(InvalidArgumentError, match=r"no field 'temprature'.*temperature"):
        SamplingParams(temprature=1.0)


def test_good_fields_are_kept_and_cannot_change():
    fields = {"max_tokens": 5, "temperature": 0.5, "top_k": 3, "top_p": 0.9, "seed": 2**64 - 1, "ignore_eos": True}
    params = SamplingParams(stop="x", **fields)
    assert (params.max_tokens, params.stop, params.seed) == (5, ("x",), 2**64 - 1)
    assert params == SamplingParams(stop=["x"], **fields)
    assert "temperature=0.5" in repr(params)
    with pytest.raises(AttributeError):
        params.seed = 1


def test_what_the_caller_leaves_open_comes_from_the_model():
    defaults = ResolvedSampling(max_tokens=9, temperature=0.6, top_k=40, top_p=0.95)
    assert ResolvedSampling.of(SamplingParams(seed=1), defaults) == ResolvedSampling(9, 0.6, 40, 0.95, 1)
    assert ResolvedSampling.of(SamplingParams(temperature=0, seed=1), defaults).temperature == 0
    assert ResolvedSampling.of(SamplingParams(top_k=5, seed=1), ResolvedSampling()).temperature == 1.0
    assert ResolvedSampling.of(SamplingParams(seed=1), ResolvedSampling()).temperature == 0.0
