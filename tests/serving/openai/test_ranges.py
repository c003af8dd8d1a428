"""The ranges of the protocols: top_p 0, negative seeds, many inputs, a continued message, names of tokens."""

from __future__ import annotations

import pytest

from penstock import LLM, SamplingParams
from penstock.engine.params import ResolvedSampling
from penstock.errors import InvalidArgumentError
from penstock.serving.openai.bodies import EmbeddingRequest, RerankRequest, ScoreRequest
from penstock.serving.request_decoding import converted
from penstock.serving.workers.messages import sampling_from, sampling_to
from tests.support.command import DEMO
from tests.support.errors import raises

PROMPT = "def add(a, b):"
HOT = {"temperature": 1.0, "max_tokens": 12, "ignore_eos": True}


def text_of(service, **fields):
    return service.post("/v1/completions", **{"prompt": PROMPT} | HOT | fields)["choices"][0]["text"]


@pytest.mark.parametrize("name", ["top_p", "typical_p"])
@pytest.mark.parametrize("value", [0, 1e-12])
def test_a_share_of_nothing_keeps_one_token(demo, name, value):
    texts = {text_of(demo, **{name: value}, seed=seed) for seed in (1, 2, 3)}
    assert len(texts) == 1
    if name == "top_p":
        assert texts == {text_of(demo, temperature=0)}


@pytest.mark.parametrize("seed", [-1, -(2**63), 2**63 - 1])
def test_every_seed_of_64_bits_is_a_seed(demo, seed):
    assert text_of(demo, seed=seed) == text_of(demo, seed=seed) != text_of(demo, seed=7)


def test_a_negative_seed_is_that_of_the_same_bits():
    params = SamplingParams(seed=-1)
    assert params.seed == -1
    assert ResolvedSampling.of(params, ResolvedSampling()).seed == 2**64 - 1
    assert sampling_from(sampling_to(params)).seed == 2**64 - 1
    with raises(InvalidArgumentError, param="seed"):
        SamplingParams(seed=-(2**63) - 1)


def test_as_many_inputs_as_clients_send(demo):
    found = demo.post("/v1/embeddings", input=[[300 + number % 7] for number in range(300)])
    assert len(found["data"]) == 300
    vectors = [one["embedding"] for one in found["data"]]
    assert vectors[:7] == vectors[7:14] != vectors[1:8]
    status, error = demo.refused("/v1/embeddings", input=["x"] * 2049)
    assert (status, error["param"], error["code"]) == (400, "input", "invalid_value")


def test_as_many_inputs_as_openai_takes():
    texts = ["y"] * 2048
    assert converted({"input": texts}, EmbeddingRequest).input == texts
    assert len(converted({"query": "x", "documents": texts}, RerankRequest).texts) == 2048
    assert len(converted({"text_1": "x", "text_2": texts}, ScoreRequest).pairs) == 2048


def test_the_last_message_is_continued(fake, make_llm):
    from tests.support.services import CHAT_FILES

    service, llm = fake, make_llm(files=CHAT_FILES)
    messages = [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "sat on "}]
    asked = {"messages": messages, "continue_final_message": True}
    found = service.post("/v1/chat/completions", **asked, max_tokens=6, temperature=0)
    prompt = "<user>the cat<assistant>sat on "
    tokens = service.post("/tokenize", **asked)["tokens"]
    assert service.post("/detokenize", tokens=tokens)["prompt"] == prompt
    expected = llm.generate(prompt, SamplingParams(max_tokens=6, temperature=0))
    assert found["choices"][0]["message"]["content"] == expected.text
    assert found["usage"]["prompt_tokens"] == len(tokens)
    mine = llm.chat(messages, continue_final_message=True, max_tokens=6, temperature=0)
    assert mine.text == expected.text


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
def test_continuing_excludes_beginning(fake, path):
    messages = [{"role": "assistant", "content": "the"}]
    asked = {"continue_final_message": True, "add_generation_prompt": True}
    status, error = fake.refused(path, messages=messages, **asked)
    assert (status, error["param"], error["code"]) == (400, "continue_final_message", "invalid_value")
    assert fake.post("/tokenize", messages=messages, continue_final_message=True, add_generation_prompt=False)


def logprobs_of(service, **fields):
    body = {"prompt": "é\U0001f600", "max_tokens": 1, "echo": True, "logprobs": 5, "temperature": 0}
    return service.post("/v1/completions", **body | fields)["choices"][0]["logprobs"]


def test_each_alternative_has_its_own_key(demo):
    found = logprobs_of(demo)
    assert all(top is None or len(top) == 5 for top in found["top_logprobs"])
    assert any(token.startswith("bytes:\\x") for token in found["tokens"])
    assert not any("\ufffd" in token for token in found["tokens"])
    for token, value, top in zip(found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True):
        if top is not None and token in top:
            assert top[token] == value
    with LLM(DEMO) as llm:
        ids = llm.tokenizer.encode("é\U0001f600")
    named = logprobs_of(demo, return_tokens_as_token_ids=True)
    assert named["tokens"][: len(ids)] == [f"token_id:{token}" for token in ids]
    assert [top and [*top.values()] for top in named["top_logprobs"]] == [
        top and [*top.values()] for top in found["top_logprobs"]
    ]


def test_tokens_of_a_message_may_be_ids(fake):
    body = {"messages": [{"role": "user", "content": "the"}], "max_tokens": 3, "logprobs": True, "top_logprobs": 2}
    (choice,) = fake.post("/v1/chat/completions", **body, temperature=0, return_tokens_as_token_ids=True)["choices"]
    (plain,) = fake.post("/v1/chat/completions", **body, temperature=0)["choices"]
    for one, other in zip(choice["logprobs"]["content"], plain["logprobs"]["content"], strict=True):
        assert one["token"].startswith("token_id:")
        assert (one["bytes"], one["logprob"]) == (other["bytes"], other["logprob"])
        assert all(top["token"].startswith("token_id:") for top in one["top_logprobs"])


def test_equal_texts_of_tokens_get_names_of_their_own():
    """Tokens whose texts are equal (a word with and without a space in front, in some vocabularies)."""
    from penstock.engine.logprobs import TokenLogprobs
    from penstock.serving.openai.logprobs import TextLogprobsBuilder

    class Words:
        def decode(self, ids, *, skip_special_tokens=True):
            return "".join("the" if token < 10 else "\ufffd" for token in ids)

        def token_bytes(self, token):
            return b"the" if token < 10 else b"<0xE2>" if token == 10 else b" \\\x9f"

        def detokenizer(self):
            return self

        def push(self, token):
            return self.decode([token])

    entry = TokenLogprobs(2, -2.0, 3, ((1, -1.0), (10, -1.5), (2, -2.0), (11, -3.0)))
    found = TextLogprobsBuilder(Words()).of([2], [entry])
    assert found["tokens"] == ["token_id:2"]
    expected = {"the": -1.0, "bytes:\\xe2": -1.5, "token_id:2": -2.0, "bytes: \\x5c\\x9f": -3.0}
    assert found["top_logprobs"] == [expected]
