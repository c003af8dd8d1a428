"""The limit on the thoughts of an answer, under the names of several servers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.api_errors import FieldError, refuse_if
from penstock.serving.openai.answer_format import BUDGETS
from penstock.serving.openai.messages import continued_field
from penstock.text.answer.formats import find_reasoning_format
from penstock.text.answer.template_features import read_variables
from penstock.validation import MAX_TOKEN

if TYPE_CHECKING:
    from penstock.serving.openai.bodies import ChatCompletionRequest, TokenizeRequest
    from penstock.serving.settings import GatewaySettings
    from penstock.text.answer.formats import AnswerFormat

__all__ = ["budget_fields", "thinking_budget"]


def thinking_budget(body: ChatCompletionRequest | TokenizeRequest, template: str) -> tuple[str, int] | None:
    """Return the field with the limit on the thoughts, and its value; None without a limit.

    ``chat_template_kwargs.thinking_budget`` is the limit if the template does not read it.  Raises FieldError.
    """
    values = {name: getattr(body, name, None) for name in ("thinking_token_budget", *BUDGETS)}
    variables = body.chat_template_kwargs or {}
    if "thinking_budget" not in read_variables(template):
        values["chat_template_kwargs.thinking_budget"] = variables.get("thinking_budget")
    budgets = [(name, value) for name, value in values.items() if value is not None]
    for name, value in budgets:
        is_count = isinstance(value, int) and not isinstance(value, bool) and -1 <= value <= MAX_TOKEN
        refuse_if(not is_count, f"{name}: expected an integer from -1 to {MAX_TOKEN}, got {value!r:.100}", name)
        other, first = budgets[0]
        refuse_if(value != first, f"{name}: expected {first}, the value of {other}; omit one", name)
    return budgets[0] if budgets and budgets[0][1] >= 0 else None


def budget_fields(
    body: ChatCompletionRequest, settings: GatewaySettings, template: str, declared: AnswerFormat
) -> dict[str, Any]:
    """Return the limit on the thoughts as keywords of SamplingParams.

    Raises FieldError for a model without thoughts, unless the limit is 0.
    """
    name, limit = thinking_budget(body, template) or ("", None)
    form = find_reasoning_format(settings.reasoning_format, template, declared=declared)
    if limit and form is None:
        raise FieldError(
            name, f"{name}: this model's chat template has no thoughts. Leave the field out", "unsupported"
        )
    is_begun = limit is not None and continued_field(body) == "reasoning_content"
    refuse_if(is_begun, f"{name}: expected none where an answer continues thoughts, got {limit}; omit it", name)
    if limit is None or form is None:
        return {"thinking_token_budget": None}
    return {"thinking_token_budget": limit, "thinking_format": form.name}
