"""Tool calls and thoughts on /v1/chat/completions, by OpenAI's client and scripted models of every format."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING

import jsonschema
import pytest

from penstock.serving.openai.answer_format import BUDGETS
from penstock.text.answer.budget import REASON
from penstock.text.answer.formats import CHANNEL_MARKERS, TOOL_FORMATS
from tests.support.answer_texts import ARGUMENTS, SPECIALS, TEXTS, THOUGHTS, TOOLS, script_of
from tests.support.fake_model import FILES
from tests.support.http_service import Service
from tests.support.scripted_model import scripted_llm

if TYPE_CHECKING:
    import openai

LISTED = [{"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in TOOLS.items()]
USER = {"role": "user", "content": "the cat"}
HARMONY = [*CHANNEL_MARKERS, "<|constrain|>", "<extra>"]
ANSWER = '{"a": 1}'
FORMATTED = {
    "think": f"<think>so</think>\n\n{ANSWER}",
    "harmony": f"{THOUGHTS['harmony']}<|channel|>final <|constrain|>json<|message|>{ANSWER}",
}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
THINKS = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<answer>{{ opening }}{{ m.reasoning_content }}</think>"
    "{{ m.content }}{% else %}<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}"
)
UNTOLD = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<answer>"


@pytest.fixture(scope="module")
def scripted() -> Iterator[Service]:
    models = {}
    for name, form in TOOL_FORMATS.items():
        signs = " ".join([*form.signs[0], "<|message|>" if name == "harmony" else "</think>"])
        models[name] = scripted_llm(script_of(name), signs, SPECIALS.get(name))
    models["opened"] = scripted_llm({0: "so</think>\n\nyes"}, "</think>enable_thinking", opening="<think>\n")
    models["long"] = scripted_llm({0: "a" * 60}, "</think>enable_thinking", opening="<think>\n")
    models["begins"] = scripted_llm({0: FORMATTED["think"]}, "</think>", ["<think>", "</think>"])
    models["extra"] = scripted_llm({0: "<think>so<extra></think>yes"}, "</think>", ["<think>", "</think>", "<extra>"])
    models["json"] = scripted_llm({0: "so</think>\n\n" + ANSWER}, "</think>", opening="<think>\n")
    models["channels"] = scripted_llm({0: FORMATTED["harmony"]}, "<|channel|>functions.<|message|>", HARMONY)
    models["cut"] = scripted_llm({0: f"because</think>\n\n{ANSWER}"}, "", opening="<think>\n", template=THINKS)
    models["untold"] = scripted_llm({0: TEXTS["hermes"]}, "<tool_call>", template=UNTOLD)
    service = Service(models)
    yield service
    service.close()


@pytest.fixture(scope="module")
def client(scripted: Service) -> Iterator[openai.OpenAI]:
    import openai

    with openai.OpenAI(base_url=scripted.url + "/v1", api_key="none", max_retries=0) as made:
        yield made


def without_ids(message: dict) -> dict:
    calls = [{"name": call["function"]["name"], "arguments": call["function"]["arguments"]}
             for call in message.get("tool_calls") or ()]  # fmt: skip
    return {"content": message["content"], "thoughts": message.get("reasoning_content"), "calls": calls}


def streamed(client: openai.OpenAI, **body) -> tuple[dict, str]:
    """Return the message that OpenAI's client puts together from a stream, and the reason of its end."""
    with client.chat.completions.stream(**body) as stream:
        final = stream.get_final_completion().choices[0]
    return final.message.to_dict(), final.finish_reason


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_a_loop_of_three_steps_runs_in_every_format(name, client):
    messages, seen = [USER], []
    for step in range(3):
        body = {"model": name, "messages": messages, "tools": LISTED, "max_tokens": 800}
        choice = client.chat.completions.create(**body).choices[0]
        message = choice.message.to_dict()
        if step != 1:
            other, reason = streamed(client, **body)
            assert without_ids(other) == without_ids(message)
            assert reason == choice.finish_reason
        seen.append((choice.finish_reason, message.get("reasoning_content")))
        messages = [*messages, message]
        calls = message.get("tool_calls", [])
        assert len({call["id"] for call in calls}) == len(calls)
        if calls:
            assert [call["function"]["name"] for call in calls] == ["weather", "now"]
            assert json.loads(calls[0]["function"]["arguments"]) == ARGUMENTS
            assert message["content"] is None
        messages += [{"role": "tool", "tool_call_id": call["id"], "content": "rain"} for call in calls]
    assert seen == [("tool_calls", None), ("tool_calls", "I <think> so"), ("stop", None)]
    assert messages[-1]["content"] == "Fine é"


def test_a_message_of_the_clients_stream_can_be_sent_back(client):
    body = {"model": "hermes", "tools": LISTED, "max_tokens": 800}
    with client.chat.completions.stream(messages=[USER], **body) as stream:
        message = stream.get_final_completion().choices[0].message
    results = [{"role": "tool", "tool_call_id": call.id, "content": "rain"} for call in message.tool_calls]
    assert client.chat.completions.create(messages=[USER, message, *results, *results], **body)


def test_only_one_call_without_parallel_calls(client):
    body = {"model": "hermes", "messages": [USER], "tools": LISTED, "max_tokens": 800, "parallel_tool_calls": False}
    assert len(client.chat.completions.create(**body).choices[0].message.tool_calls) == 1


def test_without_tools_calls_are_text(client):
    for extra in ({}, {"tools": LISTED, "tool_choice": "none"}):
        choice = client.chat.completions.create(model="hermes", messages=[USER], max_tokens=800, **extra).choices[0]
        assert (choice.message.content, choice.finish_reason) == (TEXTS["hermes"], "stop")
        assert choice.message.tool_calls is None


def test_thoughts_that_the_template_opens(scripted):
    def message(**body) -> dict:
        body = {"model": "opened", "messages": [USER], "max_tokens": 50} | body
        return scripted.post("/v1/chat/completions", **body)["choices"][0]["message"]

    assert message() == {"role": "assistant", "content": "yes", "refusal": None, "reasoning_content": "so"}
    assert message(include_reasoning=False) == {"role": "assistant", "content": "yes", "refusal": None}
    assert message(reasoning_format="none")["content"] == "so</think>\n\nyes"
    assert message(reasoning_effort="none", chat_template_kwargs={"x": 1})["content"] == "yes"
    events = scripted.events("/v1/chat/completions", model="opened", messages=[USER], max_tokens=50)
    deltas = [event["choices"][0]["delta"] for event in events]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "so"
    assert "".join(delta.get("content") or "" for delta in deltas) == "yes"


def test_thoughts_end_where_their_budget_does(scripted):
    def choices(**body) -> list[dict]:
        body = {"model": "long", "messages": [USER], "max_tokens": 40} | body
        return scripted.post("/v1/chat/completions", **body)["choices"]

    thoughts = f"aaaaa\n\n{REASON}"
    for fields in (
        *({name: 5} for name in ("thinking_token_budget", *BUDGETS)),
        {"chat_template_kwargs": {"thinking_budget": 5}, "reasoning_budget": 5},
    ):
        for choice in choices(**fields, n=2, seed=1, temperature=1):
            assert choice["message"]["reasoning_content"] == thoughts
            assert set(choice["message"]["content"]) == {"a"}
    body = {"model": "long", "messages": [USER], "max_tokens": 40, "thinking_budget": 5}
    deltas = [event["choices"][0]["delta"] for event in scripted.events("/v1/chat/completions", **body)]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == thoughts
    (choice,) = choices(thinking_token_budget=5, reasoning_format="none")
    assert choice["message"]["content"].startswith(f"{thoughts}\n</think>\n\naaa")
    for budget, has_thoughts in ((0, False), (-1, True), (1000, True)):
        (choice,) = choices(thinking_token_budget=budget)
        assert ("reasoning_content" in choice["message"]) is has_thoughts
        assert bool(choice["message"]["content"]) is not has_thoughts
    (choice,) = choices(thinking_token_budget=3, response_format={"type": "json_object"})
    assert choice["message"]["reasoning_content"] == f"aaa\n\n{REASON}"
    assert choice["message"]["content"].startswith("{")


def test_a_budget_for_a_model_without_thoughts_is_refused(scripted):
    for fields, param, code in (
        ({"thinking_budget": 5}, "thinking_budget", "unsupported_parameter"),
        ({"thinking_budget": 5, "thinking_token_budget": 6}, "thinking_budget", "invalid_value"),
        ({"chat_template_kwargs": {"thinking_budget": "5"}}, "chat_template_kwargs.thinking_budget", "invalid_value"),
        ({"thinking_budget": -2}, "thinking_budget", "invalid_value"),
        ({"thinking_budget_message": "x"}, "thinking_budget_message", "unsupported_parameter"),
    ):
        status, error = scripted.refused("/v1/chat/completions", model="untold", messages=[USER], **fields)
        assert (status, error["param"], error["code"]) == (400, param, code)
    for name in ("thinking_budget", "thinking_token_budget"):
        assert scripted.post("/v1/chat/completions", model="untold", messages=[USER], max_tokens=1, **{name: 0})


def test_thoughts_that_were_cut_are_continued(scripted):
    """Also with a format, which begins behind them."""
    cut = {"role": "assistant", "reasoning_content": "be", "content": ""}
    body = {"model": "cut", "messages": [USER, cut], "max_tokens": 50, "continue_final_message": True}
    for extra in ({}, {"response_format": FORMAT}):
        message = scripted.post("/v1/chat/completions", **body, **extra)["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("cause", ANSWER)
    status, _, data = scripted.ask("POST", "/v1/chat/completions", {**body, "thinking_token_budget": 3})
    assert (status, json.loads(data)["error"]["param"]) == (400, "thinking_token_budget")


@pytest.mark.parametrize("name", ["begins", "channels", "json"])
def test_a_format_comes_behind_thoughts(name, scripted):
    big = {**SCHEMA, "description": "x" * 200_000}
    for form in (FORMAT, {"type": "json_object"}, {"type": "json_schema", "json_schema": {"schema": big}}):
        for more in ({}, {"tools": LISTED[:1]} if name == "channels" else {}):
            body = {"model": name, "messages": [USER], "max_tokens": 200, "response_format": form, **more}
            message = scripted.post("/v1/chat/completions", **body)["choices"][0]["message"]
            assert json.loads(message["content"]) == {"a": 1}
            assert message["reasoning_content"] == ("I <think> so" if name == "channels" else "so")


def test_thoughts_in_the_content_come_before_a_format(scripted):
    body = {"model": "json", "messages": [USER], "max_tokens": 200, "response_format": FORMAT}
    message = scripted.post("/v1/chat/completions", **body, reasoning_format="none")["choices"][0]["message"]
    assert message["content"] == f"so</think>\n\n{ANSWER}"


def test_only_the_markers_of_special_tokens_reach_the_parser(scripted):
    def thoughts(**fields) -> str:
        body = {"model": "extra", "messages": [USER], "max_tokens": 20, **fields}
        return scripted.post("/v1/chat/completions", **body)["choices"][0]["message"]["reasoning_content"]

    assert thoughts() == thoughts(skip_special_tokens=True) == "so"
    assert thoughts(skip_special_tokens=False) == "so<extra>"


def test_a_call_in_channels_can_be_required(scripted):
    """Its markers are special tokens, which the grammar allows only as such."""
    for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
        body = {"model": "harmony", "messages": [USER], "tools": LISTED, "tool_choice": choice, "max_tokens": 800}
        found = scripted.post("/v1/chat/completions", **body)["choices"][0]
        assert found["finish_reason"] == "tool_calls"
        (call,) = found["message"]["tool_calls"]
        assert call["function"]["name"] == "weather"
        assert json.loads(call["function"]["arguments"]) == ARGUMENTS


def test_a_template_without_tools_gets_a_description_of_them(scripted):
    body = {"model": "untold", "messages": [USER], "tools": LISTED}
    found = scripted.post("/v1/chat/completions", **body, max_tokens=800)["choices"][0]
    assert found["finish_reason"] == "tool_calls"
    tokens = scripted.post("/tokenize", **body)["tokens"]
    text = scripted.post("/detokenize", model="untold", tokens=tokens)["prompt"]
    assert text.startswith("<system># Tools")
    assert all(part in text for part in ("weather", '"city"', "<tool_call>\n{", "<user>the cat"))
    system = {"role": "system", "content": "Be kind."}
    tokens = scripted.post("/tokenize", model="untold", messages=[system, USER], tools=LISTED)["tokens"]
    assert scripted.post("/detokenize", model="untold", tokens=tokens)["prompt"].startswith("<system>Be kind.\n\n#")
    called = {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "now", "arguments": "{}"}}]}
    history = [USER, called, {"role": "tool", "tool_call_id": "1", "content": "noon"}]
    tokens = scripted.post("/tokenize", model="untold", messages=history)["tokens"]
    text = scripted.post("/detokenize", model="untold", tokens=tokens)["prompt"]
    assert '<assistant><tool_call>\n{"name": "now", "arguments": {}}\n</tool_call><user><tool_response>' in text


SIMPLE = {
    "add": {"type": "object", "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}}, "required": ["a"],
            "additionalProperties": False},
    "set": {"type": "object", "properties": {"to": {"enum": ["on", "off"]}}, "additionalProperties": False},
}  # fmt: skip


def test_a_required_call_is_made_by_any_model(serve, make_llm):
    """A model of random tokens calls a tool, in a format that its grammar enforces."""
    tools = [{"type": "function", "function": {"name": name, "parameters": SIMPLE[name]}} for name in SIMPLE]
    config = {"bos_token": "<s>", "chat_template": "<tool_call>{{ tools }}{{ messages }}"}
    files = FILES | {"tokenizer_config.json": json.dumps(config).encode()}
    service = Service({"fake": make_llm(files=files, context_len=4096)})
    try:
        for choice, names in (
            ("required", {"add", "set"}),
            ({"type": "function", "function": {"name": "set"}}, {"set"}),
        ):
            body = {"messages": [USER], "tools": tools, "tool_choice": choice, "temperature": 1, "max_tokens": 2000}
            body["parallel_tool_calls"] = choice != "required"
            found = service.post("/v1/chat/completions", **body, seed=3)["choices"][0]
            assert found["finish_reason"] == "tool_calls"
            assert found["message"]["content"] is None
            for call in found["message"]["tool_calls"]:
                name = call["function"]["name"]
                assert name in names
                jsonschema.validate(json.loads(call["function"]["arguments"]), SIMPLE[name])
        bad = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "not": {}}}}]
        status, error = service.refused("/v1/chat/completions", messages=[USER], tools=bad, tool_choice="required")
        assert (status, error["param"]) == (400, "tools")
    finally:
        service.close()


def test_errors_name_the_field(scripted, demo):
    one = LISTED[:1]
    for fields, param, code in (
        ({"tool_choice": "required"}, "tool_choice", "invalid_value"),
        ({"tools": one, "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice.function.name",
         "invalid_value"),
        ({"tools": one * 2}, "tools[1].function.name", "invalid_value"),
        ({"tools": [{"type": "custom"}]}, "tools[0].function", "missing_required_parameter"),
        ({"messages": [{"role": "tool"}]}, "messages[0].content", "missing_required_parameter"),
        ({"messages": [{"role": "user", "content": "x", "tool_call_id": "y"}]}, "messages[0].tool_call_id",
         "invalid_value"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages", "invalid_value"),
        ({"tools": one, "tool_choice": "required", "regex": "a"}, "tool_choice", "invalid_value"),
        ({"reasoning_effort": "high"}, "reasoning_effort", "unsupported_parameter"),
    ):  # fmt: skip
        status, error = scripted.refused("/v1/chat/completions", **{"model": "hermes", "messages": [USER], **fields})
        assert (status, error["param"], error["code"]) == (400, param, code)


def test_parameters_without_the_shape_of_a_schema_are_refused(scripted):
    for parameters, place in (
        ({"required": 5}, "required"),
        ({"properties": ["a"]}, "properties"),
        ({"properties": {"x": {"type": 5}}}, "properties.x.type"),
        ({"properties": {"x": 5}}, "properties.x"),
        ({"anyOf": 5}, "anyOf"),
        ({"$defs": {"a": {"oneOf": [{"type": [1]}]}}}, "$defs.a.oneOf[0].type"),
    ):
        tools = [*LISTED, {"type": "function", "function": {"name": "f", "parameters": parameters}}]
        body = {"model": "hermes", "messages": [USER], "tools": tools}
        status, error = scripted.refused("/v1/chat/completions", **body)
        assert (status, error["param"]) == (400, f"tools[2].function.parameters.{place}")
        assert error["code"] == "invalid_value"


def test_tools_are_part_of_the_tokenized_prompt(scripted):
    def count(**fields) -> int:
        return scripted.post("/tokenize", model="hermes", messages=[USER], **fields)["count"]

    assert count(tools=LISTED) > count()
