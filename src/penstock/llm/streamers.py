"""Streamers like those of transformers: objects with ``put(token_ids)`` and ``end()`` that an answer is pushed into."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from penstock.errors import UnsupportedError
from penstock.text.terminal import write_text
from penstock.validation import refusal, wrong_type

if TYPE_CHECKING:
    from penstock.text.detokenizer import Detokenizer

__all__ = ["Streamer", "TextStreamer"]


class Streamer(Protocol):
    """Takes token ids as they are generated.  transformers' TextStreamer and TextIteratorStreamer are streamers."""

    def put(self, value: Any) -> None:
        """Take token ids: first [1, len] int64 of the prompt, then [1] for each token of the answer."""

    def end(self) -> None:
        """Note that no more will come."""


class HasDetokenizer(Protocol):
    """A tokenizer that gives incremental detokenizers."""

    def detokenizer(self) -> Detokenizer:
        """Return a new incremental detokenizer."""


class TextStreamer:
    """Prints text as soon as no later token can change it, without special tokens.

    For ``LLM.generate(..., streamer=TextStreamer(llm.tokenizer))``, like the class of the same name in transformers.
    ``tokenizer``: ``llm.tokenizer``, or an AutoTokenizer.  ``skip_prompt``: print only the answer.  ``file``: where to
    print (default: standard output).  ``skip_special_tokens``: only True.  It receives tokens, so it also prints the
    text that a stop string removes from the result.  Override ``on_finalized_text`` to do something else with the text.
    """

    def __init__(
        self,
        tokenizer: HasDetokenizer,
        skip_prompt: bool = False,
        *,
        file: TextIO | None = None,
        skip_special_tokens: bool = True,
    ) -> None:
        if not callable(getattr(tokenizer, "detokenizer", None)):
            raise wrong_type("tokenizer", "that of a model (llm.tokenizer)", tokenizer)
        if skip_special_tokens is not True:
            raise UnsupportedError(
                f"skip_special_tokens: expected True, got {skip_special_tokens!r:.60}. "
                "A TextStreamer prints text without special tokens.",
                param="skip_special_tokens",
            )
        self._tokenizer = tokenizer
        self._skip_prompt = skip_prompt
        self._file = file
        self._detokenizer = tokenizer.detokenizer()
        self._is_prompt = True

    def put(self, value: Any) -> None:
        """Print token ids: an array, a tensor or a list [len] or [1, len].  The first ones are the prompt's."""
        ids = _one_row(value)
        was_prompt, self._is_prompt = self._is_prompt, False
        if not (was_prompt and self._skip_prompt):
            self.on_finalized_text("".join(self._detokenizer.push(token) for token in ids))

    def end(self) -> None:
        """Print what was held back, and end the line.  The next ``put`` begins another prompt."""
        text = self._detokenizer.flush()
        self._detokenizer, self._is_prompt = self._tokenizer.detokenizer(), True
        self.on_finalized_text(text, stream_end=True)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Print text that is final.  ``stream_end`` marks the last one."""
        write_text(text + "\n" * stream_end, self._file)


def _one_row(value: Any) -> Sequence[int]:
    """Return token ids as a list."""
    ids = value.tolist() if hasattr(value, "tolist") else value
    ids = [ids] if isinstance(ids, int) else ids
    if isinstance(ids, list) and len(ids) == 1 and isinstance(ids[0], list):
        ids = ids[0]
    if not isinstance(ids, list) or not all(isinstance(token, int) for token in ids):
        raise refusal("value", "the token ids of one text", value)
    return ids
