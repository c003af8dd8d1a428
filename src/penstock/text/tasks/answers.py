"""Answers: the part of a text that answers a question."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from penstock.checkpoint.tokenizer_frames import TextWindow, WindowRequest
from penstock.config import check_flag, check_integer
from penstock.errors import InvalidArgumentError
from penstock.text.tasks.options import Options, TaskPrompts, windows_of
from penstock.text.tokenizer import Tokenizer

__all__ = ["AnswerOptions", "answer_prompts"]

_MAX: Final = 2**31 - 1
_NO_ANSWER: Final = 1e6
"""A score above all others."""
_SEQ_LEN, _STRIDE = 384, 128


@dataclass(frozen=True)
class AnswerOptions(Options):
    """A long context is computed in windows of ``max_seq_len`` tokens, question included, which share ``doc_stride``.

    ``max_answer_len`` is in tokens.  ``handle_impossible_answer``: "" may be the answer.  ``align_to_words``:
    answers begin and end with a word.
    """

    top_k: int = 1
    doc_stride: int | None = None
    max_answer_len: int = 15
    max_seq_len: int | None = None
    handle_impossible_answer: bool = False
    align_to_words: bool = True

    def __post_init__(self) -> None:
        """Check the options."""
        for name in ("top_k", "max_answer_len", "max_seq_len"):
            if getattr(self, name) is not None:
                check_integer(name, getattr(self, name), 1, _MAX)
        if self.doc_stride is not None:
            check_integer("doc_stride", self.doc_stride, 0, _MAX)
        for name in ("handle_impossible_answer", "align_to_words"):
            check_flag(name, getattr(self, name))


def answer_prompts(
    tokenizer: Tokenizer,
    inputs: Sequence[tuple[str, str]],
    options: AnswerOptions,
    max_len: int,
    max_tokens: int = 0,
) -> TaskPrompts:
    """Return the prompts of questions with their contexts; a row has the logits of an answer's beginning and end.

    ``max_len`` is the most tokens that the model reads, ``max_tokens`` (0: no limit) the most of all prompts.
    """
    limit = min(options.max_seq_len or min(_SEQ_LEN, max_len), max_len)
    stride = min(limit // 2, _STRIDE) if options.doc_stride is None else options.doc_stride
    if stride > limit:
        raise InvalidArgumentError(f"doc_stride: expected at most {limit} tokens, got {stride}", param="doc_stride")
    requests = [WindowRequest(question, context, limit, stride, "only_second") for question, context in inputs]
    try:
        windows = windows_of(tokenizer, requests, max_tokens)
    except InvalidArgumentError as error:
        own = {"stride": "doc_stride", "max_length": "max_seq_len"}.get(error.param or "")
        if own is None:
            raise
        raise InvalidArgumentError(error.naming(own), param=own) from None

    def results(logits: Sequence[NDArray[np.float32]]) -> list[Any]:
        rows = iter(logits)
        cls = tokenizer.special_tokens.get("cls_token")
        cls_id = None if cls is None else tokenizer.token_id(cls)
        answers = []
        for (_, context), each in zip(inputs, windows, strict=True):
            best = _Answers(context, options)
            for window in each:
                best.take(window, next(rows).astype(np.float64), cls_id)
            answers.append(best.result())
        return answers

    return TaskPrompts([window.ids for each in windows for window in each], results)


class _Answers:
    """The best answers of a context so far.  Equal answers of several places or windows are one."""

    def __init__(self, context: str, options: AnswerOptions) -> None:
        self._context, self._options = context, options
        self._found: dict[str, dict[str, Any]] = {}
        self._no_answer = _NO_ANSWER
        self._words: dict[int, tuple[int, int]] = {}  # the first and last token of each word of a window

    def take(self, window: TextWindow, logits: NDArray[np.float64], cls_id: int | None) -> None:
        """Add the answers of a window, whose ``logits`` [len, 2] are those of the beginning and the end."""
        options = self._options
        self._words = {}
        for i, (word, part) in enumerate(zip(window.words, window.parts, strict=True)):
            if part == 1 and word >= 0:
                self._words[word] = (self._words.get(word, (i, i))[0], i)
        may = np.array([part == 1 for part in window.parts]) | (
            np.array(window.ids) == (-1 if cls_id is None else cls_id)
        )
        start, end = (_softmax(np.where(may, logits[:, column], -10000.0)) for column in (0, 1))
        if options.handle_impossible_answer:
            self._no_answer = min(self._no_answer, float(start[0] * end[0]))
        start[0] = end[0] = 0.0
        # some candidates have the same words
        num_wanted = options.top_k * 2 + 10 if options.align_to_words else options.top_k
        for first, last, score in _spans(start, end, num_wanted, options.max_answer_len):
            if (first and not may[first]) or (last and not may[last]):
                continue
            begin, stop = self._place(window, first, last)
            answer = self._context[begin:stop]
            same = self._found.get(answer.lower())
            if same is None:
                self._found[answer.lower()] = {"score": score, "start": begin, "end": stop, "answer": answer}
            else:
                same["score"] += score

    def _place(self, window: TextWindow, first: int, last: int) -> tuple[int, int]:
        words = window.words[first], window.words[last]
        if self._options.align_to_words and min(words) >= 0:
            begin, end = self._words.get(words[0]), self._words.get(words[1])
            if begin is not None and end is not None:
                return window.starts[begin[0]], window.ends[end[1]]
        return window.starts[first], window.ends[last]

    def result(self) -> Any:
        """Return the best answer, or the list of the ``top_k`` best."""
        answers = list(self._found.values())
        if self._options.handle_impossible_answer:
            answers.append({"score": self._no_answer, "start": 0, "end": 0, "answer": ""})
        answers = sorted(answers, key=lambda answer: -float(answer["score"]))[: self._options.top_k]
        return answers[0] if len(answers) == 1 else answers


def _softmax(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    powers = np.exp(logits - logits.max())
    scores: NDArray[np.float64] = powers / powers.sum()
    return scores


def _spans(
    start: NDArray[np.float64], end: NDArray[np.float64], num_wanted: int, max_len: int
) -> Sequence[tuple[int, int, float]]:
    """Return the likeliest spans of at most ``max_len`` tokens, best first (Chen et al., arXiv 1704.00051)."""
    length = min(max_len, len(start))
    ends = np.arange(len(start))[:, None] + np.arange(length)
    flat = (start[:, None] * np.append(end, np.zeros(length))[ends]).ravel()
    wanted = np.argpartition(-flat, num_wanted)[:num_wanted] if num_wanted < len(flat) else np.arange(len(flat))
    order = wanted[np.argsort(-flat[wanted], kind="stable")]
    return [(int(i // length), int(i // length + i % length), float(flat[i])) for i in order if flat[i] > 0]
