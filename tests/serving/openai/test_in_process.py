"""OpenAI request bodies answered without HTTP: what an echo holds, where each token stands, what is refused."""

from __future__ import annotations

import asyncio
import json
import math

import pytest

from penstock import LLM, SamplingParams
from penstock.engine.logprobs import TokenLogprobs
from penstock.errors import InvalidArgumentError, UnsupportedError
from penstock.llm.local_backend import LocalBackend, LocalModels
from penstock.serving.openai.in_process import CHAT, COMPLETIONS, EMBEDDINGS, InProcessApi
from penstock.serving.openai.logprobs import ChatLogprobsBuilder, TextLogprobsBuilder
from tests.support.command import DEMO
from tests.support.errors import raises


@pytest.fixture(scope="module")
def llm():
    with LLM(DEMO) as opened:
        yield opened


def answer(url: str = COMPLETIONS, **body: object) -> dict:
    async def run() -> dict:
        backend = LocalBackend(LLM(DEMO), "demo")
        try:
            return await InProcessApi(LocalModels([backend])).answer(url, body, "r1")
        finally:
            await backend.close()

    return asyncio.run(run())


@pytest.mark.parametrize("as_ids", [False, True])
@pytest.mark.parametrize("max_tokens", [0, 6])
def test_echo_has_the_prompt_logprobs(llm, as_ids, max_tokens):
    text = "def add(a, b):"
    ids = llm.tokenizer.encode(text)
    body = answer(prompt=ids if as_ids else text, echo=True, logprobs=2, max_tokens=max_tokens, temperature=0)
    choice = body["choices"][0]
    logprobs = choice["logprobs"]
    score = llm.score(ids, num_top=2)
    assert logprobs["token_logprobs"][: len(ids)] == [one and one.logprob for one in score.logprobs]
    assert logprobs["top_logprobs"][0] is None
    assert [len(one) for one in logprobs["top_logprobs"][1:]] == [2] * (len(ids) + max_tokens - 1)
    assert logprobs["tokens"] == [llm.tokenizer.decode([token]) for token in ids] + logprobs["tokens"][len(ids) :]
    assert "".join(logprobs["tokens"]) == choice["text"]
    assert choice["text"].startswith(text)
    assert (choice["text"] == text) == (max_tokens == 0)
    assert body["id"] == "cmpl-r1"
    assert body["usage"]["completion_tokens"] == max_tokens
    assert choice["finish_reason"] == "length"
    for offset, token in zip(logprobs["text_offset"], logprobs["tokens"], strict=True):
        assert choice["text"].startswith(token, offset)
    if max_tokens:
        plain = llm.generate(text, SamplingParams(max_tokens=6, temperature=0, logprobs=2))
        assert logprobs["token_logprobs"][len(ids) :] == [one.logprob for one in plain.logprobs]
        assert choice["text"] == text + plain.text


def test_offsets_count_characters_of_the_text():
    text = "x = '日本'  # é\n"
    choice = answer(prompt=text, echo=True, logprobs=0, max_tokens=4, temperature=0)["choices"][0]
    echoed = choice["logprobs"]
    whole = [i for i, token in enumerate(echoed["tokens"]) if not token.startswith("bytes:")]
    assert 8 < len(whole) < len(echoed["tokens"])  # some characters are several tokens
    assert all(choice["text"].startswith(echoed["tokens"][i], echoed["text_offset"][i]) for i in whole)
    plain = answer(prompt=text, logprobs=0, max_tokens=4, temperature=0)["choices"][0]["logprobs"]
    assert [offset + len(text) for offset in plain["text_offset"]] == echoed["text_offset"][-4:]
    assert plain["text_offset"] == [len("".join(plain["tokens"][:i])) for i in range(len(plain["tokens"]))]


def test_embeddings_are_those_of_the_library(llm):
    body = answer(EMBEDDINGS, input=["def add(a, b):", "x"])
    expected = llm.embed(["def add(a, b):", "x"], pooling="mean", normalize=True)
    assert [one["embedding"] for one in body["data"]] == [one.vector.tolist() for one in expected]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": False, "echo": True}, "max_tokens"),
        ({"echo": 1}, "echo"),
        ({"echo": True, "logprobs": 21}, "logprobs"),
        ({"echo": True, "truncate_prompt_tokens": -1}, "echo"),
        ({"stream": True}, "stream"),
        ({"model": "other"}, "other"),
    ],
)
def test_a_wrong_field_is_named(fields, message):
    with pytest.raises(Exception, match=message) as caught:
        answer(**{"prompt": "x"} | fields)
    assert type(caught.value).__module__ == "penstock.errors"


def test_the_endpoint_decides_about_fields():
    with raises(InvalidArgumentError, match="/v1/images"):
        answer("/v1/images")
    with raises(InvalidArgumentError, param="prompt"):
        answer(CHAT, prompt="x")
    with raises(UnsupportedError, param="messages"):
        answer(CHAT, messages=[{"role": "user", "content": "x"}])


def test_impossible_tokens_have_a_json_number(llm):
    never = TokenLogprobs(40, -math.inf, 4096, ((40, -math.inf),))
    listed = [ChatLogprobsBuilder(llm.tokenizer).of([never]), TextLogprobsBuilder(llm.tokenizer, 0).of([40], [never])]
    for logprobs in listed:
        assert json.dumps(logprobs, allow_nan=False).count("-9999.0") == 2
