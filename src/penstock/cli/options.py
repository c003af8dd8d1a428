"""Options that several commands share, and their conversion to arguments."""

from __future__ import annotations

import argparse
import os
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

from penstock.cli.parser import CommandParser
from penstock.cli.progress import ProgressLine
from penstock.errors import FileAccessError, InvalidArgumentError
from penstock.validation import refusal

if TYPE_CHECKING:
    from penstock.engine.params import SamplingParams
    from penstock.llm.llm import LLM
    from penstock.runtime.program import ProgramLimits

__all__ = [
    "GRAMMAR_OPTIONS", "LIMIT_OPTIONS", "MODEL_OPTIONS", "SAMPLING_OPTIONS", "SHORT_FORMS", "add_joining_options",
    "add_model", "add_options", "add_parser_of", "check_writable", "host_and_port", "joining_of", "limits_of",
    "numbers_of", "open_llm", "refuse_without", "sampling_params", "sampling_values", "spellings", "text_or_file",
    "utf8_text", "write_file",
]  # fmt: skip


def add_parser_of(
    subparsers: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    description: str,
    examples: str,
) -> CommandParser:
    """Add the parser of a command with its examples, one a line."""
    lines = "".join(f"\n  {line}" for line in examples.splitlines())
    parser = subparsers.add_parser(name, description=textwrap.fill(description, 100), epilog=f"examples:{lines}")
    return cast(CommandParser, parser)  # make_parser says so


_SHARED: Final[dict[str, dict[str, Any]]] = {
    "model": {
        "dest": "model",
        "metavar": "MODEL",
        "help": "a .psm bundle, a checkpoint folder, a GGUF file, or ORG/NAME of a hub",
    },
    "local model": {
        "dest": "model",
        "metavar": "MODEL",
        "help": "a .psm bundle, a checkpoint folder, a GGUF file, or ORG/NAME of a downloaded model",
    },
    "--yes": {
        "action": "store_true",
        "help": "download a model that is not on this machine without asking (default: ask)",
    },
    "--scheme": {
        "help": "store the weights of a checkpoint folder as f32, f16, bf16, w8a16, w8a8, w4a16, w4a8, w8a8_h32 or "
        "w4a8_h32 (default: the type in the checkpoint, of a GGUF file those of its tensors)",
    },
    "--threads": {
        "type": int,
        "default": 0,
        "metavar": "N",
        "help": "number of threads; 0 (default): all allowed cores",
    },
    "--network": {
        "metavar": "FILE.py:CLASS",
        "help": "your own network script for a checkpoint folder (default: the built-in network of its model_type)",
    },
    "--no-cache": {
        "action": "store_true",
        "help": "do not keep the bundle made from a checkpoint folder (default: keep it in the cache folder)",
    },
    "--verify": {
        "choices": ("once", "always", "never"),
        "default": "once",
        "help": "when to check a bundle's checksums: once (default; the cache folder remembers verified files), always "
        "or never",
    },
    "--ops": {  # main loads them
        "action": "append",
        "default": [],
        "metavar": "LIB.so",
        "help": "run your own ops from a shared library (docs/guides/custom-ops.md); may be repeated (default: none)",
    },
    "--context-len": {
        "type": int,
        "default": 0,
        "metavar": "N",
        "help": "plan memory for N tokens of prompt and answer per request; 0 (default): as many as fit",
    },
    "--kv-cache": {
        "choices": ("auto", "f32", "bf16", "int8", "int4"),
        "default": "auto",
        "help": "type of keys and values; auto (default): what a quantized folder says, else f32 with scheme f32, "
        "otherwise bf16",
    },
    "--no-prefix-cache": {
        "action": "store_true",
        "help": "compute equal beginnings of prompts each time (default: once, then reuse their pages)",
    },
    "--weights": {
        "choices": ("mmap", "huge"),
        "default": "mmap",
        "help": "mmap (default): map the file; huge: copy the weights into huge pages first",
    },
    "--tp": {
        "type": int,
        "default": 1,
        "metavar": "N",
        "help": "divide the network over N processes of this host (tensor parallel); --threads is per process "
        "(default: 1)",
    },
    "--pp": {
        "type": int,
        "default": 1,
        "metavar": "N",
        "help": "divide the layers into N stages of --tp processes each (pipeline parallel), which work on several "
        "batches at once (default: 1)",
    },
    "--cp": {
        "type": int,
        "default": 1,
        "metavar": "N",
        "help": "divide each layer and the keys and values of each context over N processes (context parallel, for "
        "long prompts); the tokens stay the same (default: 1)",
    },
    "--max-requests": {"type": int, "default": 32, "metavar": "N", "help": "requests per step (default: 32)"},
    "--max-tokens": {
        "type": int,
        "metavar": "N",
        "help": "generate at most N tokens (default: the model's default, or 256)",
    },
    "--temperature": {
        "type": float,
        "metavar": "T",
        "help": "sampling temperature; 0 is greedy (default: the model's default, or 0)",
    },
    "--top-k": {
        "type": int,
        "metavar": "K",
        "help": "sample from the K likeliest tokens; 0 is all (default: the model's default, or 0)",
    },
    "--top-p": {
        "type": float,
        "metavar": "P",
        "help": "sample from the smallest set of tokens whose probability reaches P; 1 is all (default: the model's "
        "default, or 1)",
    },
    "--min-p": {
        "type": float,
        "metavar": "P",
        "help": "drop tokens below this share of the likeliest token's probability; 0 drops none (default: the model's "
        "default, or 0)",
    },
    "--repetition-penalty": {
        "type": float,
        "metavar": "X",
        "help": "divide the logits of tokens that occurred by X; 1 is off (default: the model's default, or 1)",
    },
    "--presence-penalty": {
        "type": float,
        "metavar": "X",
        "help": "subtract X, from -2 to 2, from the logits of tokens in the answer (default: 0)",
    },
    "--frequency-penalty": {
        "type": float,
        "metavar": "X",
        "help": "subtract X, from -2 to 2, each time that a token is in the answer (default: 0)",
    },
    "--stop": {
        "action": "append",
        "default": [],
        "metavar": "TEXT",
        "help": "end the answer before TEXT; may be repeated (default: none)",
    },
    "--ignore-eos": {
        "action": "store_true",
        "help": "continue after end-of-text tokens (default: stop at the first)",
    },
    "--seed": {
        "type": int,
        "metavar": "S",
        "help": "seed of the sampling; the same seed gives the same text (default: random)",
    },
    "--json-schema": {
        "metavar": "FILE|TEXT",
        "help": "JSON schema that the answer follows: a file, or the schema itself (default: none)",
    },
    "--json-object": {
        "action": "store_true",
        "help": "the answer is an object of JSON (default: any text)",
    },
    "--regex": {
        "metavar": "TEXT",
        "help": "regular expression that the whole answer matches (default: none)",
    },
    "--choice": {
        "action": "append",
        "default": [],
        "metavar": "TEXT",
        "help": "the answer is one of these; repeat it for each (default: any text)",
    },
    "--grammar": {
        "metavar": "FILE|TEXT",
        "help": "grammar in Lark or GBNF that the answer follows: a file, or the grammar itself (default: none)",
    },
}
MODEL_OPTIONS: Final = ("--scheme", "--threads", "--network", "--no-cache", "--verify", "--yes", "--ops")
"""The options that say how to open MODEL."""
LIMIT_OPTIONS: Final = ("--context-len", "--kv-cache")
"""The limits that memory is planned for."""
SAMPLING_OPTIONS: Final = (
    "--max-tokens", "--temperature", "--top-k", "--top-p", "--min-p", "--repetition-penalty", "--presence-penalty",
    "--frequency-penalty", "--seed", "--stop", "--ignore-eos",
)  # fmt: skip
GRAMMAR_OPTIONS: Final = ("--json-schema", "--json-object", "--regex", "--choice", "--grammar")
"""The formats of an answer, of which a command takes one."""
_FILES: Final = ("json_schema", "grammar")
SHORT_FORMS: Final = {"--max-tokens": "-n", "--context-len": "-c", "--threads": "-t", "--seed": "-s", "--yes": "-y"}


def add_options(parser: argparse._ActionsContainer, *names: str, with_underscores: bool = False) -> None:
    """Add options that several commands have; ``with_underscores`` also spells them with underscores."""
    for name in names:
        flags = () if name[0] != "-" else spellings(name) if with_underscores else (name,)
        short = (SHORT_FORMS[name],) if name in SHORT_FORMS else ()
        parser.add_argument(*short, *flags, **_SHARED[name])


def add_model(parser: CommandParser, group: argparse._ActionsContainer, name: str = "model") -> None:
    """Add the operand MODEL (``name``: "model" or "local model"), which may also be given as ``-m MODEL``."""
    add_options(group, name)
    parser.add_operand_flag(group, "-m", "--model", metavar="MODEL", is_first=True)


def add_joining_options(parser: argparse._ActionsContainer, port: str, once: str) -> None:
    """Add the options of a command that joins a process of another machine.

    ``port``: whose address ``--primary`` is, for its help.  ``once``: the help of ``--once``.
    """
    parser.add_argument("--primary", required=True, metavar="HOST:PORT", help=f"address of {port} (required)")
    parser.add_argument(
        "--token-file", type=Path, required=True, metavar="FILE", help="file with the shared secret (required)"
    )
    parser.add_argument(
        "--ca-file",
        type=Path,
        metavar="FILE",
        help="PEM file with the certificates to trust (default: those of the system)",
    )
    parser.add_argument("--once", action="store_true", help=once)


def joining_of(args: argparse.Namespace) -> tuple[tuple[str, int], str, bytes | None]:
    """Return the address, the token and the certificates to trust; the parser has the options of
    ``add_joining_options``.

    Raises InvalidArgumentError, and what the files raise.
    """
    from penstock.serving.workers.machines.remote_worker_client import read_bytes, read_token

    address = host_and_port("primary", args.primary)
    return address, read_token(args.token_file), None if args.ca_file is None else read_bytes(args.ca_file)


def sampling_values(args: argparse.Namespace) -> dict[str, Any]:
    """Return the sampling fields that the options set, by name.

    The parser has SAMPLING_OPTIONS, and may have GRAMMAR_OPTIONS.
    """
    names = [name[2:].replace("-", "_") for name in SAMPLING_OPTIONS + GRAMMAR_OPTIONS]
    values: dict[str, Any] = {name: getattr(args, name, None) for name in names}
    values |= {name: text_or_file(name, values[name]) for name in _FILES if values[name] is not None}
    return {name: value for name, value in values.items() if value is not None and value is not False and value != []}


def text_or_file(name: str, value: str) -> str:
    """Return a text, or that of the file which it names.  A grammar has characters that names of files rarely have."""
    if any(part in value for part in ("{", '"', "\n", "::=", "start:")):
        return utf8_text(value, name)
    try:
        text = utf8_text(Path(value).read_bytes(), name)
    except OSError as error:
        raise FileAccessError(f"{name}: cannot read {value!r:.200}: {error.strerror}", param=name) from None
    if not text.strip():  # which would ask for nothing
        raise InvalidArgumentError(f"{name}: {value!r:.200} is empty", param=name)
    return text


def sampling_params(args: argparse.Namespace) -> SamplingParams:
    """Return the sampling that the options ask for.  InvalidArgumentError names a field with a wrong value."""
    from penstock.engine.params import SamplingParams

    return SamplingParams(**sampling_values(args))


def spellings(name: str) -> tuple[str, ...]:
    """Return an option with hyphens and with underscores; scripts for MindFormers use the latter."""
    return tuple(dict.fromkeys((name, "--" + name[2:].replace("-", "_"))))


def host_and_port(name: str, text: str) -> tuple[str, int]:
    """Return host and port of HOST:PORT; an IPv6 address stands in brackets.  ``name``: of the option.

    Raises InvalidArgumentError.
    """
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isascii() or not port.isdigit() or not 1 <= int(port[:6]) <= 65535:
        raise InvalidArgumentError(f"--{name}: expected HOST:PORT, got {text!r:.100}", param=name)
    return host, int(port)


def numbers_of(name: str, text: str) -> tuple[int, ...]:
    """Return the integers of an option such as ``--batch 1,8,32``; InvalidArgumentError."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise refusal(name, "numbers separated by commas", text) from None


def check_writable(name: str, path: Path) -> None:
    """Raise FileAccessError if the file of an option cannot be written; do so before long work."""
    existed = path.exists()
    try:
        with path.open("ab"):
            pass
        if not existed:
            path.unlink()
    except OSError as error:
        raise FileAccessError(f"--{name} {path}: {error.strerror}") from error


def refuse_without(needed: str, args: argparse.Namespace, *names: str) -> None:
    """Raise InvalidArgumentError for an option of ``names`` that is given, as it has no effect without ``needed``."""
    for name in names:
        if (value := getattr(args, name, None)) is not None and value is not False:
            raise InvalidArgumentError(f"--{name.replace('_', '-')} requires {needed}", param=name)


def write_file(name: str, path: Path, text: str) -> None:
    """Write the file of an option; FileAccessError."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise FileAccessError(f"--{name} {path}: {error.strerror}") from error


def utf8_text(data: str | bytes, name: str) -> str:
    """Return an argument or input bytes as text, decoded as UTF-8 whatever the locale is.

    InvalidArgumentError begins with ``name``.
    """
    try:
        return os.fsencode(data).decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidArgumentError(f"{name} is not UTF-8 text at byte {error.start}", param=name) from None


def limits_of(args: argparse.Namespace, *, max_requests: int, max_tokens: int = 512) -> ProgramLimits:
    """Return the limits that the options ask for."""
    from penstock.runtime.program import ProgramLimits

    return ProgramLimits(
        max_tokens=max_tokens,
        max_requests=max_requests,
        context_len=args.context_len,
        kv_layout=args.kv_cache,
        weights=getattr(args, "weights", "mmap"),  # commands that only plan have no --weights
    )


def open_llm(args: argparse.Namespace, max_requests: int, mode: str = "graph") -> LLM:
    """Open the model that the options describe; show progress and its notes on standard error.

    The parser has MODEL_OPTIONS, LIMIT_OPTIONS and ``--no-prefix-cache``.
    """
    from penstock.cli.model_source import model_path
    from penstock.cli.stage_server import stage_server
    from penstock.llm.llm import LLM

    path = model_path(args, args.model)
    with ProgressLine() as progress:
        llm = LLM(
            path,
            scheme=args.scheme,
            mode=mode,
            threads=args.threads,
            network=args.network,
            limits=limits_of(args, max_requests=max_requests, max_tokens=max(512, max_requests)),
            use_cache=not args.no_cache,
            progress=progress,
            prefix_cache=not args.no_prefix_cache,
            verify=args.verify,
            tensor_parallel_size=getattr(args, "tp", 1),
            pipeline_parallel_size=getattr(args, "pp", 1),
            context_parallel_size=getattr(args, "cp", 1),
            stage_server=stage_server(args),
        )
    for note in llm.notes:
        print(f"penstock: {note}", file=sys.stderr, flush=True)
    return llm
