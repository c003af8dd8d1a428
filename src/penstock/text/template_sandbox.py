"""The sandbox of chat templates: jinja2's immutable sandbox, with a limit on every value that a template creates.

A deadline is not enough, because one call into C can take hours or all memory.  Not every hostile value is long: a list
of lists of lists, forty deep, stands for more text than any machine can hold.  So numbers, strings and containers are
measured where they are created, as they would be written out in full.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from typing import Any, Final

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError
from jinja2.ext import loopcontrols
from jinja2.filters import FILTERS, do_indent
from jinja2.runtime import str_join
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

__all__ = ["template_environment"]

MAX_OUTPUT_CHARS: Final = 16 << 20
"""Limit on the length of a string, or of all strings in a container."""
MAX_TOTAL_CHARS: Final = 1 << 29
"""Limit on the total length of the strings that one rendering creates."""
MAX_ITEMS: Final = 1 << 17
MAX_BITS: Final = 1024
MAX_SEARCH: Final = 1 << 30
"""Limit on the steps of a search that compares every position of one string with all of another."""

_DIGITS: Final = re.compile(r"\d{5,}")
_STARRED: Final = re.compile(r"%[#0\- +\d.]*\*")
_NESTED: Final = re.compile(r"\{[^{}]*\{")
_REFUSED_FILTERS: Final = (
    "batch",
    "center",
    "filesizeformat",
    "format",
    "pprint",
    "slice",
    "urlize",
    "wordwrap",
    "xmlattr",
)
_TEXT_METHODS: Final = frozenset((
    "capitalize", "casefold", "center", "count", "endswith", "find", "format", "format_map", "index", "isalnum",
    "isalpha", "isascii", "isdecimal", "isdigit", "islower", "isnumeric", "isprintable", "isspace", "istitle",
    "isupper", "join", "ljust", "lower", "lstrip", "partition", "removeprefix", "removesuffix", "replace", "rfind",
    "rindex", "rjust", "rpartition", "rsplit", "rstrip", "split", "splitlines", "startswith", "strip", "swapcase",
    "title", "upper", "zfill",
))  # fmt: skip
_SEARCHES: Final = frozenset(("lstrip", "rfind", "rindex", "rpartition", "rsplit", "rstrip", "strip", "trim"))


def _bounded(num_chars: int) -> None:
    if num_chars > MAX_OUTPUT_CHARS:
        raise SecurityError(f"it builds a string of more than {MAX_OUTPUT_CHARS} characters")


def _bounded_items(count: int) -> None:
    if count > MAX_ITEMS:
        raise SecurityError(f"it builds a list of more than {MAX_ITEMS} items")


def _measure(value: object) -> int:
    """Return the characters of a string, or of all strings in a container, each as often as it would be written."""
    if isinstance(value, (str, bytes)):
        _bounded(len(value))
        return len(value)
    chars = items = 0
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, Namespace):
            item = object.__getattribute__(item, "_Namespace__attrs")
        if isinstance(item, dict):
            item = [*item.keys(), *item.values()]
        if isinstance(item, (list, tuple, set, frozenset)):
            items += len(item)
            _bounded_items(items)
            if set(map(type, item)) == {str}:
                chars += sum(map(len, item))
            else:
                waiting.extend(item)
        elif isinstance(item, (str, bytes)):
            chars += len(item)
        elif isinstance(item, int) and item.bit_length() > MAX_BITS:
            raise SecurityError(f"it computes with a number of more than {MAX_BITS} bits")
        _bounded(chars)
    return chars


def _join(pieces: Iterable[str]) -> str:
    parts = list(pieces)
    _bounded(sum(map(len, parts)))
    return "".join(parts)


class _BoundedCode(CodeGenerator):
    """Compiles ``a ~ b`` and container literals to bounded calls, and everything else as jinja2 does."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802 - jinja2's name
        self.write("environment.bounded_concat((")
        for argument in node.nodes:
            self.visit(argument, frame)
            self.write(", ")
        self.write("))")

    def _bounded(self, visit: Callable[[Any, Frame], None], node: nodes.Expr, frame: Frame) -> None:
        self.write("environment.measured(")
        visit(node, frame)
        self.write(")")

    def visit_List(self, node: nodes.List, frame: Frame) -> None:  # noqa: N802
        self._bounded(super().visit_List, node, frame)

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:  # noqa: N802
        self._bounded(super().visit_Dict, node, frame)

    def visit_Tuple(self, node: nodes.Tuple, frame: Frame) -> None:  # noqa: N802
        if node.ctx == "load":
            self._bounded(super().visit_Tuple, node, frame)
        else:  # the target of an assignment
            super().visit_Tuple(node, frame)


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, with a limit on every way to a large value."""

    code_generator_class = _BoundedCode
    intercepted_binops = frozenset(["*", "**", "+", "%", "//"])
    concat = staticmethod(_join)
    total_chars = 0

    def measured(self, value: Any) -> Any:
        """Measure and count ``value``, and return it."""
        chars = _measure(value)
        if isinstance(value, str):
            self.total_chars += chars
            if self.total_chars > MAX_TOTAL_CHARS:
                raise SecurityError(f"it builds strings of more than {MAX_TOTAL_CHARS} characters in total")
        return value

    def bounded_concat(self, values: Sequence[object]) -> str:
        _measure(values)
        return str(self.measured(str_join(values)))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        chars, right_chars = _measure(left), _measure(right)
        if operator == "+":
            _bounded(chars + right_chars)
        elif operator == "*":
            for value, num_chars, times in ((left, chars, right), (right, right_chars, left)):
                if isinstance(times, int) and isinstance(value, (str, bytes, list, tuple)):
                    _bounded(num_chars * times)
                    _bounded_items(0 if isinstance(value, (str, bytes)) else len(value) * times)
        elif operator == "**" and (abs(left) > 1 << 32 or abs(right) > 64):
            raise SecurityError("it raises to a power that is too large")
        elif operator == "%" and isinstance(left, (str, bytes)):
            _check_percent(left if isinstance(left, str) else left.decode("latin-1"), right_chars)
        return self.measured(super().call_binop(context, operator, left, right))

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 - jinja2's names
        method = getattr(__obj, "__wrapped__", __obj)  # the sandbox wraps str.format
        owner, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
        if isinstance(owner, str):
            args = _check_method(owner, name, args, kwargs)
        elif isinstance(owner, (bytes, int, float, complex)):
            raise SecurityError(f"it calls {type(owner).__name__}.{name}")
        _measure((*args, *kwargs.values()))
        return __self.measured(super().call(__context, __obj, *args, **kwargs))


def _check_percent(text: str, right_chars: int) -> None:
    if _DIGITS.search(text) or _STARRED.search(text):
        raise SecurityError("it formats with a width that is too large")
    _bounded(len(text) + text.count("%") * right_chars)


def _check_method(owner: str, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Limit what a string method would build.  Returns the arguments to call it with."""
    first = args[0] if args else None
    if name not in _TEXT_METHODS:
        raise SecurityError(f"it calls str.{name}")
    if name in ("center", "ljust", "rjust", "zfill") and isinstance(first, int):
        _bounded(first)
    elif name in ("format", "format_map"):
        if _DIGITS.search(owner) or _NESTED.search(owner.replace("{{", "")):
            raise SecurityError("it formats with a width that is too large")
        _bounded(len(owner) + owner.count("{") * _measure((*args, *kwargs.values())))
    elif name == "replace" and len(args) >= 2 and isinstance(first, str) and isinstance(args[1], str):
        _bounded(len(owner) + owner.count(first) * len(args[1]))
    elif name == "join" and first is not None:
        pieces = list(first)
        _bounded(_measure(pieces) + len(owner) * len(pieces))
        return (pieces, *args[1:])
    elif name in _SEARCHES:
        _check_search(owner, first)
    return args


def _check_search(text: str, other: object) -> None:
    if isinstance(other, str) and len(text) * len(other) > MAX_SEARCH:
        raise SecurityError("it searches for a string that is too long")


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(str(message))


def _strftime_now(pattern: str) -> str:
    if len(pattern) > 1000:
        raise SecurityError("strftime_now: expected at most 1000 characters")
    return datetime.now().strftime(pattern)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    if indent is not None and not (isinstance(indent, int) and 0 <= indent <= 64):
        raise SecurityError("tojson: indent must be from 0 to 64")
    unknown = set(options) - {"separators", "sort_keys"}
    if unknown:
        raise jinja2.TemplateError(f"tojson has no option {sorted(unknown)[0]!r}")
    if _measure(options.get("separators")) > 64:
        raise SecurityError("tojson: separators must be short")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _refused(name: str) -> Callable[..., Any]:
    def refuse(*_args: Any, **_kwargs: Any) -> Any:
        raise SecurityError(f"the filter {name!r} is not allowed")

    return refuse


def _replace(text: Any, old: str, new: str, count: int | None = None) -> str:
    text = str(text)
    _check_method(text, "replace", (old, new), {})
    return str(text.replace(old, new, -1 if count is None else count))


def _join_filter(values: Iterable[Any], separator: str = "", attribute: str | int | None = None) -> str:
    parts = [str(v if attribute is None else v[attribute]) for v in values]
    _check_method(separator, "join", (parts,), {})
    return str(separator.join(parts))


def _indent(text: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    text = str(text)
    margin = width if isinstance(width, int) else len(width)
    _bounded(len(text) + (text.count("\n") + 1) * margin)
    return str(do_indent(text, width, first, blank))


def _trim(text: Any, chars: str | None = None) -> str:
    text = str(text)
    _check_search(text, chars)
    return str(text.strip(chars))


def _round(value: float, precision: int = 0, method: str = "common") -> Any:
    if not -100 <= precision <= 100:
        raise SecurityError("round: precision must be from -100 to 100")
    return FILTERS["round"](value, precision, method)


def _measured(environment: _Environment, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)  # keeps the attribute by which jinja2 passes a context
    def run(*args: Any, **kwargs: Any) -> Any:
        for value in (*args, *kwargs.values()):
            _measure(value)
        return environment.measured(function(*args, **kwargs))

    return run


@functools.wraps(FILTERS["sum"])
def _sum(environment: Any, iterable: Any, attribute: Any = None, start: Any = 0) -> Any:
    if not isinstance(start, (int, float)):
        raise SecurityError("sum: start must be a number")
    return FILTERS["sum"](environment, iterable, attribute, start)


def template_environment() -> jinja2.Environment:
    """Return a new environment for one rendering."""
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    own = {"tojson": _tojson, "replace": _replace, "indent": _indent, "join": _join_filter, "trim": _trim,
           "round": _round, "sum": _sum}  # fmt: skip
    for name, function in {**environment.filters, **own}.items():
        environment.filters[name] = _measured(environment, function)
    for name in _REFUSED_FILTERS:
        environment.filters[name] = _refused(name)
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals.pop("lipsum", None)
    return environment
