"""The formats in which models write tool calls and thoughts: one description for each format.

The parser (``parser.py``) and the grammars (``constraint.py``) are made from the descriptions.  A format is chosen by
the markers in a model's chat template.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from typing import Final

from penstock.validation import refusal

__all__ = [
    "DECLARED", "REASONING_FORMATS", "TOOL_FORMATS", "AnswerFormat", "OptionalPart", "Part", "ReasoningFormat", "Slot",
    "ToolFormat", "find_reasoning_format", "find_tool_format",
]  # fmt: skip


class Slot(Enum):
    """A place in the syntax of a call.

    ``CALL``: an object of JSON with name and arguments, or a list of them.  ``NAME``: the name of the function.
    ``ARGUMENTS``: an object of JSON.  ``VALUES``: any number of arguments, as ``ToolFormat.value`` writes one.
    ``LINES``: arguments as ``ToolFormat.value`` writes them, up to the end of the call.  ``LAX``: an object of JSON
    with the marks of ``string_marks`` around strings, and keys without quotes if ``bare_keys``.  ``PYTHON``: a list of
    calls in Python, or one call.  ``KEY`` and ``VALUE``: those of an argument.  ``WORD``: a word without a meaning
    here, such as an id.
    """

    CALL = "call"
    NAME = "name"
    ARGUMENTS = "arguments"
    VALUES = "values"
    LINES = "lines"
    LAX = "lax"
    PYTHON = "python"
    KEY = "key"
    VALUE = "value"
    WORD = "word"


@dataclass(frozen=True)
class OptionalPart:
    """Parts that a model may leave out; the first one is a text."""

    parts: tuple[str | Slot, ...]


Part = str | Slot | OptionalPart
_MARKER: Final = re.compile(r"<[^<>\s]+>|\[[A-Z_/]+\]")


@dataclass(frozen=True, kw_only=True)
class ToolFormat:
    """The syntax of tool calls.

    ``opening``: the text before the calls, or before each if ``repeats_opening``.  ``openings``: other texts that begin
    calls as well.  ``call``: the parts of a call; the parser ignores whitespace around the texts, and the grammar
    writes the texts as they are.  ``other_call``: the parts of a call that begins with a bracket instead.
    ``separator``: the text between calls.  ``closing``: the text behind the last call, or behind each if
    ``repeats_opening``.  ``bare``: an answer that begins with one of these characters may be a call without
    ``opening``, if a tool has its name.  ``value``: the parts of an argument.  ``arguments_key``: the key of the
    arguments in an object of JSON.  ``ends_reasoning``: a call ends the thoughts.  ``signs``: a chat template with all
    texts of one of these tuples is of this format.  ``id_len``: the length of a call's id if the template demands one,
    of digits and letters.  ``has_channels``: the whole answer is in the channels of gpt-oss.  ``is_json_list``: the
    calls are the items of a list of JSON.  ``string_marks`` and ``bare_keys``: see ``Slot.LAX``.  ``reads_json``: bare
    values are JSON where they can be.
    """

    name: str
    opening: str = ""
    call: tuple[Part, ...]
    closing: str = ""
    openings: tuple[str, ...] = ()
    other_call: tuple[Part, ...] = ()
    repeats_opening: bool = True
    separator: str = ""
    bare: str = ""
    value: tuple[Part, ...] = ()
    arguments_key: str = "arguments"
    ends_reasoning: bool = False
    signs: tuple[tuple[str, ...], ...] = ()
    id_len: int = 0
    has_channels: bool = False
    is_json_list: bool = False
    string_marks: tuple[tuple[str, str], ...] = ()
    bare_keys: bool = False
    reads_json: bool = False

    @property
    def all_openings(self) -> tuple[str, ...]:
        """The texts that begin calls."""
        return tuple(text.strip() for text in (self.opening, *self.openings) if text)

    @property
    def is_list(self) -> bool:
        """Return True if calls are the items of a list."""
        return self.call[0] is Slot.PYTHON or self.is_json_list

    @property
    def end_of_values(self) -> str:
        """The text behind arguments that are written one by one."""
        last = self.call[-1]
        return f"{last if isinstance(last, str) else ''}{self.closing}"

    @property
    def first_end(self) -> str:
        """The first text behind the arguments of a call."""
        last = self.call[-1]
        return last if isinstance(last, str) else self.closing.strip()

    @property
    def ends(self) -> tuple[str, ...]:
        """The markers behind the arguments of a call."""
        return tuple(_MARKER.findall(self.end_of_values))

    @property
    def markers(self) -> tuple[str, ...]:
        """The texts that may be special tokens of the model."""
        texts = [self.opening, self.closing, *self.openings, *(text for pair in self.string_marks for text in pair)]
        texts += [part for part in (*self.call, *self.value) if isinstance(part, str)]
        for part in self.call:
            if isinstance(part, OptionalPart):
                texts += [text for text in part.parts if isinstance(text, str)]
        return tuple(dict.fromkeys(_MARKER.findall(" ".join(texts))))


@dataclass(frozen=True, kw_only=True)
class ReasoningFormat:
    """The texts around the thoughts of an answer, which are at its beginning.  ``signs``: as in ToolFormat.

    ``space``: the whitespace that models write before and behind ``closing``.
    """

    name: str
    opening: str
    closing: str
    signs: tuple[tuple[str, ...], ...]
    has_channels: bool = False
    space: tuple[str, str] = ("", "")

    @property
    def head(self) -> str:
        """The text that begins thoughts."""
        return f"{self.opening}analysis{MESSAGE}" if self.has_channels else self.opening

    @property
    def ends(self) -> tuple[str, ...]:
        """The texts that end thoughts: ``closing``, and the beginnings of calls that end thoughts as well."""
        if self.has_channels:
            return CHANNEL_ENDS
        calls = [form.all_openings for form in TOOL_FORMATS.values() if form.ends_reasoning]
        return tuple(dict.fromkeys([self.closing, *(text for texts in calls for text in texts)]))

    @property
    def markers(self) -> tuple[str, ...]:
        """The texts that may be special tokens of the model."""
        return self.opening, self.closing


@dataclass(frozen=True)
class AnswerFormat:
    """The format of an answer: its tool calls and its thoughts, each if it may have them."""

    tools: ToolFormat | None = None
    reasoning: ReasoningFormat | None = None

    @property
    def has_channels(self) -> bool:
        """Return True if the answer is in the channels of gpt-oss."""
        return any(part is not None and part.has_channels for part in (self.tools, self.reasoning))

    @property
    def markers(self) -> tuple[str, ...]:
        """The texts that may be special tokens of the model."""
        channels = (*CHANNEL_MARKERS, CONSTRAIN) if self.has_channels else ()
        parts = [part for part in (self.tools, self.reasoning) if part is not None]
        return tuple(dict.fromkeys([*(mark for part in parts for mark in part.markers), *channels]))


DECLARED: Final = "declared"
"""The name of a format that only a model's own description has."""
CHANNEL: Final = "<|channel|>"
MESSAGE: Final = "<|message|>"
START: Final = "<|start|>"
CHANNEL_ENDS: Final = ("<|end|>", "<|return|>", "<|call|>")
CONSTRAIN: Final = "<|constrain|>"
CHANNEL_MARKERS: Final = (CHANNEL, MESSAGE, START, *CHANNEL_ENDS)

_FENCE_OPEN: Final = "\n```json\n"
_FENCE_CLOSE: Final = "\n```"
_DEEPSEEK_CALLS: Final = "<｜tool▁calls▁begin｜>"
_DEEPSEEK_CALL: Final = "<｜tool▁call▁begin｜>"
_DEEPSEEK_SEP: Final = "<｜tool▁sep｜>"
_DEEPSEEK_CALL_END: Final = "<｜tool▁call▁end｜>"
_DEEPSEEK_END: Final = "<｜tool▁calls▁end｜>"

_FORMATS: Final = (
    ToolFormat(
        name="harmony",
        call=(f"{CHANNEL}commentary to=functions.", Slot.NAME, f" {CONSTRAIN}json{MESSAGE}", Slot.ARGUMENTS),
        closing="<|call|>",
        signs=((CHANNEL, "functions."),),
        has_channels=True,
    ),
    ToolFormat(
        name="deepseek_v3",
        opening=_DEEPSEEK_CALLS,
        call=(f"{_DEEPSEEK_CALL}function{_DEEPSEEK_SEP}", Slot.NAME, _FENCE_OPEN, Slot.ARGUMENTS,
              f"{_FENCE_CLOSE}{_DEEPSEEK_CALL_END}"),
        separator="\n",
        closing=_DEEPSEEK_END,
        repeats_opening=False,
        ends_reasoning=True,
        signs=((_DEEPSEEK_CALL, "```json"),),
    ),
    ToolFormat(
        name="deepseek_v31",
        opening=_DEEPSEEK_CALLS,
        call=(_DEEPSEEK_CALL, Slot.NAME, _DEEPSEEK_SEP, Slot.ARGUMENTS, _DEEPSEEK_CALL_END),
        closing=_DEEPSEEK_END,
        repeats_opening=False,
        ends_reasoning=True,
        signs=((_DEEPSEEK_CALL,),),
    ),
    ToolFormat(
        name="mistral_v11",
        opening="[TOOL_CALLS]",
        call=(Slot.NAME, OptionalPart(("[CALL_ID]", Slot.WORD)), OptionalPart(("[ARGS]",)), Slot.ARGUMENTS),
        other_call=(Slot.CALL,),
        signs=(("[TOOL_CALLS]", "[ARGS]"),),
        id_len=9,
    ),
    ToolFormat(
        name="mistral",
        opening="[TOOL_CALLS]",
        call=(Slot.CALL,),
        other_call=(Slot.NAME, OptionalPart(("[CALL_ID]", Slot.WORD)), OptionalPart(("[ARGS]",)), Slot.ARGUMENTS),
        repeats_opening=False,
        signs=(("[TOOL_CALLS]",),),
        id_len=9,
        is_json_list=True,
    ),
    ToolFormat(
        name="qwen3_coder",
        opening="<tool_call>\n",
        call=("<function=", Slot.NAME, ">\n", Slot.VALUES, "</function>"),
        value=("<parameter=", Slot.KEY, ">\n", Slot.VALUE, "\n</parameter>\n"),
        closing="\n</tool_call>",
        openings=("<function=",),
        separator="\n",
        signs=(("<function=", "<parameter="),),
    ),
    ToolFormat(
        name="glm4",
        opening="<tool_call>",
        call=(Slot.NAME, "\n", Slot.VALUES),
        value=("<arg_key>", Slot.KEY, "</arg_key>\n<arg_value>", Slot.VALUE, "</arg_value>\n"),
        closing="</tool_call>",
        separator="\n",
        signs=(("<arg_key>", "<tool_call>"),),
    ),
    ToolFormat(
        name="lfm2",
        opening="<|tool_call_start|>",
        call=(Slot.PYTHON,),
        closing="<|tool_call_end|>",
        signs=(("<|tool_call_start|>",),),
    ),
    ToolFormat(
        name="hermes",
        opening="<tool_call>\n",
        call=(Slot.CALL,),
        closing="\n</tool_call>",
        separator="\n",
        bare="{",
        signs=(("<tool_call>",),),
    ),
    ToolFormat(
        name="pythonic",
        call=(Slot.PYTHON,),
        openings=("<|python_start|>", "<function_calls>"),
        bare="[",
        signs=(("func_name1(",), ("<|python_start|>",), ("<function_calls>",)),
    ),
    ToolFormat(
        name="llama3_json",
        call=(Slot.CALL,),
        openings=("<|python_tag|>",),
        separator="; ",
        bare="{",
        arguments_key="parameters",
        signs=(("<|python_tag|>",), ('"parameters"', '"name"')),
    ),
)  # fmt: skip
"""In the order in which templates are compared with them."""

TOOL_FORMATS: Final = {form.name: form for form in _FORMATS}
_THOUGHTS: Final = (
    ReasoningFormat(
        name="harmony", opening=CHANNEL, closing=CHANNEL_ENDS[0], signs=((CHANNEL, MESSAGE),), has_channels=True
    ),
    ReasoningFormat(name="mistral", opening="[THINK]", closing="[/THINK]", signs=(("[THINK]",),)),
    ReasoningFormat(
        name="cohere", opening="<|START_THINKING|>", closing="<|END_THINKING|>", signs=(("<|START_THINKING|>",),)
    ),
    ReasoningFormat(name="think", opening="<think>", closing="</think>", signs=(("</think>",),), space=("\n", "\n\n")),
)
REASONING_FORMATS: Final = {form.name: form for form in _THOUGHTS}
_TOOL_ALIASES: Final = {
    "llama4_json": "llama3_json", "llama3": "llama3_json", "llama4_pythonic": "pythonic", "olmo3": "pythonic",
    "qwen3_xml": "qwen3_coder", "qwen": "hermes", "granite4": "hermes", "glm45": "glm4", "glm47": "glm4",
    "openai": "harmony", "gpt_oss": "harmony",
}  # fmt: skip
_REASONING_ALIASES: Final = {
    "qwen3": "think", "deepseek_r1": "think", "deepseek_v3": "think", "glm45": "think", "hunyuan_a13b": "think",
    "openai_gptoss": "harmony", "gpt_oss": "harmony", "cohere_command3": "cohere", "deepseek": "think",
}  # fmt: skip
"""Names of other servers.  Hyphens count as underscores."""


def _has_signs(signs: tuple[tuple[str, ...], ...], template: str) -> bool:
    return any(all(text in template for text in texts) for texts in signs)


def find_tool_format(name: str, template: str, declared: AnswerFormat | None = None) -> ToolFormat | None:
    """Return the format of a name; for "auto" the declared one or that of a chat template, or None; for "none" None.

    Raises InvalidArgumentError naming ``tool_format`` for an unknown name.
    """
    if name == "auto":
        if declared is not None and declared.tools is not None:
            return declared.tools
        return next((form for form in _FORMATS if _has_signs(form.signs, template)), None)
    plain = name.replace("-", "_")
    plain = _TOOL_ALIASES.get(plain, plain)
    if plain != "none" and plain not in TOOL_FORMATS:
        raise refusal("tool_format", f"auto, none, {', '.join(sorted(TOOL_FORMATS))}", name)
    return TOOL_FORMATS.get(plain)


def find_reasoning_format(
    name: str, template: str, field: str = "reasoning_format", declared: AnswerFormat | None = None
) -> ReasoningFormat | None:
    """Return the format of a name; for "auto" the declared one or that of a chat template, or None; for "none" None.

    Raises InvalidArgumentError naming ``field`` for an unknown name.
    """
    if name in ("auto", DECLARED) and declared is not None and declared.reasoning is not None:
        return declared.reasoning
    if name == "auto":
        return next((form for form in _THOUGHTS if _has_signs(form.signs, template)), None)
    plain = name.replace("-", "_")
    plain = _REASONING_ALIASES.get(plain, plain)
    if plain != "none" and plain not in REASONING_FORMATS:
        raise refusal(field, f"auto, none, {', '.join(sorted(REASONING_FORMATS))}", name)
    return REASONING_FORMATS.get(plain)
