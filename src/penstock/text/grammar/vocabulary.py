"""The tokens of a model as the grammar compiler needs them: the bytes of each, and which end an answer."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from penstock.errors import UnsupportedError

if TYPE_CHECKING:
    from llguidance import LLTokenizer

    from penstock.text.tokenizer import Tokenizer

__all__ = ["STRING_SLICES", "drops_first_space", "make_vocabulary"]

_WORD = re.compile(rb" [!-~]+")
_INVALID = b"\xff"
"""No text in UTF-8 has this byte, and the library marks special tokens with it."""

_CHAR: Final = r'[^"\\\x00-\x1F\x7F]'
STRING_SLICES: Final = (
    r"[\x20\x0A\x0D\x09]+", "[a-zA-Z0-9]{1,10}",
    f"{_CHAR}{{1,10}}", f"{_CHAR}{{1,30}}", f"{_CHAR}{{1,128}}", f"{_CHAR}+",
)  # fmt: skip
"""Sets of tokens that a grammar often allows as a whole, so that a mask takes them without a look at each token.

Masks are the same with any sets.  Beside the library's own there are words, which narrow formats such as that of
addresses allow, and texts of 128 characters, which bounded strings do.
"""


class _Tokens:
    """The attributes that the library reads from a tokenizer."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokens: list[bytes], specials: list[int]) -> None:
        self.tokens = tokens
        self.special_token_ids = specials
        self.eos_token_id = specials[0]
        self.made: LLTokenizer | None = None

    def __call__(self, text: bytes | str) -> list[int]:
        """Split a text into tokens.  Grammars are compiled so that the library never needs it."""
        if self.made is None:  # it tries whether bytes are accepted
            return []
        ids: list[int] = self.made.greedy_tokenize(text if isinstance(text, str) else text.decode(errors="replace"))
        return ids


def make_vocabulary(tokenizer: Tokenizer, vocab_size: int, end_ids: Iterable[int]) -> LLTokenizer:
    """Return the library's vocabulary of a model with ``vocab_size`` tokens, of which ``end_ids`` end an answer.

    A model without end tokens gets one more that it never samples.  Takes 0.7 s for 131,072 tokens.  Raises
    UnsupportedError for a tokenizer whose tokens are not known as bytes.
    """
    from llguidance import LLTokenizer

    tokens, specials = tokenizer.vocabulary()
    tokens = tokens[:vocab_size] + [b""] * (vocab_size - len(tokens))
    ends = sorted(token for token in end_ids if token < vocab_size)
    if not ends:
        ends = [vocab_size]
        tokens.append(b"")
    marked = [*ends, *(token for token in specials if token < vocab_size and token not in ends)]
    tokens = [b"" if token.startswith(_INVALID) else token for token in tokens]
    for token in marked:
        tokens[token] = b""
    if not any(tokens):
        raise UnsupportedError("The tokenizer of this model has no tokens with text.")
    for token in marked:
        tokens[token] = b"[%d]" % token  # without a text of its own each would match every <[id]> of a grammar
    wrapper = _Tokens(tokens, marked)
    made = LLTokenizer(wrapper, eos_token=ends, slices=[*STRING_SLICES])  # type: ignore[arg-type]
    wrapper.made = made
    return made


def drops_first_space(tokenizer: Tokenizer) -> bool:
    """Return True if the text of an answer has not the space that its first token begins with, as of SentencePiece.

    A model with such a tokenizer is used to begin answers with that token.
    """
    tokens, specials = tokenizer.vocabulary()
    hidden = set(specials)
    spaced = next((i for i, token in enumerate(tokens) if _WORD.fullmatch(token) and i not in hidden), None)
    return spaced is not None and not tokenizer.decode([spaced]).startswith(" ")
