"""Reads the text of an answer as it grows: content, thoughts and tool calls.

Text that may begin a marker is held back, and so is a call until its arguments begin, because a text that turns out not
to be a call is content.  Arguments that are an object of JSON are given out as they come; other ones when the call is
complete.  A whole text is read in the same way, as one piece.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
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
from penstock.text.answer.values import (
    ARGUMENTS_KEYS,
    MAX_CALLS,
    PythonNames,
    arguments_text,
    bare_value,
    json_object,
    json_value,
    lax_value,
    line_values,
    python_calls,
)

__all__ = ["AnswerParser", "AnswerPart", "MoreArguments", "Piece", "ToolCall"]

_Calls = Sequence[tuple[str, str | dict[str, Any]]]
"""Names and arguments: objects, or texts as the model wrote them."""
_NO_CALLS: _Calls = ()
_MAX_HEADER_CHARS = 1024


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of the content, or of the thoughts."""

    text: str
    is_reasoning: bool = False


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call.  ``arguments``: the text of an object of JSON, or its beginning.

    The text is that of the model, which may be incomplete or wrong, unless the format writes arguments in another way.
    """

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class MoreArguments:
    """The next part of the arguments of the last tool call."""

    text: str


AnswerPart = Piece | ToolCall | MoreArguments


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
        self._parts: list[AnswerPart] = []
        self._arguments: list[str] = []  # of the call that is being read
        self._is_left_out = False
        self._is_open = False  # a message with arguments, which are given out as they come
        self._space = ""  # at the end of a text so far
        self._drops_space = False  # at the beginning of the next text
        self._trims_content = form.tools is not None
        self._openings = form.tools.all_openings if form.tools is not None else ()
        self._marks = tuple(dict.fromkeys((*self._openings, *form.tools.markers))) if form.tools is not None else ()
        self.num_calls = 0
        self._steps = self._channels() if form.has_channels else self._answer()
        self._is_done = False
        self._needs_known = False  # only a known tool's name makes a call
        self._is_begun = False  # the arguments of one of these calls

    def push(self, text: str) -> list[AnswerPart]:
        """Add text, and return the parts that are known by now."""
        if text:
            self._incoming.push(text)
            self._advance()
        return self._take()

    def finish(self) -> list[AnswerPart]:
        """End the text, and return the last parts."""
        self._incoming.is_over = True
        self._advance()
        if self._space:
            self._flush_arguments()
            self._parts.append(Piece(self._space))
            self._space = ""
        return self._take()

    def _advance(self) -> None:
        if not self._is_done:
            self._is_done = next(self._steps, self) is self

    def _take(self) -> list[AnswerPart]:
        self._flush_arguments()
        parts, self._parts = self._parts, []
        return parts

    def _begin_call(self, name: str) -> None:
        """Give out a call whose arguments follow.  From here on the text is no content."""
        self._incoming.mark()
        self._is_begun = True
        self._put_calls([(name, "")])

    def _put_arguments(self, text: str) -> None:
        self._incoming.mark()
        if text and not self._is_left_out:
            self._arguments.append(text)

    def _flush_arguments(self) -> None:
        if self._arguments:
            self._parts.append(MoreArguments("".join(self._arguments)))
            self._arguments = []

    def _put_reasoning(self, text: str) -> None:
        text = self._trimmed(text)
        if text:
            self._flush_arguments()
            self._parts.append(Piece(text, is_reasoning=True))

    def _put_content(self, text: str) -> None:
        if self._trims_content:
            text = self._trimmed(text)
        if text:
            self._flush_arguments()
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
        texts = [(name, text if isinstance(text, str) else arguments_text(text)) for name, text in calls]
        self._end_part()
        for name, text in texts:
            self._flush_arguments()
            self._is_left_out = self._max_calls is not None and self.num_calls >= self._max_calls
            if not self._is_left_out:
                self._parts.append(ToolCall(name, text))
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
        marker = yield from self._texts((closing, *openings), is_reasoning=True)
        if marker == closing:
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
        self._needs_known, self._is_begun = is_bare, False
        closing = tools.closing.strip()
        try:
            while True:
                calls = yield from self._call(tools)
                if not all(self._may_call(name) for name, _ in calls):
                    raise NotACall
                self._put_calls(calls)
                incoming.mark()
                yield from incoming.skip_space()
                if closing and (yield from incoming.accept(closing)):
                    break
                separator = tools.separator.strip()
                if tools.bare and separator and (yield from incoming.accept(separator)):
                    continue
                char = yield from incoming.peek()
                if char and char in tools.bare:  # models leave out the separator
                    continue
                if tools.repeats_opening or not closing or not (yield from incoming.peek()):
                    break
        except NotACall:
            self._put_content(incoming.taken)
            incoming.mark()
            for text in tools.ends if self._is_begun else ():  # it was a call, which breaks off
                yield from incoming.accept(text)
        incoming.mark()

    def _may_call(self, name: str) -> bool:
        return name in self._tools or not self._needs_known

    def _call(self, tools: ToolFormat) -> Step[_Calls]:
        """Read a call, or a list of calls; return those that were not given out while they were read."""
        incoming, parts = self._incoming, tools.call
        if tools.other_call:
            yield from incoming.skip_space()
            begins_json = (yield from incoming.peek()) in "{["
            if begins_json is not (parts[0] is Slot.CALL):
                parts = tools.other_call
        name, calls = "", _NO_CALLS
        for part in parts:
            if part is Slot.CALL:
                yield from self._json_calls(tools.arguments_key)
                return _NO_CALLS
            if part is Slot.PYTHON:
                return (yield from self._python())
            if part is Slot.NAME:
                name = yield from incoming.word()
                calls = [(name, {})]
            elif part is Slot.ARGUMENTS:
                calls = yield from self._json_arguments(name)
            elif part is Slot.LAX:
                calls = yield from self._lax_arguments(tools, name)
            elif part is Slot.LINES:
                calls = [(name, (yield from self._lines(tools, self._tools.get(name, {}))))]
            elif part is Slot.VALUES:
                calls = [(name, (yield from self._values(tools, self._tools.get(name, {}))))]
            else:
                yield from self._text(part)
        return calls

    def _json_arguments(self, name: str) -> Step[_Calls]:
        """Read arguments in JSON behind the name of their function, and give them out as they come."""
        yield from self._incoming.skip_space()
        if (yield from self._incoming.peek()) == "{":
            self._begin_call(name)
            yield from self._incoming.bracketed(self._marks, put=self._put_arguments)
            return _NO_CALLS
        return [(name, json_object((yield from self._incoming.bracketed(self._marks))))]

    def _json_calls(self, arguments_key: str) -> Step[None]:
        """Read a call that is an object of JSON, or a list of them.  Each is given out before the next one is read."""
        incoming = self._incoming
        yield from incoming.skip_space()
        if not (yield from incoming.accept("[")):
            yield from self._json_call(arguments_key)
            return
        for _ in range(MAX_CALLS):
            yield from self._json_call(arguments_key)
            yield from incoming.skip_space()
            if (yield from incoming.accept("]")):
                return
            if not (yield from incoming.accept(",")):
                break
        raise NotACall

    def _json_call(self, arguments_key: str) -> Step[None]:
        """Read a call that is an object of JSON.  Its arguments are given out as they come if its name stands before.

        The arguments have one of several keys; the first one of them counts.
        """
        incoming = self._incoming
        name, arguments, is_out = "", {}, False
        key_of_arguments = ""
        yield from incoming.skip_space()
        if not (yield from incoming.accept("{")):
            raise NotACall
        while True:
            yield from incoming.skip_space()
            key = json_value((yield from incoming.quoted()))
            yield from incoming.skip_space()
            if not (yield from incoming.accept(":")):
                raise NotACall
            yield from incoming.skip_space()
            char = yield from incoming.peek()
            is_first = not key_of_arguments and key in (arguments_key, *ARGUMENTS_KEYS)
            key_of_arguments = key if is_first else key_of_arguments
            if is_first and char == "{" and name and self._may_call(name):
                is_out = True
                self._begin_call(name)
                yield from incoming.bracketed(self._marks, put=self._put_arguments)
            else:
                value = json_value((yield from self._json_text(char)))
                if key == "name" and not is_out:
                    if not isinstance(value, str):
                        raise NotACall
                    name = value
                elif is_first:
                    arguments = json_object(value)
            yield from incoming.skip_space()
            if (yield from incoming.accept("}")):
                break
            if not (yield from incoming.accept(",")):
                raise NotACall
        if not name or not self._may_call(name):
            raise NotACall
        if not is_out:
            self._put_calls([(name, arguments)])
            incoming.mark()
            self._is_begun = True

    def _json_text(self, char: str) -> Step[str]:
        """Read a value of JSON that begins with a character."""
        if char == '"':
            return (yield from self._incoming.quoted())
        if char and char in "{[":
            return (yield from self._incoming.bracketed(self._marks))
        return (yield from self._incoming.scalar())

    def _text(self, part: Part) -> Step[None]:
        """Read a text of the syntax, or parts that may be missing."""
        incoming = self._incoming
        if isinstance(part, str):
            yield from incoming.expect(part)
        elif isinstance(part, OptionalPart):
            yield from incoming.skip_space()
            if (yield from incoming.accept(str(part.parts[0]))) and Slot.WORD in part.parts:
                yield from incoming.word()

    @cached_property
    def _python_names(self) -> PythonNames:
        return PythonNames(self._tools)

    def _python(self) -> Step[_Calls]:
        incoming = self._incoming
        yield from incoming.skip_space()
        if (yield from incoming.peek()) == "[":
            return python_calls((yield from incoming.bracketed(self._marks, is_python=True)), self._python_names)
        name = yield from incoming.word()
        text = name + (yield from incoming.bracketed(self._marks, is_python=True))
        return python_calls(text, self._python_names)

    def _values(self, tools: ToolFormat, schema: Mapping[str, Any]) -> Step[dict[str, Any]]:
        """Read arguments that are written one by one.  The end of the call also ends a value that is not closed."""
        incoming, parts = self._incoming, tools.value
        arguments: dict[str, Any] = {}
        kinds = _kinds(schema)
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
                    text = yield from incoming.until((end.strip(), tools.end_of_values))
                    text = text.removesuffix("\n") if end.startswith("\n") else text
                    arguments[key] = bare_value(text, kinds.get(key), schema, reads_json=tools.reads_json)
                    if incoming.text.startswith(tools.end_of_values, incoming.at):
                        return arguments
                elif isinstance(part, str):
                    yield from incoming.expect(part)

    def _lax_arguments(self, tools: ToolFormat, name: str) -> Step[_Calls]:
        """Read arguments in the model's own kind of JSON, up to the end of the call."""
        text = yield from self._incoming.until((tools.first_end,))
        return [(name, json_object(lax_value(text, tools.string_marks, bare_keys=tools.bare_keys)))]

    def _lines(self, tools: ToolFormat, schema: Mapping[str, Any]) -> Step[dict[str, Any]]:
        """Read arguments in lines, up to the end of the call."""
        text = yield from self._incoming.until((tools.first_end,))
        kinds = _kinds(schema)
        return {
            key: bare_value(value, kinds.get(key), schema, reads_json=tools.reads_json)
            for key, value in line_values(text, str(tools.value[2]), str(tools.value[4])).items()
        }

    def _channels(self) -> Step[None]:
        """Read the channels of gpt-oss: thoughts, calls and content, each with a header."""
        incoming, header, kind = self._incoming, "", "reasoning" if self._begins_reasoning else "content"
        body: list[str] = []  # of a call whose arguments are not given out as they come
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
            elif text:
                self._put_body(kind.removeprefix("call "), body, text)
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

    def _put_body(self, name: str, body: list[str], text: str) -> None:
        """Take a part of the message of a call.  Arguments that begin with a brace are given out as they come."""
        if not self._is_open:
            text = text if body else text.lstrip()
            if text[:1] != "{" or body:
                body += [text] if text else []
                return
            self._is_open = True
            self._begin_call(name)
        text = self._space + text
        shown = text.rstrip()
        self._space = text[len(shown) :]
        self._put_arguments(shown)

    def _end_channel(self, kind: str, header: str, body: list[str]) -> None:
        """End a message.  A call that is not an object of JSON becomes content."""
        if kind == "header":
            self._put_content("" if header.strip() == "assistant" else header)
        elif self._is_open:
            self._is_open = False
        elif kind.startswith("call "):
            try:
                self._put_calls([(kind.removeprefix("call "), json_object("".join(body)))])
            except NotACall:
                self._put_content("".join(body))
        if kind != "content":
            self._end_part()


def _kinds(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the schemas of a tool's arguments."""
    properties = schema.get("properties")
    return properties if isinstance(properties, Mapping) else {}
