"""Streamers as transformers has them: objects with ``put(token_ids)`` and ``end()`` that an answer is pushed into."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol, TextIO

import numpy as np

from penstock.engine.prompts import split_params, split_prompts
from penstock.errors import InvalidArgumentError
from penstock.text.terminal import write_text

if TYPE_CHECKING:
    from penstock.engine.options import RequestOptions
    from penstock.llm.llm import LLM
    from penstock.llm.result import Result
    from penstock.text.tokenizer import Tokenizer

__all__ = ["Streamer", "TextStreamer", "generate_into"]


class Streamer(Protocol):
    """Takes token ids as they come; transformers' TextStreamer and TextIteratorStreamer are ones."""

    def put(self, value: Any) -> None:
        """Token ids [1, len] int64 of the prompt, at first; then [1] of each token of the answer."""

    def end(self) -> None:
        """No more will come."""


def generate_into(
    llm: LLM, prompts: object, params: object, options: RequestOptions | None, streamer: Streamer, progress: bool
) -> tuple[Result, bool]:
    """Continue one prompt and put it and each token into ``streamer``; the result, and whether the prompt stood alone.

    ``end`` is called whatever happens, once the streamer has been taken: another thread may wait for it.
    InvalidArgumentError for several prompts or answers, or ``progress`` beside what the streamer may print.  What the
    streamer raises ends the answer.
    """
    if not all(callable(getattr(streamer, name, None)) for name in ("put", "end")):
        raise InvalidArgumentError(
            f"streamer must have put(token_ids) and end(), which {streamer!r:.60} has not", param="streamer"
        )
    try:
        if progress:
            raise InvalidArgumentError(
                "progress must be False beside a streamer, which shows how far it is", param="progress"
            )
        several, is_one = split_prompts(prompts)
        each = split_params(params, len(several))
        if len(several) != 1 or (each[0].best_of or each[0].n) > 1:
            answers = sum(one.best_of or one.n for one in each)
            raise InvalidArgumentError(f"a streamer takes one answer, n and best_of being 1: here are {answers}")
        stream = llm.stream(several[0], each[0], options)
        streamer.put(np.array([stream.prompt_token_ids], np.int64))
        for delta in stream:
            for token in delta.token_ids:
                streamer.put(np.array([token], np.int64))
    except BaseException:
        with suppress(Exception):
            streamer.end()
        raise
    streamer.end()
    return stream.result(), is_one


class TextStreamer:
    """Prints what is put into it as soon as no later token can change it, without special tokens.

    For ``LLM.generate(..., streamer=TextStreamer(llm.tokenizer))``, as transformers' class of this name is used there.
    ``skip_prompt``: print the answer alone.  ``file``: standard output unless given.  What a stop string cuts off the
    result is printed: it is tokens that come here.  ``on_finalized_text`` may be overridden to do something else with
    the text.
    """

    def __init__(self, tokenizer: Tokenizer, skip_prompt: bool = False, *, file: TextIO | None = None) -> None:
        if not callable(getattr(tokenizer, "detokenizer", None)):
            raise InvalidArgumentError(
                f"tokenizer must be a model's (llm.tokenizer), not {type(tokenizer).__name__}", param="tokenizer"
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
        rest = self._detokenizer.flush()
        self._detokenizer, self._is_prompt = self._tokenizer.detokenizer(), True
        self.on_finalized_text(rest, stream_end=True)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Print text that is final; ``stream_end`` with the last."""
        write_text(text + "\n" * stream_end, self._file)


def _one_row(value: Any) -> Sequence[int]:
    """Token ids as a list."""
    ids = value.tolist() if hasattr(value, "tolist") else value
    ids = [ids] if isinstance(ids, int) else ids
    if isinstance(ids, list) and len(ids) == 1 and isinstance(ids[0], list):
        ids = ids[0]
    if not isinstance(ids, list) or not all(isinstance(token, int) for token in ids):
        raise InvalidArgumentError(f"put takes the token ids of one text, not {value!r:.100}")
    return ids
