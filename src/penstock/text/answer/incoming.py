"""Text that arrives in pieces, read by generators that yield where they need more of it."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from functools import cache
from typing import Final, TypeVar

__all__ = ["Incoming", "NotACall", "Step"]

T = TypeVar("T")
Step = Generator[None, None, T]
"""Reads a part of the text and returns it; each ``yield`` waits for more text, or for the end."""

MAX_WORD_CHARS: Final = 256
_SPACE: Final = re.compile(r"\s*")
_WORD: Final = re.compile(r"[^\s<>\[\]{}()\"'`,｜]*")
_JSON: Final = re.compile(r'["{}\[\]]')
_IN_JSON_STRING: Final = re.compile(r'["\\]')
_SCALAR: Final = re.compile(r"[\w.+-]*")
_NOTHING: Final = re.compile(r"(?!)")
_PYTHON: Final = re.compile(r"[\"'{}\[\]()]")
_IN_STRING: Final = {'"': _IN_JSON_STRING, "'": re.compile(r"['\\]")}
_OPENING: Final = "{[("


class NotACall(Exception):  # noqa: N818 (no error: the text is content)
    """Raised where a text turns out not to be a call."""


class Incoming:
    """The text of an answer.  ``taken`` has what was read since ``mark``.

    Every character is looked at a bounded number of times, however the text is split.
    """

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.is_over = False
        self._taken: list[str] = []

    def push(self, text: str) -> None:
        """Add text."""
        self.text, self.at = self.text[self.at :] + text, 0

    def mark(self) -> None:
        """Forget what was read."""
        self._taken = []

    @property
    def taken(self) -> str:
        """The text that was read since ``mark``."""
        return "".join(self._taken)

    def take(self, num_chars: int) -> str:
        """Read characters that are there."""
        text = self.text[self.at : self.at + num_chars]
        self.at += num_chars
        self._taken.append(text)
        return text

    def peek(self) -> Step[str]:
        """Return the next character without reading it; "" at the end."""
        while self.at == len(self.text) and not self.is_over:
            yield
        return self.text[self.at : self.at + 1]

    def _run(self, pattern: re.Pattern[str], limit: int | None = None) -> Step[str]:
        """Read the longest run that a pattern matches, which matches every part of a run."""
        parts: list[str] = []
        num_chars = 0
        while True:
            match = pattern.match(self.text, self.at)
            run = "" if match is None else match[0]
            num_chars += len(run)
            parts.append(self.take(len(run)))
            if limit is not None and num_chars > limit:
                raise NotACall
            if self.at < len(self.text) or self.is_over:
                return "".join(parts)
            yield

    def skip_space(self) -> Step[None]:
        """Read whitespace."""
        yield from self._run(_SPACE)

    def word(self) -> Step[str]:
        """Read a name.  Raises NotACall if there is none, or one that is too long."""
        yield from self.skip_space()
        text = yield from self._run(_WORD, MAX_WORD_CHARS)
        if not text:
            raise NotACall
        return text

    def accept(self, text: str) -> Step[bool]:
        """Read a text if it comes next."""
        while True:
            there = self.text[self.at : self.at + len(text)]
            if there == text:
                self.take(len(text))
                return True
            if self.is_over or not text.startswith(there):
                return False
            yield

    def expect(self, text: str) -> Step[None]:
        """Read the words of a text, with any whitespace before each.  Raises NotACall if another text comes.

        A line break at the end of the text may be missing.
        """
        for word in text.split():
            yield from self.skip_space()
            if not (yield from self.accept(word)):
                raise NotACall
        if text.endswith("\n"):
            yield from self.accept("\n")

    def until(self, texts: tuple[str, ...]) -> Step[str]:
        """Read up to the first of some texts, which is not read.  Raises NotACall if none comes."""
        parts: list[str] = []
        pattern = _with_marks(_NOTHING, texts)
        while True:
            match = pattern.search(self.text, self.at)
            if match is not None:
                parts.append(self.take(match.start() - self.at))
                return "".join(parts)
            if self.is_over:
                self.take(len(self.text) - self.at)
                raise NotACall
            parts.append(self.take(len(self.text) - self.at - overlap(self.text, self.at, texts)))
            yield

    def quoted(self) -> Step[str]:
        """Read a string of JSON.  Raises NotACall if another character comes, or if it does not end."""
        if not (yield from self.accept('"')):
            raise NotACall
        parts = ['"']
        while True:
            match = _IN_JSON_STRING.search(self.text, self.at)
            is_cut = match is not None and match[0] == "\\" and match.end() == len(self.text)
            if match is None or is_cut:
                end = len(self.text) if match is None or self.is_over else match.start()
                parts.append(self.take(end - self.at))
                if self.is_over:
                    raise NotACall
                yield
                continue
            parts.append(self.take(match.end() + (match[0] == "\\") - self.at))
            if match[0] == '"':
                return "".join(parts)

    def scalar(self) -> Step[str]:
        """Read a number or a constant of JSON."""
        text = yield from self._run(_SCALAR, MAX_WORD_CHARS)
        return text

    def bracketed(
        self, marks: tuple[str, ...] = (), *, is_python: bool = False, put: Callable[[str], None] | None = None
    ) -> Step[str]:
        """Read from a bracket to the one that closes it.  Brackets in strings do not count.

        ``put`` gets the text as it is read; it is then not returned.
        Raises NotACall if another character comes, if the bracket is not closed, or before one of ``marks`` outside a
        string, which another call may begin with.
        """
        if not (first := (yield from self.peek())) or first not in _OPENING:
            raise NotACall
        parts: list[str] = []
        add = parts.append if put is None else put
        outside = _with_marks(_PYTHON if is_python else _JSON, marks)
        depth, quote = 0, ""
        while True:
            match = (_IN_STRING[quote] if quote else outside).search(self.text, self.at)
            if not quote and not self.is_over:
                kept = overlap(self.text, self.at, marks)
                if kept and (match is None or match.start() >= len(self.text) - kept):
                    add(self.take(len(self.text) - kept - self.at))
                    yield
                    continue
            if match is None or (match[0] == "\\" and match.end() == len(self.text) and not self.is_over):
                if self.is_over:
                    add(self.take(len(self.text) - self.at))
                    raise NotACall
                end = len(self.text) if match is None else match.start()
                add(self.take(end - self.at))
                yield
                continue
            char, end = match[0], match.end()
            if not quote and char in marks:
                add(self.take(match.start() - self.at))
                raise NotACall
            if char == "\\":
                end = min(end + 1, len(self.text))
            elif quote:
                quote = ""
            elif char in "\"'":
                quote = char
            else:
                depth += 1 if char in _OPENING else -1
            add(self.take(end - self.at))
            if depth == 0:
                return "".join(parts)


@cache
def _with_marks(pattern: re.Pattern[str], marks: tuple[str, ...]) -> re.Pattern[str]:
    """Return a pattern that matches one of ``marks`` as well."""
    return re.compile("|".join([*map(re.escape, marks), pattern.pattern]))


def overlap(text: str, start: int, marks: tuple[str, ...]) -> int:
    """Return how many characters at the end of ``text[start:]`` may be the beginning of one of ``marks``."""
    most = min(len(text) - start, max((len(mark) for mark in marks), default=1) - 1)
    for length in range(most, 0, -1):
        if any(mark.startswith(text[len(text) - length :]) for mark in marks):
            return length
    return 0
