"""Every field of a request is checked, and the error names it."""

from __future__ import annotations

import copy
import dataclasses
import math

import numpy as np
import pytest

from penstock.engine.options import EngineOptions, RequestOptions
from penstock.engine.params import ResolvedSampling, SamplingParams
from penstock.errors import InvalidArgumentError
from tests.support.errors import raises


def test_min_tokens_above_default_max_tokens_is_refused():
    defaults = ResolvedSampling(max_tokens=9)
    with raises(InvalidArgumentError, param="min_tokens", match=r"9\), got 10"):
        ResolvedSampling.of(SamplingParams(min_tokens=10), defaults)
    assert ResolvedSampling.of(SamplingParams(min_tokens=10, max_tokens=10), defaults).max_tokens == 10
    assert ResolvedSampling.of(SamplingParams(min_tokens=9), defaults).max_tokens == 9


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
        ("temperature", 10**400),
        ("temperature", True),
        ("top_k", -1),
        ("top_k", 1.0),
        ("top_k", 2**31),
        ("top_p", -0.01),
        ("top_p", 1.01),
        ("top_p", math.nan),
        ("seed", -(2**63) - 1),
        ("seed", 2**64),
        ("seed", 1.5),
        ("stop", 7),
        ("stop", [""]),
        ("stop", ["a", 1]),
        ("stop", ["x"] * 65),
        ("stop", "x" * 5000),
        ("ignore_eos", 1),
        ("ignore_eos", "yes"),
        ("min_tokens", -1),
        ("min_tokens", None),
        ("min_p", 1.1),
        ("min_p", math.nan),
        ("typical_p", -0.01),
        ("typical_p", 1.5),
        ("repetition_penalty", 0),
        ("presence_penalty", -2.5),
        ("presence_penalty", None),
        ("frequency_penalty", "much"),
        ("logit_bias", [1]),
        ("logit_bias", {3: 101}),
        ("logit_bias", {3: math.nan}),
        ("logit_bias", {3: None}),
        ("allowed_token_ids", []),
        ("allowed_token_ids", "12"),
        ("bad_words", [""]),
        ("bad_words", 3),
        ("n", 0),
        ("n", 129),
        ("best_of", 0),
        ("stop_token_ids", 5),
        ("stop_token_ids", range(4097)),
        ("allowed_token_ids", range(2**18 + 1)),
        ("include_stop_str_in_output", 1),
        ("logprobs", -1),
        ("logprobs", 21),
        ("prompt_logprobs", True),
        ("echo", "yes"),
    ],
)
def test_a_bad_field_is_refused_by_name(field, value):
    with raises(InvalidArgumentError, param=field):
        SamplingParams(**{field: value})


@pytest.mark.parametrize(
    ("fields", "param", "fact"),
    [
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens", r"max_tokens \(8\)"),
        ({"n": 3, "best_of": 2}, "best_of", r"n \(3\)"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "'x'"),
        ({"logit_bias": {"1": 1, "01": 2}}, "logit_bias", "1 appears twice"),
        ({"allowed_token_ids": [1, -2]}, "allowed_token_ids[1]", "-2"),
        ({"stop_token_ids": [1.5]}, "stop_token_ids[0]", "1.5"),
        ({"stop_token_ids": [1, None]}, "stop_token_ids[1]", "None"),
    ],
)
def test_fields_that_do_not_fit_are_refused_by_name(fields, param, fact):
    with raises(InvalidArgumentError, param=param, match=fact):
        SamplingParams(**fields)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", -5),
        ("max_tokens", 1.5),
        ("max_tokens", None),
        ("temperature", math.nan),
        ("temperature", -1.0),
        ("temperature", None),
        ("top_p", 0.0),
        ("top_k", -1),
        ("seed", -1),
        ("seed", 2**70),
        ("min_p", 2),
        ("typical_p", -0.01),
        ("repetition_penalty", 0),
        ("presence_penalty", math.inf),
        ("frequency_penalty", "x"),
        ("min_tokens", -1),
        ("num_logprobs", 21),
        ("num_logprobs", 10**6),
        ("logit_bias", ((5, math.nan),)),
        ("logit_bias", 7),
        ("logit_bias", ((5,),)),
        ("allowed_token_ids", ()),
        ("bad_words", ((),)),
        ("bad_words", (5,)),
        ("bad_words", 5),
        ("end_ids", (-1,)),
    ],
)
def test_resolved_sampling_is_checked_by_name(field, value):
    with raises(InvalidArgumentError, param=field):
        ResolvedSampling(**{field: value})


def test_resolved_sampling_is_plain_and_keeps_word_order():
    plain = ResolvedSampling(7, 0.5, 3, logit_bias=((5, 1.0),), allowed_token_ids=(1, 2), bad_words=((3, 3), (4,)))
    same = ResolvedSampling(
        np.int64(7), np.float32(0.5), np.uint8(3), logit_bias=[(5, 1)], allowed_token_ids=np.array([1, 2]),
        bad_words=[[3, 3], np.array([4])],
    )  # fmt: skip
    assert plain == same
    assert hash(plain) == hash(same)
    assert {type(same.max_tokens), type(same.top_k)} == {int}


def test_logit_bias_is_a_copy_that_cannot_change():
    given = {5: 1.0}
    params = SamplingParams(logit_bias=given)
    given[5] = math.nan
    with pytest.raises(TypeError):
        params.logit_bias[5] = math.nan
    assert params.logit_bias == {5: 1.0}
    assert (repr(params.logit_bias), list(params.logit_bias.items())) == ("{5: 1.0}", [(5, 1.0)])
    assert copy.deepcopy(params) == params == dataclasses.replace(params)
    assert dataclasses.asdict(params)["logit_bias"] == {5: 1.0}


def test_numbers_of_numpy_are_numbers_in_options_too():
    options = RequestOptions(priority=np.int64(-3), deadline_s=np.float32(2))
    assert options == RequestOptions(priority=-3, deadline_s=2.0)
    assert (type(options.priority), type(options.deadline_s)) == (int, float)
    assert EngineOptions(max_chunk=np.int32(8), max_waiting=np.uint8(3)) == EngineOptions(max_chunk=8, max_waiting=3)
    for fields in ({"priority": None}, {"priority": np.float32(1)}, {"deadline_s": 10**400}, {"deadline_s": math.nan}):
        with raises(InvalidArgumentError, param=next(iter(fields))):
            RequestOptions(**fields)


def test_lists_and_mappings_become_plain_values():
    params = SamplingParams(logit_bias={"7": 1, 8: -2.5}, stop_token_ids=np.array([3, 3, 4]), bad_words="no")
    assert params.logit_bias == {7: 1.0, 8: -2.5}
    assert (params.stop_token_ids, params.bad_words) == ((3, 4), ("no",))
    assert hash(params) == hash(dataclasses.replace(params))


def test_numbers_of_numpy_are_numbers():
    params = SamplingParams(max_tokens=np.int64(8), temperature=np.float32(0.5), top_k=np.uint8(3), seed=np.int32(7))
    assert params == SamplingParams(max_tokens=8, temperature=0.5, top_k=3, seed=7)
    assert (type(params.top_k), type(params.temperature)) == (int, float)
    with raises(InvalidArgumentError, param="temperature"):
        SamplingParams(temperature=np.float32("nan"))


def test_an_unknown_field_is_refused_by_name():
    with raises(InvalidArgumentError, param="temprature", match="temperature"):
        SamplingParams(temprature=1.0)
    with raises(InvalidArgumentError, param="frob", match="max_tokens, .*echo"):
        SamplingParams(frob=1.0)


def test_good_fields_are_kept_and_cannot_change():
    fields = {"max_tokens": 5, "temperature": 0.5, "top_k": 3, "top_p": 0.9, "seed": 2**64 - 1, "ignore_eos": True}
    params = SamplingParams(stop="x", **fields)
    assert (params.max_tokens, params.stop, params.seed) == (5, ("x",), 2**64 - 1)
    assert params == SamplingParams(stop=["x"], **fields)
    assert "temperature=0.5" in repr(params)
    with pytest.raises(AttributeError):
        params.seed = 1


def test_unset_fields_come_from_the_model():
    defaults = ResolvedSampling(max_tokens=9, temperature=0.6, top_k=40, top_p=0.95)
    assert ResolvedSampling.of(SamplingParams(seed=1), defaults) == ResolvedSampling(9, 0.6, 40, 0.95, 1)
    assert ResolvedSampling.of(SamplingParams(temperature=0, seed=1), defaults).temperature == 0
    assert ResolvedSampling.of(SamplingParams(top_k=5, seed=1), ResolvedSampling()).temperature == 1.0
    assert ResolvedSampling.of(SamplingParams(seed=1), ResolvedSampling()).temperature == 0.0


@pytest.mark.parametrize(
    ("prompts", "param"),
    [({5, 6}, "prompts"), ({5: 6}, "prompts"), ([{5, 6}], "prompt"), ([[7], {5: 6}], "prompt"),
     ([frozenset("x")], "prompt")],
)  # fmt: skip
def test_unordered_collections_are_refused_as_prompts(make_llm, prompts, param):
    llm = make_llm()
    for call in (llm.generate, llm.score, llm.embed):
        with raises(InvalidArgumentError, param=param):
            call(prompts)
    assert llm.engine.num_steps == 0


@pytest.mark.parametrize(
    ("field", "value", "fact"),
    [
        ("stop", ["x"] * 65, "64 strings, got 65$"),
        ("bad_words", ["x"] * 65, "64 strings, got 65$"),
        ("stop", "x" * 5000, "1 to 4096 characters, got one of 5000$"),
        ("stop", ["x", ""], "1 to 4096 characters, got one of 0$"),
        ("logit_bias", dict.fromkeys(range(4097), 1.0), "4096 token ids, got 4097$"),
        ("logit_bias", [1, 2], r"mapping .*\[1, 2\]$"),
    ],
)
def test_too_many_or_too_long_values_are_refused(field, value, fact):
    with raises(InvalidArgumentError, param=field, match=fact):
        SamplingParams(**{field: value})
