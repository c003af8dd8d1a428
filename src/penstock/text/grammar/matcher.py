"""The state of one answer in its grammar: the tokens that may come next."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from penstock.errors import InternalError, InvalidArgumentError, PenstockError

if TYPE_CHECKING:
    from llguidance import LLMatcher
    from numpy.typing import NDArray

__all__ = ["GrammarMatcher", "fill_mask"]


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


class GrammarMatcher:
    """The state of one answer in its grammar.

    ``mask`` has a set bit for each token that may come next [ceil(vocab / 32)].  An error leaves no mask that allows
    more: the request must end.  ``renew`` compiles the grammar again.
    """

    def __init__(
        self, matcher: LLMatcher, renew: Callable[[], LLMatcher], field: str, mask: NDArray[np.uint32]
    ) -> None:
        self._matcher, self._renew, self._field = matcher, renew, field
        self._tokens: list[int] = []
        self.mask = mask

    def accept(self, tokens: Sequence[int]) -> bool:
        """Take the next tokens.  Returns True if the answer is complete, so that no token may follow.

        Raises InvalidArgumentError if the grammar exceeds its limits, and InternalError for a forbidden token.
        """
        if not tokens:
            return False
        self._tokens += tokens
        try:
            return self._advance(tokens)
        except PenstockError:  # perhaps by the limit that other answers have used up
            self._matcher = self._renew()
            return self._advance(self._tokens)

    def _advance(self, tokens: Sequence[int]) -> bool:
        is_complete = self._take(tokens)
        self.mask = np.zeros_like(self.mask) if is_complete else fill_mask(self._matcher, self._field, len(self.mask))
        return is_complete

    def _take(self, tokens: Sequence[int]) -> bool:
        num_taken = self._matcher.try_consume_tokens(list(tokens))
        if self._matcher.is_error():
            raise _failure(self._matcher, self._field)
        if num_taken < len(tokens):
            raise InternalError(f"{self._field}: token {tokens[num_taken]} is not allowed by the grammar")
        return bool(self._matcher.is_stopped())
