"""Grammars over bytes as tokens: whether they allow a text, and texts drawn from them."""

from __future__ import annotations

import random

import numpy as np

from penstock.errors import InternalError
from penstock.text.grammar.compiler import Grammar, GrammarCompiler

__all__ = ["END", "allows", "byte_compiler", "random_text"]

END = 256
_CLOSING = {END, *b'"}],0'}


class _Bytes:
    def vocabulary(self) -> tuple[list[bytes], list[int]]:
        return [*(bytes([one]) for one in range(END)), b""], [END]


def byte_compiler() -> GrammarCompiler:
    """Return the grammars of a model whose tokens are the 256 bytes and an end."""
    return GrammarCompiler(lambda: _Bytes(), END + 1, [END])  # type: ignore[arg-type, return-value]


def allowed_tokens(mask: np.ndarray) -> list[int]:
    """Return the tokens of a mask."""
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


def allows(grammar: Grammar, text: str) -> bool:
    """Return True if a grammar allows a whole answer."""
    matcher = grammar.matcher()
    try:
        return matcher.accept(text.encode()) or END in allowed_tokens(matcher.mask)
    except InternalError:
        return False


def random_text(grammar: Grammar, rng: random.Random, most: int = 80) -> str | None:
    """Return a text that a grammar allows; None if it is not complete after ``most`` bytes."""
    matcher, found = grammar.matcher(), bytearray()
    while len(found) < most:
        allowed = allowed_tokens(matcher.mask)
        closing = [token for token in allowed if token in _CLOSING]
        plain = [token for token in allowed if 32 <= token < 127]
        if closing and rng.random() < 0.2 + len(found) / most:
            token = rng.choice(closing)
        else:
            token = rng.choice(plain if plain and rng.random() < 0.9 else allowed)
        if token == END:
            return found.decode()
        found.append(token)
        if matcher.accept([token]):
            return found.decode()
    return None
