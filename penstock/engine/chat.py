"""Chat templates: messages to a prompt.

A template comes with the model and is therefore hostile until proven otherwise: it runs in jinja2's immutable
sandbox, with bounds on its size, on every value that it builds and on the time it takes.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, Final

import jinja2
from jinja2.exceptions import SecurityError

from penstock.engine.template import template_environment
from penstock.errors import InvalidArgumentError, InvalidFileError

__all__ = ["check_messages", "render_chat"]

MAX_TEMPLATE_CHARS: Final = 1 << 20
MAX_SECONDS: Final = 5.0


@contextmanager
def _deadline(seconds: float) -> Iterator[None]:
    """SecurityError in this thread when the block takes longer: looked at on every line that runs inside."""
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
    """Messages as a list of dicts with a role; InvalidArgumentError names the one that is wrong."""
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence) or not messages:
        raise InvalidArgumentError("messages must be a list of {'role': ..., 'content': ...} and not empty")
    checked = []
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise InvalidArgumentError(f"messages[{index}] must be an object with a role, not {message!r}")
        if "content" not in message and "tool_calls" not in message:
            raise InvalidArgumentError(f"messages[{index}] has no content: it has {', '.join(map(repr, message))}")
        if not isinstance(message.get("content"), (str, list, type(None))):
            raise InvalidArgumentError(f"messages[{index}]: content must be text, not {message['content']!r}")
        checked.append(dict(message))
    return checked


def render_chat(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    special_tokens: Mapping[str, str],
    *,
    add_generation_prompt: bool = True,
) -> str:
    """The prompt that a template makes of messages.

    ``special_tokens`` maps "bos_token", "eos_token" ... to their text.  InvalidFileError when the template is
    damaged or breaks a bound; InvalidArgumentError when it refuses the messages.
    """
    checked = check_messages(messages)
    if len(template) > MAX_TEMPLATE_CHARS:
        raise InvalidFileError(f"chat template: at most {MAX_TEMPLATE_CHARS} characters, found {len(template)}")
    try:
        with _deadline(MAX_SECONDS):
            compiled = template_environment().from_string(template)
            text = compiled.render(
                {**special_tokens, "messages": checked, "add_generation_prompt": add_generation_prompt, "tools": None}
            )
    except jinja2.TemplateSyntaxError as error:
        raise InvalidFileError(f"chat template: line {error.lineno}: {error.message}") from error
    except SecurityError as error:
        raise InvalidFileError(f"chat template: {error}") from error
    except jinja2.TemplateError as error:
        raise InvalidArgumentError(f"messages: the chat template refuses them: {error}") from error
    except Exception as error:  # whatever the code that a template becomes may raise
        raise InvalidFileError(f"chat template: {type(error).__name__}: {error}") from error
    return text
