"""The messages and the tools of a conversation, as request bodies have them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

from msgspec import Meta, structs

from penstock.api_errors import CombinationError, refuse_if
from penstock.config import parse_json
from penstock.errors import InvalidArgumentError, InvalidFileError
from penstock.serving.json_bounds import check_counts
from penstock.serving.openai import unsupported_fields
from penstock.serving.request_fields import MAX_NAME_CHARS, Body, extended

__all__ = [
    "Message", "Messages", "Tool", "ToolChoice", "Tools", "check_messages", "check_tools", "continued_field",
    "num_chars", "rendered",
]  # fmt: skip

MAX_MESSAGES: Final = 4096
MAX_TOOLS: Final = 1024

if TYPE_CHECKING:
    _MessageFields = Body
    _PartFields = Body
else:
    _MessageFields = extended("MessageFields", Body, fields=unsupported_fields.MESSAGE)
    _PartFields = extended("PartFields", Body, fields=unsupported_fields.CONTENT_PART)

_Name = Annotated[str, Meta(max_length=MAX_NAME_CHARS)]
_ToolName = Annotated[str, Meta(pattern=r"^[\w.:/-]+\Z", max_length=MAX_NAME_CHARS)]


class ContentPart(_PartFields, kw_only=True):
    """A part of a message's content."""

    text: str
    type: Literal["text"]


class FunctionCall(Body):
    """The function that a call names, and the text of its arguments."""

    name: str
    arguments: str = "{}"
    parsed_arguments: Annotated[Any, unsupported_fields.WITHOUT_EFFECT] = None


class MessageToolCall(Body, kw_only=True):
    """A tool call of an earlier answer."""

    function: FunctionCall
    id: _Name | None = None
    type: Literal["function"] = "function"
    index: int | None = None


_Nothing = Annotated[list[int], Meta(max_length=0)]
"""Some clients repeat fields that they do not use as empty lists."""
_Calls = Annotated[list[MessageToolCall], Meta(max_length=MAX_MESSAGES)]


class Message(_MessageFields, kw_only=True):
    """A message of a conversation.  Only an assistant's message may have no content."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[ContentPart], Meta(max_length=MAX_MESSAGES)] | None = None
    name: _Name | None = None
    tool_calls: Annotated[_Calls | Literal[""] | None, Meta(description="The calls of an assistant's message.")] = None
    tool_call_id: Annotated[_Name | _Nothing | None, Meta(description="The call that a tool's message answers.")] = None
    reasoning_content: Annotated[str | _Nothing | None, Meta(description="An assistant's thoughts.")] = None
    reasoning: Annotated[str | _Nothing | None, Meta(description="Another name of reasoning_content.")] = None

    @property
    def text(self) -> str:
        """The content; "" without any."""
        content = self.content or ""
        return content if isinstance(content, str) else "\n".join(part.text for part in content)

    @property
    def thoughts(self) -> str | None:
        """The thoughts, if there are any."""
        value = self.reasoning_content or self.reasoning
        return value if isinstance(value, str) else None


Messages = Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)]


class ToolFunction(Body, kw_only=True):
    """A function that the model may call.  ``parameters``: the JSON schema of its arguments."""

    name: _ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    """A tool: a function."""

    type: Literal["function"]
    function: ToolFunction

    def plain(self) -> dict[str, Any]:
        """Return the tool for a chat template, without fields that are null."""
        fields = {name: value for name, value in structs.asdict(self.function).items() if value is not None}
        return {"type": self.type, "function": fields}


class NamedFunction(Body):
    """The name of a tool."""

    name: str


class NamedTool(Body):
    """The tool that must be called."""

    type: Literal["function"]
    function: NamedFunction


Tools = Annotated[list[Tool], Meta(max_length=MAX_TOOLS)]
ToolChoice = Literal["none", "auto", "required"] | NamedTool


def check_messages(messages: Sequence[Message]) -> None:
    """Check the fields that only messages of some roles have.  Raises CombinationError."""
    for index, message in enumerate(messages):
        path, is_assistant = f"messages[{index}]", message.role == "assistant"
        has_other = bool(message.tool_calls) or message.thoughts is not None
        if message.content in (None, []) and not (is_assistant and has_other):  # some clients write [] for none
            raise CombinationError(f"{path}.content", f"{path}.content is missing", "missing")
        for name in ("tool_calls", "reasoning_content", "reasoning"):
            is_wrong = bool(getattr(message, name)) and not is_assistant
            refuse_if(is_wrong, f"{path}.{name}: expected the role assistant, got {message.role}", f"{path}.{name}")
        is_wrong = bool(message.tool_call_id) and message.role != "tool"
        refuse_if(is_wrong, f"{path}.tool_call_id: expected the role tool, got {message.role}", f"{path}.tool_call_id")


def check_tools(tools: Sequence[Tool] | None, choice: ToolChoice | None) -> None:
    """Check that names are unique, and that a tool that must be called exists.  Raises CombinationError.

    The parameters must have the shape of a JSON schema, whose keywords are not judged.
    """
    names = [tool.function.name for tool in tools or ()]
    for index, tool in enumerate(tools or ()):
        path, name = f"tools[{index}].function", tool.function.name
        refuse_if(name in names[:index], f"{path}.name: expected a name of its own, got {name!r} again", f"{path}.name")
        _check_schema(tool.function.parameters, f"{path}.parameters")
    if isinstance(choice, NamedTool):
        path, name = "tool_choice.function.name", choice.function.name
        refuse_if(name not in names, f"{path}: expected a name in tools, got {name!r:.100}", path)
    refuse_if(choice == "required" and not names, "tool_choice: required needs tools, got none", "tool_choice")


_OBJECTS: Final = ("properties", "$defs", "definitions")
_LISTS: Final = ("anyOf", "oneOf", "allOf")


def _check_schema(schema: Any, path: str) -> None:
    """Check the shape of a JSON schema and of those in it.  Raises CombinationError."""
    required = schema.get("required") if schema is not None else None
    _expect(required is None or _are_texts(required), f"{path}.required", "a list of names", required)
    waiting = [(schema, path)]
    while waiting:
        node, where = waiting.pop()
        if node is None or isinstance(node, bool):
            continue
        _expect(isinstance(node, dict), where, "a JSON schema", node)
        types = node.get("type")
        _expect(types is None or isinstance(types, str) or _are_texts(types), f"{where}.type", "a type", types)
        for key in _OBJECTS:
            inner = node.get(key)
            _expect(inner is None or isinstance(inner, dict), f"{where}.{key}", "an object of JSON schemas", inner)
            waiting += [(value, f"{where}.{key}.{name}") for name, value in (inner or {}).items()]
        for key in _LISTS:
            inner = node.get(key)
            _expect(inner is None or isinstance(inner, list), f"{where}.{key}", "a list of JSON schemas", inner)
            waiting += [(value, f"{where}.{key}[{index}]") for index, value in enumerate(inner or ())]


def _expect(is_right: bool, path: str, expected: str, value: Any) -> None:
    refuse_if(not is_right, "" if is_right else f"{path}: expected {expected}, got {value!r:.100}", path)


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def plain(message: Message, *, has_objects: bool = True) -> dict[str, Any]:
    """Return a message for the template, which knows OpenAI's ``developer`` as ``system``.

    A message without content has "".  With ``has_objects`` the arguments of calls become objects, which most templates
    expect; a text that is not JSON within the bounds of a body stays a text.
    """
    fields: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role}
    fields["content"] = message.text
    if message.tool_calls:
        fields["tool_calls"] = [_plain_call(call, has_objects=has_objects) for call in message.tool_calls]
    others = {"name": message.name, "tool_call_id": message.tool_call_id or None, "reasoning_content": message.thoughts}
    return fields | {name: value for name, value in others.items() if value is not None}


def _plain_call(call: MessageToolCall, *, has_objects: bool) -> dict[str, Any]:
    text = call.function.arguments.strip() or "{}"
    arguments: Any = text
    if has_objects:
        with contextlib.suppress(ValueError, InvalidFileError):
            data = text.encode()
            check_counts(data, "arguments")
            arguments = parse_json(data, "arguments", max_values=len(data), lets_threads_run=True)
    own = {} if call.id is None else {"id": call.id}
    return {**own, "type": call.type, "function": {"name": call.function.name, "arguments": arguments}}


def rendered(messages: Sequence[Message], render: Callable[[list[dict[str, Any]]], str]) -> str:
    """Return what ``render`` makes of messages.

    A message without content has "", because templates such as Qwen 3's add the content to a text.  If the template
    cannot render arguments as objects, it gets their texts.
    """
    try:
        return render([plain(message) for message in messages])
    except InvalidArgumentError as error:
        is_limit = error.__cause__ is None or type(error.__cause__).__name__ == "SecurityError"
        if is_limit or not any(message.tool_calls for message in messages):
            raise
        try:
            return render([plain(message, has_objects=False) for message in messages])
        except InvalidArgumentError:
            raise error from error.__cause__


def continued_field(body: Any) -> str:
    """Return the field of the last message that the answer continues: the content, or thoughts without a content.

    "" if it continues none.
    """
    if not body.continue_final_message:
        return ""
    last: Message = body.messages[-1]
    return "reasoning_content" if last.thoughts and not last.text and not last.tool_calls else "content"


def num_chars(messages: Sequence[Message]) -> int:
    """Return the number of characters that the messages have."""
    calls = [call.function for message in messages for call in message.tool_calls or ()]
    texts = sum(len(message.text) + len(message.thoughts or "") for message in messages)
    return texts + sum(len(call.name) + len(call.arguments) for call in calls)
