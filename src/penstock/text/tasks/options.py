"""The options of a task, and what a task does before and after its model runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from penstock.checkpoint.tokenizer_frames import TextWindow, WindowRequest
from penstock.errors import InvalidArgumentError
from penstock.text.tokenizer import Tokenizer
from penstock.validation import nearest, refusal

__all__ = ["CUTS", "Options", "TaskPrompts", "changed_options", "read_cut", "windows_of"]

CUTS: Final = ("longest_first", "only_first", "only_second")
_NO_CUT: Final = "do_not_truncate"


@dataclass(frozen=True)
class Options:
    """The options of a call; a task's own class has a field for each, checked when it is made."""


OptionsT = TypeVar("OptionsT", bound=Options)


@dataclass(frozen=True)
class TaskPrompts:
    """The prompts of a call, lists of token ids; ``results`` makes its results of the model's rows of each prompt."""

    prompts: list[Sequence[int]]
    results: Callable[[Sequence[NDArray[np.float32]]], list[Any]]


def changed_options(base: OptionsT, changes: Mapping[str, Any], task: str) -> OptionsT:
    """Return options with the values that a call names.  InvalidArgumentError for a name that the task lacks."""
    names = [field.name for field in fields(base)]
    for name in changes:
        if name not in names:
            near = nearest(name, names)
            hint = f"Did you mean {near}?" if near else f"It takes {', '.join(names)}."
            raise InvalidArgumentError(f"{name}: not an option of the task {task}. {hint}", param=name)
    return replace(base, **changes)


def read_cut(truncation: object, max_length: int | None = None) -> str:
    """Return which text of an input is cut, or "" for none, of the options that tokenizers of transformers take.

    With ``truncation`` None a ``max_length`` cuts the text.
    """
    if truncation is None:
        truncation = max_length is not None
    if isinstance(truncation, bool):
        return CUTS[0] if truncation else ""
    if not isinstance(truncation, str) or truncation not in (*CUTS, _NO_CUT):
        raise refusal("truncation", f"True, False or one of {', '.join((*CUTS, _NO_CUT))}", truncation)
    return "" if truncation == _NO_CUT else truncation


def windows_of(tokenizer: Tokenizer, requests: Iterable[WindowRequest], max_tokens: int) -> list[list[TextWindow]]:
    """Return the windows of each text.  InvalidArgumentError if all have more than ``max_tokens``; 0 is no limit."""
    left = max_tokens
    text_windows: list[list[TextWindow]] = []
    for request in requests:
        if max_tokens:
            _check_size(tokenizer, request, left)
        windows = tokenizer.windows(request)
        left -= sum(len(window.ids) for window in windows)
        text_windows.append(windows)
    return text_windows


def _check_size(tokenizer: Tokenizer, request: WindowRequest, left: int) -> None:
    """Refuse a text whose windows have more than ``left`` tokens, before they are made."""
    texts = [request.text] if isinstance(request.text, str) else request.text
    texts = texts if request.pair is None else [*texts, request.pair]
    num_tokens = sum(map(len, texts))
    if request.first_only:
        num_tokens = min(num_tokens, request.max_len)
    if num_tokens > left:  # a token may have several characters
        num_tokens = -(-num_tokens // tokenizer.longest_token)
    if num_tokens <= left and not request.first_only:
        counts = [len(tokenizer.encode(text, add_special_tokens=False)) for text in texts]
        num_tokens, room = sum(counts), request.max_len - request.stride - sum(counts[: len(counts) - 1])
        if num_tokens > request.max_len:
            num_tokens = -(-counts[-1] // max(room, 1)) * request.max_len
    if num_tokens > left:
        raise InvalidArgumentError(
            f"inputs: expected texts whose windows have at most {left} tokens more, got about {num_tokens}; "
            f"send fewer or shorter texts{', or a smaller stride' if request.stride else ''}",
            param="inputs",
        )
