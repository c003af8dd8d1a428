"""Chat templates: turn messages into a prompt, and keep the token ids of a conversation from turn to turn.

A template comes with the model and is treated as hostile: it runs in jinja2's immutable sandbox, with limits on its
size, on every value that it builds, and on its time.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any, Final

import jinja2
from jinja2.exceptions import SecurityError

from penstock.errors import InvalidArgumentError, InvalidFileError, UnsupportedError
from penstock.text.template_sandbox import template_environment

if TYPE_CHECKING:
    from penstock.text.tokenizer import Tokenizer

__all__ = ["TurnTokens", "check_messages", "encode_chat", "render_chat"]

MAX_TEMPLATE_CHARS: Final = 1 << 20
MAX_SECONDS: Final = 5.0


@contextmanager
def _deadline(seconds: float) -> Iterator[None]:
    """Raise SecurityError in this thread if the block takes longer; checked on every line that runs in it."""
    end = time.monotonic() + seconds
    before = sys.gettrace()

    def watch(_frame: FrameType, _event: str, _argument: object) -> Any:
        if time.monotonic() > end:
            raise SecurityError(f"it takes longer than {seconds:g} s")
        return watch

    sys.settrace(watch)
    try:
        yield
    finally:
        sys.settrace(before)


def check_messages(messages: object) -> list[dict[str, Any]]:
    """Return messages as a list of dicts with a role.  An InvalidArgumentError names the message that is wrong."""
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence) or not messages:
        raise InvalidArgumentError(
            "messages must be a list of {'role': ..., 'content': ...} and not empty", param="messages"
        )
    checked = []
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise InvalidArgumentError(
                f"messages[{index}] must be an object with a role, not {message!r}", param="messages"
            )
        if "content" not in message and "tool_calls" not in message:
            raise InvalidArgumentError(
                f"messages[{index}] has no content: it has {', '.join(map(repr, message))}", param="messages"
            )
        if not isinstance(message.get("content"), (str, list, type(None))):
            raise InvalidArgumentError(
                f"messages[{index}]: content must be a string, not {message['content']!r}", param="messages"
            )
        checked.append(dict(message))
    return checked


def render_chat(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    special_tokens: Mapping[str, str],
    *,
    add_generation_prompt: bool = True,
) -> str:
    """Return the prompt that a template makes of messages.

    ``special_tokens`` maps "bos_token", "eos_token" and so on to their text.  Raises InvalidFileError if the template
    is damaged or exceeds a limit, and InvalidArgumentError if it refuses the messages.
    """
    checked = check_messages(messages)
    if len(template) > MAX_TEMPLATE_CHARS:
        raise InvalidFileError(
            f"chat template: expected at most {MAX_TEMPLATE_CHARS} characters, found {len(template)}"
        )
    try:
        with _deadline(MAX_SECONDS):
            compiled = template_environment().from_string(template)
            text = compiled.render(
                {**special_tokens, "messages": checked, "add_generation_prompt": add_generation_prompt, "tools": None}
            )
    except jinja2.TemplateSyntaxError as error:
        raise InvalidFileError(f"chat template: line {error.lineno}: {error.message}") from error
    except SecurityError as error:
        raise InvalidFileError(f"chat template: {error}", param="messages") from error
    except jinja2.TemplateError as error:
        raise InvalidArgumentError(f"messages: the chat template refuses them: {error}", param="messages") from error
    except Exception as error:  # the code of a template may raise any exception
        raise InvalidFileError(f"chat template: {type(error).__name__}: {error}", param="messages") from error
    return text


def _template(tokenizer: Tokenizer) -> str:
    if tokenizer.chat_template is None:
        raise UnsupportedError("This model has no chat template. Pass a plain prompt instead of messages.")
    return tokenizer.chat_template


def encode_chat(tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return the token ids of messages.

    Raises UnsupportedError if the model has no template, and the errors of ``render_chat``.
    """
    text = render_chat(_template(tokenizer), messages, tokenizer.special_tokens)
    return tokenizer.encode(text, add_special_tokens=False)


class TurnTokens:
    """The token ids of a conversation, kept from turn to turn.

    The tokens of a sampled answer often differ from those that the tokenizer makes of its text, and pages are shared
    only for equal tokens.  So the ids of the last prompt and of its answer are kept as far as the text of the next
    prompt begins with theirs, and only the rest is encoded::

        prompt = tokens.prompt(messages)
        result = llm.generate(prompt, params)
        tokens.answered(result.token_ids)

    Raises UnsupportedError if the model has no chat template.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._template = _template(tokenizer)
        self._last_prompt: tuple[str, list[int]] = ("", [])
        self._known: tuple[str, list[int], list[int]] = ("", [], [])  # text of a prompt, its ids, ids of the answer

    def prompt(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Return the ids of the messages, including the opening of the answer.

        Raises the errors of ``render_chat``.
        """
        text = render_chat(self._template, messages, self._tokenizer.special_tokens)
        whole = self._tokenizer.encode(text, add_special_tokens=False)
        ids = self._extend_known(text)
        # Some tokenizers encode the beginning of a text differently.
        if self._decode(ids) != self._decode(whole):
            ids = whole
        self._last_prompt = text, ids
        return list(ids)

    def answered(self, token_ids: Sequence[int]) -> None:
        """Note the answer to the last ``prompt``, including an end token.  A turn without an answer needs no call."""
        self._known = (*self._last_prompt, list(token_ids))

    def _extend_known(self, text: str) -> list[int]:
        """Return the known ids of the beginning of ``text``, and the rest encoded."""
        start, prompt_ids, answer_ids = self._known
        if not text.startswith(start):
            return self._tokenizer.encode(text, add_special_tokens=False)
        num_answer, num_chars = self._match(answer_ids, text[len(start) :])
        new_ids = self._tokenizer.encode(text[len(start) + num_chars :], add_special_tokens=False)
        return [*prompt_ids, *answer_ids[:num_answer], *new_ids]

    def _match(self, ids: Sequence[int], text: str) -> tuple[int, int]:
        """Return how many of ``ids`` write the beginning of ``text`` in whole characters, and how many characters."""
        detokenizer, num_chars, ends = self._tokenizer.detokenizer(), 0, [0]
        for token in ids:
            piece = detokenizer.push(token)
            if self._tokenizer.is_special(token) or not text.startswith(piece, num_chars):
                break
            num_chars += len(piece)
            ends.append(num_chars)
        while len(ends) > 1 and self._ends_within_character(ids[: len(ends) - 1]):
            ends.pop()
        return len(ends) - 1, ends[-1]

    def _ends_within_character(self, ids: Sequence[int]) -> bool:
        """Return True if the ids end within a character that the next token may complete."""
        detokenizer = self._tokenizer.detokenizer()
        for token in ids:
            detokenizer.push(token)
        return detokenizer.flush() != ""

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)
