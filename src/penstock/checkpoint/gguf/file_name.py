"""The names of the files of a model that is split into several GGUF files."""

from __future__ import annotations

import re
from typing import Final

__all__ = ["MAX_SPLITS", "split_names"]

MAX_SPLITS: Final = 4096
_SPLIT_NAME: Final = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})(?P<end>(?i:\.gguf)?)", re.DOTALL)


def split_names(name: str) -> list[str]:
    """Return the names of all files of the model that ``name`` is a file of, from the first on.

    A name without -00001-of-00002 at its end, or with a count above MAX_SPLITS, is that of a whole model.
    """
    match = _SPLIT_NAME.fullmatch(name)
    count = int(match["count"]) if match is not None else 0
    if match is None or not 1 <= int(match["number"]) <= count <= MAX_SPLITS:
        return [name]
    return [f"{match['stem']}-{number:05d}-of-{count:05d}{match['end']}" for number in range(1, count + 1)]
