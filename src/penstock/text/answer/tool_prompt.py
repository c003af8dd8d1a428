"""Tools for a model whose chat template has none: their description, earlier calls and what they returned, as text."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, Final

from jinja2.exceptions import SecurityError

from penstock.errors import InvalidArgumentError
from penstock.text.answer.formats import OptionalPart, Part, Slot, ToolFormat
from penstock.text.answer.values import lax_text

__all__ = ["render_described", "tool_prompt", "with_plain_calls", "written_calls"]

_EXAMPLE: Final = ("FUNCTION_NAME", {"ARGUMENT_NAME": "VALUE"})
_Messages = list[dict[str, Any]]


def tool_prompt(form: ToolFormat, tools: Sequence[dict[str, Any]]) -> str:
    """Return a text that lists tools and says how calls are written."""
    listed = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    return (
        "# Tools\n\nYou may call functions. These are their names, descriptions and the JSON schemas of their "
        f"arguments:\n\n{listed}\n\nTo call a function, write exactly this, with its name and its arguments:"
        f"\n\n{written_calls(form, [_EXAMPLE])}"
    )


def written_calls(form: ToolFormat, calls: Sequence[tuple[str, Any]]) -> str:
    """Return calls as a model of a format writes them.  Arguments: an object, or a text that is no JSON."""
    texts = ["".join(_written(form, part, *call) for part in form.call) for call in calls]
    if form.is_list:
        return f"{form.opening}[{', '.join(texts)}]{form.closing}"
    if form.repeats_opening:
        return form.separator.join(f"{form.opening}{text}{form.closing}" for text in texts)
    return f"{form.opening}{form.separator.join(texts)}{form.closing}"


def _written(form: ToolFormat, part: Part, name: str, arguments: Any) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, OptionalPart):
        return "[ARGS]" if part.parts[0] == "[ARGS]" else ""
    values = arguments if isinstance(arguments, dict) else {}
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    if part is Slot.CALL:
        return f'{{"name": {json.dumps(name, ensure_ascii=False)}, "{form.arguments_key}": {text}}}'
    if part is Slot.PYTHON:
        return f"{name}({', '.join(f'{key}={value!r}' for key, value in values.items())})"
    if part is Slot.LAX and isinstance(arguments, dict):
        return lax_text(arguments, form.string_marks, bare_keys=form.bare_keys)
    if part in (Slot.VALUES, Slot.LINES):
        return "".join(_value(form, key, value) for key, value in values.items())
    return name if part is Slot.NAME else text if part in (Slot.ARGUMENTS, Slot.LAX) else ""


def _value(form: ToolFormat, key: str, value: Any) -> str:
    shown = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    texts: dict[Part, str] = {Slot.KEY: key, Slot.VALUE: shown}
    return "".join(part if isinstance(part, str) else texts[part] for part in form.value)


def with_plain_calls(messages: _Messages, form: ToolFormat) -> _Messages:
    """Return messages for a template that knows no calls: each call is text of its message, and results are a user's.

    Results that follow each other, and the user's message behind them, are one message, because some templates demand
    that the roles alternate.
    """
    plain: _Messages = []
    takes_more = False  # the last message has results
    for message in messages:
        calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or ()]
        if message["role"] == "tool":
            text = f"<tool_response>\n{message['content']}\n</tool_response>"
        elif calls:
            text = "\n".join(filter(None, [message["content"], written_calls(form, calls)]))
        else:
            text = message["content"]
        role = "user" if message["role"] == "tool" else message["role"]
        if takes_more and role == "user":
            plain[-1]["content"] += f"\n{text}"
        else:
            others = ("role", "content", "tool_calls", "tool_call_id") if calls or role != message["role"] else ()
            kept = {name: value for name, value in message.items() if name not in others}
            plain.append({**kept, "role": role, "content": text})
        takes_more = role == "user" and (takes_more or message["role"] == "tool")
    return plain


def render_described(render: Callable[[_Messages], str], messages: _Messages, prompt: str) -> str:
    """Render messages with a description of tools; without it for "".

    It is in the system message, or in the first message of the user if the template refuses or drops system messages.
    Raises the errors of ``render``.
    """
    if not prompt:
        return render(messages)
    refusal: InvalidArgumentError | None = None
    try:
        text = render(_in_system_message(messages, prompt))
        if prompt in text:
            return text
    except InvalidArgumentError as error:
        if isinstance(error.__cause__, SecurityError):
            raise
        refusal = error
    index = next((index for index, message in enumerate(messages) if message["role"] == "user"), None)
    if index is not None:
        try:
            return render(_in_message(messages, index, prompt))
        except InvalidArgumentError as error:
            refusal = refusal or error
    if refusal is not None:
        raise refusal
    return text


def _in_system_message(messages: _Messages, prompt: str) -> _Messages:
    if messages and messages[0]["role"] == "system":
        return [{**messages[0], "content": f"{messages[0]['content']}\n\n{prompt}"}, *messages[1:]]
    return [{"role": "system", "content": prompt}, *messages]


def _in_message(messages: _Messages, index: int, prompt: str) -> _Messages:
    described = {**messages[index], "content": f"{prompt}\n\n{messages[index]['content']}"}
    return [*messages[:index], described, *messages[index + 1 :]]
