"""Text of a model on a terminal."""

from __future__ import annotations

import re
import sys
from typing import Final, TextIO

__all__ = ["write_text"]

_CONTROL: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # all but tabs and ends of lines


def write_text(text: str, file: TextIO | None = None) -> None:
    """Write what a model wrote to ``file`` (standard output), at once.

    On a terminal control characters are replaced: what a model writes never drives it.  So is what the file's encoding
    cannot say.
    """
    out = sys.stdout if file is None else file
    if out.isatty():
        text = _CONTROL.sub("\ufffd", text)
    encoding = getattr(out, "encoding", None) or "utf-8"
    out.write(text.encode(encoding, errors="replace").decode(encoding))
    out.flush()
