"""The command in a terminal of its own."""

from __future__ import annotations

import fcntl
import os
import select
import termios
import time
from collections.abc import Callable
from types import TracebackType

from tests.support.command import environment, start


class Terminal:
    """``penstock ARGS`` with a terminal as its three streams; what it wrote is read with ``until``."""

    def __init__(self, *args: object, **env: str) -> None:
        self._end, theirs = os.openpty()
        self._rest = b""
        streams = {"stdin": theirs, "stdout": theirs, "stderr": theirs}
        own = {"start_new_session": True, "preexec_fn": lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0)}
        self.process = start(*args, **streams, **own, env=environment(**{"TERM": "xterm", **env}))
        os.close(theirs)

    def until(self, text: str, timeout_s: float = 300) -> str:
        """Return what was written up to ``text`` and with it; what follows is kept for the next call."""
        while text.encode() not in self._rest:
            ready, _, _ = select.select([self._end], [], [], timeout_s)
            assert ready, f"{text!r} did not come after {self._rest!r}"
            self._rest += os.read(self._end, 4096)
        seen, _, self._rest = self._rest.partition(text.encode())
        return (seen + text.encode()).decode(errors="replace")

    def rest(self, timeout_s: float = 300) -> str:
        """Return what is written up to the end of the process."""
        while True:
            ready, _, _ = select.select([self._end], [], [], timeout_s)
            assert ready, f"the process did not end after {self._rest!r}"
            try:
                data = os.read(self._end, 4096)
            except OSError:  # Linux: the last process closed its end
                data = b""
            if not data:
                return self._rest.decode(errors="replace")
            self._rest += data

    def interrupt(self, is_done: Callable[[], bool]) -> None:
        """Press Ctrl-C until it was noticed: Python misses one between readline's prompt and its wait for a key."""
        for _ in range(30):
            self.type("\x03")
            for _ in range(200):
                if is_done():
                    return
                time.sleep(0.01)
        raise AssertionError(f"Ctrl-C was not noticed after {self._rest!r}")

    def shows(self, text: str) -> bool:
        """Return whether ``text`` was written since the last ``until``."""
        if select.select([self._end], [], [], 0)[0]:
            self._rest += os.read(self._end, 4096)
        return text.encode() in self._rest

    def type(self, text: str) -> None:
        os.write(self._end, text.encode())

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._end)
