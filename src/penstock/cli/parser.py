"""The argument parser of every command: errors in one line with a suggestion, help in groups, colour on a terminal."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final, NoReturn

__all__ = ["CommandParser", "OverviewParser", "has_colour"]

_OTHER_NAMES: Final = {
    "--ctx-size": "--context-len",
    "--max-model-len": "--context-len",
    "--num-ctx": "--context-len",
    "--n-predict": "--max-tokens",
    "--predict": "--max-tokens",
    "--num-predict": "--max-tokens",
    "--max-new-tokens": "--max-tokens",
    "--max-num-seqs": "--max-requests",
    "--parallel": "--max-requests",
    "--dtype": "--scheme",
    "--quantization": "--scheme",
    "--kv-cache-dtype": "--kv-cache",
    "--cache-type-k": "--kv-cache",
    "--no-enable-prefix-caching": "--no-prefix-cache",
    "--system-prompt": "--system",
    "--tensor-parallel-size": "--tp",
    "--tensor-parallel": "--tp",
    "--pipeline-parallel-size": "--pp",
    "-v": "--version",
    "-V": "--version",
    "--api-key": "--api-key-file",
    "--ssl-certfile": "--tls-certificate",
    "--ssl-keyfile": "--tls-key",
}
"""Options of llama.cpp, ollama, transformers and vLLM, and the option here that replaces each."""
_OTHER_COMMANDS: Final = {
    "benchmark": "bench",
    "complete": "run",
    "create": "export",
    "delete": "rm",
    "download": "pull",
    "generate": "run",
    "info": "inspect",
    "ls": "list",
    "ps": "models",
    "remove": "rm",
    "server": "serve",
    "start": "serve",
    "version": "--version",
}
"""Commands of other engines and package managers, and the one here that replaces each."""
_OPTION: Final = r"(?<![\w-])(--?[a-zA-Z][\w-]*)( (?:[A-Z]+(?![a-z])[\w.:|]*(?:,[A-Z])*|\{[^}]*\}))?"
"""An option, and what it takes, in help."""


def has_colour() -> bool:
    """Return True if standard output is a terminal whose user did not switch colours off (no-color.org)."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


class CommandParser(argparse.ArgumentParser):
    """Report wrong usage in one line and with the nearest correct name; colour the help on a terminal."""

    def __init__(self, **options: Any) -> None:
        options.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(**{"allow_abbrev": False, **options})
        self._operand_flags: dict[str, bool] = {}
        self.is_ended_by_script = False  # True: all that follows an operand FILE.py is the script's, as after --
        self.option_hint = ""  # what to do about an unknown option that is not similar to one

    def add_operand_flag(self, group: argparse._ActionsContainer, *flags: str, metavar: str, is_first: bool) -> None:
        """Let ``flags`` give the first operand, or else the last one; ``group`` is where the help lists them."""
        help_text = f"{metavar} as an option (default: the operand)"
        group.add_argument(*flags, metavar=metavar, default=argparse.SUPPRESS, help=help_text)
        self._operand_flags |= dict.fromkeys(flags, is_first)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse; end with an error that suggests an option for the first argument that no option takes."""
        argv = self._with_operands(list(sys.argv[1:] if args is None else args))
        if self.is_ended_by_script:
            at = 0
            while argv[at:] and argv[at] != "--" and not self._is_operand(argv[at]):
                at += 1 + self._num_values(argv[at])
            if argv[at:] and argv[at].endswith(".py"):
                argv.insert(at, "--")
        self._refuse_unknown(argv)
        argv = self._gathered(argv)
        parsed, extra = super().parse_known_args(argv, namespace)
        if extra:
            self._refuse(extra[0])
        return parsed, extra

    def _with_operands(self, argv: Sequence[str]) -> list[str]:
        """Return the arguments with the values of operand flags as operands."""
        before: list[str] = []
        reordered: list[str] = []
        behind: list[str] = []
        arguments = iter(argv)
        for argument in arguments:
            if argument == "--":
                reordered += ["--", *arguments]
                break
            flag, value = self._operand_flag(argument)
            if flag is None:
                reordered.append(argument)
                continue
            if value is None:
                value = next(arguments, None)
                if value is None or value == "--":
                    self.error(f"argument {flag}: expected one argument")
            (before if self._operand_flags[flag] else behind).append(value)
        if behind and "--" not in reordered:
            reordered.append("--")  # a value may begin with a hyphen
        return [*before, *reordered, *behind]

    def _gathered(self, argv: Sequence[str]) -> list[str]:
        """Return the arguments with all operands behind the options.

        argparse gives operands that may be left out no value unless they stand together, so `export FOLDER --scheme
        w8a8 OUT.psm` would end with an error about OUT.psm.
        """
        counts = {action.nargs for action in self._actions if not action.option_strings}
        if counts & {argparse.PARSER, argparse.REMAINDER} or not counts & {argparse.OPTIONAL, "*", "+"}:
            return list(argv)
        options: list[str] = []
        operands: list[str] = []
        num_runs, is_behind_option = 0, False
        rest = list(argv)
        while rest:
            argument = rest.pop(0)
            if argument == "--":
                operands += rest
                num_runs += 1
                break
            if self._is_operand(argument):
                num_runs += not operands or is_behind_option
                operands.append(argument)
                is_behind_option = False
                continue
            options.append(argument)
            is_behind_option = True
            most = self._num_values(argument)
            while most > 0 and rest and self._is_operand(rest[0]):
                options.append(rest.pop(0))
                most -= 1
        return [*options, "--", *operands] if num_runs > 1 else list(argv)

    def _refuse_unknown(self, argv: Sequence[str]) -> None:
        """End with an error about an unknown option before one about the operands that it hides."""
        counts = {action.nargs for action in self._actions if not action.option_strings}
        has_commands = bool(counts & {argparse.PARSER, argparse.REMAINDER})
        for argument in argv:
            if argument == "--" or (has_commands and self._is_operand(argument)):
                return
            known = (argument.partition("=")[0], argument[:2])
            if not self._is_operand(argument) and not any(name in self._option_string_actions for name in known):
                self._refuse(argument)

    def _is_operand(self, argument: str) -> bool:
        if not argument.startswith("-") or argument == "-":
            return True
        if argument.partition("=")[0] in self._option_string_actions:
            return False
        return " " in argument or self._negative_number_matcher.match(argument) is not None

    def _num_values(self, argument: str) -> int:
        """Return how many of the following arguments an option takes at most."""
        name, separator, _ = argument.partition("=")
        action = self._option_string_actions.get(name)
        if action is None or separator:  # of an unknown option, or with its value: -n5, --seed=5
            return 0
        several = {None: 1, argparse.OPTIONAL: 1, "*": sys.maxsize, "+": sys.maxsize}
        return action.nargs if isinstance(action.nargs, int) else several[action.nargs]

    def _operand_flag(self, argument: str) -> tuple[str | None, str | None]:
        """Return the operand flag that an argument names, and the value that it contains."""
        name, separator, value = argument.partition("=")
        if name in self._operand_flags:
            return name, value if separator else None
        if argument[:2] in self._operand_flags and argument[:2] != "--":
            return argument[:2], argument[2:]
        return None, None

    def _refuse(self, argument: str) -> NoReturn:
        from penstock.validation import nearest

        name = argument.partition("=")[0]
        if not name.startswith("-"):
            self.error(f"unexpected argument {argument!r:.60}")
        options = [option for option in self._option_string_actions if option.startswith("--")]
        other = _OTHER_NAMES.get(name.replace("_", "-"), "")
        near = other[2:] if other in options else ""
        if not near and name.startswith("--"):
            near = nearest(name[2:], [option[2:] for option in options])  # the hyphens are alike in all of them
        hint = f". Did you mean --{near}?" if near else self.option_hint and f". {self.option_hint}"
        self.error(f"unknown option {name:.60}{hint}")

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        """Return the converted value; an error about a number says which kind is expected."""
        try:
            return super()._get_value(action, arg_string)
        except argparse.ArgumentError:
            if action.type not in (int, float):
                raise
            expected = "an integer" if action.type is int else "a number"
            raise argparse.ArgumentError(action, f"expected {expected}, got {arg_string!r:.60}") from None

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Refuse a value that is no choice; name the nearest choice and all of them."""
        if action.choices is None or value in action.choices:
            return
        from penstock.validation import nearest

        choices = [str(choice) for choice in action.choices]
        near = nearest(str(value), choices)
        hint = f". Did you mean {near}?" if near else f": expected one of {', '.join(choices)}"
        raise argparse.ArgumentError(action, f"unknown value {value!r:.60}{hint}")

    def error(self, message: str) -> NoReturn:
        """Print one line and exit with status 2."""
        from penstock.cli.progress import printable

        end = "" if message.endswith("?") else "."
        print(f"{self.prog}: {printable(message)}{end} See `{self.prog} --help`.", file=sys.stderr)
        raise SystemExit(2)

    def format_help(self) -> str:
        """Return the help with a short usage line, coloured where standard output is a terminal."""
        operands = [_operand(action) for action in self._actions if not action.option_strings]
        self.usage = " ".join(["%(prog)s [OPTION ...]", *operands])
        try:
            text = super().format_help()
        finally:
            self.usage = None
        return _coloured(text) if has_colour() else text


class OverviewParser(CommandParser):
    """The parser of the whole command line; its help lists the commands in groups.

    ``groups``: a heading for each group, with the summaries of its commands by name.
    """

    def __init__(self, groups: Mapping[str, Mapping[str, str]], **options: Any) -> None:
        super().__init__(**options)
        self._groups = groups
        self._commands = [name for commands in groups.values() for name in commands]

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse; an unknown option in place of the command is the error, not the missing command."""
        arguments = list(sys.argv[1:] if args is None else args)
        if arguments and arguments[0].startswith("-") and arguments[0] not in self._option_string_actions:
            self._refuse(arguments[0])
        return super().parse_known_args(arguments, namespace)

    def format_help(self) -> str:
        """Return the description, the commands in groups, the options and the examples."""
        formatter = self.formatter_class(prog=self.prog)
        formatter.add_usage("%(prog)s COMMAND [OPTION ...]", [], [])
        formatter.add_text(self.description)
        for heading, commands in self._groups.items():
            formatter.start_section(heading)
            formatter.add_arguments([argparse.Action([], name, metavar=name, help=commands[name]) for name in commands])
            formatter.end_section()
        formatter.start_section("options")
        formatter.add_arguments([action for action in self._actions if action.option_strings])
        formatter.end_section()
        formatter.add_text(self.epilog)
        text = formatter.format_help()
        return _coloured(text) if has_colour() else text

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Refuse an unknown command, whichever commands this parser was made with."""
        if action.dest != "command":
            super()._check_value(action, value)
        elif value not in (action.choices or ()):
            from penstock.validation import nearest

            near = _OTHER_COMMANDS.get(value) or nearest(str(value), self._commands)
            hint = f". Did you mean {near}?" if near else ""
            raise argparse.ArgumentError(None, f"unknown command {value!r:.60}{hint}")


def _operand(action: argparse.Action) -> str:
    """Return an operand as a usage line shows it."""
    name = str(action.metavar or action.dest or "{" + ",".join(map(str, action.choices or ())) + "}")
    forms = {"?": f"[{name}]", "*": f"[{name} ...]", "+": f"{name} [{name} ...]", argparse.PARSER: f"{name} ..."}
    return forms.get(str(action.nargs), name)


def _coloured(text: str) -> str:
    """Return help with headings in bold, commands and options in cyan, and what an option takes in green."""
    text = re.sub(r"(?m)^(\S.*:)$|^usage:", "\x1b[1m\\g<0>\x1b[0m", text)
    text = re.sub(r"(?m)^(  |    )([a-zA-Z][\w.-]*)(?=  )", "\\1\x1b[36m\\2\x1b[0m", text)
    return re.sub(_OPTION, _in_colour, text)


def _in_colour(match: re.Match[str]) -> str:
    value = f"\x1b[32m{match[2]}\x1b[0m" if match[2] else ""
    return f"\x1b[36m{match[1]}\x1b[0m{value}"
