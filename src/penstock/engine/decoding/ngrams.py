"""The tokens that would repeat a sequence of a request's own tokens."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["SeenNgrams"]


class SeenNgrams:
    """The sequences of ``size`` tokens that prompt and answer have, by the hash of all but their last token.

    Each call adds only what is new, so that a step costs as much for a long text as for a short one.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._tokens: list[int] = []
        self._followers: dict[int, list[int]] = {}

    def forbidden(self, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> list[int]:
        """Return the tokens that would complete a sequence that occurred."""
        tokens, size = self._tokens, self._size
        start = len(tokens)
        if start < len(prompt_ids):
            tokens += prompt_ids[start:]
        tokens += output_ids[len(tokens) - len(prompt_ids) :]
        for last in range(max(start, size - 1), len(tokens)):
            self._followers.setdefault(hash(tuple(tokens[last - size + 1 : last])), []).append(tokens[last])
        if len(tokens) < size:
            return []
        return self._followers.get(hash(tuple(tokens[len(tokens) - size + 1 :])), [])
