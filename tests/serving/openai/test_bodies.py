"""Request bodies as structs: which field is at fault, and that they accept what ``/openapi.json`` describes.

``PENSTOCK_CHAOS=n`` tries n times as many random bodies (``make chaos``).
"""

from __future__ import annotations

import copy
import json
import os
import random
from typing import Any

import jsonschema_rs
import msgspec
import pytest

from penstock.api_errors import CombinationError, FieldError, RefusalError
from penstock.serving.http.app import operations
from penstock.serving.http.openapi import describe
from penstock.serving.oip.bodies import GenerateRequest, InferenceRequest
from penstock.serving.openai.bodies import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    TokenizeRequest,
)
from penstock.serving.request_decoding import converted, decode_body, field_error_of

NUM = 3000 * int(os.environ.get("PENSTOCK_CHAOS", "1"))
USER = {"role": "user", "content": "x"}
PART = {"type": "text", "text": "y"}
GOOD: dict[type, dict[str, Any]] = {
    CompletionRequest: {
        "prompt": "x", "max_tokens": 5, "temperature": 0.5, "stop": ["a"], "logit_bias": {"5": 1}, "n": 2, "echo": True,
        "stream": True, "stream_options": {"include_usage": True}, "logprobs": 3, "stop_token_ids": [1, 2],
        "guided_json": {"type": "object"},
    },
    ChatCompletionRequest: {
        "messages": [USER, {"role": "assistant", "content": [PART, PART], "name": "bob"}], "top_logprobs": 2,
        "logprobs": True, "response_format": {"type": "json_schema", "json_schema": {"schema": {}, "strict": True}},
        "modalities": ["text"], "allowed_token_ids": [7],
    },
    EmbeddingRequest: {"input": ["a", "b"], "encoding_format": "base64", "pooling": "last", "timeout": 5},
    TokenizeRequest: {"messages": [USER], "add_generation_prompt": True},
    DetokenizeRequest: {"tokens": [1, 2, 3]},
    GenerateRequest: {"input_ids": [1, 2], "parameters": {"max_tokens": 5, "timeout": 2000}, "stream": False},
    InferenceRequest: {
        "inputs": [{"name": "a", "datatype": "INT32", "shape": [2], "data": [1, 2]}], "parameters": {"a": 1, "b": "x"},
        "outputs": [{"name": "o", "parameters": {"binary_data": True}}], "model_version": "1",
    },
}  # fmt: skip
VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 1.0, 2.0, 0.5, -0.5, 1e300, 20, 21, 100, 101, 128, 129, 2**31 - 1, 2**31, 2**53, "",
    "x", "text", "float", "mean", "user", "y" * 256, "y" * 257, "é\u2028\U0001f600", [], [None], [1], ["a"],
    [1.0, 2], [0.5], [[1], [2.0]], [[]], [[1], []], ["a", 1], [1, "a"], [True], [[True]], ["a"] * 64, ["a"] * 65,
    ["x"] * 2049, [[1]] * 2049, [1] * 20_000, [1] * 20_000 + [-1], {}, {"1": 5}, {"1\n": 5}, {"x": 1}, {"1": "a"},
    {"99": 101}, {"": 1}, {"a": {}}, {"include_usage": 1.0}, {"type": "text"}, ["text"], ["text", "text"], [PART], PART,
    [USER],
    dict.fromkeys("abc", True),
]  # fmt: skip
NAMES = sorted({name for struct in GOOD for name in struct.__struct_fields__})
NAMES += ["role", "content", "name", "type", "text", "image_url", "tool_calls", "zzz", "a.b", "q` - at `$.n", "é", ""]


def places(value: Any) -> list[Any]:
    """All objects and lists in a value."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) and len(value) < 9 else ()
    own = [value] if isinstance(value, (dict, list)) else []
    return own + [place for item in inner for place in places(item)]


def damaged(rng: random.Random, body: dict[str, Any]) -> dict[str, Any]:
    """A copy of a body with one to three values changed, added or removed."""
    body = copy.deepcopy(body)
    for _ in range(rng.choice((1, 1, 2, 3))):
        place = rng.choice(places(body))
        value = copy.deepcopy(rng.choice(VALUES))
        if isinstance(place, list):
            at = rng.randrange(len(place) + 1)
            place[at : at + rng.randrange(2)] = [value]
        elif place and rng.random() < 0.2:
            del place[rng.choice(list(place))]
        else:
            place[rng.choice(list(place) if place and rng.random() < 0.6 else NAMES)] = value
    return body


def reaches(body: Any, param: str) -> bool:
    """Whether a path ends at a field of the body, or at one that is missing from an object of it."""
    for step in param.replace("]", "").replace("[", ".").split("."):
        if isinstance(body, list):
            if not step.isdigit() or int(step) >= len(body):
                return False
            body = body[int(step)]
        elif isinstance(body, dict):
            body = body.get(step.strip("'"))
        else:
            return body is None
    return True


def refusal(data: bytes, struct: type) -> RefusalError | None:
    """The error for a body; None for one that is accepted."""
    try:
        decode_body(data, struct)
    except RefusalError as error:
        return error
    return None


@pytest.mark.parametrize("struct", GOOD, ids=lambda struct: struct.__name__)
def test_bodies_are_accepted_as_they_are_described(struct):
    """An independent implementation of JSON schema accepts the same bodies by ``/openapi.json``."""
    description = describe(operations())
    schema = {"$ref": f"#/components/schemas/{struct.__name__}", "components": description["components"]}
    validator = jsonschema_rs.Draft202012Validator(schema)
    rng, num_accepted = random.Random(7), 0
    for _ in range(NUM // len(GOOD)):
        body = damaged(rng, GOOD[struct])
        error = refusal(json.dumps(body).encode(), struct)
        fits = error is None or isinstance(error, CombinationError)
        assert validator.is_valid(body) == fits, (body, str(error))
        if error is None:
            num_accepted += 1
        else:
            is_plain = error.param is not None and not any(c in error.param for c in "`é'")
            assert not is_plain or reaches(body, error.param), (body, error.param)
    assert 5 < num_accepted < NUM // len(GOOD)


SPLICES = [
    b"NaN", b"-Infinity", b"1e999", b"[" * 70 + b"]" * 70, b'"\\ud800"', b'"\xff"', b'{"a":1,"a":2}', b"01",
    b"9" * 5000, b'{"prompt":1,"prompt":1}', b"", b"'x'", b"\x00", b"{", b"]", b'"', b"1 2", b"tru", b"nul",
]  # fmt: skip


def test_damaged_json_raises_refusals_only():
    rng, codes = random.Random(8), set()
    for _ in range(NUM):
        struct = rng.choice(list(GOOD))
        data = bytearray(json.dumps(damaged(rng, GOOD[struct])).encode())
        at = rng.randrange(len(data) + 1)
        data[at : at + rng.choice((0, 0, 1, 5))] = rng.choice(SPLICES)
        error = refusal(bytes(data), struct)
        assert error is None or error.status == 400
        codes.add(error and error.code)
    assert codes >= {"invalid_json", "invalid_value", "unknown_parameter"}


CASES = [
    (CompletionRequest, {}, "prompt", "missing_required_parameter"),
    (CompletionRequest, [], None, "invalid_value"),
    (CompletionRequest, {"prompt": "x", "zzz": 1}, "zzz", "unknown_parameter"),
    (CompletionRequest, {"zzz": 1, "suffix": "x"}, "zzz", "unknown_parameter"),
    (CompletionRequest, {"suffix": "x", "n": "x"}, "suffix", "unsupported_parameter"),
    (CompletionRequest, {"n": "x"}, "prompt", "missing_required_parameter"),
    (CompletionRequest, {"prompt": "x", "q` - at `$.n": 1}, "q` - at `$.n", "unknown_parameter"),
    (CompletionRequest, {"prompt": "x", "stream_options": {"q` - at `$.n": 1}}, "stream_options.q` - at `$.n",
     "unknown_parameter"),
    (CompletionRequest, {"prompt": "x", "max_tokens": True}, "max_tokens", "invalid_value"),
    (CompletionRequest, {"prompt": "x", "max_tokens": 1.5}, "max_tokens", "invalid_value"),
    (CompletionRequest, {"prompt": "x", "temperature": 10**400}, "temperature", "invalid_value"),
    (CompletionRequest, {"prompt": "x", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "invalid_value"),
    (CompletionRequest, {"prompt": "x", "logit_bias": {"5": 1, "6": 101}}, "logit_bias['6']", "invalid_value"),
    (CompletionRequest, {"prompt": "x", "logit_bias": {"5\n": 1}}, "logit_bias", "invalid_value"),
    (CompletionRequest, {"prompt": [[1, 2], [1, -1]]}, "prompt[1][1]", "invalid_value"),
    (CompletionRequest, {"prompt": [1] * 20_000 + [-1]}, "prompt[20000]", "invalid_value"),
    (ChatCompletionRequest, {"messages": [USER, {"role": "x", "content": "x"}]}, "messages[1].role", "invalid_value"),
    (ChatCompletionRequest, {"messages": [{**USER, "tool_calls": [{}]}]}, "messages[0].tool_calls[0].function",
     "missing_required_parameter"),
    (ChatCompletionRequest, {"messages": [{**USER, "function_call": {"name": "f"}}]}, "messages[0].function_call",
     "unsupported_parameter"),
    (ChatCompletionRequest, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
     "messages[0].content[0].image_url", "unsupported_parameter"),
    (ChatCompletionRequest, {"messages": [{"role": "user", "content": [PART, {"type": "text"}]}]},
     "messages[0].content[1].text", "missing_required_parameter"),
    (ChatCompletionRequest, {"messages": [USER], "response_format": {"type": "json_schema", "json_schema": {"a": 1}}},
     "response_format.json_schema.a", "unknown_parameter"),
    (ChatCompletionRequest, {"messages": [USER], "response_format": {"type": "structural_tag"}},
     "response_format.type", "invalid_value"),
    (ChatCompletionRequest, {"messages": [USER], "response_format": {"type": "text", "json_schema": {}}},
     "response_format.json_schema", "invalid_value"),
    (CompletionRequest, {"prompt": "x", "response_format": {"type": "json_object"}, "guided_json": {}},
     "response_format.type", "invalid_value"),
    (CompletionRequest, {"prompt": "x", "guided_whitespace_pattern": " "}, "guided_whitespace_pattern",
     "unsupported_parameter"),
    (EmbeddingRequest, {"input": ["a", ""]}, "input[1]", "invalid_value"),
    (InferenceRequest, {"inputs": [{"name": "a", "datatype": "INT32", "shape": [-1]}]}, "inputs[0].shape[0]",
     "invalid_value"),
]  # fmt: skip


@pytest.mark.parametrize(("struct", "body", "param", "code"), CASES)
def test_the_field_at_fault_is_named(struct, body, param, code):
    with pytest.raises(FieldError) as raised:
        converted(body, struct)
    assert (raised.value.param, raised.value.code) == (param, code)


def test_an_unknown_field_comes_with_the_nearest_known_one():
    with pytest.raises(FieldError, match=r"temprature\. Did you mean temperature\?"):
        converted({"prompt": "x", "temprature": 1}, CompletionRequest)


def test_paths_of_errors_begin_with_the_path_of_the_value():
    with pytest.raises(msgspec.ValidationError) as raised:
        msgspec.convert([1, "x"], list[int])
    assert field_error_of(raised.value, [1, "x"], list[int], "tokens").param == "tokens[1]"


def test_integral_floats_count_as_integers():
    body = converted({"prompt": [1.0, 2], "n": 2.0, "stop_token_ids": [3.0], "temperature": 1}, CompletionRequest)
    assert (body.prompt, body.n, body.stop_token_ids, body.temperature) == ([1, 2], 2, [3], 1.0)
    values = [*body.prompt, body.n, *body.stop_token_ids]
    assert {type(value) for value in values} == {int}
    assert type(body.temperature) is float


def test_half_a_surrogate_pair_is_refused_or_kept():
    with pytest.raises(RefusalError):
        decode_body(b'{"prompt": "\\ud800"}', CompletionRequest)
    with pytest.raises(FieldError):  # decoded by other code
        converted({"prompt": "x", "\ud800": 1}, CompletionRequest)


@pytest.mark.parametrize(("name", "most"), [("stop_token_ids", 4096), ("allowed_token_ids", 1 << 18)])
def test_lists_of_token_ids_are_bounded(name, most):
    """A list of a million took the event loop 0.2 s."""
    decode_body(json.dumps({"prompt": "x", name: [7] * most}).encode(), CompletionRequest)
    with pytest.raises(FieldError) as caught:
        decode_body(json.dumps({"prompt": "x", name: [7] * (most + 1)}).encode(), CompletionRequest)
    assert (caught.value.param, caught.value.code) == (name, "invalid_value")
