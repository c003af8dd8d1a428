"""The sandbox of chat templates: jinja2's immutable sandbox, with a limit on every value that a template creates.

A deadline is not enough, because one call into C can take hours or all memory.  Not every hostile value is long: a list
of lists of lists, forty deep, stands for more text than any machine can hold.  So numbers, strings and containers are
measured where they are created, as they would be written out in full.
"""

from __future__ import annotations

import functools
import json
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from types import CodeType, FrameType
from typing import Any, Final

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import FILTERS, do_indent, make_attrgetter, sync_do_slice
from jinja2.parser import Parser
from jinja2.runtime import Macro, str_join
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace, pass_environment

__all__ = ["compiled_template", "deadline", "template_environment", "template_error"]

MAX_SECONDS: Final = 5.0
"""Limit on the time of one rendering."""
MAX_TEMPLATE_CHARS: Final = 1 << 20
MAX_OUTPUT_CHARS: Final = 16 << 20
"""Limit on the length of a string, or of all strings in a container."""
MAX_TOTAL_CHARS: Final = 1 << 29
"""Limit on the total length of the strings that one rendering creates."""
MAX_ITEMS: Final = 1 << 17
MAX_BITS: Final = 1024
MAX_SEARCH: Final = 1 << 30
"""Limit on the steps of a search that compares every position of one string with all of another."""
MAX_LAYOUT_CHARS: Final = 1 << 20
"""Limit on the strings that the filters urlize and wordwrap lay out with regular expressions."""

RETRY_S: Final = 60.0
"""A template that reached the deadline is compiled again after so long: the machine may have been slow."""
MAX_SLOW: Final = 32

_WATCHED_MODULES: Final = ("jinja2.", "json.", __name__)
"""Modules of the functions that a template runs, beside its own."""
_DIGITS: Final = re.compile(r"\d{5,}")
_STARRED: Final = re.compile(r"%[#0\- +\d.]*\*")
_NESTED: Final = re.compile(r"\{[^{}]*\{")
_TEXT_METHODS: Final = frozenset((
    "capitalize", "casefold", "center", "count", "endswith", "expandtabs", "find", "format", "format_map", "index",
    "isalnum", "isalpha", "isascii", "isdecimal", "isdigit", "isidentifier", "islower", "isnumeric", "isprintable",
    "isspace", "istitle", "isupper", "join", "ljust", "lower", "lstrip", "partition", "removeprefix", "removesuffix",
    "replace", "rfind", "rindex", "rjust", "rpartition", "rsplit", "rstrip", "split", "splitlines", "startswith",
    "strip", "swapcase", "title", "upper", "zfill",
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
    elif name == "expandtabs":
        _check_tabs(owner, *args, **kwargs)
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


def _check_tabs(text: str, tabsize: int = 8) -> None:
    _bounded(len(text) + text.count("\t") * max(0, tabsize))


def _check_search(text: str, other: object) -> None:
    if isinstance(other, str) and len(text) * len(other) > MAX_SEARCH:
        raise SecurityError("it searches for a string that is too long")


class RenderTimeoutError(SecurityError):
    """Raised where a template takes longer than ``MAX_SECONDS``."""


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(str(message))


def _strftime_now(format: str) -> str:
    if len(format) > 1000:
        raise SecurityError("strftime_now: expected at most 1000 characters")
    return datetime.now().strftime(format)


class _Dict:
    """The global ``dict``: what a template can reach of Python's own class."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """The global ``namespace``; as in transformers, no name in it begins with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # so that namespace(self=...) is allowed
        self, *rest = args
        values = dict(*rest, **kwargs)
        for name in values:
            _check_name(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a name in a namespace must not begin with an underscore: {name!r:.60}")


class _Generation(Extension):
    """The tag ``generation`` around the answers of a conversation.

    Training reads from it which tokens an assistant wrote.  Its text is that of its body, in a scope of its own.
    """

    tags = {"generation"}  # noqa: RUF012 - jinja2's attribute

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("body_text"), [], [], body).set_lineno(line)

    def body_text(self, caller: Macro) -> str:
        """Return the text of the body."""
        return str(caller())


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: Sequence[str] | None = None,
    sort_keys: bool = False,
) -> str:
    width = len(indent) if isinstance(indent, str) else indent or 0
    if not (isinstance(width, int) and width <= 64):
        raise SecurityError("tojson: indent must be at most 64")
    if _measure(separators) > 64:
        raise SecurityError("tojson: separators must be short")
    pair = None if separators is None else (separators[0], separators[1])
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=pair, sort_keys=sort_keys)


def _replace(s: Any, old: Any, new: Any, count: int | None = None) -> str:
    text, old, new = str(s), str(old), str(new)
    _check_method(text, "replace", (old, new), {})
    return text.replace(old, new, -1 if count is None else count)


@pass_environment
def _join_filter(
    environment: jinja2.Environment, value: Iterable[Any], d: Any = "", attribute: str | int | None = None
) -> str:
    parts = map(str, value if attribute is None else map(make_attrgetter(environment, attribute), value))
    (pieces,) = _check_method(str(d), "join", (parts,), {})
    return str(d).join(pieces)


def _indent(s: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    text = str(s)
    margin = width if isinstance(width, int) else len(width)
    _bounded(len(text) + (text.count("\n") + 1) * margin)
    return str(do_indent(text, width, first, blank))


def _trim(value: Any, chars: str | None = None) -> str:
    text = str(value)
    _check_search(text, chars)
    return text.strip(chars)


def _round(value: float, precision: int = 0, method: str = "common") -> Any:
    if not -100 <= precision <= 100:
        raise SecurityError("round: precision must be from -100 to 100")
    return FILTERS["round"](value, precision, method)


def _format(value: Any, *args: Any, **kwargs: Any) -> str:
    _check_percent(str(value), _measure((*args, *kwargs.values())))
    return str(FILTERS["format"](str(value), *args, **kwargs))


def _center(value: Any, width: int = 80) -> str:
    _bounded(width)
    return str(value).center(width)


def _slice(value: Iterable[Any], slices: int, fill_with: Any = None) -> list[list[Any]]:
    items = list(value)
    _bounded_items(len(items) + slices)
    return list(sync_do_slice(items, slices, fill_with))


def _batch(value: Iterable[Any], linecount: int, fill_with: Any = None) -> list[list[Any]]:
    items = list(value)
    _bounded_items(len(items) + (0 if fill_with is None else linecount))
    return list(FILTERS["batch"](items, linecount, fill_with))


@pass_environment
def _wordwrap(
    environment: Any,
    s: Any,
    width: int = 79,
    break_long_words: bool = True,
    wrapstring: str | None = None,
    break_on_hyphens: bool = True,
) -> str:
    text = str(s)
    _bounded_layout(text)
    _bounded(len(text) * (1 + len(wrapstring or "")))
    return str(FILTERS["wordwrap"](environment, text, width, break_long_words, wrapstring, break_on_hyphens))


@functools.wraps(FILTERS["urlize"])
def _urlize(context: Any, value: Any, *args: Any, **kwargs: Any) -> str:
    text, others = str(value), _measure((*args, *kwargs.values()))
    _bounded_layout(text)
    _bounded(len(text) * (64 + others))
    return str(FILTERS["urlize"](context, text, *args, **kwargs))


def _bounded_layout(text: str) -> None:
    if len(text) > MAX_LAYOUT_CHARS:
        raise SecurityError(f"it lays out a string of more than {MAX_LAYOUT_CHARS} characters")


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


_OWN_FILTERS: Final[dict[str, Callable[..., Any]]] = {
    "batch": _batch, "center": _center, "format": _format, "indent": _indent, "join": _join_filter,
    "replace": _replace, "round": _round, "slice": _slice, "sum": _sum, "tojson": _tojson, "trim": _trim,
    "urlize": _urlize, "wordwrap": _wordwrap,
}  # fmt: skip


def template_environment() -> jinja2.Environment:
    """Return a new environment for one rendering, with the tags, filters and globals that transformers has."""
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    for name, function in {**environment.filters, **_OWN_FILTERS}.items():
        environment.filters[name] = _measured(environment, function)
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["dict"] = _Dict()
    environment.globals["namespace"] = _Namespace
    environment.globals.pop("lipsum", None)
    return environment


@contextmanager
def deadline() -> Iterator[None]:
    """Raise SecurityError in this thread if the block takes too long; every line of jinja2 is checked.

    Processor time counts, so a busy machine refuses no template.

    Frames of other modules may belong to a destructor or a callback of a weak reference, which run at any point: Python
    drops an exception raised there, and removes the trace function with it.
    """
    end = time.thread_time() + MAX_SECONDS
    before = sys.gettrace()

    def watch(_frame: FrameType, event: str, _argument: object) -> Any:
        # a generator that is closed has events too, but no line
        if event == "line" and time.thread_time() > end:
            raise RenderTimeoutError(f"it takes longer than {MAX_SECONDS:g} s")
        return watch

    def enter(frame: FrameType, _event: str, _argument: object) -> Any:
        module = frame.f_globals.get("__name__") or ""
        watched = frame.f_code.co_filename == "<template>" or module.startswith(_WATCHED_MODULES)
        return watch if watched else None

    sys.settrace(enter)
    try:
        yield
    finally:
        sys.settrace(before)


@functools.lru_cache(maxsize=32)
def compiled_template(template: str) -> CodeType:
    """Return the code of a template, for any environment of ``template_environment``."""
    if len(template) > MAX_TEMPLATE_CHARS:
        raise SecurityError(f"expected at most {MAX_TEMPLATE_CHARS} characters, got {len(template)}")
    return template_environment().compile(template)


@functools.lru_cache(maxsize=32)
def _lasting_error(template: str) -> str:
    """Return why a template does not compile; "" if it does.  Raises RenderTimeoutError."""
    try:
        with deadline():
            compiled_template(template)
    except RenderTimeoutError:
        raise
    except jinja2.TemplateSyntaxError as error:
        return f"chat template: line {error.lineno}: {error.message}"
    except Exception as error:  # any exception of the compilers of jinja2 and of Python
        return f"chat template: {error}"
    return ""


_slow: Final[dict[str, tuple[float, str]]] = {}
"""Templates that reached the deadline, with the time from which they are compiled again, and the reason."""


def template_error(template: str) -> str:
    """Return why a template does not compile; "" if it does.

    The result is kept, but only for ``RETRY_S`` if the template took too long.
    """
    until, reason = _slow.get(template, (0.0, ""))
    if time.monotonic() < until:
        return reason
    try:
        return _lasting_error(template)
    except RenderTimeoutError as error:
        reason = f"chat template: {error}"
        if len(_slow) >= MAX_SLOW:
            _slow.clear()
        _slow[template] = time.monotonic() + RETRY_S, reason
        return reason
