"""Reads the text of an answer as it grows: content, thoughts and tool calls.

Text that may begin a marker is held back, and so is a call until it is complete, because a text that turns out not to
be a call is content.  A whole text is read in the same way, as one piece.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.text.answer.formats import (
    CHANNEL,
    CHANNEL_MARKERS,
    MESSAGE,
    START,
    AnswerFormat,
    OptionalPart,
    Part,
    Slot,
    ToolFormat,
)
from penstock.text.answer.incoming import Incoming, NotACall, Step, overlap
from penstock.text.answer.values import arguments_text, json_calls, json_object, python_calls, typed_value

__all__ = ["AnswerParser", "Piece", "ToolCall"]

_Calls = list[tuple[str, dict[str, Any]]]
_MAX_HEADER_CHARS = 1024


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of the content, or of the thoughts."""

    text: str
    is_reasoning: bool = False


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call.  ``arguments``: the text of an object of JSON."""

    name: str
    arguments: str


class AnswerParser:
    """The parts of one answer.

    ``tools``: the JSON schema of the arguments by the name of each tool.  ``is_reasoning``: the prompt has begun the
    thoughts.  ``max_calls``: further calls are left out.
    """

    def __init__(
        self,
        form: AnswerFormat,
        tools: Mapping[str, Mapping[str, Any]],
        *,
        is_reasoning: bool = False,
        max_calls: int | None = None,
    ) -> None:
        self._form, self._tools = form, tools
        self._begins_reasoning, self._max_calls = is_reasoning, max_calls
        self._incoming = Incoming()
        self._parts: list[Piece | ToolCall] = []
        self._space = ""  # at the end of a text so far
        self._drops_space = False  # at the beginning of the next text
        self._trims_content = form.tools is not None
        self._openings = form.tools.all_openings if form.tools is not None else ()
        self._marks = tuple(dict.fromkeys((*self._openings, *form.tools.markers))) if form.tools is not None else ()
        self.num_calls = 0
        self._steps = self._channels() if form.has_channels else self._answer()
        self._is_done = False

    def push(self, text: str) -> list[Piece | ToolCall]:
        """Add text, and return the parts that are known by now."""
        if text:
            self._incoming.push(text)
            self._advance()
        return self._take()

    def finish(self) -> list[Piece | ToolCall]:
        """End the text, and return the last parts."""
        self._incoming.is_over = True
        self._advance()
        if self._space:
            self._parts.append(Piece(self._space))
            self._space = ""
        return self._take()

    def _advance(self) -> None:
        if not self._is_done:
            self._is_done = next(self._steps, self) is self

    def _take(self) -> list[Piece | ToolCall]:
        parts, self._parts = self._parts, []
        return parts

    def _put_reasoning(self, text: str) -> None:
        text = self._trimmed(text)
        if text:
            self._parts.append(Piece(text, is_reasoning=True))

    def _put_content(self, text: str) -> None:
        if self._trims_content:
            text = self._trimmed(text)
        if text:
            self._parts.append(Piece(text))

    def _trimmed(self, text: str) -> str:
        """Return a text without whitespace at its end, which is kept for the next one."""
        if self._drops_space:
            text = text.lstrip()
            if not text:
                return ""
            self._drops_space = False
        text = self._space + text
        shown = text.rstrip()
        self._space = text[len(shown) :]
        return shown

    def _end_part(self) -> None:
        """Drop whitespace between two parts of an answer."""
        self._space, self._drops_space, self._trims_content = "", True, True

    def _put_calls(self, calls: _Calls) -> None:
        texts = [ToolCall(name, arguments_text(arguments)) for name, arguments in calls]
        self._end_part()
        for call in texts:
            if self._max_calls is None or self.num_calls < self._max_calls:
                self._parts.append(call)
                self.num_calls += 1

    def _answer(self) -> Step[None]:
        incoming, reasoning = self._incoming, self._form.reasoning
        if reasoning is not None:
            begins = self._begins_reasoning
            if not begins:
                incoming.mark()
                yield from incoming.skip_space()
                begins = yield from incoming.accept(reasoning.opening)
                if not begins:
                    self._put_content(incoming.taken)
            if begins:
                yield from self._thoughts(reasoning.closing)
        tools = self._form.tools
        if tools is not None and tools.bare:
            yield from self._bare_call(tools)
        yield from self._content()

    def _thoughts(self, closing: str) -> Step[None]:
        """Read the thoughts and their end."""
        tools, self._drops_space = self._form.tools, True
        openings = self._openings if tools is not None and tools.ends_reasoning else ()
        found = yield from self._texts((closing, *openings), is_reasoning=True)
        if found == closing:
            self._incoming.take(len(closing))
        self._end_part()

    def _texts(self, marks: tuple[str, ...], *, is_reasoning: bool = False) -> Step[str]:
        """Read and show text up to the first of some marks, and return that mark; "" at the end of the answer."""
        incoming = self._incoming
        put = self._put_reasoning if is_reasoning else self._put_content
        pattern = re.compile("|".join(map(re.escape, sorted(marks, key=len, reverse=True))) or r"(?!)")
        while True:
            incoming.mark()
            match = pattern.search(incoming.text, incoming.at)
            if match is not None:
                put(incoming.take(match.start() - incoming.at))
                return match[0]
            kept = 0 if incoming.is_over else overlap(incoming.text, incoming.at, marks)
            put(incoming.take(len(incoming.text) - incoming.at - kept))
            if incoming.is_over:
                return ""
            yield

    def _bare_call(self, tools: ToolFormat) -> Step[None]:
        """Read calls without a marker at the beginning of an answer, if they are there."""
        incoming = self._incoming
        incoming.mark()
        yield from incoming.skip_space()
        char = yield from incoming.peek()
        if not char or char not in tools.bare:
            self._put_content(incoming.taken)
            return
        yield from self._calls(tools, is_bare=True)

    def _content(self) -> Step[None]:
        """Read content and calls up to the end."""
        tools, incoming = self._form.tools, self._incoming
        while True:
            opening = yield from self._texts(self._openings)
            if not opening or tools is None:
                return
            incoming.mark()
            first = tools.call[0]
            if not isinstance(first, str) or opening != first.strip():  # else it is the beginning of the call itself
                incoming.take(len(opening))
            yield from self._calls(tools)

    def _calls(self, tools: ToolFormat, *, is_bare: bool = False) -> Step[None]:
        """Read calls behind their opening.  What is not a call becomes content."""
        incoming = self._incoming
        try:
            while True:
                calls = yield from self._call(tools)
                if is_bare and not all(name in self._tools for name, _ in calls):
                    raise NotACall
                self._put_calls(calls)
                incoming.mark()
                yield from incoming.skip_space()
                closing = tools.closing.strip()
                if closing and (yield from incoming.accept(closing)):
                    break
                if tools.bare and (yield from incoming.accept(tools.separator.strip() or "\n")):
                    continue
                if tools.repeats_opening or not closing or not (yield from incoming.peek()):
                    break
        except NotACall:
            self._put_content(incoming.taken)
        incoming.mark()

    def _call(self, tools: ToolFormat) -> Step[_Calls]:
        incoming, parts = self._incoming, tools.call
        if tools.other_call:
            yield from incoming.skip_space()
            begins_json = (yield from incoming.peek()) in "{["
            if begins_json is not (parts[0] is Slot.CALL):
                parts = tools.other_call
        name, arguments = "", {}
        for part in parts:
            if part is Slot.CALL:
                yield from incoming.skip_space()
                return json_calls((yield from incoming.bracketed(self._marks)), tools.arguments_key)
            if part is Slot.PYTHON:
                return (yield from self._python())
            if part is Slot.NAME:
                name = yield from incoming.word()
            elif part is Slot.ARGUMENTS:
                yield from incoming.skip_space()
                arguments = json_object((yield from incoming.bracketed(self._marks)))
            elif part is Slot.VALUES:
                arguments = yield from self._values(tools.value, self._tools.get(name, {}))
            else:
                yield from self._text(part)
        return [(name, arguments)]

    def _text(self, part: Part) -> Step[None]:
        """Read a text of the syntax, or parts that may be missing."""
        incoming = self._incoming
        if isinstance(part, str):
            yield from incoming.expect(part)
        elif isinstance(part, OptionalPart):
            yield from incoming.skip_space()
            if (yield from incoming.accept(str(part.parts[0]))) and Slot.WORD in part.parts:
                yield from incoming.word()

    def _python(self) -> Step[_Calls]:
        incoming = self._incoming
        yield from incoming.skip_space()
        if (yield from incoming.peek()) == "[":
            return python_calls((yield from incoming.bracketed(self._marks, is_python=True)))
        name = yield from incoming.word()
        return python_calls(name + (yield from incoming.bracketed(self._marks, is_python=True)))

    def _values(self, parts: tuple[Part, ...], schema: Mapping[str, Any]) -> Step[dict[str, Any]]:
        """Read arguments that are written one by one."""
        incoming = self._incoming
        arguments: dict[str, Any] = {}
        kinds = schema.get("properties")
        kinds = kinds if isinstance(kinds, Mapping) else {}
        first = str(parts[0]).strip()
        while True:
            yield from incoming.skip_space()
            if not (yield from incoming.accept(first)):
                return arguments
            key = ""
            for index, part in enumerate(parts[1:], 2):
                if part is Slot.KEY:
                    key = yield from incoming.word()
                elif part is Slot.VALUE:
                    end = str(parts[index])
                    text = yield from incoming.until(end.strip())
                    text = text.removesuffix("\n") if end.startswith("\n") else text
                    arguments[key] = typed_value(text, kinds.get(key), schema)
                elif isinstance(part, str):
                    yield from incoming.expect(part)

    def _channels(self) -> Step[None]:
        """Read the channels of gpt-oss: thoughts, calls and content, each with a header."""
        incoming, header, kind = self._incoming, "", "content"
        body: list[str] = []
        pattern = re.compile("|".join(map(re.escape, CHANNEL_MARKERS)))
        while True:
            match = pattern.search(incoming.text, incoming.at)
            kept = 0 if match is not None or incoming.is_over else overlap(incoming.text, incoming.at, CHANNEL_MARKERS)
            end = match.start() if match is not None else len(incoming.text) - kept
            text = incoming.take(end - incoming.at)
            incoming.mark()
            if kind == "header":
                header += text
                if len(header) > _MAX_HEADER_CHARS:
                    self._put_content(header)
                    kind = "content"
            elif kind in ("content", "reasoning"):
                (self._put_content if kind == "content" else self._put_reasoning)(text)
            else:
                body.append(text)
            if match is None:
                if incoming.is_over:
                    self._end_channel(kind, header, body)
                    return
                yield
                continue
            marker = incoming.take(len(match[0]))
            if kind == "header" and marker == MESSAGE:
                kind = self._kind_of(header)
            elif kind == "header" and marker in (CHANNEL, START):
                header += marker
            else:
                self._end_channel(kind, header, body)
                body, header = [], ""
                kind = "header" if marker in (CHANNEL, START) else "content"

    def _kind_of(self, header: str) -> str:
        """Return the kind of a message: content, reasoning, or the name of the function that it calls."""
        recipient = re.search(r"to=(?:functions\.)?([\w.:/\-]+)", header)
        if recipient is not None and self._form.tools is not None:
            return f"call {recipient[1]}"
        return "reasoning" if "analysis" in header and self._form.reasoning is not None else "content"

    def _end_channel(self, kind: str, header: str, body: list[str]) -> None:
        """End a message.  A call that is not an object of JSON becomes content."""
        if kind == "header":
            self._put_content("" if header.strip() == "assistant" else header)
        elif kind.startswith("call "):
            try:
                self._put_calls([(kind.removeprefix("call "), json_object("".join(body)))])
            except NotACall:
                self._put_content("".join(body))
        if kind != "content":
            self._end_part()
