"""The features that a chat template offers to authors of requests: tools, thoughts and the switches of thinking."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Final, Literal

import jinja2
from jinja2 import meta

from penstock.errors import PenstockError
from penstock.text.answer.formats import find_reasoning_format, find_tool_format
from penstock.text.answer.response_template import declared_formats
from penstock.text.chat_template import find_template
from penstock.text.template_sandbox import deadline, template_environment, template_error

if TYPE_CHECKING:
    from penstock.text.tokenizer import Tokenizer

__all__ = ["TemplateFeature", "features_of", "read_variables"]

TemplateFeature = Literal["tools", "thoughts", "enable_thinking", "thinking", "reasoning_effort"]
_SWITCHES: Final[tuple[TemplateFeature, ...]] = ("enable_thinking", "thinking", "reasoning_effort")


@functools.lru_cache(maxsize=32)
def _variables(template: str) -> frozenset[str]:
    with deadline():
        return frozenset(meta.find_undeclared_variables(template_environment().parse(template)))


def read_variables(template: str) -> frozenset[str]:
    """Return the variables that a template reads; none of one that does not compile."""
    if template_error(template):
        return frozenset()
    try:
        return _variables(template)
    except (jinja2.TemplateError, RecursionError):
        return frozenset()


def features_of(tokenizer: Tokenizer, tool_format: str = "auto", reasoning_format: str = "auto") -> list[str]:
    """Return the features of a model's chat template; none without a template.

    "tools": requests may have tools, whose calls are read; a template that does not read them gets their description in
    a message.  "thoughts": thoughts are read apart from the answer.
    "enable_thinking", "thinking" and "reasoning_effort": the template reads a variable of this name.  The formats are
    those of GatewaySettings.
    """
    try:
        template = find_template(tokenizer)
        with_tools = find_template(tokenizer, has_tools=True)
    except PenstockError:
        return []
    features: list[str] = []
    declared = declared_formats(tokenizer)
    if find_tool_format(tool_format, with_tools, declared) is not None:
        features.append("tools")
    if find_reasoning_format(reasoning_format, template, declared=declared) is not None:
        features.append("thoughts")
    return features + [name for name in _SWITCHES if name in read_variables(template)]
