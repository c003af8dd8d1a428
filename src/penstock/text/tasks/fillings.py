"""Fillings: the likeliest tokens in the place of a mask, and the texts with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from penstock.config import check_integer
from penstock.text.tasks.options import Options
from penstock.text.tokenizer import Tokenizer
from penstock.validation import refusal, strings

__all__ = ["FillingOptions", "fillings_of", "find_mask"]

_MAX: Final = 2**31 - 1
_MASKS: Final = ("[MASK]", "<mask>")
"""The texts of the mask in tokenizers whose files do not name it."""


@dataclass(frozen=True)
class FillingOptions(Options):
    """``top_k``: tokens for each mask; ``targets``: the only tokens that are considered."""

    top_k: int = 5
    targets: Any = None

    def __post_init__(self) -> None:
        """Check the options."""
        check_integer("top_k", self.top_k, 1, _MAX)
        if self.targets is not None and not strings("targets", self.targets, _MAX):
            raise refusal("targets", "at least one text", self.targets)

    def target_ids(self, tokenizer: Tokenizer) -> tuple[list[int], dict[str, int | None]]:
        """Return the token of each target, or else the first token of its text; none without targets.

        Also return the targets that are no token, with the first token of each; None for one that has none.
        """
        replaced: dict[str, int | None] = {}
        if self.targets is None:
            return [], replaced
        ids = []
        for target in strings("targets", self.targets, _MAX):
            token = tokenizer.token_id(target)
            if token is None:
                token = next(iter(tokenizer.encode(target, add_special_tokens=False)), None)
                replaced[target] = token
            if token is not None:
                ids.append(token)
        if not ids:
            raise refusal("targets", "a text with at least one token", self.targets)
        return list(dict.fromkeys(ids)), replaced


def find_mask(tokenizer: Tokenizer) -> tuple[int, str] | None:
    """Return the token of the mask and its text; None for a tokenizer without one."""
    named = tokenizer.special_tokens.get("mask_token")
    for text in (named,) if named else _MASKS:
        token = tokenizer.token_id(text)
        if token is not None:
            return token, text
    return None


def fillings_of(
    tokenizer: Tokenizer, ids: Sequence[int], best: Sequence[tuple[int, Sequence[tuple[int, float]]]]
) -> list[Any]:
    """Return ``{"score", "token", "token_str", "sequence"}`` of each filling of a text of token ``ids``.

    ``best``: for each mask its place, and its tokens with their probabilities, the likeliest first.  A text with
    several masks has a list for each.
    """
    pad = tokenizer.special_tokens.get("pad_token")
    pad_id = None if pad is None else tokenizer.token_id(pad)
    results = []
    for place, candidates in best:
        tokens = [token for token, _ in candidates]
        whole = [[token if i == place else other for i, other in enumerate(ids)] for token in tokens]
        texts = tokenizer.decode_each(
            [[token for token in each if token != pad_id] for each in whole], skip_special_tokens=len(best) == 1
        )
        words = tokenizer.decode_each([[token] for token in tokens], skip_special_tokens=False)
        results.append(
            [
                {"score": score, "token": token, "token_str": word, "sequence": text}
                for (token, score), word, text in zip(candidates, words, texts, strict=True)
            ]
        )
    return results[0] if len(results) == 1 else results
