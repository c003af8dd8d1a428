"""The limit on thoughts: which tokens are forced, and where."""

from __future__ import annotations

import json

import pytest
import tokenizers

from penstock.errors import UnsupportedError
from penstock.text.answer.budget import REASON, ThoughtsBudget
from penstock.text.answer.formats import REASONING_FORMATS
from penstock.text.tokenizer import Tokenizer
from tests.support.fake_model import FILES
from tests.support.scripted_model import scripted_llm


def tokenizer_of(*specials: str) -> Tokenizer:
    library = tokenizers.Tokenizer.from_str(FILES["tokenizer.json"].decode())
    library.add_special_tokens(list(specials))
    return Tokenizer({"tokenizer.json": library.to_str().encode()})


def written(tokenizer: Tokenizer, name: str, limit: int, prompt: str, *parts: str) -> str:
    """Return an answer whose model writes the parts, each from where the text before it was closed."""
    state = ThoughtsBudget.of(limit, REASONING_FORMATS[name], tokenizer, 1000).begin(tokenizer.encode(prompt))
    ids: list[int] = []
    for part in parts:
        for token in tokenizer.encode(part, add_special_tokens=False):
            was_forced = state.forced_token is not None
            while (forced := state.forced_token) is not None:
                ids.append(forced)
                state.accept(forced)
            if was_forced:
                break
            ids.append(token)
            state.accept(token)
    return tokenizer.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("specials", [(), ("<think>", "</think>")])
def test_thoughts_end_after_their_tokens(specials):
    tokenizer = tokenizer_of(*specials)
    end = f"\n\n{REASON}\n</think>\n\n"
    for limit, prompt, parts, expected in (
        (4, "<think>\n", ("abcdefgh", "yes"), f"abcd{end}yes"),
        (4, "hi", ("<think>abcdefgh", "yes"), f"<think>abcd{end}yes"),
        (4, "hi", (" \n<think>abc</think>yes and more",), " \n<think>abc</think>yes and more"),
        (4, "hi", ("no thoughts <think> at all",), "no thoughts <think> at all"),
        (0, "<think>\n", ("abc", "yes"), "\n</think>\n\n"),
        (0, "<think>\n\n</think>\n\n", ("abcdefgh",), "abcdefgh"),
        (3, "<think>", ("ab日本", "yes"), f"ab日{end}yes"),
    ):
        found = written(tokenizer, "think", limit, prompt, *parts)
        assert found == expected or (limit == 0 and found.startswith(expected)), (limit, prompt)


@pytest.mark.parametrize("specials", [(), ("<think>", "</think>", "<|im_start|>", "<|im_end|>")])
def test_a_prompt_may_end_within_thoughts(specials):
    """Its thoughts count, as in vLLM."""
    tokenizer = tokenizer_of(*specials)
    end = f"\n\n{REASON}\n</think>\n\n"
    for limit, prompt, parts, expected in (
        (6, "<think>\nabcd", ("efgh", "yes"), f"ef{end}yes"),
        (6, "x" * 300 + "<think>\n" + "é" * 2, ("efgh", "yes"), f"ef{end}yes"),
        (2, "<think>abcd", ("e", "yes"), f"{end}yes"),
        (9, "<think>a\n</thi", ("nk>yes and more",), "nk>yes and more"),
        (2, "<think>a\n</thi", ("nk>yes and more",), "nk>yes and more"),
        (2, "<think>a</think>b", ("<think>cdefg",), f"<think>cd{end}"),
        (2, "<think> what is that<|im_end|>\n<|im_start|>assistant\n", ("abcdefgh",), "abcdefgh"),
        (2, "<think>a</think>b<think>c", ("defgh", "yes"), f"d{end}yes"),
    ):
        found = written(tokenizer, "think", limit, prompt, *parts)
        assert found == expected or (not parts[1:] and expected.startswith(found)), (limit, prompt)
    turns = tokenizer_of(*specials, "<｜User｜>", "<｜Assistant｜>")
    found = written(turns, "think", 2, "<think> what is that<｜User｜>hi<｜Assistant｜>", "abcdefgh")
    assert found == "abcdefgh"
    channels = tokenizer_of("<|channel|>", "<|message|>", "<|end|>", "<|start|>")
    head = "<|channel|>analysis<|message|>"
    for prompt, closes in (
        (f"<|start|>user<|message|>x<|end|><|start|>assistant{head}ab", True),
        (f"{head}ab<|end|>", False),
    ):
        assert written(channels, "harmony", 3, prompt, "cdef", "x").startswith(f"c\n\n{REASON}" if closes else "cdefx")


def test_another_channel_of_thoughts_ends_in_the_final_one():
    tokenizer = tokenizer_of("<|channel|>", "<|message|>", "<|end|>", "<|start|>")
    head = "<|channel|>analysis<|message|>"
    found = written(tokenizer, "harmony", 3, "<|start|>assistant", f"{head}abcdef", f"{head}x", "fine")
    first = f"{head}abc\n\n{REASON}<|end|><|start|>assistant"
    assert found == f"{first}{head}<|end|><|start|>assistant<|channel|>final<|message|>fine"


def test_the_tokens_of_an_answer_do_not_depend_on_how_it_runs():
    """Alone, among others, resumed by another engine, and as one of two answers."""
    llm = scripted_llm({0: "a" * 60}, "</think>", opening="<think>\n")
    prompts = ["<answer><think>\n", "the cat <answer><think>\n"]
    try:
        options = {"max_tokens": 30, "thinking_token_budget": 7, "temperature": 0}
        alone = [llm.generate(prompt, **options) for prompt in prompts]
        assert alone[0].text.startswith(f"aaaaaaa\n\n{REASON}\n</think>\n\naaa")
        for result, other in zip(llm.generate(prompts, **options), alone, strict=True):
            assert result.token_ids == other.token_ids
        two = llm.generate(prompts[0], **options, n=2)
        assert [choice.token_ids for choice in two.choices] == [alone[0].token_ids] * 2
        with pytest.raises(UnsupportedError) as caught:
            scripted_llm({0: "a"}, "").generate("a", thinking_token_budget=1)
        assert caught.value.param == "thinking_token_budget"
    finally:
        llm.close()


def test_a_state_is_that_of_its_tokens():
    tokenizer = tokenizer_of()
    budget = ThoughtsBudget.of(5, REASONING_FORMATS["think"], tokenizer, 1000)
    first, prompt = budget.begin(tokenizer.encode("<think>")), tokenizer.encode("<think>")
    ids = []
    for token in tokenizer.encode("abcdefghij" * 20):
        ids.append(token if first.forced_token is None else first.forced_token)
        first.accept(ids[-1])
        second = budget.begin(prompt)
        for one in ids:
            second.accept(one)
        assert second.forced_token == first.forced_token
    assert json.dumps(REASON)[1:-1] in tokenizer.decode(ids)
