"""The text of an answer as it grows, and the stop strings and stop tokens that end it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.text.tokenizer import Tokenizer

__all__ = ["StopMatcher", "StopRules", "TextStream"]


class StopMatcher:
    """Finds the first stop string that is completed, and holds back text that may still become one."""

    def __init__(self, stops: Sequence[str], keep_stop: bool = False) -> None:
        self._stops = tuple(stops)
        self._keep_stop = keep_stop
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """Return the text that is safe to show, and whether a stop string ended it."""
        if not self._stops:
            return text, False
        buffer = self._held + text
        matches = [(buffer.find(stop) + len(stop), -len(stop)) for stop in self._stops if stop in buffer]
        if matches:
            end, minus_length = min(matches)  # the one that is completed first; of several, the longest
            self._held = ""
            return buffer[: end if self._keep_stop else end + minus_length], True
        keep = max(self._overlap(buffer, stop) for stop in self._stops)
        self._held = buffer[len(buffer) - keep :]
        return buffer[: len(buffer) - keep], False

    def flush(self) -> str:
        """Return the text that was held back and became no stop string."""
        text, self._held = self._held, ""
        return text

    @staticmethod
    def _overlap(buffer: str, stop: str) -> int:
        """Return the length of the longest end of ``buffer`` that is a beginning of ``stop``."""
        for length in range(min(len(buffer), len(stop) - 1), 0, -1):
            if buffer.endswith(stop[:length]):
                return length
        return 0


@dataclass(frozen=True)
class StopRules:
    """The conditions that end a text.

    ``strings`` and the tokens ``ids`` end it, neither before ``min_tokens`` tokens.  They are part of the text only
    with ``keep``.  Special tokens are part of it only without ``skip_special_tokens``, or if they are among
    ``kept_special_ids``.  ``keeps_bytes``: as ``Tokenizer.detokenizer`` has it.
    """

    strings: Sequence[str] = ()
    ids: frozenset[int] = frozenset()
    keep: bool = False
    min_tokens: int = 0
    skip_special_tokens: bool = True
    keeps_bytes: bool = False
    kept_special_ids: frozenset[int] = frozenset()


class TextStream:
    """The text of one answer as it grows.

    ``stops`` tells what ends the text; the text begins with ``echo``.
    """

    def __init__(self, tokenizer: Tokenizer, stops: StopRules | None = None, echo: str = "") -> None:
        self._stops = stops or StopRules()
        skips, self._kept = self._stops.skip_special_tokens, self._stops.kept_special_ids
        self._skips_others = skips and bool(self._kept)
        self._tokenizer = tokenizer
        self._detokenizer = tokenizer.detokenizer(
            skip_special_tokens=skips and not self._kept, keeps_bytes=self._stops.keeps_bytes
        )
        self._matcher = StopMatcher(self._stops.strings, self._stops.keep)
        self._pieces: list[str] = [echo] if echo else []
        self._num_tokens = 0
        self._num_taken = 0
        self._num_given_chars = 0
        self._ended = False

    @property
    def text(self) -> str:
        """The whole text so far, without what is held back."""
        return "".join(self._pieces)

    def replay(self, token_ids: Sequence[int], num_chars: int) -> bool:
        """Add tokens of an answer that another stream began, which gave out ``num_chars`` characters of its text.

        ``take`` leaves those out.  Return True if a token completes a stop string.
        """
        self._num_given_chars = num_chars
        completes = [self.push(token) for token in token_ids]
        return any(completes)

    def push(self, token: int) -> bool:
        """Add a token.  Return True if it completes a stop string."""
        if self._ended or (token in self._stops.ids and not self._stops.keep):
            return False
        self._num_tokens += 1
        is_skipped = self._skips_others and token not in self._kept and self._tokenizer.is_special(token)
        text = "" if is_skipped else self._detokenizer.push(token)
        if self._num_tokens <= self._stops.min_tokens:
            if text:
                self._pieces.append(text)
            return False
        return self._show(text)

    def _show(self, text: str) -> bool:
        shown, self._ended = self._matcher.push(text)
        if shown:
            self._pieces.append(shown)
        return self._ended

    def finish(self) -> None:
        """End the text: add what was held back, unless a stop string ended it."""
        if self._ended:
            return
        if not self._show(self._detokenizer.flush()):
            held = self._matcher.flush()
            if held:
                self._pieces.append(held)
        self._ended = True

    def take(self) -> str:
        """Return the text that was added since the last call."""
        end = len(self._pieces)  # another thread may be adding
        new = "".join(self._pieces[self._num_taken : end])
        self._num_taken = end
        if self._num_given_chars:
            num_dropped = min(self._num_given_chars, len(new))
            self._num_given_chars -= num_dropped
            new = new[num_dropped:]
        return new
