"""Windows: the tokens and the scored ones are those of transformers' guide and of llama.cpp; none is scored twice."""

from __future__ import annotations

import pytest

from penstock.bench.quality.texts import TextSource
from penstock.bench.quality.windows import Window, WindowRule, cut_ids, cut_text
from penstock.errors import InvalidArgumentError
from tests.support.errors import raises

IDS = list(range(100, 137))


class Letters:
    """A tokenizer with a token for each letter, and one before a text."""

    special_tokens = {"bos_token": "<s>"}  # noqa: RUF012
    chat_template = None

    def __init__(self, adds: bool = True) -> None:
        self._adds = adds

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [1] * (self._adds and add_special_tokens) + [ord(letter) for letter in text]

    def token_id(self, token: str) -> int:
        return 1


def scored(windows: list[Window]) -> list[tuple[list[int], int]]:
    """Each scored token with the tokens before it."""
    return [(window.ids[:at], window.ids[at]) for window in windows for at in range(window.first, len(window.ids))]


@pytest.mark.parametrize("stride", [3, 5, 8])
def test_windows_of_transformers_are_those_of_its_guide(stride: int) -> None:
    length, expected, end = 8, [], 0
    for begin in range(0, len(IDS), stride):  # huggingface.co/docs/transformers/perplexity
        stop = min(begin + length, len(IDS))
        ids, target_len = IDS[begin:stop], stop - end
        labels = [None] * (len(ids) - target_len) + ids[len(ids) - target_len :]
        expected += [(ids[:at], ids[at]) for at in range(1, len(ids)) if labels[at] is not None]
        end = stop
        if end == len(IDS):
            break
    assert scored(cut_ids(IDS, WindowRule("transformers", length, stride), None)) == expected


def test_windows_of_llama_cpp_score_their_second_halves() -> None:
    expected = []
    for number in range(len(IDS) // 8):  # llama.cpp: logits from n_ctx / 2 to n_ctx - 2, the first token is the BOS
        ids = [1, *IDS[8 * number + 1 : 8 * number + 8]]
        expected += [(ids[: at + 1], ids[at + 1]) for at in range(4, 7)]
    assert scored(cut_ids(IDS, WindowRule("llama.cpp", 8), 1)) == expected


@pytest.mark.parametrize(("stride", "bos"), [(8, None), (3, None), (8, 1), (5, 1)])
def test_each_token_but_the_first_is_scored_once(stride: int, bos: int | None) -> None:
    windows = cut_ids(IDS, WindowRule("penstock", 8, stride), bos)
    assert [token for _, token in scored(windows)] == (IDS[1:] if bos is None else IDS)
    assert all(len(window.ids) <= 9 and (bos is None or window.ids[0] == bos) for window in windows)
    if stride == 8 and bos is None:
        assert windows[1] == Window(IDS[8:17], 1)


@pytest.mark.parametrize(
    ("convention", "adds", "bos", "resolved", "begin"),
    [
        ("penstock", True, "auto", "first", [1, 97]),
        ("penstock", False, "auto", "first", [97, 98]),
        ("penstock", False, "each", "each", [1, 97]),
        ("penstock", True, "none", "none", [97, 98]),
        ("llama.cpp", True, "auto", "each", [1, 97]),
        ("llama.cpp", False, "auto", "none", [97, 98]),
    ],
)
def test_the_begin_token_is_where_the_rule_says(convention, adds, bos, resolved, begin) -> None:
    source = TextSource("t", "", ("abcdefgh", "ijklmnop"))
    cut = cut_text(source, Letters(adds), WindowRule(convention, 4, bos=bos))  # type: ignore[arg-type]
    assert (cut.bos, cut.windows[0].ids[:2]) == (resolved, begin)


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"convention": "gptq"}, "convention", "invalid_value"),
        ({"length": 1}, "window", "invalid_value"),
        ({"length": 8, "stride": 9}, "stride", "invalid_value"),
        ({"convention": "llama.cpp", "stride": 4}, "stride", "invalid_value"),
        ({"convention": "transformers", "bos": "each"}, "bos", "invalid_value"),
        ({"max_windows": -1}, "max_windows", "invalid_value"),
    ],
)
def test_a_wrong_rule_is_refused_by_name(fields, param, code) -> None:
    with raises(InvalidArgumentError, param=param, code=code):
        WindowRule(**fields)


def test_short_texts_and_small_contexts_are_refused() -> None:
    with raises(InvalidArgumentError, param="window", code="context_length_exceeded"):
        WindowRule(length=513).resolve(512)
    with raises(InvalidArgumentError, param="window", code="context_length_exceeded"):
        WindowRule().resolve(3)
    with raises(InvalidArgumentError, param="text", code="text_too_short"):
        cut_text(TextSource("t", "", ("a",)), Letters(False), WindowRule(length=4))  # type: ignore[arg-type]
    with raises(InvalidArgumentError, param="text", code="text_too_short"):
        cut_text(TextSource("t", "", ("abc",)), Letters(), WindowRule("llama.cpp", 8))  # type: ignore[arg-type]
