"""Text in, text out: the tokenizer, the incremental detokenizer and stop strings.

The text of an answer is the concatenation of the pieces that were streamed, whatever the split of characters
over tokens: a piece is given out only when no later token can change it.
"""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from penstock.checkpoint.generation import find_chat_template, read_tokenizer_config
from penstock.checkpoint.tokenizer_process import TokenizerProcess
from penstock.core import tokenizer as lite
from penstock.errors import InvalidArgumentError, UnsupportedError

__all__ = ["Detokenizer", "StopMatcher", "StopRules", "TextStream", "Tokenizer", "WindowDetokenizer"]

REPLACEMENT = "\ufffd"
MAX_PENDING_TOKENS = 16


class _Backend(Protocol):
    """What the compiled tokenizer and the library's both do."""

    @property
    def is_byte_level(self) -> bool: ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...

    def decode_each(self, lists: Sequence[Sequence[int]], *, skip_special_tokens: bool = True) -> list[str]: ...

    def token(self, token: int) -> tuple[bytes, bool]: ...

    def longest_token(self) -> int: ...


class Tokenizer:
    """A ``tokenizer.json`` with what ``tokenizer_config.json`` says of special tokens and chat.

    Where the bundle holds the tokenizer in compiled form (``tokenizer.bin``), the core runs it.  Otherwise the
    ``tokenizers`` library runs it in a process of its own, because the file is untrusted and the library has no limits;
    that process starts here, so that a file that cannot be opened is refused here.  ``token_id`` always asks the
    library.
    Whether a prompt begins with the begin-of-text token is the post-processor's decision, as in transformers.

    Raises TokenizerError for a text or ids that the tokenizer fails on.
    """

    def __init__(self, files: Mapping[str, bytes | memoryview]) -> None:
        if "tokenizer.json" not in files:
            raise UnsupportedError("the model has no tokenizer.json: give token ids, or convert its tokenizer first")
        self._data = files["tokenizer.json"]
        compiled = _open_compiled(files)
        self._is_isolated = compiled is None
        self._backend: _Backend = compiled or self._library
        if compiled is None:
            self._library.open()
        self.special_tokens = read_tokenizer_config(files).special_tokens
        self.chat_template = find_chat_template(files)

    @cached_property
    def _library(self) -> TokenizerProcess:
        return TokenizerProcess(self._data)

    @property
    def is_isolated(self) -> bool:
        """Whether every call goes to another process and may wait for it."""
        return self._is_isolated

    def close(self) -> None:
        """End the library's process, if there is one; a later call starts another."""
        library = self.__dict__.get("_library")
        if library is not None:
            library.close()

    def token_id(self, token: str) -> int | None:
        """The id of a token's text; None when there is no such token."""
        return self._library.token_id(token)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; with ``add_special_tokens`` those that the tokenizer puts around a prompt, too."""
        if not isinstance(text, str):
            raise InvalidArgumentError(f"text must be a string, not {type(text).__name__}")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise InvalidArgumentError(f"text holds half a surrogate pair at character {error.start}") from error
        return self._backend.encode(text, add_special_tokens=add_special_tokens)

    @cached_property
    def longest_token(self) -> int:
        """Limit on the characters of one token: a longer text is more than one token."""
        return self._backend.longest_token()

    def spellings(self, word: str) -> list[tuple[int, ...]]:
        """The token sequences that write a word at the beginning of a text and behind a space (vLLM's bad words)."""
        plain = tuple(self.encode(word.lstrip() or word, add_special_tokens=False))
        spaced = tuple(self.encode(" " + (word.lstrip() or word), add_special_tokens=False))
        found = [plain] if plain else []
        if spaced and (not plain or (spaced[0] != plain[0] and len(spaced) == len(plain))):
            found.append(spaced)
        return found

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of token ids."""
        return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def decode_each(self, lists: Sequence[Sequence[int]]) -> list[str]:
        """The texts of several lists of token ids, without special tokens."""
        return self._backend.decode_each(lists)

    def detokenizer(self) -> Detokenizer:
        """A fresh incremental detokenizer."""
        return _ByteDetokenizer(self) if self._backend.is_byte_level else WindowDetokenizer(self)

    def is_special(self, token: int) -> bool:
        """Whether a token is no text."""
        return self._backend.token(token)[1]

    def token_bytes(self, token: int) -> bytes:
        """What a token stands for, part of a character as it may be; nothing for a special or an unknown one."""
        text, special = self._backend.token(token)
        return b"" if special else text


def _open_compiled(files: Mapping[str, bytes | memoryview]) -> lite.Tokenizer | None:
    """The tokenizer that export compiled; None without one, and for a kind that the core does not know."""
    data = files.get(lite.TOKENIZER_SEGMENT)
    if data is None:
        return None
    tokenizer = lite.Tokenizer.of_segment(bytes(data))
    return None if tokenizer.info.unsupported else tokenizer


class Detokenizer(Protocol):
    """Tokens in, finished text out."""

    def push(self, token: int) -> str:
        """Text that this token completes; often one token's, sometimes nothing yet."""

    def flush(self) -> str:
        """What is left at the end: a character cut short shows as the replacement character."""


class _ByteDetokenizer:
    """Byte-level tokenizers: tokens are bytes, and bytes become characters as UTF-8 allows."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        return self._decoder.decode(self._tokenizer.token_bytes(token))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class WindowDetokenizer:
    """Other tokenizers: decode the last finished piece with the new tokens, and give out what is new.

    The last piece stays in the window because a decoder may treat the first token of a text apart (the space
    in front of a word).  Text that ends in the replacement character may be half a character and is held back.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._shown: list[int] = []
        self._pending: list[int] = []

    def _new_text(self) -> str:
        before, after = self._tokenizer.decode_each([self._shown, self._shown + self._pending])
        if after.startswith(before):
            return after[len(before) :]
        # A byte that fits nothing made the decoder give up on its neighbours as well.
        return self._tokenizer.decode(self._pending)

    def push(self, token: int) -> str:
        self._pending.append(token)
        text = self._new_text()
        if not text or (text.endswith(REPLACEMENT) and len(self._pending) < MAX_PENDING_TOKENS):
            return ""
        self._shown, self._pending = self._pending, []
        return text

    def flush(self) -> str:
        text = self._new_text() if self._pending else ""
        self._pending = []
        return text


class StopMatcher:
    """Finds the first stop string to be completed, holding back text that may still become one."""

    def __init__(self, stops: Sequence[str], keep_stop: bool = False) -> None:
        self._stops = tuple(stops)
        self._keep_stop = keep_stop
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """The text that is safe to show, and whether a stop string ended it."""
        if not self._stops:
            return text, False
        buffer = self._held + text
        found = [(buffer.find(stop) + len(stop), -len(stop)) for stop in self._stops if stop in buffer]
        if found:
            end, minus_length = min(found)  # completed first; of those, the longest
            self._held = ""
            return buffer[: end if self._keep_stop else end + minus_length], True
        keep = max(self._overlap(buffer, stop) for stop in self._stops)
        self._held = buffer[len(buffer) - keep :]
        return buffer[: len(buffer) - keep], False

    def flush(self) -> str:
        """What was held back and became no stop string."""
        held, self._held = self._held, ""
        return held

    @staticmethod
    def _overlap(buffer: str, stop: str) -> int:
        """Length of the longest end of ``buffer`` that begins ``stop``."""
        for length in range(min(len(buffer), len(stop) - 1), 0, -1):
            if buffer.endswith(stop[:length]):
                return length
        return 0


@dataclass(frozen=True)
class StopRules:
    """What ends a text: ``strings``; ``ids``, which are not part of it unless ``keep`` (special ones never are);
    neither before ``min_tokens``."""

    strings: Sequence[str] = ()
    ids: frozenset[int] = frozenset()
    keep: bool = False
    min_tokens: int = 0


class TextStream:
    """The text of one answer as it grows.

    ``stops`` say what ends it; ``echo`` is what the text begins with.  ``take`` hands out what is new since the last
    time.
    """

    def __init__(self, tokenizer: Tokenizer, stops: StopRules | None = None, echo: str = "") -> None:
        self._detokenizer = tokenizer.detokenizer()
        self._stops = stops or StopRules()
        self._matcher = StopMatcher(self._stops.strings, self._stops.keep)
        self._pieces: list[str] = [echo] if echo else []
        self._num_tokens = 0
        self._num_taken = 0
        self._ended = False

    @property
    def text(self) -> str:
        """All text so far, without what is held back."""
        return "".join(self._pieces)

    def push(self, token: int) -> bool:
        """Take a token; True when it completes a stop string."""
        if self._ended or (token in self._stops.ids and not self._stops.keep):
            return False
        self._num_tokens += 1
        text = self._detokenizer.push(token)
        if self._num_tokens <= self._stops.min_tokens:
            if text:
                self._pieces.append(text)
            return False
        return self._show(text)

    def _show(self, text: str) -> bool:
        shown, self._ended = self._matcher.push(text)
        if shown:
            self._pieces.append(shown)
        return self._ended

    def finish(self) -> None:
        """The answer is over: give out what was held back, unless a stop string ended it."""
        if self._ended:
            return
        if not self._show(self._detokenizer.flush()):
            held = self._matcher.flush()
            if held:
                self._pieces.append(held)
        self._ended = True

    def take(self) -> str:
        """Text that came since the last call."""
        end = len(self._pieces)  # another thread may be adding
        new = "".join(self._pieces[self._num_taken : end])
        self._num_taken = end
        return new
