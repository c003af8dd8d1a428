"""A conversation continues from its own token ids, also after sampled answers."""

from __future__ import annotations

import shutil

import pytest

from penstock import LLM, InvalidArgumentError, RequestOptions, SamplingParams, UnsupportedError
from penstock.text.chat_template import TurnTokens, render_chat
from penstock.text.tokenizer import Tokenizer
from tests.support.command import FOLDER
from tests.support.errors import raises
from tests.support.fake_model import FILES, byte_fallback_json, byte_level_json

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>\n{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<assistant>\n"
    "{% endif %}"
)
PLAIN = "{% for m in messages %}{{ m.content }}{% endfor %}"


def said(*contents: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chat") / "model"
    shutil.copytree(FOLDER, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    with LLM(folder, scheme="w8a8", use_cache=False) as made:
        yield made


def one_by_one(llm, seed: int) -> dict[str, object]:
    """For every other seed: an answer of single spaces, which the tokenizer encodes many at a time."""
    space = llm.tokenizer.token_id("\u0120")
    assert llm.tokenizer.encode(" " * 60, add_special_tokens=False) != [space] * 60
    return {"allowed_token_ids": [space]} if seed % 2 else {}


@pytest.mark.long
def test_a_turn_after_a_sampled_answer_computes_only_new_tokens(llm):
    for seed in range(8):
        conversation, contents, computed = TurnTokens(llm.tokenizer), [], 0
        for turn in range(3):
            contents.append(f"add two numbers and return their sum, please: {turn} of {seed}")
            prompt = conversation.prompt(said(*contents))
            text = render_chat(TEMPLATE, said(*contents), {})
            assert llm.tokenizer.decode(prompt, skip_special_tokens=False) == text
            if turn and seed % 2:
                assert prompt != llm.chat_prompt(said(*contents))
            fields = one_by_one(llm, seed)
            result = llm.generate(prompt, SamplingParams(max_tokens=90, temperature=1.3, seed=seed, **fields))
            if turn:  # other conversations share the first prompt's words
                assert result.num_cached_tokens == computed // 32 * 32
            conversation.answered(result.token_ids)
            contents.append(result.text)
            computed = len(result.prompt_token_ids) + len(result.token_ids) - 1  # the last one is never computed


def test_only_what_the_text_still_says_is_kept():
    tokenizer = Tokenizer({"tokenizer.json": byte_level_json(), "chat_template.jinja": PLAIN.encode()})

    def spelt(text: str) -> list[int]:  # a token for each byte, although the tokenizer has one for "plain"
        return [tokenizer.token_id(char) for char in text]

    ask = tokenizer.encode("ask")
    for answer, content, kept in (
        (spelt("plain"), "plain", spelt("plain")),
        ([*spelt("plain"), 1], "plain", spelt("plain")),  # an end token
        ([*spelt("plain"), *tokenizer.encode("日")[:2]], "plain\ufffd", spelt("plain")),  # half a character
        (spelt("plainx"), "plain", spelt("plain")),  # a stop string was cut off
        (spelt("xplain"), "plain", []),
        (spelt("plain"), "other", []),
    ):
        conversation = TurnTokens(tokenizer)
        assert conversation.prompt(said("ask")) == ask
        conversation.answered(answer)
        whole = "ask" + content + "-plain"
        rest = whole[3 + len(kept) :]
        for _ in range(2):  # as after a turn that failed
            assert conversation.prompt(said("ask", content, "-plain")) == [*ask, *kept, *tokenizer.encode(rest)]
        assert conversation.prompt(said("ask")) == ask  # once more
        assert conversation.prompt(said("plain")) == tokenizer.encode("plain")


def test_tokenizers_with_special_beginnings_encode_the_whole():
    tokenizer = Tokenizer({"tokenizer.json": byte_fallback_json(), "chat_template.jinja": PLAIN.encode()})
    conversation = TurnTokens(tokenizer)
    conversation.prompt(said("the cat"))
    conversation.answered([tokenizer.token_id("\u2581the")])
    whole = tokenizer.encode("the catthe cat", add_special_tokens=False)
    assert conversation.prompt(said("the cat", "the", " cat")) == whole


def test_a_model_without_a_template_has_no_conversation():
    with raises(UnsupportedError, param="messages"):
        TurnTokens(Tokenizer({"tokenizer.json": byte_level_json()}))


ASK = "add two numbers and return their sum, please: "


def sampled(seed: int, **fields: object) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 60, "temperature": 1.3, "seed": seed} | fields)


def test_a_second_turn_is_bit_equal_to_the_whole_conversation(llm):
    for seed in range(4):
        conversation, computed = llm.conversation([{"role": "system", "content": "be brief"}]), 0
        for turn in range(3):
            params = sampled(seed, logprobs=2, **one_by_one(llm, seed))
            result = conversation.ask(f"{ASK}{turn} of {seed}", params)
            if turn:
                assert result.num_cached_tokens == computed // 32 * 32
            computed = len(result.prompt_token_ids) + len(result.token_ids) - 1
            if turn and seed % 2:
                assert result.prompt_token_ids != llm.chat_prompt(conversation.messages[:-1])
            llm.engine.forget_prefixes()
            whole = llm.generate(result.prompt_token_ids, params)
            assert whole.num_cached_tokens == 0
            assert (whole.token_ids, whole.logprobs) == (result.token_ids, result.logprobs)
    assert [message["role"] for message in conversation.messages] == ["system", *["user", "assistant"] * 3]


def test_a_turn_is_kept_when_it_has_ended(llm):
    conversation = llm.conversation()
    turn = conversation.stream(ASK, sampled(1, ignore_eos=True))
    first = next(turn)
    assert conversation.messages == []
    with raises(InvalidArgumentError, code="not_ended"):
        conversation.ask("more")
    turn.abort()
    assert turn.result().finish_reason == "abort"
    assert conversation.messages == said(ASK, turn.result().text)
    assert turn.result().text.startswith(first.text)
    again = conversation.retry(sampled(1, ignore_eos=True)).result()
    assert again.token_ids[:1] == turn.result().token_ids[:1]
    assert len(again.token_ids) == 60
    assert conversation.messages == said(ASK, again.text)
    dropped = conversation.stream("never read", sampled(2))
    next(dropped)
    del dropped
    assert not llm.engine.has_work
    assert conversation.ask("more", sampled(2)).text == conversation.messages[-1]["content"]
    assert len(conversation.messages) == 4


def test_sampling_of_a_turn_may_be_keywords(llm):
    params = SamplingParams(max_tokens=3, temperature=0)
    conversation, other = llm.conversation(), llm.conversation()
    expected = other.ask("add two numbers", params)
    assert conversation.ask("add two numbers", max_tokens=3, temperature=0).token_ids == expected.token_ids
    assert conversation.retry(max_new_tokens=3, do_sample=False).result().token_ids == expected.token_ids
    turn = conversation.stream("and now", max_tokens=2, temperature=0)
    assert turn.result().token_ids == other.ask("and now", SamplingParams(max_tokens=2, temperature=0)).token_ids
    for call in (conversation.ask, conversation.stream):
        with raises(InvalidArgumentError, param="max_token"):
            call("more", max_token=4)
        with raises(InvalidArgumentError, param="max_tokens"):
            call("more", params, max_tokens=4)
    with raises(InvalidArgumentError, param="frob"):
        conversation.retry(frob=1)
    assert len(conversation.messages) == 4


def test_a_turn_that_fails_leaves_the_conversation_as_it_was(llm):
    conversation = llm.conversation()
    conversation.ask(ASK, sampled(1))
    before = conversation.messages
    for content, more, param in (
        (1, {}, "content"),
        ("x", {"params": SamplingParams(n=2)}, "n"),
        ("x", {"params": SamplingParams(echo=True)}, "echo"),
        ("x", {"options": RequestOptions(truncate_prompt=True)}, "truncate_prompt"),
        ("x" * 5000, {}, "prompt"),
    ):
        with raises(InvalidArgumentError, param=param):
            conversation.ask(content, **more)
        assert conversation.messages == before
    with raises(InvalidArgumentError, code="no_answer"):
        llm.conversation().retry()
    with raises(InvalidArgumentError, param="drop_oldest"):
        llm.conversation(drop_oldest=1)
    with raises(InvalidArgumentError, param="messages", match=r"messages\[0\]"):
        llm.conversation([{"content": "x"}])


def test_the_oldest_turns_are_forgotten_when_that_is_asked_for(make_llm):
    system = {"role": "system", "content": "be brief"}
    small = make_llm(files=FILES | {"chat_template.jinja": TEMPLATE.encode()}, context_len=512)
    conversation = small.conversation([system], drop_oldest=True)
    num_dropped = num_times = 0
    for turn in range(20):
        result = conversation.ask(f"say {turn}", sampled(turn, ignore_eos=True, max_tokens=20))
        assert len(result.token_ids) == 20  # it had room
        messages = conversation.messages
        assert messages[0] == system
        assert messages[-2] == {"role": "user", "content": f"say {turn}"}
        assert [m["role"] for m in messages[1:]] == ["user", "assistant"] * (len(messages) // 2)
        if conversation.num_dropped > num_dropped:
            num_times += 1
            assert len(result.prompt_token_ids) <= 256
        num_dropped = conversation.num_dropped
    assert len(messages) + num_dropped == 1 + 2 * 20
    assert 2 <= num_times <= 5  # several turns at once, so that pages are shared in between
    with raises(InvalidArgumentError, param="prompt", match="holds 512"):
        conversation.ask(ASK * 20, sampled(0))
    assert conversation.messages == messages
    refusing = small.conversation(messages)
    assert refusing.ask("x", sampled(1)).text
    with raises(InvalidArgumentError, param="prompt", match="holds 512"):
        refusing.ask("x" * 300, sampled(1))
