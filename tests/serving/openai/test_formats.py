"""Formats of answers, by the fields that clients of OpenAI, vLLM and llama.cpp send."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import pydantic
import pytest

from penstock import LLM, SamplingParams
from penstock.engine.params import SamplingParams as Params
from penstock.serving.openai.answer_format import asked_grammar
from penstock.serving.openai.bodies import ChatCompletionRequest, CompletionRequest
from penstock.serving.request_decoding import converted
from tests.support.command import DEMO

SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}
OPENAI = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
FIELDS = [
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": {}}, None),
    ({"response_format": {"json_schema": None, "schema": None}}, None),
    ({"response_format": {"type": "json_object"}}, {"json_object": True}),
    ({"response_format": {"type": "json_object", "schema": SCHEMA}}, {"json_schema": SCHEMA}),
    ({"response_format": OPENAI}, {"json_schema": SCHEMA}),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, {"json_schema": {}}),
    ({"json_schema": SCHEMA}, {"json_schema": SCHEMA}),
    ({"json_schema": json.dumps(SCHEMA)}, {"json_schema": json.dumps(SCHEMA)}),
    ({"json_object": True}, {"json_object": True}),
    ({"grammar": 'root ::= "a"'}, {"grammar": 'root ::= "a"'}),
    ({"guided_json": SCHEMA}, {"json_schema": SCHEMA}),
    ({"guided_json": {}}, {"json_schema": {}}),
    ({"guided_regex": "a+", "guided_decoding_backend": "xgrammar"}, {"regex": "a+"}),
    ({"guided_choice": ["a", "b"]}, {"choice": ["a", "b"]}),
    ({"guided_grammar": 'start: "a"'}, {"grammar": 'start: "a"'}),
    ({"structured_outputs": {"json": SCHEMA}}, {"json_schema": SCHEMA}),
    ({"structured_outputs": {"json_object": True}}, {"json_object": True}),
    ({"structured_outputs": {"regex": "a"}}, {"regex": "a"}),
    ({"structured_outputs": {"choice": ["a"]}, "guided_choice": ["a"]}, {"choice": ["a"]}),
    ({"structured_outputs": {}, "guided_regex": "", "guided_choice": [], "grammar": "", "json_object": False}, None),
]


@pytest.mark.parametrize(("fields", "expected"), FIELDS, ids=lambda value: str(value)[:40])
def test_each_field_asks_for_its_grammar(fields, expected):
    for kind, own in ((CompletionRequest, {"prompt": "x"}), (ChatCompletionRequest, {"messages": [USER]})):
        asked = asked_grammar(converted(own | fields, kind))
        assert (None if asked is None else {asked[1]: asked[2]}) == expected


USER = {"role": "user", "content": "the cat"}


def test_answers_of_both_routes_follow_their_format(demo, serve):
    """Whole and streamed, n > 1; the tokens are the engine's with the same grammar."""
    fake = serve("fake")
    hot = {"temperature": 1.0, "seed": 4, "max_tokens": 80}
    with LLM(DEMO) as llm:
        expected = llm.generate("x", SamplingParams(json_schema=SCHEMA, **hot)).text
    for fields in ({"response_format": OPENAI}, {"guided_json": SCHEMA}, {"structured_outputs": {"json": SCHEMA}}):
        assert demo.post("/v1/completions", prompt="x", **hot, **fields)["choices"][0]["text"] == expected
        events = demo.events("/v1/completions", prompt="x", **hot, **fields)
        assert "".join(event["choices"][0]["text"] for event in events) == expected
    body = {"messages": [USER], **hot, "n": 3, "structured_outputs": {"regex": "[a-f]{3}[0-9]{5}"}}
    choices = fake.post("/v1/chat/completions", **body)["choices"]
    assert all(re.fullmatch("[a-f]{3}[0-9]{5}", choice["message"]["content"]) for choice in choices)
    assert len({choice["message"]["content"] for choice in choices}) == 3
    assert {choice["finish_reason"] for choice in choices} == {"stop"}


def test_the_open_inference_protocol_has_the_fields(demo):
    parameters = {"temperature": 1, "seed": 3, "max_tokens": 20, "regex": "[0-9]{4}"}
    found = demo.post("/v2/models/demo/generate", text_input="x", parameters=parameters)
    assert re.fullmatch("[0-9]{4}", found["text_output"])
    parameters = {"max_tokens": 20, "json_schema": '{"type": "boolean"}'}
    assert demo.post("/v2/models/demo/generate", text_input="x", parameters=parameters)["text_output"] in (
        "true", "false",
    )  # fmt: skip


class Part(pydantic.BaseModel):
    kind: Literal["wheel", "frame"]
    count: int = pydantic.Field(ge=0, le=9)


class Bike(pydantic.BaseModel):
    color: Literal["red", "blue"]
    is_new: bool
    parts: list[Part] = pydantic.Field(max_length=2)


def test_openais_client_parses_answers(serve):
    import openai

    with openai.OpenAI(base_url=serve("fake").url + "/v1", api_key="none", max_retries=0) as client:
        for seed in range(4):
            answer = client.chat.completions.parse(
                model="fake", messages=[USER], response_format=Bike, temperature=1, seed=seed, max_tokens=400
            )
            assert isinstance(answer.choices[0].message.parsed, Bike)
        with pytest.raises(openai.LengthFinishReasonError):
            client.chat.completions.parse(model="fake", messages=[USER], response_format=Bike, max_tokens=3)
        answer = client.chat.completions.create(
            model="fake", messages=[USER], response_format={"type": "json_object"}, max_tokens=300, temperature=0
        )
        text = answer.choices[0].message.content
        assert answer.choices[0].finish_reason == "length" or isinstance(json.loads(text), dict)


def test_errors_name_the_field_that_was_sent(demo):
    for fields, param, word in (
        ({"response_format": {"type": "json_object", "schema": {"not": {}}}}, "response_format.schema", '["not"]'),
        ({"guided_json": {"type": "x"}}, "guided_json", "Invalid type"),
        ({"structured_outputs": {"grammar": "x"}}, "structured_outputs.grammar", "start"),
        ({"regex": "a("}, "regex", "unclosed"),
    ):
        status, error = demo.refused("/v1/completions", prompt="x", **fields)
        assert (status, error["param"]) == (400, param)
        assert error["message"].startswith(f"{param}: ")
        assert word in error["message"]
    assert Params(regex="a").answer_grammar.field == "regex"


def hostile() -> list[dict]:
    """Grammars that ask for much time or memory, most of which are refused."""
    wide = {f"p{index}": {"type": "string", "pattern": f".*x.{{{index}}}"} for index in range(100)}
    return [
        {"regex": "(" * 1000 + "a" + ")" * 1000},
        {"regex": "((a{0,1000}){0,1000}){0,1000}"},
        {"regex": "(.*a.{30}|.*b.{30}|.*c.{30})*d"},
        {"regex": "[^a]{100000}"},
        {"regex": "(a+)+b" * 50},
        {"grammar": "start: " + "(" * 5000 + '"a"' + ")" * 5000},
        {"grammar": "start: " + " | ".join(f'"{index}"' for index in range(2000))},
        {"grammar": 'start: start start | "a" |'},
        {"grammar": 'start: a\na: b\nb: a | "x"'},
        {"grammar": "start: r0\n" + "\n".join(f"r{i}: r{i + 1} r{i + 1}" for i in range(500)) + '\nr500: "a"'},
        {"grammar": 'start: ("a"{0,100000}){0,100000}'},
        {"grammar": "root ::= " + "(" * 3000 + '"a"' + ")" * 3000},
        {"grammar": 'root ::= root root | "a"'},
        {"choice": [f"choice number {index}" for index in range(1000)]},
        {"json_schema": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}},
        {"json_schema": {"$ref": "#"}},
        {"json_schema": {"enum": [f"value {index}" for index in range(5000)]}},
        {"json_schema": {"type": "object", "properties": wide, "required": list(wide)}},
        {"json_schema": {"allOf": [{"anyOf": [{"properties": {f"a{i}{j}": {"type": "string", "pattern": ".*x.{9}"}}}
                                             for j in range(6)]} for i in range(8)]}},
        {"json_schema": {"type": "array", "items": {"type": "string", "maxLength": 2000}, "minItems": 2000}},
        {"json_schema": '{"anyOf":[' * 30 + "{}" + "]}" * 30},
    ]  # fmt: skip


def test_hostile_grammars_are_bounded(serve):
    """Each ends soon, with an answer or a refusal, and the service still answers others alike."""
    service = serve("fake")
    plain = {"prompt": "the cat", "max_tokens": 8, "temperature": 0}
    expected = service.post("/v1/completions", **plain)["choices"]
    with ThreadPoolExecutor(4) as pool:
        asked = [
            pool.submit(
                service.ask, "POST", "/v1/completions", {"prompt": "x", "max_tokens": 8, "temperature": 1, **fields}
            )
            for fields in hostile()
        ]
        for one in asked:
            assert one.result()[0] in (200, 400)
            assert service.post("/v1/completions", **plain)["choices"] == expected
