"""OpenAI's bodies of completions: what an echo holds, and where each token stands in the text."""

from __future__ import annotations

import pytest

from penstock import LLM, SamplingParams
from penstock.errors import InvalidArgumentError
from penstock.offline.batch_completions import CHAT, COMPLETIONS, answer_body, read_body
from tests.support.command import DEMO


@pytest.fixture(scope="module")
def llm():
    with LLM(DEMO) as made:
        yield made


def answer(llm: LLM, **body: object) -> dict:
    prompt, params, options = read_body(llm, COMPLETIONS, body)
    return answer_body(llm, COMPLETIONS, body, llm.generate(prompt, params, options=options))


@pytest.mark.parametrize("as_ids", [False, True])
@pytest.mark.parametrize("max_tokens", [0, 6])
def test_an_echo_has_the_log_probabilities_of_the_prompt(llm, as_ids, max_tokens):
    text = "def add(a, b):"
    ids = llm.tokenizer.encode(text)
    body = answer(llm, prompt=ids if as_ids else text, echo=True, logprobs=2, max_tokens=max_tokens, temperature=0)
    choice = body["choices"][0]
    found = choice["logprobs"]
    score = llm.score(ids, num_top=2)
    assert found["token_logprobs"][: len(ids)] == [one and one.logprob for one in score.logprobs]
    assert found["top_logprobs"][0] is None
    assert [len(one) for one in found["top_logprobs"][1:]] == [2] * (len(ids) + max_tokens - 1)
    assert found["tokens"] == [llm.tokenizer.decode([token]) for token in ids] + found["tokens"][len(ids) :]
    assert "".join(found["tokens"]) == choice["text"]
    assert choice["text"].startswith(text)
    assert (choice["text"] == text) == (max_tokens == 0)
    assert body["usage"]["completion_tokens"] == max_tokens
    assert choice["finish_reason"] == "length"
    for offset, token in zip(found["text_offset"], found["tokens"], strict=True):
        assert choice["text"].startswith(token, offset)
    if max_tokens:
        plain = llm.generate(text, SamplingParams(max_tokens=6, temperature=0, logprobs=2))
        assert found["token_logprobs"][len(ids) :] == [one.logprob for one in plain.logprobs]
        assert choice["text"] == text + plain.text


def test_offsets_count_characters_of_the_text(llm):
    text = "x = '日本'  # é\n"
    choice = answer(llm, prompt=text, echo=True, logprobs=0, max_tokens=4, temperature=0)["choices"][0]
    found = choice["logprobs"]
    whole = [i for i, token in enumerate(found["tokens"]) if "\ufffd" not in token]
    assert 8 < len(whole) < len(found["tokens"])  # some characters are several tokens
    assert all(choice["text"].startswith(found["tokens"][i], found["text_offset"][i]) for i in whole)
    alone = answer(llm, prompt=text, logprobs=0, max_tokens=4, temperature=0)["choices"][0]
    assert [offset + len(text) for offset in alone["logprobs"]["text_offset"]] == found["text_offset"][-4:]
    assert alone["logprobs"]["text_offset"] == [
        len("".join(alone["logprobs"]["tokens"][:i])) for i in range(len(alone["logprobs"]["tokens"]))
    ]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt_logprobs": 1}, "prompt_logprobs needs echo and logprobs"),
        ({"prompt_logprobs": 1, "echo": True}, "prompt_logprobs needs echo and logprobs"),
        ({"prompt_logprobs": 1, "logprobs": 1}, "prompt_logprobs needs echo and logprobs"),
        ({"max_tokens": 0}, "max_tokens must be"),
        ({"max_tokens": 0, "echo": True, "min_tokens": 1}, "min_tokens must be at most max_tokens"),
        ({"max_tokens": False, "echo": True}, "max_tokens must be"),
        ({"echo": 1}, "echo must be"),
        ({"truncate_prompt": 1}, "truncate_prompt must be"),
        ({"truncate_prompt": True, "echo": True}, "truncate_prompt must be false with echo"),
        ({"echo": True, "logprobs": 21}, "logprobs must be"),
    ],
)
def test_what_would_be_left_out_is_refused(llm, fields, message):
    with pytest.raises(InvalidArgumentError, match=message):
        read_body(llm, COMPLETIONS, {"prompt": "x"} | fields)


@pytest.mark.parametrize("name", ["echo", "prompt_logprobs"])
def test_a_chat_has_no_echo(llm, name, monkeypatch):
    monkeypatch.setattr(llm, "chat_prompt", lambda _messages: [5])
    with pytest.raises(InvalidArgumentError, match=f"{name} is not a field of {CHAT}"):
        read_body(llm, CHAT, {"messages": [], name: 1})


def test_a_prompt_is_cut_where_its_request_says_so(llm):
    long = "x = 1\n" * 600
    with pytest.raises(InvalidArgumentError, match="but the context holds 1024"):
        answer(llm, prompt=long)
    body = answer(llm, prompt=long, truncate_prompt=True, max_tokens=8, temperature=0)
    assert body["usage"]["prompt_tokens"] == 1024 - 8
    kept = llm.tokenizer.encode(long)[-(1024 - 8) :]
    expected = llm.generate(kept, SamplingParams(max_tokens=8, temperature=0))
    assert body["choices"][0]["text"] == expected.text
    with pytest.raises(InvalidArgumentError, match="truncate_prompt must be false: a chat's messages"):
        read_body(llm, CHAT, {"messages": [], "truncate_prompt": True})
    items = [read_body(llm, COMPLETIONS, {"prompt": long, "truncate_prompt": cut}) for cut in (False, True)]
    outcomes = dict(llm.generate_each(items))
    assert isinstance(outcomes[0], InvalidArgumentError)
    assert len(outcomes[1].prompt_token_ids) < 1024


@pytest.mark.parametrize("most", [0, 3])
def test_two_names_of_the_longest_answer_must_agree(llm, most):
    body = {"messages": [{"role": "user", "content": "a"}], "max_completion_tokens": 5, "max_tokens": most}
    with pytest.raises(InvalidArgumentError, match="max_tokens must not differ from max_completion_tokens"):
        read_body(llm, CHAT, body)
