"""Damaged files, and how many of them are refused."""

from __future__ import annotations

import os
import random
from collections.abc import Callable

from penstock.errors import PenstockError

INTERESTING = (b"\0", b"\xff", b"{", b"}", b"[", b"]", b'"', b",", b":", b"-", b"1e999", b"true", b"null", b"9" * 30,
               b"\\ud800", b"-1", b"0", b"[[[[", b'"a"', b"18446744073709551615", b"NaN")  # fmt: skip


def num_mutants(default: int) -> int:
    """Return how many mutants of a file a test tries: ``default``, or what ``make fuzz`` sets."""
    return int(os.environ.get("PENSTOCK_MUTANTS", default))


def mutate(data: bytes, rng: random.Random) -> bytes:
    """One to four edits: flipped bits, interesting bytes, runs removed, repeated or moved, the end cut off."""
    result = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        if not result:
            break
        at, kind = rng.randrange(len(result)), rng.randrange(6)
        end = min(len(result), at + rng.randint(1, 16))
        if kind == 0:
            result[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            result[at:end] = rng.choice(INTERESTING)
        elif kind == 2:
            del result[at:end]
        elif kind == 3:
            result[at:at] = result[at:end] * rng.randint(1, 4)
        elif kind == 4:
            result[at:at] = rng.choice(INTERESTING)
        else:
            del result[at:]
    return bytes(result)


def count_refusals(seed: int, rounds: int, data: bytes, use: Callable[[bytes], None]) -> int:
    rng = random.Random(seed)
    refused = 0
    for _ in range(rounds):
        message = ""
        try:
            use(mutate(data, rng))
        except PenstockError as error:
            message = str(error)
            refused += 1
        assert message.isprintable()
    return refused
