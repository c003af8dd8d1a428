"""Write a model's text to a terminal."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import Final, TextIO

__all__ = ["write_text"]

_CONTROL: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # all but tab and newline


def write_text(text: str, file: TextIO | None = None, *, wrap: Callable[[str], str] | None = None) -> None:
    """Write text to ``file`` (default: standard output) and flush it.

    On a terminal control characters are replaced, so that a model cannot control the terminal.  Characters that the
    file's encoding does not have are replaced as well.  ``wrap`` then adds what breaks lines.
    """
    out = sys.stdout if file is None else file
    if out.isatty():
        text = _CONTROL.sub("\ufffd", text)
    if wrap is not None:
        text = wrap(text)
    encoding = getattr(out, "encoding", None) or "utf-8"
    out.write(text.encode(encoding, errors="replace").decode(encoding))
    out.flush()
