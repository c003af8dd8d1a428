"""The spec of an answer: how it begins, is constrained and is read, with its tools, its thoughts and its template."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

from penstock.api_errors import FieldError, refuse_if
from penstock.engine.params import SamplingParams
from penstock.serving.openai.answer_format import asked_grammar, checked_field
from penstock.serving.openai.messages import NamedTool, continued_field
from penstock.serving.openai.thinking_budget import thinking_budget
from penstock.text.answer.constraint import calls_grammar, calls_or_answer, grammar_behind_thoughts
from penstock.text.answer.formats import (
    AnswerFormat,
    ReasoningFormat,
    ToolFormat,
    find_reasoning_format,
    find_tool_format,
)
from penstock.text.answer.parser import AnswerParser
from penstock.text.answer.response_template import declared_formats
from penstock.text.answer.template_features import read_variables
from penstock.text.answer.tool_prompt import tool_prompt
from penstock.text.tokenizer_threads import call_tokenizer

if TYPE_CHECKING:
    from penstock.serving.openai.bodies import ChatCompletionRequest, TokenizeRequest
    from penstock.serving.settings import GatewaySettings
    from penstock.text.grammar.source import GrammarSource
    from penstock.text.tokenizer import Tokenizer

__all__ = [
    "AnswerSpec",
    "answer_spec_of",
    "chat_grammar",
    "format_of_history",
    "num_tool_chars",
    "prompt_of_tools",
    "template_tools",
    "template_variables",
]  # fmt: skip

_RESERVED: Final = ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message")
_NO_ARGUMENTS: Final = {"type": "object", "properties": {}, "additionalProperties": False}
_THINKING: Final = ("enable_thinking", "thinking")


@dataclass(frozen=True)
class AnswerSpec:
    """The way to read the answers to one conversation.

    ``form`` is that of the parser.  ``thoughts``: the format of the thoughts that an answer in a grammar may begin
    with; ``is_reasoning``: the prompt has begun them.  ``tools``: the schema of the arguments by the name of each tool.
    ``specials``: the ids of the markers that are special tokens.
    """

    form: AnswerFormat
    thoughts: ReasoningFormat | None
    tools: Mapping[str, Mapping[str, Any]]
    is_reasoning: bool
    is_parallel: bool
    choice: str | NamedTool | None
    shows_thoughts: bool
    specials: Mapping[str, int]

    def parser(self) -> AnswerParser:
        """Return a parser of one answer."""
        max_calls = None if self.is_parallel else 1
        return AnswerParser(self.form, self.tools, is_reasoning=self.is_reasoning, max_calls=max_calls)

    @property
    def is_text(self) -> bool:
        """Return True if the text of the answer is the content."""
        return self.form == AnswerFormat()

    @property
    def kept_special_ids(self) -> list[int]:
        """The special tokens that the parser needs."""
        return [self.specials[text] for text in self.form.markers if text in self.specials]

    @property
    def must_call(self) -> bool:
        """Return True if the answer must call a tool."""
        return self.choice == "required" or isinstance(self.choice, NamedTool)

    @cached_property
    def calls_grammar(self) -> str:
        """The grammar of an answer that must call a tool."""
        if self.form.tools is None:
            raise RuntimeError("the answer has no tools")
        is_named = isinstance(self.choice, NamedTool)
        names = [self.choice.function.name] if isinstance(self.choice, NamedTool) else [*self.tools]
        return calls_grammar(
            self.form.tools,
            {name: self.tools[name] for name in names},
            reasoning=self.thoughts,
            is_reasoning=self.is_reasoning,
            is_parallel=self.is_parallel and not is_named,
            specials=self.specials,
        )

    def around(self, source: GrammarSource) -> str | None:
        """Return a grammar that allows calls as well, and begins behind the thoughts.

        None if it would be that of ``source``.
        """
        if self.form.tools is not None:
            return calls_or_answer(
                source.lark(),
                self.form.tools,
                self.tools,
                thoughts=self.thoughts,
                is_reasoning=self.is_reasoning,
                is_parallel=self.is_parallel,
                specials=self.specials,
            )
        if self.thoughts is None:
            return None
        return grammar_behind_thoughts(source.lark(), self.thoughts, self.specials, has_begun=self.is_reasoning)


def template_tools(body: ChatCompletionRequest | TokenizeRequest) -> list[dict[str, Any]] | None:
    """Return the tools that the template gets; None without any, and if none may be called."""
    if not body.tools or getattr(body, "tool_choice", None) == "none":
        return None
    return [tool.plain() for tool in body.tools]


def prompt_of_tools(
    body: ChatCompletionRequest | TokenizeRequest, tool_format: str, template: str, declared: AnswerFormat
) -> str:
    """Return the description of the tools for a template that does not read them; "" for another one.

    Such a template still has the format of calls, which it writes into the history.
    """
    tools = template_tools(body)
    if tools is None or "tools" in read_variables(template):
        return ""
    form = find_tool_format(tool_format, template, declared)
    return "" if form is None else tool_prompt(form, tools)


def format_of_history(tool_format: str, template: str, declared: AnswerFormat) -> ToolFormat | None:
    """Return the format in which earlier calls are written into messages; None for a template that writes calls."""
    return None if "tool_calls" in template else find_tool_format(tool_format, template, declared)


def template_variables(body: ChatCompletionRequest | TokenizeRequest, template: str) -> dict[str, Any]:
    """Return the variables that the template gets: ``chat_template_kwargs``, and those of ``reasoning_effort``
    and of a budget of 0.

    Raises FieldError for an effort that the template does not know.
    """
    variables = dict(body.chat_template_kwargs or {})
    for name in _RESERVED:
        path = f"chat_template_kwargs.{name}"
        refuse_if(name in variables, f"{path}: expected another name; the request has a field for it", path)
    reads = read_variables(template)
    switches = [name for name in _THINKING if name in reads]
    budget = thinking_budget(body, template)
    if budget is not None and budget[1] == 0:
        variables = dict.fromkeys(switches, False) | variables
    effort = getattr(body, "reasoning_effort", None)
    if effort is None:
        return variables
    reads_effort = "reasoning_effort" in reads
    if effort != "none" and not reads_effort and not switches:
        message = "reasoning_effort: this model's chat template has no effort. Leave the field out, or pass none"
        raise FieldError("reasoning_effort", message, "unsupported")
    own: dict[str, Any] = dict.fromkeys(switches, effort != "none")
    if effort != "none" or reads_effort:
        own["reasoning_effort"] = effort
    return own | variables


async def answer_spec_of(
    body: ChatCompletionRequest, settings: GatewaySettings, tokenizer: Tokenizer, template: str, prompt: str
) -> AnswerSpec | None:
    """Return how the answers to a conversation are read; None if their text is the content.

    Raises FieldError if the model has no tools.
    """
    has_tools, declared = template_tools(body) is not None, declared_formats(tokenizer)
    tools = find_tool_format(settings.tool_format, template, declared) if has_tools else None
    if has_tools and tools is None and "tools" not in read_variables(template):
        message = (
            "tools: this model's chat template has no tools. Start the service with --tool-format, or leave them out"
        )
        raise FieldError("tools", message, "unsupported")
    if has_tools and tools is None:
        message = "tools: the format of this model's calls is not known. Start the service with --tool-format"
        raise FieldError("tools", message, "unsupported")
    thoughts = find_reasoning_format(settings.reasoning_format, template, declared=declared)
    shown = prompt.rstrip()
    form = AnswerFormat(tools, None if body.reasoning_format == "none" else thoughts)
    if tools is None and thoughts is None:
        return None
    begins = thoughts is not None and not thoughts.has_channels and shown.endswith(thoughts.opening)
    begins = begins or (thoughts is not None and continued_field(body) == "reasoning_content")
    if thoughts is not None and not begins and (form.reasoning is None or shown.endswith(thoughts.closing)):
        thoughts = None
    markers = dict.fromkeys([*form.markers, *AnswerFormat(None, thoughts).markers])
    return AnswerSpec(
        form,
        thoughts,
        {tool.function.name: tool.function.parameters or _NO_ARGUMENTS for tool in body.tools or ()},
        is_reasoning=begins,
        is_parallel=body.parallel_tool_calls is not False,
        choice=body.tool_choice if has_tools else None,
        shows_thoughts=body.include_reasoning is not False,
        specials=await call_tokenizer(tokenizer, 1, tokenizer.special_ids, tuple(markers)),
    )


def num_tool_chars(body: ChatCompletionRequest | TokenizeRequest) -> int:
    """Return the number of characters that the tools have in JSON."""
    return len(json.dumps(template_tools(body) or ""))


async def chat_grammar(body: ChatCompletionRequest, spec: AnswerSpec | None) -> dict[str, Any]:
    """Return the grammar of an answer as a keyword of SamplingParams: of its calls, or of the format that is asked for.

    Raises RefusalError naming the field of the body.
    """
    if spec is not None and spec.must_call:
        return await checked_field("tools", "grammar", spec.calls_grammar)
    asked = asked_grammar(body)
    if asked is None:
        return {}
    values = await checked_field(*asked)
    source = SamplingParams(**values).answer_grammar
    if spec is None or source is None:
        return values
    if spec.form.tools is not None:  # checked first, so that an error names the tool
        await checked_field("tools", "grammar", spec.calls_grammar)
    around = spec.around(source)
    return values if around is None else await checked_field(asked[0], "grammar", around)
