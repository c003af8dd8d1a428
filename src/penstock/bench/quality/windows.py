"""Cuts texts into windows of tokens, as different programs do, and says which of their tokens are scored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.bench.quality.texts import TextSource, encode_document
from penstock.config import check_choice, check_integer
from penstock.errors import InvalidArgumentError

if TYPE_CHECKING:
    from penstock.text.tokenizer import Tokenizer

__all__ = ["BOS", "CONVENTIONS", "Window", "WindowCut", "WindowRule", "cut_text"]

CONVENTIONS: Final = ("penstock", "transformers", "llama.cpp")
BOS: Final = ("auto", "first", "each", "none")
_LENGTHS: Final = {"penstock": 512, "transformers": 1024, "llama.cpp": 512}
_MAX_LENGTH: Final = 1 << 20


class Window(NamedTuple):
    """Tokens that are computed together.  Those from number ``first`` on are scored, each given the ones before it."""

    ids: list[int]
    first: int


@dataclass(frozen=True)
class WindowRule:
    """How a text is cut.

    ``convention``: "penstock" feeds ``length`` tokens and scores every token but the first of a document, each once.
    "transformers" (its guide, and with ``stride`` = ``length`` the papers of GPTQ and SmoothQuant) joins the documents
    with empty lines; a window has ``length`` tokens, and its first one is not scored unless windows overlap.
    "llama.cpp" joins them too, scores the second half of each window and drops the last one if it is short.
    ``length``: None is 512, or 1,024 for "transformers", or as many tokens as the model's context holds.  ``stride``:
    tokens from the beginning of a window to that of the next; None is ``length``.
    ``bos``: "first" begins each document as the tokenizer does, "each" begins every window with the begin-of-text token
    ("llama.cpp": in the place of its first token), "none" adds none.  "auto" is "first"; for "llama.cpp" it is "each"
    if the tokenizer adds that token, else "none".
    ``max_windows``: use so many windows from the beginning; 0 is all.
    """

    convention: str = "penstock"
    length: int | None = None
    stride: int | None = None
    bos: str = "auto"
    max_windows: int = 0

    def __post_init__(self) -> None:
        """Check every field; errors name it."""
        check_choice("convention", self.convention, CONVENTIONS)
        check_choice("bos", self.bos, BOS)
        check_integer("max_windows", self.max_windows, 0, 1 << 31)
        if self.length is not None:
            check_integer("window", self.length, 2 if self.convention == "penstock" else 4, _MAX_LENGTH)
        if self.stride is not None:
            check_integer("stride", self.stride, 1, self.length or _LENGTHS[self.convention])
            if self.convention == "llama.cpp":
                raise InvalidArgumentError(
                    "stride: llama.cpp's windows do not overlap. Leave it out, or use another convention.",
                    param="stride",
                )
        if self.bos == "each" and self.convention == "transformers":
            raise InvalidArgumentError("bos: expected first or none for transformers' windows, got 'each'", param="bos")

    def resolve(self, context_len: int) -> WindowRule:
        """Return the rule with the length for a model with this context; InvalidArgumentError if it is too long."""
        most = context_len - (self.bos == "each" and self.convention == "penstock")
        length = self.length if self.length is not None else min(_LENGTHS[self.convention], most)
        if length > most or length < 4:
            raise InvalidArgumentError(
                f"window: expected 4 to {most} tokens, which the model's context holds, got {length}",
                param="window",
                code="context_length_exceeded",
            )
        stride = None if self.stride is None else min(self.stride, length)
        return WindowRule(self.convention, length, stride, self.bos, self.max_windows)


@dataclass(frozen=True)
class WindowCut:
    """The windows of a text.  ``bos`` is what "auto" came to; ``num_tokens`` those of the text."""

    windows: list[Window]
    bos: str
    num_tokens: int

    @property
    def num_scored(self) -> int:
        """The number of tokens that are scored."""
        return sum(len(window.ids) - window.first for window in self.windows)


def cut_text(source: TextSource, tokenizer: Tokenizer, rule: WindowRule) -> WindowCut:
    """Cut the documents of a source; the rule has a length.

    Raises InvalidArgumentError if the text is too short for a window.
    """
    added = _added_bos(tokenizer)
    bos = (
        rule.bos if rule.bos != "auto" else ("first" if rule.convention != "llama.cpp" else "each" if added else "none")
    )
    token = added if added is not None else _bos_of(tokenizer) if bos == "each" else None
    if bos == "each" and token is None:
        raise InvalidArgumentError("bos: the tokenizer has no bos_token. Use first or none.", param="bos")
    documents = source.documents
    if rule.convention != "penstock" and all(isinstance(document, str) for document in documents):
        documents = ("\n\n".join(map(str, documents)),)
    with_special = bos == "first" or (bos == "each" and rule.convention == "llama.cpp")
    windows: list[Window] = []
    num_tokens = 0
    for document in documents:
        ids = encode_document(tokenizer, document, with_special)
        num_tokens += len(ids)
        windows += cut_ids(ids, rule, token if bos == "each" else None)
    if rule.max_windows:
        windows = windows[: rule.max_windows]
    if not windows:
        needed = rule.length if rule.convention == "llama.cpp" else 2
        raise InvalidArgumentError(
            f"text: {source.name} has {num_tokens} tokens, expected at least {needed} in a document for a window. "
            "Use a longer text or a smaller --window.",
            param="text",
            code="text_too_short",
        )
    return WindowCut(windows, bos, num_tokens)


def cut_ids(ids: Sequence[int], rule: WindowRule, bos_id: int | None) -> list[Window]:
    """Cut a document.  ``bos_id``: the token that begins every window, or None."""
    length, stride = rule.length or 0, rule.stride or rule.length or 0
    if rule.convention == "llama.cpp":
        head = [] if bos_id is None else [bos_id]
        return [
            Window([*head, *ids[begin + len(head) : begin + length]], length // 2 + 1)
            for begin in range(0, len(ids) - length + 1, length)
        ]
    if bos_id is not None:
        head, size, scored = [bos_id], length, 0
    else:
        head, size, scored = [], length + (rule.convention == "penstock"), 1
    windows, end = [], scored
    for begin in range(0, max(0, len(ids) - scored), stride):
        stop = min(begin + size, len(ids))
        first = max(end, begin + scored) - begin
        if stop > begin + first:
            windows.append(Window([*head, *ids[begin:stop]], first + len(head)))
        end = stop
        if stop == len(ids):
            break
    return windows


def _added_bos(tokenizer: Tokenizer) -> int | None:
    """Return the token that the tokenizer puts before a text; None if it puts none."""
    plain = tokenizer.encode("a", add_special_tokens=False)
    whole = tokenizer.encode("a")
    return whole[0] if len(whole) > len(plain) and whole[0] != plain[0] else None


def _bos_of(tokenizer: Tokenizer) -> int | None:
    name = tokenizer.special_tokens.get("bos_token")
    return None if name is None else tokenizer.token_id(name)
