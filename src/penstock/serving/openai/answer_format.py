"""The formats that a body may ask of an answer: OpenAI's ``response_format``, vLLM's and llama.cpp's fields.

This is the only place that knows how each maps to the grammar fields of SamplingParams.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

from msgspec import Meta

from penstock.api_errors import RefusalError, refuse_if
from penstock.engine.params import SamplingParams
from penstock.errors import PenstockError
from penstock.serving.openai import unsupported_fields
from penstock.serving.request_fields import MAX_NAME_CHARS, Body, extended
from penstock.text.grammar.compiler import check_grammar
from penstock.text.grammar.shared_jobs import SharedJobs
from penstock.text.grammar.source import GRAMMAR_FIELDS

if TYPE_CHECKING:
    from penstock.serving.request_fields import SamplingFields

__all__ = [
    "BUDGETS", "GUIDED", "ResponseFormat", "StructuredOutputs", "asked_grammar", "checked_field", "checked_grammar",
]  # fmt: skip

_NAMES: Final = {
    "json": "json_schema",
    "json_object": "json_object",
    "regex": "regex",
    "choice": "choice",
    "grammar": "grammar",
}
"""vLLM's names of the fields of SamplingParams."""
GUIDED: Final = {f"guided_{name}": field for name, field in _NAMES.items() if name != "json_object"}
BUDGETS: Final = ("thinking_budget", "thinking_budget_tokens", "reasoning_budget", "reasoning_budget_tokens")
"""The names that other servers and their clients have for ``thinking_token_budget``."""
_CHECKS: Final = SharedJobs(check_grammar, "penstock-grammar-check")
"""Threads of their own, so that slow grammars delay nothing else."""

if TYPE_CHECKING:
    _StructuredFields = Body
else:
    _StructuredFields = extended("StructuredFields", Body, _NAMES, unsupported_fields.STRUCTURED)


class StructuredOutputs(_StructuredFields):
    """vLLM's object of grammars: one of its fields."""


class JsonSchemaFormat(Body):
    """A JSON schema with its name.  Answers always follow it, as if ``strict`` were true."""

    schema: dict[str, Any] | None = None
    name: Annotated[str, Meta(max_length=MAX_NAME_CHARS)] | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Body, kw_only=True):
    """The format of an answer: any text, an object of JSON, or JSON that follows a schema."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    json_schema: JsonSchemaFormat | None = None
    schema: Annotated[dict[str, Any] | None, Meta(description="llama.cpp's field, for json_object only.")] = None

    def check(self) -> None:
        """Check that the schema is where the type expects it.  Raises CombinationError."""
        for name, kind in (("json_schema", "json_schema"), ("schema", "json_object")):
            where, has_value = f"response_format.{name}", getattr(self, name) is not None
            refuse_if(has_value and self.type != kind, f"{where} requires the type {kind}", where)
        is_missing = self.type == "json_schema" and self.json_schema is None
        refuse_if(is_missing, "response_format.json_schema is missing", "response_format.json_schema")


def _asked(body: Any) -> Iterator[tuple[str, str, Any]]:
    """Yield the path, the field of SamplingParams and the value of each grammar that a body asks for."""
    pairs = [(name, name) for name in GRAMMAR_FIELDS] + list(GUIDED.items())
    values = [(path, field, getattr(body, path, None)) for path, field in pairs]
    nested = getattr(body, "structured_outputs", None)
    if nested is not None:
        values += [(f"structured_outputs.{name}", field, getattr(nested, name)) for name, field in _NAMES.items()]
    form: ResponseFormat | None = getattr(body, "response_format", None)
    if form is not None:
        form.check()
    if form is not None and form.type == "json_schema" and form.json_schema is not None:
        values.append(("response_format.json_schema.schema", "json_schema", form.json_schema.schema or {}))
    elif form is not None and form.type == "json_object" and form.schema is not None:
        values.append(("response_format.schema", "json_schema", form.schema))
    elif form is not None and form.type == "json_object":
        values.append(("response_format.type", "json_object", True))
    for path, field, value in values:
        if value not in (None, "", [], False):
            yield path, field, value


def asked_grammar(body: Any) -> tuple[str, str, Any] | None:
    """Return the path, the field of SamplingParams and the value of the grammar that a body asks for, if any.

    Raises CombinationError if it asks for two.
    """
    asked = [*_asked(body)]
    for path, *grammar in asked[1:]:
        refuse_if(grammar != [*asked[0][1:]], f"{path}: expected one format, got also {asked[0][0]}", path)
    return asked[0] if asked else None


async def checked_grammar(body: SamplingFields) -> dict[str, Any]:
    """Return the grammar of a body as a keyword of SamplingParams.  Raises RefusalError naming the body's field."""
    asked = asked_grammar(body)
    return {} if asked is None else await checked_field(*asked)


async def checked_field(path: str, field: str, value: Any) -> dict[str, Any]:
    """Return the value of a grammar field as a keyword of SamplingParams.  Raises RefusalError naming ``path``."""
    try:
        source = SamplingParams(**{field: value}).answer_grammar
        if source is not None:
            await asyncio.wrap_future(_CHECKS.begin(source))
    except PenstockError as error:
        raise RefusalError(400, error.naming(path), param=path, code=error.code) from None
    return {field: value}
