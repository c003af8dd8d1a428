"""A conversation goes on from its own token ids, however its answers were sampled."""

from __future__ import annotations

import shutil

import pytest

from penstock import LLM, SamplingParams, UnsupportedError
from penstock.engine.chat import Conversation, render_chat
from penstock.engine.text import Tokenizer
from tests.cli.conftest import FOLDER
from tests.engine.conftest import byte_fallback_json, byte_level_json

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


def test_a_turn_computes_only_its_new_tokens_however_the_answer_was_sampled(llm):
    num_respelt = 0
    for seed in range(8):
        conversation, contents, computed = Conversation(llm.tokenizer), [], 0
        for turn in range(3):
            contents.append(f"add two numbers and return their sum, please: {turn} of {seed}")
            prompt = conversation.prompt(said(*contents))
            text = render_chat(TEMPLATE, said(*contents), {})
            assert llm.tokenizer.decode(prompt, skip_special_tokens=False) == text
            num_respelt += prompt != llm.chat_prompt(said(*contents))
            result = llm.generate(prompt, SamplingParams(max_tokens=90, temperature=(0.8, 1.3)[seed % 2], seed=seed))
            if turn:  # the words of the first prompt are other conversations', too
                assert result.num_cached_tokens == computed // 32 * 32
            conversation.answered(result.token_ids)
            contents.append(result.text)
            computed = len(result.prompt_token_ids) + len(result.token_ids) - 1  # the last one is computed by nobody
    assert num_respelt > 2


def test_only_what_the_text_still_says_is_kept():
    tokenizer = Tokenizer({"tokenizer.json": byte_level_json(), "chat_template.jinja": PLAIN.encode()})

    def spelt(text: str) -> list[int]:  # a token for each byte, where the tokenizer has one for "plain"
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
        conversation = Conversation(tokenizer)
        assert conversation.prompt(said("ask")) == ask
        conversation.answered(answer)
        whole = "ask" + content + "-plain"
        rest = whole[3 + len(kept) :]
        for _ in range(2):  # as after a turn that failed
            assert conversation.prompt(said("ask", content, "-plain")) == [*ask, *kept, *tokenizer.encode(rest)]
        assert conversation.prompt(said("ask")) == ask  # once more
        assert conversation.prompt(said("plain")) == tokenizer.encode("plain")


def test_a_tokenizer_that_writes_beginnings_apart_encodes_the_whole():
    tokenizer = Tokenizer({"tokenizer.json": byte_fallback_json(), "chat_template.jinja": PLAIN.encode()})
    conversation = Conversation(tokenizer)
    conversation.prompt(said("the cat"))
    conversation.answered([tokenizer.token_id("\u2581the")])
    whole = tokenizer.encode("the catthe cat", add_special_tokens=False)
    assert conversation.prompt(said("the cat", "the", " cat")) == whole


def test_a_model_without_a_template_has_no_conversation():
    with pytest.raises(UnsupportedError, match="chat template"):
        Conversation(Tokenizer({"tokenizer.json": byte_level_json()}))
