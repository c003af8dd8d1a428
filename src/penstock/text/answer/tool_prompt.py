"""The description of tools for a model whose chat template has none."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from penstock.text.answer.formats import OptionalPart, Part, Slot, ToolFormat

__all__ = ["tool_prompt", "with_tool_prompt"]

_NAME, _KEY, _VALUE = "FUNCTION_NAME", "ARGUMENT_NAME", "VALUE"


def tool_prompt(form: ToolFormat, tools: Sequence[dict[str, Any]]) -> str:
    """Return a text that lists tools and says how calls are written."""
    listed = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    example = f"{form.opening}{''.join(_example(form, part) for part in form.call)}{form.closing}"
    return (
        "# Tools\n\nYou may call functions. These are their names, descriptions and the JSON schemas of their "
        f"arguments:\n\n{listed}\n\nTo call a function, write exactly this, with its name and its arguments:"
        f"\n\n{example}"
    )


def _example(form: ToolFormat, part: Part) -> str:
    arguments = json.dumps({_KEY: _VALUE})
    if isinstance(part, OptionalPart):
        return "[ARGS]" if part.parts[0] == "[ARGS]" else ""
    if part is Slot.VALUES:
        return "".join(_example(form, one) for one in form.value)
    texts = {
        Slot.CALL: f'{{"name": "{_NAME}", "{form.arguments_key}": {arguments}}}',
        Slot.PYTHON: f"[{_NAME}({_KEY}={_VALUE})]",
        Slot.NAME: _NAME,
        Slot.ARGUMENTS: arguments,
        Slot.KEY: _KEY,
        Slot.VALUE: _VALUE,
    }
    return part if isinstance(part, str) else texts.get(part, "")


def with_tool_prompt(messages: list[dict[str, Any]], prompt: str) -> list[dict[str, Any]]:
    """Return messages with a description of tools at the end of the system message; as they are for ""."""
    if not prompt:
        return messages
    if messages and messages[0]["role"] == "system":
        return [{**messages[0], "content": f"{messages[0]['content']}\n\n{prompt}"}, *messages[1:]]
    return [{"role": "system", "content": prompt}, *messages]
