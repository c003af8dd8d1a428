"""The help of each command: an example, and a default for each option."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterator

import pytest

from penstock.cli.main import COMMANDS, main, make_parser
from tests.support.command import DEMO, FOLDER, environment
from tests.support.terminal import Terminal


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


def test_the_overview_lists_every_command_and_imports_none(penstock_command):
    done = penstock_command("--help")
    assert done.returncode == 0
    for command in COMMANDS:
        assert f"\n  {command} " in done.stdout
    for heading in ("generate text:", "get and make models:", "serve models:", "examples:"):
        assert heading in done.stdout
    assert penstock_command("help").stdout == done.stdout
    assert penstock_command("help", "run").stdout == penstock_command("run", "--help").stdout
    alone = penstock_command()
    assert (alone.returncode, alone.stdout, alone.stderr) == (2, "", done.stdout)
    imported = penstock_command("--help", PYTHONPROFILEIMPORTTIME="1").stderr
    assert " penstock.cli.main\n" in imported
    assert " penstock.cli.run" not in imported


def test_help_has_colour_only_on_a_terminal(penstock_command):
    assert "\x1b" not in penstock_command("run", "--help").stdout
    with Terminal("run", "--help") as terminal:
        coloured = terminal.rest()
    assert "\x1b[" in coloured
    assert "--max-tokens" in coloured
    assert "FILE.py:CLASS" in coloured
    for env in ({"NO_COLOR": "1"}, {"TERM": "dumb"}):
        with Terminal("--help", **env) as terminal:
            assert "\x1b" not in terminal.rest()


@pytest.mark.parametrize("has_colour", [True, False])
def test_help_loads_nothing_heavy(has_colour):
    script = (
        f"import sys; from penstock.cli import main, parser\nparser.has_colour = lambda: {has_colour}\n"
        "try: main.main(['run', '--help'])\nfinally: print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment(), check=True)
    loaded = done.stdout.splitlines()[-1].split()
    for heavy in ("rich", "argcomplete", "numpy", "asyncio"):
        assert heavy not in loaded
    assert ("\x1b[36m--seed\x1b[0m\x1b[32m S\x1b[0m" in done.stdout) == has_colour


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["rnu"], "unknown command 'rnu'. Did you mean run?"),
        (["generate", "m", "p"], "unknown command 'generate'. Did you mean run?"),
        (["version"], "unknown command 'version'. Did you mean --version?"),
        (["run", "m", "p", "--temprature", "1"], "unknown option --temprature. Did you mean --temperature?"),
        (["run", "m", "p", "--max_tokens=1"], "unknown option --max_tokens. Did you mean --max-tokens?"),
        (["serve", "m", "--max-model-len", "1"], "unknown option --max-model-len. Did you mean --context-len?"),
        (["run", "m", "p", "-q"], "unknown option -q."),
        (["run", "m", "p", "--mode", "eagre"], "--mode: unknown value 'eagre'. Did you mean eager?"),
        (["cache", "drop"], "unknown value 'drop': expected one of list, clear"),
        (["run", "m", "p", "q"], "unexpected argument 'q'"),
        (["run", "-m"], "-m: expected one argument"),
        (["run", "-m", "m"], "the following arguments are required: PROMPT"),
        (["run", "-m", "m", "-p", "p", "q"], "unexpected argument 'p'"),
        (["cache"], "the following arguments are required: list|clear"),
        (["completion", "tcsh"], "unknown value 'tcsh': expected one of bash, zsh, fish"),
        (["models", "lsit"], "Did you mean list?"),
        (["--verbos"], "unknown option --verbos."),
        (["export", "m", "--foo", "o.psm"], "unknown option --foo. See"),
        (["run", "--foo"], "unknown option --foo. See"),
        (["models", "--service", "http://x"], "unknown option --service. See"),
        (["inspect"], "the following arguments are required: MODEL"),
        (["export", "m", "--scheme", "w8a8", "o.psm", "third"], "unexpected argument 'third'"),
        (["-v"], "unknown option -v. Did you mean --version?"),
        (["run", "m", "p", "--max-token", "4"], "unknown option --max-token. Did you mean --max-tokens?"),
        (["serve", "m", "--api-key", "secret"], "unknown option --api-key. Did you mean --api-key-file?"),
        (["serve", "m", "--tensor-parallel-size", "2"], "Did you mean --tp?"),
        (["run", "m", "p", "-n", "four"], "-n/--max-tokens: expected an integer, got 'four'."),
        (["run", "m", "p", "--temperature", "hot"], "--temperature: expected a number, got 'hot'."),
    ],
)
def test_wrong_usage_is_one_line_with_a_suggestion(capsys, arguments, expected):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert expected in error


@pytest.mark.parametrize(
    "arguments",
    [
        ["-m", "M", "-p", "-P"],
        ["-mM", "--prompt=-P"],
        ["-p", "-P", "--model", "M"],
        ["M", "-p", "-P"],
        ["-m", "M", "--", "-P"],
        ["--model=M", "-n", "7", "-p", "-P"],
    ],
)
def test_model_and_prompt_may_be_options(arguments):
    args = make_parser(["run"]).parse_args(["run", *arguments])
    assert (args.model, args.prompt) == ("M", "-P")


@pytest.mark.parametrize(
    ("arguments", "values"),
    [
        (["export", "M", "--scheme", "w8a8", "O.psm", "--yes"], {"model": "M", "out": "O.psm", "scheme": "w8a8"}),
        (["export", "--scheme=w8a8", "M", "-y", "O.psm"], {"model": "M", "out": "O.psm", "yes": True}),
        (["export", "M", "--yes", "--", "-o.psm"], {"model": "M", "out": "-o.psm"}),
        (["infer", "-m", "M", "P", "-n", "3", "Q", "--stream"], {"prompts": ["P", "Q"], "stream": True}),
        (["infer", "P", "-n3", "-5", "a -b"], {"prompts": ["P", "-5", "a -b"], "max_tokens": 3}),
        (["infer", "P", "--stream", "true", "Q"], {"prompts": ["P", "Q"], "stream": True}),
        (["serve", "A", "--port", "1", "B"], {"models": ["A", "B"], "port": 1}),
        (["launch", "--nproc", "2", "--", "python", "-c", "x"], {"command_line": ["python", "-c", "x"]}),
    ],
)
def test_options_may_stand_between_operands(arguments, values):
    parsed = vars(make_parser([arguments[0]]).parse_args(arguments))
    assert {name: parsed[name] for name in values} == values


def test_short_forms_are_those_of_the_long_options():
    args = make_parser(["run"]).parse_args(["run", "M", "P", "-n", "3", "-c", "64", "-t", "2", "-s", "5", "-y"])
    assert (args.max_tokens, args.context_len, args.threads, args.seed, args.yes) == (3, 64, 2, 5, True)
    args = make_parser(["bench"]).parse_args(["bench", "-m", "M", "-p", "64", "-n", "8", "-b", "1,2", "-t", "1"])
    assert (args.model, args.prompt_tokens, args.new_tokens, args.batch, args.threads) == ("M", 64, 8, "1,2", 1)
    args = make_parser(["serve"]).parse_args(["serve", "-m", "A", "B", "-c", "64"])
    assert (args.models, args.context_len) == (["A", "B"], 64)


def test_a_wrong_value_of_a_short_form_is_named_by_its_option(penstock_command):
    done = penstock_command("run", DEMO, "x", "-n0")
    assert done.returncode == 2
    assert done.stderr.startswith("penstock: --max-tokens: ")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_prints_a_script(penstock_command, shell):
    done = penstock_command("completion", shell)
    assert done.returncode == 0
    assert "penstock" in done.stdout
    assert "_ARGCOMPLETE" in done.stdout


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("penstock ben", {"bench"}),
        ("penstock run --top", {"--top-k", "--top-p"}),
        ("penstock run --mode ", {"graph", "eager"}),
        ("penstock completion f", {"fish"}),
    ],
)
def test_a_shell_gets_completions(line, expected, tmp_path):
    """As the scripts of argcomplete ask: by environment variables, answered in a file."""
    answer = tmp_path / "answer"
    asked = {"COMP_LINE": line, "COMP_POINT": str(len(line)), "_ARGCOMPLETE_STDOUT_FILENAME": str(answer)}
    env = environment(_ARGCOMPLETE="1", _ARGCOMPLETE_IFS="\n", **asked)
    subprocess.run([sys.executable, "-m", "penstock"], env=env, check=False, timeout=300)
    assert {word.strip() for word in answer.read_text().split("\n")} == expected


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        (("infer", "-m", DEMO, "--target", "gpu", "x"), "--target"),
        (("infer", "-m", DEMO, "--model-type", "mindir", "x"), "--model-type"),
        (("infer", "-m", DEMO, "--device-id", 1, "x"), "--device-id"),
        (("infer", "-m", DEMO, "--backend", "gpu", "x"), "--backend"),
        (("run", DEMO, "x", "--scheme", "w4a8"), "--scheme"),
        (("run", DEMO, "x", "--network", "x.py:Net"), "--network"),
        (("run", DEMO, "x", "--ops", "none.so"), "--ops"),
        (("bench", DEMO, "--batch", "one"), "--batch"),
        (("bench", DEMO, "--rate", "1"), "--rate"),
        (("profile", DEMO, "--plot", "x.png"), "--plot"),
        (("serve", DEMO, "--workers", 0), "workers"),
        (("serve", DEMO, "--worker-host", "x"), "--worker-host"),
        (("worker", DEMO, "--primary", "x", "--token-file", "x"), "--primary"),
        (("worker", DEMO, "--primary", "h:²", "--token-file", "x"), "--primary: expected HOST:PORT"),
        (("stage", DEMO, "--primary", "h:²", "--token-file", "x"), "--primary: expected HOST:PORT"),
        (("stage", DEMO, "--primary", "h:99999", "--token-file", "x"), "--primary: expected HOST:PORT"),
        (("export", "a", "b.bin"), "b.bin"),
        (("quantize", FOLDER, "b", "--scheme", "w9"), "scheme"),
        (("models", "list"), "--admin-socket"),
        (("batch", DEMO, "a.jsonl", "b.jsonl", "--max-requests", 0), "a.jsonl"),
        (("show", "not/a/name"), "not/a/name"),
        (("chat", DEMO, "--system", "x"), "--system"),
        (("chat", DEMO, "--kv-cache", "fp8"), "--kv-cache"),
    ],
)
def test_a_wrong_option_ends_with_status_2(penstock_inline, arguments, option):
    done = penstock_inline(*arguments)
    assert (done.returncode, done.stdout) == (1 if option in ("a.jsonl", "--ops") else 2, "")
    assert option in done.stderr.splitlines()[-1]
