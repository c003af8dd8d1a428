"""The state of an answer whose lexer is full: its tokens are taken again with a lexer of its own."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from penstock.text.grammar import matcher as module
from penstock.text.grammar.matcher import GrammarMatcher


class Library:
    """Takes all tokens; ``fails_at``: the number of tokens behind which its lexer is full."""

    def __init__(self, fails_at: int) -> None:
        self.taken: list[int] = []
        self.num_masks = self.num_calls = 0
        self._fails_at = fails_at

    def compute_bitmask(self) -> bytes:
        self.num_masks += 1
        return np.full(1, 2**32 - 1, np.uint32).tobytes()

    def try_consume_tokens(self, tokens: list[int]) -> int:
        self.taken += tokens
        self.num_calls += 1
        return len(tokens)

    def is_error(self) -> bool:
        return len(self.taken) >= self._fails_at

    def get_error(self) -> str:
        return "too many states"

    def is_stopped(self) -> bool:
        return False


@pytest.mark.parametrize(("limit_s", "num_masks"), [(60.0, 3), (0.0, 0)])
def test_tokens_are_taken_again_once(monkeypatch, limit_s: float, num_masks: int) -> None:
    monkeypatch.setattr(module, "_REPLAY_S", limit_s)
    renewed = Library(100)
    state = GrammarMatcher(Library(4), lambda: renewed, "response_format", np.ones(1, np.uint32))  # type: ignore[arg-type, return-value]
    begun = [1, 2]  # the list of an answer that goes on, to which the engine appends
    for tokens in (begun, [3], [4]):
        state.accept(tokens)
        if tokens is not begun:
            begun += tokens
    assert renewed.taken == [1, 2, 3, 4]
    assert renewed.num_masks == num_masks


def test_answers_of_one_grammar_share_the_time_of_replays(monkeypatch) -> None:
    """The first one uses it up; the second one takes its tokens in one call."""
    now = iter(range(1000))
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: next(now)))
    monkeypatch.setattr(module, "_REPLAY_S", 4.0)
    replay, renewed = module.ReplayTime(), [Library(100), Library(100)]
    for library in renewed:
        state = GrammarMatcher(Library(3), lambda made=library: made, "regex", np.ones(1, np.uint32), replay)  # type: ignore[arg-type, misc]
        for token in (1, 2, 3):
            state.accept([token])
    assert [library.taken for library in renewed] == [[1, 2, 3]] * 2
    assert [library.num_masks for library in renewed] == [3, 0]
    assert [library.num_calls for library in renewed] == [3, 1]
