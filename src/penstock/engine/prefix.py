"""Keys of pages: a name for the content of a page and of everything before it.

A page's keys and values follow from all tokens up to its end, so its key is a hash of its own tokens chained to the key
of the page before.  The hash is 128 bits of BLAKE2 with a secret of this process: a client cannot construct a
collision, and one by chance is expected after about 10^18 pages.  A request's salt is the first link of the chain.
Requests with different salts share nothing, so that one tenant cannot learn by timing what another tenant sent.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Sequence
from hashlib import blake2b

from penstock.runtime.program import PAGE_TOKENS

__all__ = ["PageKeys"]

_KEY_BYTES = 16


class PageKeys:
    """Creates the page keys of one engine."""

    def __init__(self) -> None:
        self._secret = os.urandom(_KEY_BYTES)

    def extend(self, keys: list[bytes], salt: str, tokens: Sequence[int]) -> None:
        """Append the keys of further pages to ``keys``.

        ``tokens`` are those after the pages that have keys, 32 for each page.  An incomplete page at the end gets no
        key.
        """
        key = keys[-1] if keys else self._hash(salt.encode("utf-8", "surrogatepass"))
        for start in range(0, len(tokens) - PAGE_TOKENS + 1, PAGE_TOKENS):
            key = self._hash(key + array("i", tokens[start : start + PAGE_TOKENS]).tobytes())
            keys.append(key)

    def _hash(self, data: bytes) -> bytes:
        return blake2b(data, digest_size=_KEY_BYTES, key=self._secret).digest()
