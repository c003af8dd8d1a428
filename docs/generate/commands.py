"""The reference of the command line, from the parsers of the commands."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from generate.markdown import code, definitions, page
from penstock.cli import main

ROOT = Path(__file__).parents[2]
TITLES = {
    "run": "Run models",
    "models": "Get and prepare models",
    "service": "Serve models",
    "measure": "Measure",
    "scale": "Run over ranks",
    "setup": "Set up",
}


def parsers_of(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """Return the parsers of the subcommands."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    return {}


def help_of(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    """Return the help of an option with its values filled in, and a capital at the beginning."""
    text = argparse.HelpFormatter(parser.prog)._expand_help(action) if action.help else ""
    text = re.sub(r"<(\w[\w-]*)>", r"\\<\1>", text)
    return text[:1].upper() + text[1:]


def term_of(action: argparse.Action) -> str:
    """Return an option as it is typed."""
    value = ""
    if action.nargs != 0:
        choices = "|".join(map(str, action.choices)) if action.choices else None
        metavar = action.metavar or choices or action.dest.upper()
        value = metavar if isinstance(metavar, str) else " ".join(metavar)
    if not action.option_strings:
        return code(value)
    return ", ".join(code(f"{name} {value}".strip()) for name in action.option_strings)


def section(parser: argparse.ArgumentParser, level: int = 2) -> str:
    """Return a command: description, usage, arguments and options, examples, subcommands."""
    usage = argparse.HelpFormatter(parser.prog, width=84)
    usage.add_usage(None, parser._actions, parser._mutually_exclusive_groups, prefix="")
    parts = [
        f"{'#' * level} {parser.prog}",
        " ".join((parser.description or "").split()),
        f"```text\n{usage.format_help().strip()}\n```",
    ]
    if parser.epilog:
        lines = [line.strip() for line in parser.epilog.splitlines()]
        parts.append("```sh\n" + "\n".join(line for line in lines if line and line != "examples:") + "\n```")
    for group in parser._action_groups:
        actions = [
            one
            for one in group._group_actions
            if one.help != argparse.SUPPRESS and not isinstance(one, argparse._HelpAction | argparse._SubParsersAction)
        ]
        if actions:
            title = {"positional arguments": "Arguments", "options": "Options"}.get(group.title or "", group.title)
            title = (title or "Options")[:1].upper() + (title or "Options")[1:]
            parts += [f"**{title}**", definitions((term_of(one), help_of(parser, one)) for one in actions)]
    parts += [section(one, level + 1) for one in parsers_of(parser).values()]
    return "\n\n".join(part for part in parts if part)


def pages() -> dict[str, str]:
    """Return a page for each group of commands, and one for penstock-lite."""
    parsers = parsers_of(main.make_parser())
    made = {}
    listed = []
    for group, names in main.GROUPS.items():
        title = TITLES.get(group, group.capitalize())
        made[f"reference/cli/{group}.md"] = page(title, *(section(parsers[name]) for name in names))
        listed.append(f"## {title}")
        listed.append(
            definitions(
                (
                    f"[`penstock {name}`]({group}.md#penstock-{name})",
                    _sentence(parsers[name].description or ""),
                )
                for name in names
            )
        )
    listed.append("## Devices\n\n`penstock-lite`\n:   Continue a prompt without Python: [penstock-lite](lite.md).")
    made["reference/cli/index.md"] = page(
        "Command line",
        "Each command has `--help`. The pages of this section are generated from the same parsers.",
        *listed,
        "## Exit status\n\n" + " ".join((main.__doc__ or "").split("Exit status: ")[1].split()),
        "`--debug` shows the traceback of an error, and `--version` the version.",
    )
    made["reference/cli/lite.md"] = page(
        "penstock-lite",
        "The program for devices; [Devices](../../guides/devices.md) says how to build it. This is its `--help`:",
        f"```text\n{lite_help().rstrip()}\n```",
    )
    return made


def lite_help() -> str:
    """Return the help of penstock-lite, from the literal in its source."""
    source = (ROOT / "core/tools/lite/options.cpp").read_text()
    literal = source.split("const char kHelp[] =")[1].split(";\n")[0]
    lines = re.findall(r'^\s*"(.*)"$', literal, re.MULTILINE)
    return "".join(line.replace("\\n", "\n").replace('\\"', '"') for line in lines)


def _sentence(text: str) -> str:
    """Return the first sentence of a description."""
    return re.split(r"(?<=\.)\s", " ".join(text.split()))[0]
