"""Chat templates: messages to a prompt.

A template comes with the model and is therefore hostile until proven otherwise: it runs in jinja2's immutable
sandbox, with bounds on its size, on every string that it builds and on the time it takes.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from types import FrameType
from typing import Any, Final

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError
from jinja2.ext import loopcontrols
from jinja2.filters import do_indent
from jinja2.runtime import str_join
from jinja2.sandbox import ImmutableSandboxedEnvironment

from penstock.errors import InvalidArgumentError, InvalidFileError

__all__ = ["check_messages", "render_chat"]

MAX_TEMPLATE_CHARS: Final = 1 << 20
MAX_OUTPUT_CHARS: Final = 16 << 20
MAX_SECONDS: Final = 5.0
_WIDTH: Final = re.compile(r"\d{5,}|\*")


def _bounded(num_chars: int) -> None:
    if num_chars > MAX_OUTPUT_CHARS:
        raise SecurityError(f"it builds a text of more than {MAX_OUTPUT_CHARS} characters")


def _join(pieces: Iterable[str]) -> str:
    parts = list(pieces)
    _bounded(sum(map(len, parts)))
    return "".join(parts)


def _size(value: object) -> int:
    return len(value) if isinstance(value, (str, list, tuple, dict)) else 0


class _BoundedCode(CodeGenerator):
    """Compiles ``a ~ b`` to a bounded call; everything else as jinja2 does."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802 - jinja2's name
        self.write("environment.bounded_concat((")
        for argument in node.nodes:
            self.visit(argument, frame)
            self.write(", ")
        self.write("))")


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, with every way to a long string bounded."""

    code_generator_class = _BoundedCode
    intercepted_binops = frozenset(["*", "**", "+", "%"])
    concat = staticmethod(_join)

    @staticmethod
    def bounded_concat(values: Sequence[object]) -> str:
        _bounded(sum(map(_size, values)))
        return str_join(values)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "+":
            _bounded(_size(left) + _size(right))
        elif operator == "*":
            _bounded(max(_size(left) * right if isinstance(right, int) else 0, 0))
            _bounded(max(_size(right) * left if isinstance(left, int) else 0, 0))
        elif operator == "**" and (abs(left) > 1 << 32 or abs(right) > 64):
            raise SecurityError("it raises to a power that is too large")
        elif operator == "%" and isinstance(left, str) and _WIDTH.search(left):
            raise SecurityError("it formats with a width that is too large")
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 - jinja2's names
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str):
            _check_method(owner, getattr(__obj, "__name__", ""), args)
        return super().call(__context, __obj, *args, **kwargs)


def _check_method(owner: str, name: str, args: tuple[Any, ...]) -> None:
    """Bound what a string's method would build."""
    first = args[0] if args else None
    if name in ("center", "ljust", "rjust", "zfill", "expandtabs") and isinstance(first, int):
        _bounded(first * (owner.count("\t") + 1))
    elif name in ("format", "format_map") and _WIDTH.search(owner):
        raise SecurityError("it formats with a width that is too large")
    elif name == "replace" and len(args) >= 2 and isinstance(first, str):
        _bounded(len(owner) + owner.count(first) * _size(args[1]))
    elif name == "join" and isinstance(first, (list, tuple)):
        _bounded(sum(_size(piece) + len(owner) for piece in first))


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(str(message))


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    if indent is not None and not (isinstance(indent, int) and 0 <= indent <= 64):
        raise SecurityError("tojson: indent must be from 0 to 64")
    unknown = set(options) - {"separators", "sort_keys"}
    if unknown:
        raise jinja2.TemplateError(f"tojson has no option {sorted(unknown)[0]!r}")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _refused(name: str) -> Callable[..., Any]:
    def refuse(*_args: Any, **_kwargs: Any) -> Any:
        raise SecurityError(f"the filter {name!r} is not allowed")

    return refuse


def _bounded_replace(text: Any, old: str, new: str, count: int | None = None) -> str:
    text = str(text)
    _check_method(text, "replace", (old, new))
    return str(text.replace(old, new, -1 if count is None else count))


def _bounded_join(values: Iterable[Any], separator: str = "", attribute: str | int | None = None) -> str:
    parts = [str(v if attribute is None else v[attribute]) for v in values]
    _check_method(separator, "join", (parts,))
    return separator.join(parts)


def _bounded_indent(text: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    text = str(text)
    margin = width if isinstance(width, int) else len(width)
    _bounded(len(text) + (text.count("\n") + 1) * margin)
    return str(do_indent(text, width, first, blank))


def _environment() -> _Environment:
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = _tojson
    environment.filters["replace"] = _bounded_replace
    environment.filters["indent"] = _bounded_indent
    environment.filters["join"] = _bounded_join
    for name in ("center", "format", "filesizeformat", "pprint", "wordwrap", "xmlattr", "urlize"):
        environment.filters[name] = _refused(name)
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals.pop("lipsum", None)
    return environment


@contextmanager
def _deadline(seconds: float) -> Iterator[None]:
    """SecurityError in this thread when the block takes longer: looked at on every line that runs inside."""
    end = time.monotonic() + seconds
    before = sys.gettrace()

    def watch(_frame: FrameType, _event: str, _argument: object) -> Any:
        if time.monotonic() > end:
            raise SecurityError(f"it takes longer than {seconds:g} s")
        return watch

    sys.settrace(watch)
    try:
        yield
    finally:
        sys.settrace(before)


def check_messages(messages: object) -> list[dict[str, Any]]:
    """Messages as a list of dicts with a role; InvalidArgumentError names the one that is wrong."""
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence) or not messages:
        raise InvalidArgumentError("messages must be a list of {'role': ..., 'content': ...} and not empty")
    checked = []
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise InvalidArgumentError(f"messages[{index}] must be an object with a role, not {message!r}")
        if "content" not in message and "tool_calls" not in message:
            raise InvalidArgumentError(f"messages[{index}] has no content: it has {', '.join(map(repr, message))}")
        if not isinstance(message.get("content"), (str, list, type(None))):
            raise InvalidArgumentError(f"messages[{index}]: content must be text, not {message['content']!r}")
        checked.append(dict(message))
    return checked


def render_chat(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    special_tokens: Mapping[str, str],
    *,
    add_generation_prompt: bool = True,
) -> str:
    """The prompt that a template makes of messages.

    ``special_tokens`` maps "bos_token", "eos_token" ... to their text.  InvalidFileError when the template is
    damaged or breaks a bound; InvalidArgumentError when it refuses the messages.
    """
    checked = check_messages(messages)
    if len(template) > MAX_TEMPLATE_CHARS:
        raise InvalidFileError(f"chat template: at most {MAX_TEMPLATE_CHARS} characters, found {len(template)}")
    try:
        with _deadline(MAX_SECONDS):
            compiled = _environment().from_string(template)
            text = compiled.render(
                {**special_tokens, "messages": checked, "add_generation_prompt": add_generation_prompt, "tools": None}
            )
    except jinja2.TemplateSyntaxError as error:
        raise InvalidFileError(f"chat template: line {error.lineno}: {error.message}") from error
    except SecurityError as error:
        raise InvalidFileError(f"chat template: {error}") from error
    except jinja2.TemplateError as error:
        raise InvalidArgumentError(f"messages: the chat template refuses them: {error}") from error
    except (TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RecursionError, MemoryError) as error:
        raise InvalidFileError(f"chat template: {type(error).__name__}: {error}") from error
    return text
