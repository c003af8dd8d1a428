"""The help of each command: an example, and a default for each option."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import pytest

from penstock.cli.main import COMMANDS, make_parser


def subparsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for one in action.choices.values():
                yield one
                yield from subparsers(one)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_examples_and_defaults(command: str) -> None:
    for parser in subparsers(make_parser([command])):
        assert "example" in (parser.epilog or ""), parser.prog
        for action in parser._actions:
            assert action.help, f"{parser.prog}: {action.dest}"
            if action.option_strings and action.dest != "help":
                has_default = "default" in action.help or "required" in action.help
                assert has_default, f"{parser.prog}: {action.option_strings[0]}: {action.help}"


def test_a_wrong_value_is_named_by_its_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        make_parser(["serve"]).parse_args(["serve", "m.psm", "--port", "http"])
    assert ended.value.code == 2
    assert "--port" in capsys.readouterr().err
