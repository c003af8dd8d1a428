"""A precompiled character map of SentencePiece: the size of a trie, the trie as a double array, replacements.

The layout is that of Darts-clone (https://github.com/s-yata/darts-clone), which SentencePiece uses.
"""

from __future__ import annotations

import struct
from itertools import count
from typing import Any

HAS_LEAF, LEAF = 1 << 8, 1 << 31
REPLACEMENTS = {
    "a": "bc", "\n": " ", "\r": "R", "\u00a0": " ", "\u0301": "", "\u0300": "x", "\ufb01": "fi", "e\u0301": "\u00e9",
    "\u65e5": "\u66f0", "\u6f22\u5b57": "K", "\u0600": "P", "\u070f": "PP", "\u0d4e": "p", "\ufdfa": "long " * 7,
    "\u00a9": "(c)", "\u1100": "g", "\u1161": "v", "\u11a8": "k", "\uff21": "A", "\u0627": "", "\u094d": "V",
}  # fmt: skip


def charsmap(replacements: dict[str, str]) -> bytes:
    """Return the bytes of a map with these replacements."""
    texts, places = bytearray(), {}
    for text in replacements.values():
        places[text] = len(texts)
        texts += text.encode() + b"\0"
    root: dict[int, Any] = {}
    for key, text in replacements.items():
        node = root
        for byte in key.encode():
            node = node.setdefault(byte, {})
        node[0] = places[text]
    units, begin = {0: 0}, 1

    def place(node: dict[int, Any], at: int) -> None:
        nonlocal begin
        first = min(node)
        base = next(
            free ^ first
            for free in count(begin if len(node) < 9 else max(units) + 1)
            if all(free ^ first ^ byte not in units for byte in node)
        )
        while begin in units:
            begin += 1
        units[at] |= (at ^ base) << 10 | HAS_LEAF * (0 in node)
        for byte, child in node.items():
            units[base ^ byte] = byte if byte else LEAF | child
        for byte, child in node.items():
            if byte:
                place(child, base ^ byte)

    place(root, 0)
    size = -(-(max(units) + 1) // 256) * 256  # so that a step by any byte stays inside
    array = struct.pack(f"<{size}I", *(units.get(at, 0) for at in range(size)))
    return struct.pack("<I", len(array)) + array + bytes(texts)
