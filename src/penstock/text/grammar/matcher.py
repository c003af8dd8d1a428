"""The state of one answer in its grammar: the tokens that may come next."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from penstock.errors import InternalError, InvalidArgumentError, PenstockError

if TYPE_CHECKING:
    from llguidance import LLMatcher
    from numpy.typing import NDArray

__all__ = ["MAX_AHEAD", "GrammarMatcher", "MaskThread", "ReplayTime", "fill_mask"]

_FULL_LEXER: Final = "too many states"
_REPLAY_S: Final = 0.25
"""Limit on the time for masks behind the tokens of replays, for which the steps of all requests wait."""
MAX_AHEAD: Final = 32
"""Limit on the forced tokens that are taken during one step."""
_AHEAD_S: Final = 0.02
"""Limit on the processor time to look ahead during one step, for which all requests may have to wait."""


def fill_mask(matcher: LLMatcher, field: str, num_words: int) -> NDArray[np.uint32]:
    """Return the mask of the next token: a set bit for each that is allowed [num_words].

    Raises InvalidArgumentError naming ``field`` if the grammar exceeds its limits, or if no token of the model
    continues it.  The library would then allow the end of the answer.
    """
    mask = np.frombuffer(matcher.compute_bitmask(), np.uint32)[:num_words]  # one word more without end tokens
    if matcher.is_error():
        raise _failure(matcher, field)
    return mask


def _failure(matcher: LLMatcher, field: str) -> InvalidArgumentError:
    reason = matcher.get_error().partition("\n")[0]
    if "NoExtension" in reason:
        return InvalidArgumentError(
            f"{field}: no token of the model continues the answer", param=field, code="grammar_dead_end"
        )
    return InvalidArgumentError(
        f"{field}: the grammar is too complex to go on: {reason:.200}", param=field, code="grammar_too_complex"
    )


def only_token(mask: NDArray[np.uint32]) -> int | None:
    """Return the token that a mask allows if it is the only one."""
    words = np.flatnonzero(mask)
    if len(words) != 1:
        return None
    word = int(mask[words[0]])
    return None if word & (word - 1) else int(words[0]) * 32 + word.bit_length() - 1


@dataclass(frozen=True, slots=True)
class _Ahead:
    """A forced token that the matcher has taken, and the state behind it: its mask, or the error of the grammar."""

    token: int
    is_complete: bool = False
    mask: NDArray[np.uint32] | None = None
    error: PenstockError | None = None


class ReplayTime:
    """The seconds that are left for masks in replays of the answers of one grammar.

    Their lexer is full for all of them at once, so they share the limit.
    """

    def __init__(self) -> None:
        self.left_s = _REPLAY_S


class GrammarMatcher:
    """The state of one answer in its grammar.

    An error leaves no mask that allows more: the request must end.  ``renew`` returns the grammar with a lexer of its
    own, or None if this answer had one; it is called at most once.  ``replay``: what the answers of the grammar share.
    One thread at a time may use it.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        renew: Callable[[], LLMatcher | None],
        field: str,
        mask: NDArray[np.uint32],
        replay: ReplayTime | None = None,
    ) -> None:
        self._matcher, self._field = matcher, field
        self._replay = replay or ReplayTime()
        self._renew: Callable[[], LLMatcher | None] | None = renew
        self._taken: list[Sequence[int]] = []
        self._mask: NDArray[np.uint32] | None = mask
        self._num_words = len(mask)
        self._error: PenstockError | None = None
        self._ahead: deque[_Ahead] = deque()

    @property
    def has_mask(self) -> bool:
        """True if the mask of the next token is made."""
        return self._mask is not None

    @property
    def mask(self) -> NDArray[np.uint32]:
        """A set bit for each token that may come next [ceil(vocab / 32)].

        The first call after a token takes about 50 us, in which other threads run, at the limits 14 ms.  Raises
        InvalidArgumentError if the grammar exceeds them.
        """
        if self._error is not None:
            raise self._error
        if self._mask is None:
            try:
                self._mask = self._fill()
            except PenstockError as error:
                self._error = error
                raise
        return self._mask

    @property
    def forced_token(self) -> int | None:
        """The next token if ``look_ahead`` has taken it; None before one behind which the grammar fails.

        That one is drawn in a step of its own, so that the tokens before it are delivered before the error.
        """
        return self._ahead[0].token if self._ahead and self._ahead[0].error is None else None

    def look_ahead(self, max_tokens: int, end_s: float = math.inf) -> None:
        """Take up to ``max_tokens`` next tokens, as long as each is the only one that is allowed.

        They still have to be accepted, and an error of the grammar comes then.  ``end_s``: the processor time of this
        thread after which it takes no more.  Raises as ``mask``.
        """
        mask = self.mask
        while len(self._ahead) < min(max_tokens, MAX_AHEAD) and time.thread_time() < end_s:
            token = only_token(mask)
            if token is None:
                return
            self._taken.append((token,))
            try:
                is_complete = self._take_or_renew((token,))
                mask = np.zeros(self._num_words, np.uint32) if is_complete else self._fill()
            except PenstockError as error:
                self._ahead.append(_Ahead(token, error=error))
                return
            self._ahead.append(_Ahead(token, is_complete, mask))

    def _fill(self) -> NDArray[np.uint32]:
        try:
            return fill_mask(self._matcher, self._field, self._num_words)
        except InvalidArgumentError as error:
            self._begin_again(error)
            return fill_mask(self._matcher, self._field, self._num_words)

    def accept(self, tokens: Sequence[int]) -> bool:
        """Take the next tokens.  Returns True if the answer is complete, so that no token may follow.

        Raises InvalidArgumentError if the grammar exceeds its limits, and InternalError for a forbidden token.
        """
        if not tokens:
            return False
        if self._ahead:
            return self._accept_ahead(tokens)
        self._taken.append(tuple(tokens))  # the caller may append to its list
        self._mask = None
        is_complete = self._take_or_renew(tokens)
        if is_complete:
            self._mask = np.zeros(self._num_words, np.uint32)
        return is_complete

    def _accept_ahead(self, tokens: Sequence[int]) -> bool:
        """Accept a token that ``look_ahead`` has taken."""
        ahead = self._ahead.popleft()
        if [*tokens] != [ahead.token]:
            raise InternalError(f"{self._field}: tokens {[*tokens]} are not allowed by the grammar")
        self._mask, self._error = ahead.mask, ahead.error
        if ahead.error is not None:
            raise ahead.error
        return ahead.is_complete

    def _take_or_renew(self, tokens: Sequence[int]) -> bool:
        """Take the last tokens of ``_taken``."""
        try:
            return self._take(tokens)
        except InvalidArgumentError as error:
            return self._begin_again(error)

    def _begin_again(self, error: InvalidArgumentError) -> bool:
        """Take the tokens with a lexer of this answer's own, if others may have filled the shared one.

        Masks are made behind them as before, so that it is filled as far as if there had been no other answer.  Behind
        the tokens of a long answer, or of many answers, they would take too long: the rest is taken at once and without
        masks, 10 us a token, which fills the lexer less.
        """
        renew, self._renew = self._renew, None
        renewed = renew() if renew is not None and _FULL_LEXER in str(error) else None
        if renewed is None:
            raise error
        self._matcher, is_complete = renewed, False
        start, num_masked = time.monotonic(), 0
        try:
            for tokens in self._taken:
                if time.monotonic() - start >= self._replay.left_s:
                    break
                fill_mask(self._matcher, self._field, self._num_words)
                is_complete = self._take(tokens)
                num_masked += 1
        finally:
            self._replay.left_s -= time.monotonic() - start
        rest = [token for tokens in self._taken[num_masked:] for token in tokens]
        return self._take(rest) if rest else is_complete

    def _take(self, tokens: Sequence[int]) -> bool:
        if not tokens:
            return False
        num_taken = self._matcher.try_consume_tokens(list(tokens))
        if num_taken < len(tokens) and not self._matcher.is_error():
            self._matcher.compute_bitmask()  # without it, a full lexer looks like a forbidden token
        if self._matcher.is_error():
            raise _failure(self._matcher, self._field)
        if num_taken < len(tokens):
            raise InternalError(f"{self._field}: token {tokens[num_taken]} is not allowed by the grammar")
        return bool(self._matcher.is_stopped())


class MaskThread:
    """Makes masks while a step runs.  Its thread starts with the first of them."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "penstock-masks")

    @contextmanager
    def making(self, matchers: Sequence[tuple[GrammarMatcher, int]]) -> Iterator[None]:
        """Make the masks during the block, and look ahead of each by up to so many tokens.

        An error of a grammar comes with the next use of its mask.
        """
        made = self._pool.submit(_make_masks, matchers)
        try:
            yield
        finally:
            made.result()

    def close(self) -> None:
        """End the thread."""
        self._pool.shutdown(wait=False)


def _make_masks(matchers: Sequence[tuple[GrammarMatcher, int]]) -> None:
    end_s = time.thread_time() + _AHEAD_S
    for matcher, max_ahead in matchers:
        with suppress(PenstockError):
            matcher.look_ahead(max_ahead, end_s)
