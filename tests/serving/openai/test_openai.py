"""OpenAI's own client, every answer checked against its types, over every route that it has."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING

import numpy as np
import pytest

from penstock import LLM, SamplingParams
from tests.support.command import DEMO
from tests.support.http_service import Service

if TYPE_CHECKING:
    import openai
    from openai.types import Completion

PROMPT = "def add(a, b):"
GREEDY = {"temperature": 0, "max_tokens": 12}


@pytest.fixture(scope="module")
def llm():
    with LLM(DEMO) as made:
        yield made


def client_of(service: Service, is_strict: bool = True) -> openai.OpenAI:
    import openai

    url = service.url + "/v1"
    return openai.OpenAI(base_url=url, api_key="none", max_retries=0, _strict_response_validation=is_strict)


def complete(client: openai.OpenAI, *, stream: bool = False, **fields: object) -> list[Completion]:
    """A completion as a list of answers, one or as many as are streamed, each checked against OpenAI's types.

    Those want what OpenAI's own service leaves null: a finish_reason in every piece, a log-probability of the first
    token of an echo.
    """
    from openai.types import Completion

    loose = client.with_options(_extra_kwargs={"_strict_response_validation": False})
    made = loose.completions.create(model="demo", stream=stream, **fields)
    answers = list(made) if stream else [made]
    for answer in answers:
        filled = answer.model_dump()
        for choice in filled["choices"]:
            choice["finish_reason"] = choice["finish_reason"] or ("stop" if stream else None)
            if fields.get("echo") and choice["logprobs"]:
                values = choice["logprobs"]["token_logprobs"]
                values[0] = 0.0 if values[0] is None else values[0]
                choice["logprobs"]["top_logprobs"][0] = choice["logprobs"]["top_logprobs"][0] or {}
        Completion.model_validate(filled, strict=True)
    return answers


@pytest.fixture(scope="module")
def client(demo):
    with client_of(demo) as made:
        yield made


@pytest.fixture
def chat_client(serve):
    with client_of(serve("fake")) as made:
        yield made


def test_models(client):
    import openai

    assert [one.id for one in client.models.list()] == ["demo"]
    assert client.models.retrieve("demo").owned_by == "penstock"
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("other")
    assert caught.value.code == "model_not_found"


def test_a_completion_is_the_engines(client, llm):
    whole = llm.generate(PROMPT, SamplingParams(**GREEDY))
    found = client.completions.create(model="demo", prompt=PROMPT, **GREEDY)
    assert found.choices[0].text == whole.text
    assert found.choices[0].finish_reason == whole.finish_reason
    assert found.usage.prompt_tokens == len(whole.prompt_token_ids)
    assert found.usage.completion_tokens == len(whole.token_ids)
    pieces = complete(client, prompt=PROMPT, stream=True, **GREEDY)
    assert "".join(piece.choices[0].text for piece in pieces) == whole.text
    assert [p.choices[0].finish_reason for p in pieces if p.choices[0].finish_reason] == [whole.finish_reason]


def test_token_ids_and_batches_of_prompts(client, llm):
    ids = llm.tokenizer.encode(PROMPT)
    prompts = [PROMPT, "class Point:", "import os"]
    expected = [llm.generate(p, SamplingParams(**GREEDY)).text for p in prompts]
    assert client.completions.create(model="demo", prompt=ids, **GREEDY).choices[0].text == expected[0]
    several = client.completions.create(model="demo", prompt=prompts, **GREEDY)
    assert [one.text for one in several.choices] == expected
    assert [one.index for one in several.choices] == [0, 1, 2]
    texts = ["", "", ""]
    given = [llm.tokenizer.encode(p) for p in prompts]
    for piece in complete(client, prompt=given, stream=True, **GREEDY):
        texts[piece.choices[0].index] += piece.choices[0].text
    assert texts == expected


@pytest.mark.parametrize("stream", [False, True])
def test_seeds_and_several_answers(client, llm, stream):
    params = {"temperature": 1, "max_tokens": 8, "seed": 5, "n": 3}
    whole = llm.generate(PROMPT, SamplingParams(**params))
    texts = [""] * 3
    for answer in complete(client, prompt=PROMPT, stream=stream, **params):
        for choice in answer.choices:
            texts[choice.index] += choice.text
    assert texts == [choice.text for choice in whole.choices]
    assert len(set(texts)) > 1


def test_the_likeliest_of_several(client, llm):
    params = {"temperature": 1, "max_tokens": 8, "seed": 5, "n": 1, "best_of": 4}
    whole = llm.generate(PROMPT, SamplingParams(**params))
    assert client.completions.create(model="demo", prompt=PROMPT, **params).choices[0].text == whole.text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("echo", [False, True])
def test_log_probabilities_of_a_completion(client, llm, stream, echo):
    whole = llm.generate(PROMPT, SamplingParams(logprobs=2, prompt_logprobs=2, **GREEDY))
    text, tokens, values, tops, offsets = "", [], [], [], []
    for answer in complete(client, prompt=PROMPT, logprobs=2, echo=echo, stream=stream, **GREEDY):
        text += answer.choices[0].text
        logprobs = answer.choices[0].logprobs
        tokens += logprobs.tokens
        values += logprobs.token_logprobs
        tops += logprobs.top_logprobs
        offsets += logprobs.text_offset
    assert text == (PROMPT if echo else "") + whole.text
    expected = [*(whole.prompt_logprobs if echo else []), *whole.logprobs]
    assert values == [one and one.logprob for one in expected]
    assert [top and len(top) for top in tops] == [one and 2 for one in expected]
    assert all(text.startswith(token, offset) for token, offset in zip(tokens, offsets, strict=True))
    assert offsets[0] == 0


@pytest.mark.parametrize("logprobs", [None, 1])
def test_echo_without_new_tokens(client, llm, logprobs):
    (found,) = complete(client, prompt=PROMPT, echo=True, max_tokens=0, logprobs=logprobs)
    assert found.choices[0].text == PROMPT
    assert found.usage.completion_tokens == 0
    if logprobs is None:
        assert found.choices[0].logprobs is None
    else:
        score = llm.score(PROMPT, num_top=1)
        assert found.choices[0].logprobs.token_logprobs == [one and one.logprob for one in score.logprobs]


def test_usage_comes_last_when_it_is_asked_for(client, chat_client):
    *pieces, last = complete(client, prompt=PROMPT, stream=True, stream_options={"include_usage": True}, **GREEDY)
    assert all(piece.usage is None for piece in pieces)
    assert last.choices == []
    assert last.usage.completion_tokens == 12
    messages = [{"role": "user", "content": "the cat"}]
    made = chat_client.chat.completions.create(
        model="fake", messages=messages, stream=True, stream_options={"include_usage": True}, max_tokens=5
    )
    *pieces, last = list(made)
    assert last.usage.completion_tokens == 5


@pytest.mark.parametrize("stream", [False, True])
def test_chat(chat_client, make_llm, stream):
    from tests.support.services import CHAT_FILES

    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "the"}, {"type": "text", "text": "cat"}]},
    ]
    own = make_llm(files=CHAT_FILES)
    params = {"temperature": 1.2, "seed": 3, "n": 2}
    whole = own.generate("<system>be brief<user>the\ncat<a>", SamplingParams(max_tokens=20, logprobs=2, **params))
    found = chat_client.chat.completions.create(
        model="fake",
        messages=messages,
        max_completion_tokens=20,
        logprobs=True,
        top_logprobs=2,
        stream=stream,
        **params,
    )
    texts, values, reasons = ["", ""], [[], []], ["", ""]
    for answer in found if stream else [found]:
        for choice in answer.choices:
            message = choice.delta if stream else choice.message
            texts[choice.index] += message.content or ""
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
            for entry in choice.logprobs.content if choice.logprobs else []:
                values[choice.index].append(entry.logprob)
                assert len(entry.top_logprobs) == 2
    assert texts == [choice.text for choice in whole.choices]
    assert values == [[one.logprob for one in choice.logprobs] for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices]


def test_embeddings(client, llm):
    ids = llm.tokenizer.encode(PROMPT)
    expected = llm.embed([PROMPT, "x = 1"], normalize=True)
    found = client.embeddings.create(model="demo", input=[PROMPT, "x = 1"], encoding_format="float")
    for one, mine in zip(found.data, expected, strict=True):
        assert np.array_equal(np.float32(one.embedding), mine.vector)
    assert found.usage.prompt_tokens == sum(len(one.token_ids) for one in expected)
    raw = client.embeddings.with_raw_response.create(model="demo", input=ids, encoding_format="base64")
    data = raw.http_response.json()["data"][0]["embedding"]
    assert base64.b64decode(data) == expected[0].vector.tobytes()
    loose = client.with_options(_extra_kwargs={"_strict_response_validation": False})
    found = loose.embeddings.create(model="demo", input=ids)  # base64 on the wire, which the types do not know
    assert np.array_equal(np.float32(found.data[0].embedding), expected[0].vector)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"suffix": "x"}, "suffix"),
        ({"temperature": -1}, "temperature"),
        ({"logprobs": 21}, "logprobs"),
        ({"n": 1000}, "n"),
        ({"extra_body": {"foo": 1}}, "foo"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"stop": [1]}, "stop[0]"),
    ],
)
def test_a_refusal_names_the_field(client, fields, param):
    import openai

    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="demo", prompt=PROMPT, **fields)
    assert caught.value.param == param
    assert caught.value.type == "invalid_request_error"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}}},
            "response_format.json_schema.schema",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content[0].image_url",
        ),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "function", "content": "x"}]}, "messages[0].role"),
        ({"reasoning_effort": "low"}, "reasoning_effort"),
    ],
)
def test_unsupported_chat_fields_are_refused_by_name(chat_client, fields, param):
    import openai

    with pytest.raises(openai.BadRequestError) as caught:
        chat_client.chat.completions.create(
            **{"model": "fake", "messages": [{"role": "user", "content": "x"}]} | fields
        )
    assert caught.value.param.startswith(param)


def test_a_model_without_a_template_refuses_chat(client):
    import openai

    with pytest.raises(openai.BadRequestError, match="no chat template"):
        client.chat.completions.create(model="demo", messages=[{"role": "user", "content": "x"}])
