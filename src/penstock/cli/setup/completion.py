"""``penstock completion SHELL``: print the script that completes penstock's commands and options in a shell."""

from __future__ import annotations

import argparse
from typing import Final

from penstock.cli.options import add_parser_of

__all__ = ["add_parser", "run"]

_SHELLS: Final = ("bash", "zsh", "fish")


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the subcommand."""
    parser = add_parser_of(
        subparsers,
        "completion",
        "Print the script that completes commands, options and their values when you press the Tab key. Put the line "
        "of your shell into its start file.",
        'eval "$(penstock completion bash)"      # in ~/.bashrc\n'
        'eval "$(penstock completion zsh)"       # in ~/.zshrc, behind compinit\n'
        "penstock completion fish | source       # in ~/.config/fish/config.fish",
    )
    parser.add_argument("shell", metavar="SHELL", choices=_SHELLS, help="bash, zsh or fish")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the script."""
    from argcomplete.shell_integration import shellcode

    print(shellcode(["penstock"], shell=args.shell))
    return 0
