"""The reference of errors: statuses, exceptions, and every code with the messages that carry it."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

from generate.http import statuses
from generate.markdown import code, page, summary, table
from penstock import errors

PACKAGE = Path(__file__).parents[2] / "src/penstock"
CLASSES = {name: getattr(errors, name) for name in errors.__all__}


def text_of(node: ast.expr) -> str:
    """Return a message with placeholders for the parts that are known only later."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=values):
            return "".join(text_of(one) for one in values)
        case ast.FormattedValue(value=value):
            name = ast.unparse(value)
            return "{" + (re.findall(r"\w+", name) or ["value"])[-1] + "}"
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return text_of(left) + text_of(right)
    return ""


def assigned(function: ast.AST) -> dict[str, str]:
    """Return the texts that a function gives to names, as messages are often made a line earlier."""
    found: dict[str, str] = {}
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and text_of(node.value):
            found.setdefault(node.targets[0].id, text_of(node.value))
    return found


def raised() -> dict[str, dict[str, set[str]]]:
    """Return, by code, the statuses or exceptions that carry it and their messages."""
    found: dict[str, dict[str, set[str]]] = defaultdict(lambda: {"carriers": set(), "messages": set()})
    for path in sorted(PACKAGE.rglob("*.py")):
        tree = ast.parse(path.read_text())
        functions = [one for one in ast.walk(tree) if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)]
        for function in functions:
            names = assigned(function)
            for call in ast.walk(function):
                if isinstance(call, ast.Call):
                    _note(call, names, found)
    return found


def _note(call: ast.Call, names: dict[str, str], found: dict[str, dict[str, set[str]]]) -> None:
    failure = next((one.value for one in call.keywords if one.arg == "code"), None)
    kind = call.func.id if isinstance(call.func, ast.Name) else ""
    if not (isinstance(failure, ast.Constant) and isinstance(failure.value, str) and kind.endswith("Error")):
        return
    arguments = list(call.args)
    entry = found[failure.value]
    if kind == "RefusalError" and arguments and isinstance(arguments[0], ast.Constant):
        entry["carriers"].add(str(arguments.pop(0).value))
    elif kind in CLASSES:
        entry["carriers"].add(kind)
    if arguments:
        message = arguments[0]
        text = names.get(message.id, "") if isinstance(message, ast.Name) else text_of(message)
        if re.search(r"[A-Za-z]{3}", re.sub(r"\{\w*\}", "", text)):
            entry["messages"].add(text)


def pages() -> dict[str, str]:
    """Return the page."""
    found = raised()
    for kind in CLASSES.values():
        found[kind.default_code]["carriers"].add(kind.__name__)
        found[kind.default_code]["messages"].add(summary(kind))
    parts = []
    for name in sorted(found):
        carriers = sorted(found[name]["carriers"])
        shown = [f"status {one}" if one.isdigit() else f"[{one}](#{one.lower()})" for one in carriers]
        messages = sorted(found[name]["messages"])
        listed = "\n".join(f"- {_plain(one)}" for one in messages)
        parts.append(f"### {name}\n\n{', '.join(shown)}\n\n{listed}".rstrip())
    exceptions = [
        (f'<span id="{name.lower()}"></span>{code(name)}', code(kind.default_code), summary(kind))
        for name, kind in CLASSES.items()
    ]
    return {
        "reference/errors.md": page(
            "Errors",
            'An HTTP error is `{"error": {"message", "type", "param", "code"}}`. Under `/v2` the message is `error`, '
            "and the other fields are beside it. `param` names the field at fault. Programs match `code` and `param`, "
            "because the sentence may change. Exceptions of Python have the same `code` and `param`.",
            "## Statuses",
            statuses(),
            "Repeat the same request only after 408, 429 and 503, and not before `Retry-After` seconds.",
            "## Exceptions",
            table(("exception", "code", "meaning"), exceptions),
            "## Codes",
            "Each code with the statuses or exceptions that carry it, and its messages. A name in braces stands for a "
            "value.",
            *parts,
        )
    }


def _plain(text: str) -> str:
    """Return a message whose placeholders and markup are shown as they are."""
    return re.sub(r"([\\<>*_\[\]#])", r"\\\1", " ".join(text.split()))
