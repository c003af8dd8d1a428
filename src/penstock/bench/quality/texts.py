"""Texts that a model is judged on: plain files, lines of JSON with texts or messages, and the built-in sample."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from penstock.checkpoint.side_files import read_small_file
from penstock.config import parse_json, show
from penstock.errors import FileAccessError, InvalidArgumentError, InvalidFileError
from penstock.text.chat_template import find_template, render_chat

if TYPE_CHECKING:
    from penstock.text.tokenizer import Tokenizer

__all__ = ["SAMPLE_NAME", "Document", "TextSource", "encode_document", "open_text", "read_lines"]

MAX_TEXT_BYTES: Final = 1 << 28
SAMPLE_NAME: Final = "built-in sample"
_SAMPLE: Final = Path(__file__).with_name("sample.jsonl")
_FORMAT: Final = (
    'a string, or an object with "text", with "messages", or with "prompt" and "completion"; other fields are ignored'
)
Document = str | list[dict[str, Any]]
"""A text, or messages that the model's chat template renders."""


@dataclass(frozen=True)
class TextSource:
    """The documents of a file.  ``name``: its path, or SAMPLE_NAME.  ``sha256``: of its bytes."""

    name: str
    sha256: str
    documents: tuple[Document, ...]


def open_text(path: Path | str | None) -> TextSource:
    """Read a text; None is the built-in sample: prose, code and a conversation of this project.

    A name that ends in .jsonl or .json has a document in each line (``read_lines``).  Any other file is one document in
    UTF-8.  Raises FileAccessError, and InvalidFileError for what is not a text.
    """
    source = _SAMPLE if path is None else Path(path)
    data = read_bytes("text", source)
    name = SAMPLE_NAME if path is None else str(path)
    if source.suffix in (".jsonl", ".json"):
        documents = tuple(_document(name, number, value) for number, value in read_lines("text", source, data))
    else:
        documents = (_utf8("text", source, data),)
    if not any(documents):
        raise InvalidFileError(f"text: {name} is empty", param="text", code="text_too_short")
    return TextSource(name, hashlib.sha256(data).hexdigest(), documents)


def read_bytes(param: str, path: Path) -> bytes:
    """Return the bytes of the file that an option names; the errors name the option."""
    try:
        return read_small_file(path, MAX_TEXT_BYTES)
    except InvalidFileError as error:
        raise InvalidFileError(f"{param}: {error}", param=param, code="invalid_file") from None
    except OSError as error:
        raise FileAccessError(f"{param}: cannot read {path}: {error.strerror or error}", param=param) from None


def read_lines(param: str, path: Path, data: bytes) -> list[tuple[int, Any]]:
    """Return the values of a file with a JSON value in each line, with the numbers of their lines.

    A file that is one JSON array has its elements instead.  Raises InvalidFileError naming ``param`` and the line.
    """
    text = _utf8(param, path, data)
    if text.lstrip()[:1] == "[":
        values = _parse(param, path, 1, text)
        return list(enumerate(values, 1))
    return [
        (number, _parse(param, path, number, line)) for number, line in enumerate(text.split("\n"), 1) if line.strip()
    ]


def _parse(param: str, path: Path, number: int, line: str) -> Any:
    try:
        return parse_json(line.encode(), f"{path}: line {number}", max_bytes=MAX_TEXT_BYTES, lenient=True)
    except InvalidFileError as error:
        raise InvalidFileError(f"{param}: {error}", param=param, code="invalid_json") from None


def _utf8(param: str, path: Path, data: bytes) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        message = f"{param}: {path}: expected text in UTF-8, got other bytes at {error.start}"
        raise InvalidFileError(message, param=param, code="invalid_file") from None


def _document(name: str, number: int, value: Any) -> Document:
    """Return the document of a line; InvalidFileError for another form."""
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        if isinstance(value.get("text"), str):
            return str(value["text"])
        if isinstance(value.get("messages"), list) and value["messages"]:
            return list(value["messages"])
        parts = [value.get("prompt"), value.get("completion")]
        if all(isinstance(part, str) for part in parts):
            return "".join(map(str, parts))
    fields = ", ".join(map(show, value)) if isinstance(value, dict) else type(value).__name__
    raise InvalidFileError(
        f"text: {name}: line {number}: expected {_FORMAT}; got {fields or 'an object without fields'}",
        param="text",
        code="invalid_text_line",
    )


def encode_document(tokenizer: Tokenizer, document: Document, with_special: bool) -> list[int]:
    """Return the token ids of a document.

    ``with_special`` adds the tokens that the tokenizer puts around a text.  Messages have those of the chat template.
    """
    if isinstance(document, str):
        return tokenizer.encode(document, add_special_tokens=with_special)
    if tokenizer.chat_template is None:
        return tokenizer.encode(_plain(document), add_special_tokens=with_special)
    try:
        text = render_chat(find_template(tokenizer), document, tokenizer.special_tokens, add_generation_prompt=False)
    except InvalidArgumentError as error:
        raise InvalidFileError(f"text: {error}", param="text", code="invalid_text_line") from None
    return tokenizer.encode(text, add_special_tokens=False)


def _plain(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return messages as text, for a model without a chat template."""
    lines = []
    for message in messages:
        content = message.get("content") if isinstance(message, Mapping) else None
        if not isinstance(content, str):
            raise InvalidFileError(
                "text: expected messages with a role and a content of text", param="text", code="invalid_text_line"
            )
        lines.append(f"{message.get('role', 'user')}: {content}")
    return "\n\n".join(lines)
