"""The entry point of the command line: find the subcommand, run it, print an error as one line.

Exit status: 0 for success, 2 for a wrong option, argument or value, 130 for an interrupt, and 1 for any other error,
such as a missing or damaged file.
"""

from __future__ import annotations

import argparse
import gc
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from importlib import import_module
from typing import Final

from penstock.cli.parser import CommandParser, OverviewParser
from penstock.cli.progress import printable
from penstock.errors import InvalidArgumentError, InvalidFileError, PenstockError, UnavailableError
from penstock.runtime.export_process import allow_copies
from penstock.symbolic.choice import use_own_modules
from penstock.version import __version__

__all__ = ["main", "make_parser"]

GROUPS: Final = {
    "run": {
        "run": "continue a prompt",
        "chat": "chat with a model",
        "batch": "answer a file of requests",
        "embed": "print a vector for each line of a file",
        "rerank": "order the lines of a file by their relevance to a query",
        "predict": "run a network that is no language model over arrays in files",
        "infer": "answer prompts with a bundle, a pair of bundles or a model folder",
    },
    "models": {
        "pull": "download a model from a Hugging Face hub",
        "list": "list the downloaded models, or the short names of models",
        "show": "show a downloaded model: files, sizes, memory",
        "rm": "remove a downloaded model",
        "export": "make a bundle (.psm) from a checkpoint folder",
        "quantize": "write a checkpoint folder with quantized weights",
        "convert": "write a model in another form: type, layout, adapter, safetensors or bundle",
        "inspect": "show the contents of a bundle or a checkpoint folder",
        "cache": "list or remove the bundles made from checkpoint folders and GGUF files",
    },
    "service": {
        "serve": "answer requests over HTTP (OpenAI's API) and gRPC",
        "worker": "run a worker for a service on another machine",
        "servable-worker": "run servables' processes for a service on another machine",
        "node": "make this machine a node of a cluster that runs workers",
        "models": "list, load, update or unload the models of a running service, or drain a worker",
        "new": "write the first version of a servable (a network or Python code as a service)",
    },
    "measure": {
        "advise": "advise on a scheme and a way to run a model on this machine",
        "bench": "measure speed and compare it with the limits of this machine",
        "eval": "measure the quality of a model, alone or against another one",
        "profile": "show where the time of a step goes",
    },
    "scale": {
        "launch": "run a command as several ranks",
        "plan": "show what each rank of a model gets, and write the strategy",
        "stage": "compute some layers of a model that another machine runs",
        "shard": "cut a checkpoint folder for ranks, cut it again, or merge it",
        "simulate": "simulate many replicas of a model that serve a trace",
    },
    "setup": {
        "doctor": "report what this machine offers and what is missing",
        "completion": "print the script that completes commands in bash, zsh or fish",
    },
}
"""The folders of ``penstock.cli``, and in each the commands with their summaries, in the order of the help."""
_HEADINGS: Final = {
    "run": "generate text",
    "models": "get and make models",
    "service": "serve models",
    "measure": "measure",
    "scale": "run over processes and machines",
    "setup": "set up",
}
COMMANDS: Final = {
    name: f"penstock.cli.{group}.{name.replace('-', '_')}" for group, names in GROUPS.items() for name in names
}
_EXAMPLES: Final = """examples:
  penstock run demo/demo.psm "def fibonacci(n):"
  penstock chat smollm2-135m
  penstock serve demo/demo.psm

`penstock COMMAND --help` shows the options of a command, with examples."""
_OPTIONS: Final = {
    "tensor_parallel_size": "tp",
    "pipeline_parallel_size": "pp",
    "context_parallel_size": "cp",
    "queue_s": "scale_queue_seconds",
    "down_after_s": "scale_down_seconds",
    "start_s": "start_seconds",
    "mtbf_s": "mtbf",
    "restart_s": "restart",
    "num_pages": "pages",
}
"""The options whose names differ from the fields that they set."""
_CAPTURING: Final = ("plan", "shard", "convert", "quantize")
"""The commands that construct built-in networks in their own process, and compute with none."""
_OPENING: Final = ("run", "chat", "infer")
"""The commands that open a model first of all, which a first run exports."""
_GC_OBJECTS: Final = 50_000
"""New objects until the next search for cycles: imports make as many, and no cycles that are worth a search."""
_FILE_ENDINGS: Final = ("_file", "_certificate", "_key", "_path")
"""The ends of the names of options whose value is a file; several of them may be on one command line."""
_GRACE_SECONDS = 0.8


def make_parser(commands: Iterable[str] = COMMANDS) -> argparse.ArgumentParser:
    """Return the parser of the whole command line, or of the subcommands in ``commands``."""
    parser = OverviewParser(
        {_HEADINGS[group]: names for group, names in GROUPS.items()},
        prog="penstock",
        description="Run, export, quantize, serve and measure language models.",
        epilog=_EXAMPLES,
    )
    parser.add_argument("--version", action="version", version=f"penstock {__version__}", help="show the version")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error (default: one line)")
    subparsers = parser.add_subparsers(
        dest="command", metavar="COMMAND", required=True, parser_class=CommandParser, prog="penstock"
    )
    for name in commands:
        import_module(COMMANDS[name]).add_parser(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status."""
    from penstock.env import keep_log_format

    with keep_log_format():  # the one-line error of `serve` is still a line of its log
        return _main(argv)


def _main(argv: Sequence[str] | None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments == ["--version"]:
        print(f"penstock {__version__}")
        return 0
    end = arguments.index("--") if "--" in arguments else len(arguments)
    debug = "--debug" in arguments[:end]  # before or after the subcommand
    if debug:
        arguments.remove("--debug")
    if arguments[:1] == ["help"]:
        arguments = [*arguments[1:], "--help"]
    # Import only the subcommand that is asked for.
    command = next((a for a in arguments if not a.startswith("-")), "")
    _open_missing_streams()
    if "_ARGCOMPLETE" in os.environ:
        _complete()
    parser = make_parser([command] if command in COMMANDS else ())
    if not arguments:
        parser.print_help(sys.stderr)
        return 2
    args = parser.parse_args(arguments)
    if argv is None:  # a program that passes arguments keeps its own handling of Ctrl-C
        _watch_interrupts()
        if command in _CAPTURING and not getattr(args, "network", None):
            use_own_modules()
        if command in _OPENING:
            gc.set_threshold(_GC_OBJECTS, 10, 10)
            allow_copies()
    try:
        if getattr(args, "ops", ()):
            _load_ops(args.ops)
        status: int = args.run(args)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return _interrupted()
    except BrokenPipeError:
        _drop_stdout()
        return 1
    except (PenstockError, OSError) as error:
        if debug:
            raise
        text, option = _one_line(error), _option_at_fault(error, args, arguments)
        if option:
            text = _with_options(text, option, args)
        _tell(_with_file_option(text, args))
        _settle_stdout()
        is_elsewhere = isinstance(error, (OSError, UnavailableError))  # a file or a machine may be missing
        is_option = bool(option or text.startswith("--")) and not is_elsewhere
        return 2 if isinstance(error, InvalidArgumentError) or is_option else 1
    return status


def _tell(text: str) -> None:
    """Write an error; a service whose log has JSON lines writes it as one of them."""
    from penstock.env import writes_json_log

    if not writes_json_log():
        print(f"penstock: {text}", file=sys.stderr)
        return
    import logging

    from penstock.logs import note

    note("penstock", text, logging.ERROR)


def _complete() -> None:
    """Print the completions that a shell asks for, and exit; `penstock completion` sets the shell up."""
    import argcomplete

    commands = set(os.environ.get("COMP_LINE", "").split()) & set(COMMANDS)
    argcomplete.autocomplete(make_parser(commands or COMMANDS))


def _load_ops(paths: Sequence[str]) -> None:
    from penstock.core.library import load_ops

    for path in paths:
        try:
            load_ops(path)
        except PenstockError as error:
            raise error.with_message(f"--ops: {error}") from None


def _option_at_fault(error: BaseException, args: argparse.Namespace, arguments: Sequence[str]) -> str:
    """Return the option that sets the field at fault if it is on the command line, or ""."""
    from penstock.cli.options import SHORT_FORMS

    if not isinstance(error, PenstockError) or type(error) is InvalidFileError:  # its ``param`` is a field of the file
        return ""
    param = _OPTIONS.get(error.param or "", error.param)
    if param is None or param not in vars(args):
        return ""
    option = f"--{param.replace('_', '-')}"
    if (
        error.param in _OPTIONS
    ):  # the command line has no other way to set it, so the option is named where it is missing
        return option
    options = {argument.partition("=")[0].replace("_", "-") for argument in arguments}
    options |= {argument[:2] for argument in arguments if not argument.startswith("--")}
    return option if options & {option, SHORT_FORMS.get(option)} else ""


def _with_file_option(text: str, args: argparse.Namespace) -> str:
    """Return a message about a file behind the option that named the file, such as --api-key-file."""
    for name, value in vars(args).items():
        if name.endswith(_FILE_ENDINGS) and value and text.startswith(f"{value}: "):
            return f"--{name.replace('_', '-')}: {text}"
    return text


def _with_options(text: str, option: str, args: argparse.Namespace) -> str:
    """Return a message with options in place of the fields: the one at fault, and any whose name cannot be a word."""
    own = option[2:].replace("-", "_")
    fields = [own, *(field for field, name in _OPTIONS.items() if name == own)]
    for field in sorted(fields, key=len, reverse=True):  # one may begin as another one does
        if text.startswith(field):
            text = option + text.removeprefix(field)
    names = "|".join(re.escape(name) for name in vars(args) if "_" in name)
    if not names:
        return text
    return re.sub(rf"(?<![\w.'/-])({names})(?![\w.'/-])", lambda match: f"--{match[1].replace('_', '-')}", text)


def _one_line(error: BaseException) -> str:
    """Return the message as one line without control characters."""
    text = str(error)
    if isinstance(error, OSError) and error.strerror:
        text = error.strerror if error.filename is None else f"{error.filename}: {error.strerror}"
    text = " ".join(text.split()) or type(error).__name__
    return printable(text)


def _open_missing_streams() -> None:
    """Open the null device for each standard stream that the shell left closed."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 - stays open until exit


def _interrupted() -> int:
    print(file=sys.stderr)
    _settle_stdout()
    return 130


def _settle_stdout() -> None:
    """Flush standard output, or drop it: a failing flush at exit would make the interpreter end with status 120."""
    try:
        sys.stdout.flush()
    except OSError:
        _drop_stdout()


def _drop_stdout() -> None:
    """Send further output to the null device, after the reader closed the pipe or the disk filled up."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _watch_interrupts() -> None:
    """Make Ctrl-C end the process within a second, even during a long native call that Python cannot interrupt.

    The signal writes a byte to a pipe, which wakes a thread at once.  That thread gives the main thread _GRACE_SECONDS
    to exit on its own.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return  # started in the background of a shell, or embedded in another program
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)

    def watch() -> None:
        while os.read(read_end, 1) != bytes([signal.SIGINT]):
            pass
        time.sleep(_GRACE_SECONDS)
        os._exit(130)

    threading.Thread(target=watch, name="interrupt", daemon=True).start()
