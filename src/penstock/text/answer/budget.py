"""The limit on the tokens of thoughts: counts them, and names the tokens of the text that ends them.

All of it depends only on the tokens of the request itself, so a request that another engine goes on with, or that is
computed again, has the same tokens.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Final

from penstock.text.answer.formats import CHANNEL, MESSAGE, START, ReasoningFormat
from penstock.text.answer.incoming import overlap
from penstock.validation import check_vocabulary

if TYPE_CHECKING:
    from penstock.text.tokenizer import Tokenizer

__all__ = ["ThoughtsBudget", "ThoughtsState"]

REASON: Final = (
    "Considering the limited time by the user, I have to give the solution based on the thinking directly now."
)
"""The sentence that Qwen's reports use, and that their models were trained with."""
MAX_BEYOND: Final = 32
"""A marker has at most so many tokens."""
_MAX_MARKER_BYTES: Final = 64
_TURN: Final = r"<(?:\||｜)(?:(?!｜)[^|<>])*(?:\||｜)>|</?s>|\[/?INST\]|<(?:start|end)_of_turn>"
"""The special tokens of chat templates that begin or end a message; no thoughts go on behind one.  It is a pattern of
bytes, so it has no set with a character of several bytes."""


@dataclass(frozen=True)
class ThoughtsBudget:
    """The limit on the thoughts of a request.

    ``closings``: the tokens that end thoughts that are too long, and those that end thoughts that the answer begins
    again.
    """

    limit: int
    form: ReasoningFormat
    tokenizer: Tokenizer
    closings: tuple[tuple[int, ...], tuple[int, ...]]

    @staticmethod
    def of(limit: int, form: ReasoningFormat, tokenizer: Tokenizer, vocab_size: int) -> ThoughtsBudget:
        """Return the limit with its closing texts as tokens.  Raises InvalidArgumentError for tokens that the model
        does not have.
        """
        before, behind = form.space
        sentence = f"\n\n{REASON}" if limit else ""
        behind += f"{START}assistant" if form.has_channels else ""
        first = f"{sentence}{before}{form.closing}{behind}"
        again = f"{form.closing}{behind}{CHANNEL}final{MESSAGE}" if form.has_channels else first
        closings = [tuple(tokenizer.encode(text, add_special_tokens=False)) for text in (first, again)]
        for ids in closings:
            check_vocabulary("thinking_token_budget", ids, vocab_size)
        return ThoughtsBudget(limit, form, tokenizer, (closings[0], closings[1]))

    def begin(self, prompt_ids: Sequence[int]) -> ThoughtsState:
        """Return the state at the beginning of an answer."""
        num_begun = self._num_begun(prompt_ids)
        begun = None if num_begun is None else prompt_ids[len(prompt_ids) - num_begun :]
        return ThoughtsState(self, begun=begun)

    def token_bytes(self, token: int) -> bytes:
        """Return the text of a token."""
        return self.tokenizer.token_bytes(token, skip_special_tokens=False)

    def _num_begun(self, prompt_ids: Sequence[int]) -> int | None:
        """Return how many tokens of thoughts a prompt ends with; None if it does not end within thoughts."""
        form, text = self.form, b""
        head, others = form.head.encode(), START if form.has_channels else ""
        marks = "|".join([*map(re.escape, form.ends), re.escape(others) if others else _TURN])
        ends, lens = re.compile(marks.encode()), list[int]()
        for token in reversed(prompt_ids):
            piece = self.token_bytes(token)
            lens.append(len(piece))
            text = piece + text[:_MAX_MARKER_BYTES]
            begin = text.rfind(head)
            end = max((match.start() for match in ends.finditer(text)), default=-1)
            if begin >= max(0, end):
                num_bytes = sum(lens) - begin - len(head)
                rest = text[begin + len(head) :]
                num_bytes -= len(rest) - len(rest.lstrip())
                return sum(total <= num_bytes for total in accumulate(lens)) if num_bytes else 0
            if end >= 0:
                return None
        return None


class ThoughtsState:
    """The thoughts of one answer.  ``forced_token``: the token that must come next, if there is one."""

    def __init__(self, budget: ThoughtsBudget, *, begun: Sequence[int] | None) -> None:
        """Begin within thoughts that have the tokens ``begun``, or outside of thoughts if it is None."""
        self._budget = budget
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._text = ""  # in which the next marker may begin
        self._is_thinking, self._is_over = begun is not None, False
        self._num_closed = self._at = 0
        self._closing: tuple[int, ...] = ()
        self._num_tokens = min(len(begun or ()), budget.limit)
        for token in begun or ():
            self._text += self._decoder.decode(budget.token_bytes(token))
            self._find_end()
        self._close_if_full()

    @property
    def forced_token(self) -> int | None:
        return self._closing[self._at] if self._at < len(self._closing) else None

    def accept(self, token: int) -> None:
        """Take the next token of the answer."""
        if self._is_over:
            return
        forced = self.forced_token
        if forced is not None:
            self._at += 1
            if token != forced:  # a grammar allows no text that ends the thoughts
                self._is_over = True
            if self._is_over or self._at == len(self._closing):
                self._end()
            return
        self._text += self._decoder.decode(self._budget.token_bytes(token))
        if self._is_thinking:
            self._num_tokens += 1
        elif not self._find_head():
            return
        self._find_end()
        self._close_if_full()

    def _find_head(self) -> bool:
        """Look for the beginning of the thoughts: of the answer, or of a channel."""
        form = self._budget.form
        if form.has_channels:
            _, head, rest = self._text.rpartition(form.head)
            self._is_thinking = bool(head)
            self._text = rest if head else self._text[1 - len(form.head) :]
            return self._is_thinking
        self._text = self._text.lstrip()
        self._is_thinking = self._text.startswith(form.head)
        if self._is_thinking:
            self._text = self._text[len(form.head) :]
        elif not form.head.startswith(self._text):
            self._is_over = True
        return self._is_thinking

    def _find_end(self) -> None:
        ends = self._budget.form.ends
        if any(end in self._text for end in ends):
            self._end()
        else:
            self._text = self._text[1 - max(map(len, ends)) :]

    def _end(self) -> None:
        self._closing, self._at, self._text, self._is_thinking = (), 0, "", False
        self._is_over = self._is_over or not self._budget.form.has_channels

    def _close_if_full(self) -> None:
        """Force the closing text if the thoughts have enough tokens, but not within a character or a marker."""
        num_beyond = self._num_tokens - self._budget.limit
        if not self._is_thinking or num_beyond < 0:
            return
        is_within = bool(self._decoder.getstate()[0] or overlap(self._text, 0, self._budget.form.ends))
        if not is_within or num_beyond > MAX_BEYOND:
            self._closing, self._at = self._budget.closings[min(self._num_closed, 1)], 0
            self._num_closed += 1
