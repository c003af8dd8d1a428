"""Write an answer to a terminal as it grows, without breaking words at the edge."""

from __future__ import annotations

import os
import shutil
import sys
import unicodedata
from typing import Final

from penstock.text.terminal import write_text

__all__ = ["AnswerWriter", "WordWrap"]

_TAB: Final = 8
_ERASE_FROM: Final = "\x1b[{}G\x1b[K"
"""Move to a column, counted from 1, and erase the rest of the line (ECMA-48: CHA and EL)."""

_DIM: Final = "\x1b[2m"
_NOT_DIM: Final = "\x1b[22m"
"""Less bright, and as bright as before (ECMA-48: SGR)."""


class WordWrap:
    """The lines of a terminal of ``width`` columns while a text is written to it piece by piece.

    The beginning of a word is written at once.  When the word reaches the edge, it is erased there and begins again on
    the next line.  Words longer than a line are broken, and so is text without spaces, such as Chinese.
    """

    def __init__(self, width: int) -> None:
        self.width = width
        self._column = 0
        self._word = ""
        self._word_column = 0

    def feed(self, text: str) -> str:
        """Return what to write for the next piece of text, which has no control characters but tab and newline."""
        return "".join(map(self._next, text))

    def _next(self, char: str) -> str:
        if char == "\n":
            self._column, self._word = 0, ""
            return char
        if char == "\t":
            return self._space(_TAB - self._column % _TAB, char)
        if char == " ":
            return self._space(1, char)
        columns = _columns(char)
        before = self._break_line(columns) if self._column + columns > self.width else ""
        if columns == 2:  # a line may end before and behind it
            self._word = ""
        else:
            if not self._word:
                self._word_column = self._column
            self._word += char
        self._column += columns
        return before + char

    def _space(self, columns: int, char: str) -> str:
        self._word = ""
        if self._column + columns > self.width:  # the end of the line takes the place of the space
            self._column = 0
            return "\n"
        self._column += columns
        return char

    def _break_line(self, columns: int) -> str:
        """Begin the next line, with the word that has reached the edge unless a wide character follows it."""
        word, start = self._word, self._word_column
        if not word or start == 0 or columns == 2:
            self._column, self._word = 0, ""
            return "\n"
        self._column, self._word_column = self._column - start, 0
        return f"{_ERASE_FROM.format(start + 1)}\n{word}"


def _columns(char: str) -> int:
    if unicodedata.combining(char) or unicodedata.category(char) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1


class AnswerWriter:
    """Writes answers to standard output; on a terminal that can erase, words are not broken at the edge."""

    def __init__(self) -> None:
        self.is_terminal = sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"
        self._wrap = WordWrap(1) if self.is_terminal else None
        self._is_thought = False

    def write(self, text: str, *, is_thought: bool = False) -> None:
        """Write a piece of an answer.  An empty line follows thoughts, which are dim on a terminal."""
        has_changed = is_thought is not self._is_thought
        self._is_thought = is_thought
        if has_changed and not is_thought and text != "\n":
            text = f"\n\n{text}"
        if self._wrap is None:
            write_text(text)
            return
        self._wrap.width = max(1, shutil.get_terminal_size().columns)
        if has_changed:
            sys.stdout.write(_DIM if is_thought else _NOT_DIM)
        write_text(text, wrap=self._wrap.feed)
