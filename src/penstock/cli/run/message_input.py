"""The messages that a user types in a chat: lines with editing and history, and messages of several lines."""

from __future__ import annotations

import os
import select
import sys
from contextlib import suppress
from types import TracebackType
from typing import Any, Final

__all__ = ["MessageInput"]

_QUOTES: Final = '"""'
_MAX_HISTORY: Final = 1000


class MessageInput:
    """Reads messages from standard input; on a terminal with arrow keys and the history of earlier chats.

    ``was_interrupted``: Ctrl-C ended the last answer, so that one more leaves.
    """

    def __init__(self, *, keeps_history: bool) -> None:
        self.was_interrupted = False
        self._readline: Any = None
        self._keeps_history = keeps_history
        self._num_kept = 0
        self._has_paste_marks = False
        self._is_terminal = sys.stdin.isatty()

    def __enter__(self) -> MessageInput:
        if self._is_terminal and sys.stdout.isatty():  # else input() edits no lines
            with suppress(ImportError):
                import readline

                self._readline = readline
                if "libedit" not in (readline.__doc__ or ""):  # Python turns it off for its own prompt
                    readline.parse_and_bind("set enable-bracketed-paste on")
                    self._has_paste_marks = True
                self._open_history()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._readline is None or not self._keeps_history:
            return
        from penstock.env import state_dir

        path = state_dir() / "chat_history"
        with suppress(OSError):
            self._readline.append_history_file(self._readline.get_current_history_length() - self._num_kept, path)

    def _open_history(self) -> None:
        """Read the history file, or create it for this user only; without a place to keep it there is none."""
        if not self._keeps_history:
            return
        from penstock.env import state_dir

        path = state_dir() / "chat_history"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
            self._readline.read_history_file(path)
            if self._readline.get_current_history_length() > _MAX_HISTORY:
                self._readline.set_history_length(_MAX_HISTORY)
                self._readline.write_history_file(path)
        except OSError:
            self._keeps_history = False
        self._num_kept = self._readline.get_current_history_length()

    def read(self) -> str | None:
        """Return a line, a paste, lines joined by a backslash, or the lines between triple quotes; None at the end.

        Ctrl-C discards the message being typed; on an empty line, or after an interrupted answer, it leaves.
        """
        while True:
            try:
                message = self._read_message()
            except EOFError:
                if self._is_terminal:
                    print(file=sys.stderr)  # the shell's prompt starts on a new line
                return None
            except KeyboardInterrupt:
                print(file=sys.stderr)
                if self.was_interrupted:
                    return None
                self.was_interrupted = True
                print("Ctrl-C again, Ctrl-D or /exit leaves.", file=sys.stderr)
            else:
                self.was_interrupted = False
                return message

    def _read_message(self) -> str:
        line = self._read_line("> ")
        if line.strip() == _QUOTES:
            lines: list[str] = []
            while (more := self._read_more()) is not None:
                lines += more.split("\n")
                if lines[-1].strip() == _QUOTES:
                    lines.pop()
                    break
            return "\n".join(lines)
        parts = [line]
        while parts[-1].endswith("\\"):
            parts[-1] = parts[-1][:-1]
            if (more := self._read_more()) is None:
                break
            parts.append(more)
        return "\n".join(parts)

    def _read_line(self, prompt: str) -> str:
        """Return a line without its newline, or all lines of a paste; EOFError at the end of the input.

        GNU readline knows a paste by the marks that a terminal puts around it.  Without them, lines that are there
        already when a line ends are a paste.
        """
        lines = [self._input(prompt)]
        while self._is_terminal and not self._has_paste_marks and _has_input():
            try:
                lines.append(self._input(""))
            except EOFError:
                break
        return "\n".join(lines).strip("\n") if len(lines) > 1 or "\n" in lines[0] else lines[0]

    def _input(self, prompt: str) -> str:
        if self._readline is not None:
            return input(prompt)
        if self._is_terminal and prompt:
            print(prompt, end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line:
            raise EOFError
        return line.rstrip("\n")

    def _read_more(self) -> str | None:
        """Return the next line of a longer message; None at the end of a file, which also ends the message."""
        try:
            return self._read_line(". ")
        except EOFError:
            if self._is_terminal:
                raise
            return None


def _has_input() -> bool:
    """Return True if a terminal has a further line already."""
    return bool(select.select([sys.stdin], [], [], 0)[0])
