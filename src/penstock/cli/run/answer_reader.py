"""The reader of a model's answers in a chat in the terminal: their thoughts, and the tools that they call."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from penstock.cli.progress import format_seconds
from penstock.errors import InvalidArgumentError, PenstockError, UnsupportedError
from penstock.text.answer.constraint import calls_or_answer, grammar_behind_thoughts
from penstock.text.answer.formats import AnswerFormat, find_reasoning_format, find_tool_format
from penstock.text.answer.parser import AnswerParser, AnswerPart, MoreArguments, Piece, ToolCall
from penstock.text.answer.response_template import declared_formats
from penstock.text.chat_template import find_template, render_chat
from penstock.text.grammar.source import GRAMMAR_FIELDS

if TYPE_CHECKING:
    from penstock.cli.run.word_wrap import AnswerWriter
    from penstock.engine.params import SamplingParams
    from penstock.text.tokenizer import Tokenizer

__all__ = ["AnswerReader", "AnswerView", "checked_tools", "read_tools"]

_NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}}


def read_tools(text: str) -> list[dict[str, Any]]:
    """Return the tools in a JSON text: a list of them or one, with or without the part around the function."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidArgumentError(f"tools: expected a JSON list: {error}", param="tools") from None
    return checked_tools(value)


def checked_tools(value: Any) -> list[dict[str, Any]]:
    """Return tools as ``read_tools`` does.  Raises InvalidArgumentError with ``param`` "tools"."""
    tools = [
        tool if not isinstance(tool, dict) or "function" in tool else {"type": "function", "function": tool}
        for tool in (value if isinstance(value, list) else [value])
    ]
    for index, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
            raise InvalidArgumentError(
                f"tools[{index}]: expected a function with a name, got {tool!r:.100}", param="tools"
            )
        if not isinstance(function.get("parameters") or {}, dict):
            raise InvalidArgumentError(f"tools[{index}]: expected a JSON schema as parameters", param="tools")
    return tools


class AnswerReader:
    """The format of a model's answers to messages.

    ``tools``: those that it may call.  Raises UnsupportedError, with ``param`` "tools", if it has none.
    """

    def __init__(self, tokenizer: Tokenizer, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        template = find_template(tokenizer, has_tools=bool(tools))
        declared = declared_formats(tokenizer)
        form = find_tool_format("auto", template, declared) if tools else None
        if tools and (form is None or "tools" not in template):
            raise UnsupportedError("tools: the model's chat template has no tools of a known format", param="tools")
        self._form = AnswerFormat(form, find_reasoning_format("auto", template, declared=declared))
        functions = [tool["function"] for tool in tools]
        self._tools = {function["name"]: function.get("parameters") or _NO_ARGUMENTS for function in functions}
        self._specials = tokenizer.special_ids(self._form.markers)
        reasoning = self._form.reasoning
        self._begins = reasoning is not None and not reasoning.has_channels
        if reasoning is not None and self._begins:
            self._begins = _opening(tokenizer, template, tools).endswith(reasoning.opening)
        self._num_calls = 0

    @property
    def has_parts(self) -> bool:
        """Return True if answers may have thoughts or calls."""
        return self._form != AnswerFormat()

    @property
    def keeps_parts(self) -> bool:
        """Return True if a conversation must keep the parts of an answer, not its text."""
        return self._form.tools is not None or bool(self._specials)

    def parser(self) -> AnswerParser:
        """Return a parser of one answer."""
        return AnswerParser(self._form, self._tools, is_reasoning=self._begins)

    def params(self, params: SamplingParams) -> SamplingParams:
        """Return the sampling of an answer whose thoughts and calls are free of the form that is asked for."""
        if self._specials:
            params = replace(params, skip_special_tokens=False)
        source, thoughts = params.answer_grammar, self._form.reasoning
        if source is None or (thoughts is None and self._form.tools is None):
            return params
        if self._form.tools is not None:
            lark = calls_or_answer(
                source.lark(), self._form.tools, self._tools, thoughts=thoughts,
                is_reasoning=self._begins, is_parallel=True, specials=self._specials,
            )  # fmt: skip
        elif thoughts is not None:
            lark = grammar_behind_thoughts(source.lark(), thoughts, self._specials, has_begun=self._begins)
        fields: dict[str, Any] = dict.fromkeys(GRAMMAR_FIELDS)
        return replace(params, **fields | {"json_object": False, "grammar": lark})

    def message(self, text: str) -> dict[str, Any]:
        """Return the message of an answer's text: content, thoughts and calls apart."""
        parser = self.parser()
        parts = [*parser.push(text), *parser.finish()]
        pieces = [part for part in parts if isinstance(part, Piece)]
        message: dict[str, Any] = {"role": "assistant"}
        message["content"] = "".join(piece.text for piece in pieces if not piece.is_reasoning)
        if thoughts := "".join(piece.text for piece in pieces if piece.is_reasoning):
            message["reasoning_content"] = thoughts
        if calls := [self._call(call) for call in _whole_calls(parts)]:
            message["tool_calls"] = calls
        return message

    def _call(self, call: ToolCall) -> dict[str, Any]:
        self._num_calls += 1
        function = {"name": call.name, "arguments": _values(call)}  # templates expect an object
        return {"id": f"{self._num_calls:09}", "type": "function", "function": function}  # as Mistral's template wants


def _opening(tokenizer: Tokenizer, template: str, tools: Sequence[Mapping[str, Any]]) -> str:
    """Return the prompt of a message, whose end the template may write as the beginning of an answer."""
    messages = [{"role": "user", "content": "x"}]
    try:
        return render_chat(template, messages, tokenizer.special_tokens, tools=[*tools] or None).rstrip()
    except PenstockError:  # it wants other messages
        return ""


def _whole_calls(parts: Sequence[AnswerPart]) -> list[ToolCall]:
    """Return the calls with all of their arguments."""
    calls: list[ToolCall] = []
    for part in parts:
        if isinstance(part, ToolCall):
            calls.append(part)
        elif isinstance(part, MoreArguments):
            calls[-1] = replace(calls[-1], arguments=calls[-1].arguments + part.text)
    return calls


def _values(call: ToolCall) -> dict[str, Any] | str:
    """Return the arguments of a call; their text if the model wrote something else than an object."""
    try:
        values = json.loads(call.arguments)
    except (ValueError, RecursionError):
        return call.arguments
    return values if isinstance(values, dict) else call.arguments


class AnswerView:
    """Writes the parts of one answer: thoughts and calls are dim; folded thoughts are one line with their time."""

    def __init__(self, writer: AnswerWriter, *, shows_thoughts: bool) -> None:
        self._writer, self._shows_thoughts = writer, shows_thoughts
        self._began = 0.0  # when the folded thoughts did
        self._has_text = False
        self._call: list[AnswerPart] = []  # the parts of the call that is being read

    def write(self, parts: Sequence[AnswerPart]) -> None:
        """Write the next parts of the answer; a call once its arguments are complete."""
        for part in parts:
            if isinstance(part, MoreArguments):
                self._call.append(part)
                continue
            self._end_call()
            if isinstance(part, ToolCall):
                self._call = [part]
            elif part.is_reasoning and not self._shows_thoughts:
                if not self._began:
                    self._began = time.monotonic()
                    self._writer.write("Thinking ...", is_thought=True)
            else:
                self._end_thoughts()
                self._writer.write(part.text, is_thought=part.is_reasoning)
                self._has_text = True

    def end(self) -> None:
        """Write what waits for its end: a call, and how long the folded thoughts took."""
        self._end_call()
        self._end_thoughts()

    def _end_call(self) -> None:
        for call in _whole_calls(self._call):
            self._end_thoughts()
            before = "\n" if self._has_text else ""
            self._writer.write(f"{before}-> {call.name}({_arguments(call)})", is_thought=True)
            self._has_text = True
        self._call = []

    def _end_thoughts(self) -> None:
        if self._began:
            self._writer.write(f" {format_seconds(time.monotonic() - self._began)}", is_thought=True)
            self._began, self._has_text = 0.0, True


def _arguments(call: ToolCall) -> str:
    """Return the arguments of a call as Python writes them: ``city="Bern", days=3``."""
    values = _values(call)
    if isinstance(values, str):
        return values
    return ", ".join(f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in values.items())
