"""``penstock infer``: ``penstock.pipeline`` as a command."""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cli.model_source import downloaded_path
from penstock.cli.options import SAMPLING_OPTIONS, add_options, add_parser_of, sampling_params, spellings, utf8_text
from penstock.errors import FileAccessError, InvalidArgumentError
from penstock.file_kinds import is_bundle
from penstock.text.terminal import write_text

if TYPE_CHECKING:
    from penstock.llm.result import Result

__all__ = ["add_parser", "run"]

_EXAMPLES = """penstock infer --prefill-model-path demo/demo.psm "def add(a, b):"
penstock infer -m demo/demo.psm --stream -n 32 < prompts.txt
PENSTOCK_MODELS=models penstock infer --model-name bloom_560m --is-sample-acceleration True "I love Beijing,because"
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the subcommand."""
    parser = add_parser_of(
        subparsers,
        "infer",
        "Answer the prompts on the command line together, or the lines of standard input one by one. The options are "
        "those of penstock.pipeline and of the scripts of MindFormers, with hyphens or underscores. For one prompt and "
        "one model, penstock run is shorter.",
        _EXAMPLES,
    )
    parser.add_argument(
        "prompts", metavar="PROMPT", nargs="*", help="texts to continue (default: the lines of standard input)"
    )
    parser.add_operand_flag(parser, "-p", "--prompt", metavar="PROMPT", is_first=False)
    _add_model(parser)
    _add_answer(parser)
    add_options(parser, "--ops")
    parser.set_defaults(run=run)


def _add_model(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model (one of the first three is required)")
    group.add_argument(
        "-m",
        "--model",
        metavar="PATH",
        help="a bundle, a model folder, a checkpoint folder, ORG/NAME of a downloaded model, or a YAML file (default: "
        "none)",
    )
    group.add_argument(
        *spellings("--prefill-model-path"), metavar="FILE.psm", help="the bundle that reads prompts (default: none)"
    )
    group.add_argument(
        *spellings("--model-name"),
        metavar="NAME",
        help="a model in the folders of PENSTOCK_MODELS; with another of the three, only its name (default: common)",
    )
    group.add_argument(
        *spellings("--increment-model-path"),
        metavar="FILE.psm",
        help="the bundle that generates tokens (default: the bundle that reads prompts)",
    )
    group.add_argument(
        *spellings("--model-type"), metavar="TYPE", help="format of the bundles; only penstock (default: penstock)"
    )
    group.add_argument(
        *spellings("--config-path"),
        metavar="FILE.ini",
        help="a file whose section [model] sets what memory is planned for (default: none)",
    )
    group.add_argument(
        *spellings("--seq-length"),
        *spellings("--infer-seq-length"),
        dest="seq_length",
        type=int,
        metavar="N",
        help="tokens of prompt and answer per request; 0 (default): as many as the model allows",
    )
    group.add_argument(*spellings("--device-id"), type=int, metavar="N", help="device number; only 0 (default: 0)")
    group.add_argument(*spellings("--rank-id"), type=int, metavar="N", help="rank; only 0 is supported (default: 0)")
    group.add_argument("--target", help="kind of device; only cpu (default: cpu)")
    group.add_argument(
        "--backend", default="graph", help="graph, lite or eager, which give the same tokens (default: graph)"
    )
    group.add_argument(
        "--tokenizer", metavar="PATH", help="a tokenizer.json, a folder or a bundle (default: the bundle's own)"
    )
    add_options(group, "--scheme", "--network", "--threads")
    add_options(group, "--verify")
    group.set_defaults(verify=None)  # the configuration file may set it


def _add_answer(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("answers")
    for name, note in (
        ("--is-sample-acceleration", "let the graph choose the likeliest token (default: as the model's file says)"),
        ("--add-special-tokens", "add the tokenizer's special tokens to a prompt (default: True)"),
        ("--stream", "print the answer as it is generated (default: False)"),
    ):
        group.add_argument(*spellings(name), type=_truth, nargs="?", const=True, metavar="True|False", help=note)
    add_options(group, *SAMPLING_OPTIONS, with_underscores=True)
    group.add_argument("--json", action="store_true", help="print one JSON object per answer (default: text)")


def _truth(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"expected True or False, got {text!r:.60}; put prompts before this option")
    return text.lower() == "true"


def run(args: argparse.Namespace) -> int:
    """Answer all prompts; print text or JSON on standard output."""
    from penstock.offline.pipeline import pipeline

    params = sampling_params(args)
    if args.stream and args.json:
        raise InvalidArgumentError("--stream cannot be combined with --json")
    if args.model is None and args.prefill_model_path is None and args.model_name is None:
        raise InvalidArgumentError("--model, --prefill-model-path or --model-name is required")
    if args.model is not None:
        args.model = downloaded_path(args.model)
    _check_paths(args)
    prompts = [utf8_text(prompt, f"prompt {number}") for number, prompt in enumerate(args.prompts, 1)]
    names = {"seq_length": "infer_seq_length"}
    fields = ("prefill_model_path", "increment_model_path", "model_name", "config_path", "seq_length", "device_id")
    all_values = {names.get(name, name): getattr(args, name) for name in (*fields, "model_type", "rank_id", "target")}
    values = {name: value for name, value in all_values.items() if value is not None}
    run_options = {name: getattr(args, name) for name in ("backend", "threads", "scheme", "network", "verify")}
    options: dict[str, Any] = {**run_options, **values}
    with pipeline("text_generation", args.model, args.tokenizer, **options) as generate:
        call = {"params": params, "is_sample_acceleration": args.is_sample_acceleration}
        call["add_special_tokens"] = args.add_special_tokens is not False
        if prompts and not args.stream:
            for result in generate(prompts, **call):
                _show(result, args.json)
            return 0
        for prompt in prompts or _lines():
            _answer(generate, prompt, bool(args.stream), args.json, call)
    return 0


def _check_paths(args: argparse.Namespace) -> None:
    """Refuse a tokenizer that does not exist, and a bundle for the eager backend."""
    if args.tokenizer == "":
        raise InvalidArgumentError(
            "--tokenizer: expected a tokenizer.json, a folder or a bundle, got an empty path", param="tokenizer"
        )
    if args.tokenizer is not None and not Path(args.tokenizer).exists():
        raise FileAccessError(f"--tokenizer: no such file or folder: {args.tokenizer!r:.200}", param="tokenizer")
    bundle = args.prefill_model_path or args.model
    if args.backend == "eager" and bundle and Path(bundle).is_file() and is_bundle(Path(bundle)):
        raise InvalidArgumentError("--backend eager: expected a checkpoint folder, not a bundle")


def _answer(generate: Any, prompt: str, stream: bool, as_json: bool, call: dict[str, Any]) -> None:
    if not stream:
        _show(generate(prompt, **call), as_json)
        return
    for delta in generate(prompt, stream=True, **call):
        write_text(delta.text)
    write_text("\n")


def _show(result: Result, as_json: bool) -> None:
    if as_json:
        value = {"text": result.text, "token_ids": result.token_ids, "finish_reason": result.finish_reason}
        print(json.dumps({**value, "seed": result.seed}, ensure_ascii=False), flush=True)
    else:
        write_text(f"{result.text}\n")


def _lines() -> Iterator[str]:
    """Yield the lines of standard input that are not empty, after a prompt on a terminal."""
    is_terminal = sys.stdin.isatty()
    for number in itertools.count(1):
        if is_terminal:
            print("prompt> ", end="", file=sys.stderr, flush=True)
        line = utf8_text(getattr(sys.stdin, "buffer", sys.stdin).readline(), f"line {number}")
        if not line:
            return
        if line.strip():
            yield line.rstrip("\r\n")
