"""Traces: requests with their time, the segments of their prompt, and the number of tokens of their answer.

A trace is JSON lines, in the order of time::

    {"time": 0.25, "segments": [["system", 512], ["question 7", 40]], "output_tokens": 64}

Segments of one name have the same content: a prompt is the leading tokens of each of its segments, one after another.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import count
from pathlib import Path
from typing import Any, Final

from penstock.config import is_integer, is_number, show
from penstock.engine.pages import PageKeys
from penstock.errors import FileAccessError, InvalidFileError
from penstock.runtime.program import PAGE_TOKENS

__all__ = ["SegmentKeys", "TraceRequest", "parse_trace", "read_trace"]

MAX_TOKENS: Final = 1 << 22
MAX_SEGMENTS: Final = 4096
_FIELDS: Final = ("time", "segments", "output_tokens")
_MAX_PREFIXES: Final = 4096
_UNPACKED: Final = ". Unpack it: `gunzip -c FILE | penstock simulate -`."


@dataclass(slots=True)
class TraceRequest:
    """A request: its arrival in seconds, the names and tokens of its segments, and the tokens of its answer.

    ``source``: the file and the line that it comes from.
    """

    time: float
    segments: list[tuple[str, int]]
    output_tokens: int
    source: str = ""

    @property
    def prompt_tokens(self) -> int:
        """The number of tokens of the prompt."""
        return sum(tokens for _, tokens in self.segments)


def read_trace(path: Path) -> Iterator[TraceRequest]:
    """Return the requests of a file, one after another; those of standard input for the path "-".

    Raises FileAccessError if it cannot be read, and InvalidFileError that names the line and the field.
    """
    is_stdin = str(path) == "-"
    name = "standard input" if is_stdin else str(path)
    try:
        with open(0 if is_stdin else path, encoding="utf-8", closefd=not is_stdin) as file:
            yield from parse_trace(file, name)
    except OSError as error:
        raise FileAccessError(f"{name}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise InvalidFileError(f"{name}: expected text in UTF-8{_UNPACKED * name.endswith('.gz')}") from None


def parse_trace(lines: Iterable[str], name: str = "trace") -> Iterator[TraceRequest]:
    """Return the requests of lines.  Blank lines are ignored.  Raises InvalidFileError as ``read_trace`` does."""
    last_time = 0.0
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        place = f"{name}: line {number}"
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InvalidFileError(f"{place}: expected one JSON object: {error}") from None
        request = _request_of(fields, place)
        if request.time < last_time:
            raise _refuse(place, "time", f"at least that of the line before ({last_time:g})", request.time)
        last_time = request.time
        yield request


def _refuse(place: str, name: str, expected: str, actual: object) -> InvalidFileError:
    return InvalidFileError(f"{place}: {name}: expected {expected}, got {show(actual)}", param=name)


def _request_of(fields: Any, place: str) -> TraceRequest:
    if not isinstance(fields, dict):
        raise InvalidFileError(f"{place}: expected one JSON object, got {show(fields)}")
    if len(fields) != 3 or not all(name in fields for name in _FIELDS):
        for name in fields:
            if name not in _FIELDS:
                raise _refuse(place, str(name), f"one of the fields {', '.join(_FIELDS)}", name)
        missing = next(name for name in _FIELDS if name not in fields)
        raise InvalidFileError(f"{place}: {missing}: expected a value, got none", param=missing)
    time, segments, output_tokens = fields["time"], fields["segments"], fields["output_tokens"]
    if not is_number(time, 0, 1e9):
        raise _refuse(place, "time", "seconds from 0 to 1e9", time)
    if not is_integer(output_tokens, 1, MAX_TOKENS):
        raise _refuse(place, "output_tokens", f"an integer from 1 to {MAX_TOKENS}", output_tokens)
    if not isinstance(segments, list) or not 1 <= len(segments) <= MAX_SEGMENTS:
        raise _refuse(place, "segments", f"a list of 1 to {MAX_SEGMENTS} segments", segments)
    for segment in segments:
        if not isinstance(segment, list) or len(segment) != 2 or not isinstance(segment[0], str):
            raise _refuse(place, "segments", "pairs of a name and a number of tokens", segment)
        if not is_integer(segment[1], 1, MAX_TOKENS):
            raise _refuse(place, "segments", f"tokens from 1 to {MAX_TOKENS}", segment[1])
    return TraceRequest(float(time), [(text, tokens) for text, tokens in segments], output_tokens, place)


class SegmentKeys(PageKeys):
    """Page keys without tokens: those of a prompt are made from its segments, those of an answer are new ones.

    The content of a page and of everything before it follows from the segments before the one with its last token, from
    that segment's name, and from the number of the page.  The key is a hash of the former and the number.
    """

    def __init__(self) -> None:
        super().__init__(b"trace")
        self._numbers = count(1)
        self._known: OrderedDict[bytes, dict[int, bytes]] = OrderedDict()

    def of_prompt(self, segments: Sequence[tuple[str, int]]) -> list[bytes]:
        """Return the keys of the full pages of a prompt."""
        keys: list[bytes] = []
        position, page, chain = 0, 0, b""
        for name, tokens in segments:
            base = blake2b(chain + name.encode("utf-8", "surrogatepass"), digest_size=12).digest()
            position += tokens
            stop = position // PAGE_TOKENS
            if stop > page:
                known = self._numbered(base)
                for number in range(page, stop):
                    key = known.get(number)
                    if key is None:
                        key = known[number] = base + number.to_bytes(4, "little")
                    keys.append(key)
                page = stop
            chain = base + tokens.to_bytes(4, "little")
        return keys

    def _numbered(self, base: bytes) -> dict[int, bytes]:
        """Return the keys that were made with a hash, so that equal keys are one object; 4096 hashes are remembered."""
        known = self._known.get(base)
        if known is None:
            known = self._known[base] = {}
            if len(self._known) > _MAX_PREFIXES:
                self._known.popitem(last=False)
        else:
            self._known.move_to_end(base)
        return known

    def extend(self, keys: list[bytes], salt: str, tokens: Sequence[int]) -> None:
        """Append a new key for each page of ``tokens``: no other request has the same answer."""
        for _ in range(len(tokens) // PAGE_TOKENS):
            keys.append(next(self._numbers).to_bytes(16, "big"))
