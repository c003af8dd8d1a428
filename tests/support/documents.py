"""The commands that documents show."""

from __future__ import annotations

import re
import shlex
from pathlib import Path


def commands(document: Path) -> list[list[str]]:
    """Return the lines of a document's shell blocks that call penstock, split into words."""
    commands_shown = []
    for block in re.findall(r"```(?:sh|console)\n(.*?)```", document.read_text(), re.DOTALL):
        lines = (shlex.split(line.lstrip("$ "), comments=True) for line in block.splitlines())
        commands_shown += [words for words in lines if words and Path(words[0]).name == "penstock" and len(words) > 1]
    return commands_shown
