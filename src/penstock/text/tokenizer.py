"""The tokenizer of a model: text to token ids and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, Protocol

from penstock.checkpoint.generation import read_chat_templates, read_tokenizer_config
from penstock.checkpoint.pooling.head import PoolingHead, read_pooling_head
from penstock.config import show
from penstock.core import tokenizer as core_tokenizer
from penstock.errors import InvalidArgumentError, InvalidFileError, UnsupportedError
from penstock.text.detokenizer import ByteDetokenizer, Detokenizer, WindowDetokenizer
from penstock.text.pairs import PairTemplate, read_pair_template
from penstock.validation import listed_token_ids, missing_attribute, wrong_type

if TYPE_CHECKING:
    from penstock.checkpoint.tokenizer_frames import TextWindow, WindowRequest
    from penstock.checkpoint.tokenizer_process import TokenizerProcess

__all__ = ["Tokenizer"]


class _Backend(Protocol):
    """The operations of the compiled tokenizer and of the ``tokenizers`` library."""

    @property
    def is_byte_level(self) -> bool: ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...

    def decode_each(self, lists: Sequence[Sequence[int]], *, skip_special_tokens: bool = True) -> list[str]: ...

    def token(self, token: int) -> tuple[bytes, bool]: ...

    def longest_token(self) -> int: ...

    def vocabulary(self) -> tuple[list[bytes], list[int]]: ...


_HINTS: Final = {"apply_chat_template": "LLM.chat", "batch_decode": "decode_each", "tokenize": "encode"}


_TASK_FILES: Final = ("config.json", "generation_config.json")


class Tokenizer:
    """A ``tokenizer.json``, with the special tokens and the chat template of ``tokenizer_config.json``.

    If the bundle holds the tokenizer in compiled form (``tokenizer.bin``), the core runs it.  Otherwise the
    ``tokenizers`` library runs it in a separate process, because the file is untrusted and the library has no limits.
    The constructor starts that process, so it refuses a file that cannot be opened.  ``token_id`` always asks the
    library.  The post-processor of the file decides whether a prompt begins with the begin-of-text token, as in
    transformers.

    ``task_files``: config.json and generation_config.json, which say what tasks of texts put before them.

    Methods raise TokenizerError for a text or for token ids that the tokenizer fails on.
    """

    def __init__(self, files: Mapping[str, bytes | memoryview]) -> None:
        if "tokenizer.json" not in files:
            raise UnsupportedError(
                "This model has no tokenizer.json. Pass token ids instead of text, or convert its tokenizer first."
            )
        self._data = files["tokenizer.json"]
        compiled = _open_compiled(files)
        self._is_isolated = compiled is None
        self._backend: _Backend = compiled or self._library
        if compiled is None:
            self._library.open()
        config = read_tokenizer_config(files)
        self.special_tokens, self.response_template = config.special_tokens, config.response_template
        self.max_len = config.max_len
        self.chat_templates, self._template_damage = _chat_templates(files)
        self.pooling_head = read_pooling_head(files)
        self.task_files = {name: bytes(files[name]) for name in _TASK_FILES if name in files}
        self._special_ids: dict[str, int | None] = {}

    @property
    def chat_template(self) -> str | None:
        """The chat template; None if the model has none, or none that can be used."""
        return None if self.chat_template_error else self.chat_templates.get("default")

    @property
    def chat_template_error(self) -> str:
        """The reason why the model's chat templates cannot be used; "" if they can, or if it has none.

        A model with such a template completes plain text.
        """
        from penstock.text.template_sandbox import template_error

        if self._template_damage or not self.chat_templates:
            return self._template_damage
        if "default" not in self.chat_templates:
            names = ", ".join(map(show, sorted(self.chat_templates)))
            return f"chat template: expected one named 'default', got {names}"
        return template_error(self.chat_templates["default"])

    @cached_property
    def _library(self) -> TokenizerProcess:
        from penstock.checkpoint.tokenizer_process import TokenizerProcess  # imported here: most models need no process

        return TokenizerProcess(self._data)

    @property
    def is_isolated(self) -> bool:
        """True if every call goes to another process and may wait for it."""
        return self._is_isolated

    def close(self) -> None:
        """End the process of the library, if there is one.  A later call starts another one."""
        library = self.__dict__.get("_library")
        if library is not None:
            library.close()

    def token_id(self, token: str) -> int | None:
        """Return the id of the token with this text; None if the vocabulary does not have it."""
        return self._library.token_id(token)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text.

        ``add_special_tokens`` also adds the tokens that the tokenizer puts around a prompt.
        """
        if not isinstance(text, str):
            raise wrong_type("text", "a string", text)
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise InvalidArgumentError(f"text has a lone surrogate at character {error.start}", param="text") from error
        return self._backend.encode(text, add_special_tokens=add_special_tokens)

    @cached_property
    def longest_token(self) -> int:
        """The largest number of characters that one token can stand for."""
        return self._backend.longest_token()

    def encode_pair(self, first: str, second: str, max_len: int | None = None) -> list[int]:
        """Return the token ids of two texts with the special tokens that the file's post-processor puts around them.

        ``max_len`` cuts the second text so that the pair has at most so many tokens.  The ids of the second text count
        from the ``segment_offset`` of the model's pooling head.  Raises UnsupportedError for a file that does not say
        how texts are paired, and InvalidArgumentError when the first text leaves no room for the second.
        """
        head = self.pooling_head or PoolingHead()
        texts = [self.encode(text, add_special_tokens=False) for text in (first, second)]
        return self._pair_template.fill(texts[0], texts[1], head.segment_offset, max_len)

    @cached_property
    def _pair_template(self) -> PairTemplate:
        return read_pair_template(self._data)

    def windows(self, request: WindowRequest) -> list[TextWindow]:
        """Return the tokens of a text, or of the parts that it is cut into, with their places in the text.

        The ids of tokens of type 1 count from the ``segment_offset`` of the model's pooling head.  Raises
        InvalidArgumentError if ``max_len`` leaves no room for a token of the text that is cut, or for more than the
        ``stride``.
        """
        windows = self._library.windows(request)
        if not windows:
            name = "stride" if request.stride else "max_length"
            raise InvalidArgumentError(
                f"{name}: {request.max_len} tokens leave no room for the text that is cut"
                f"{f' and a stride of {request.stride}' if request.stride else ''}; shorten the other text"
                f"{' or the stride' if request.stride else ''}",
                param=name,
            )
        offset = 0 if self.pooling_head is None else self.pooling_head.segment_offset
        if not offset:
            return windows
        typed = ([token + offset * kind for token, kind in zip(w.ids, w.types, strict=True)] for w in windows)
        return [replace(window, ids=ids) for window, ids in zip(windows, typed, strict=True)]

    def join_tokens(self, lists: Sequence[Sequence[str]]) -> list[str]:
        """Return the text that each list of tokens' texts stands for."""
        return self._library.join_tokens(lists)

    @property
    def has_subword_prefix(self) -> bool:
        """True if a token inside a word begins with a mark, such as ``##``."""
        return self._library.has_subword_prefix

    def spellings(self, word: str) -> list[tuple[int, ...]]:
        """Return the token sequences that write a word: at the beginning of a text, and after a space.

        This is the rule of vLLM's ``bad_words``.
        """
        plain = tuple(self.encode(word.lstrip() or word, add_special_tokens=False))
        spaced = tuple(self.encode(" " + (word.lstrip() or word), add_special_tokens=False))
        sequences = [plain] if plain else []
        if spaced and (not plain or (spaced[0] != plain[0] and len(spaced) == len(plain))):
            sequences.append(spaced)
        return sequences

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of token ids."""
        return self._backend.decode(listed_token_ids("ids", ids), skip_special_tokens=skip_special_tokens)

    def decode_each(self, lists: Sequence[Sequence[int]], *, skip_special_tokens: bool = True) -> list[str]:
        """Return the text of each list of token ids."""
        return self._backend.decode_each(lists, skip_special_tokens=skip_special_tokens)

    def detokenizer(self, *, skip_special_tokens: bool = True, keeps_bytes: bool = False) -> Detokenizer:
        """Return a new incremental detokenizer.

        ``keeps_bytes``: the text is the bytes of all tokens, also the space in front of the first word, which some
        tokenizers drop.
        """
        kind = ByteDetokenizer if keeps_bytes or self._backend.is_byte_level else WindowDetokenizer
        return kind(self, skip_special_tokens=skip_special_tokens)

    def is_special(self, token: int) -> bool:
        """Return True if a token stands for no text."""
        return self._backend.token(token)[1]

    def special_ids(self, texts: Sequence[str]) -> dict[str, int]:
        """Return the id of each of the texts that is one special token."""
        for text in texts:
            if text not in self._special_ids:
                ids = self.encode(text, add_special_tokens=False)
                self._special_ids[text] = ids[0] if len(ids) == 1 and self.is_special(ids[0]) else None
        ids_of = {text: self._special_ids[text] for text in texts}
        return {text: token for text, token in ids_of.items() if token is not None}

    def token_bytes(self, token: int, *, skip_special_tokens: bool = True) -> bytes:
        """Return the bytes of a token, possibly part of a character; b"" for an unknown token.

        Those of a special token are b"", too, unless ``skip_special_tokens`` is False.
        """
        text, special = self._backend.token(token)
        return b"" if special and skip_special_tokens else text

    def vocabulary(self) -> tuple[list[bytes], list[int]]:
        """Return the bytes of each token by its id, and the ids of special tokens.

        Raises UnsupportedError if the tokens of the tokenizer are not bytes and the core does not support its kind.
        """
        return self._backend.vocabulary()

    if not TYPE_CHECKING:  # type checkers know the attributes

        def __getattr__(self, name: str) -> Any:
            raise missing_attribute("Tokenizer", name, dir(type(self)), _HINTS)


def _chat_templates(files: Mapping[str, bytes | memoryview]) -> tuple[dict[str, str], str]:
    """Return the chat templates by name, and why they cannot be read; a request for plain text needs none of them."""
    try:
        return read_chat_templates(files), ""
    except InvalidFileError as error:
        return {}, str(error)


def _open_compiled(files: Mapping[str, bytes | memoryview]) -> core_tokenizer.NativeTokenizer | None:
    """Open the tokenizer that export compiled; None if there is none, or if the core does not support its kind."""
    data = files.get(core_tokenizer.TOKENIZER_SEGMENT)
    if data is None:
        return None
    tokenizer = core_tokenizer.NativeTokenizer.of_segment(bytes(data))
    return None if tokenizer.info.unsupported else tokenizer
