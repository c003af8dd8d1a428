"""``penstock infer``: answers from bundles, the pipeline in one line."""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from penstock.cli.options import add_ops_option, add_verify_option, utf8_text
from penstock.errors import InvalidArgumentError
from penstock.text.terminal import write_text

if TYPE_CHECKING:
    from penstock.llm.result import Result

__all__ = ["add_parser", "run"]

_EXAMPLES = """examples:
  penstock infer --prefill-model-path demo/demo.psm "def add(a, b):"
  penstock infer --model demo/demo.psm --stream --max-tokens 32 < prompts.txt
  PENSTOCK_MODELS=models penstock infer --model-name bloom_560m --is-sample-acceleration True "I love Beijing,because"
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the subcommand."""
    parser = subparsers.add_parser(
        "infer",
        help="answer prompts from a bundle, a pair of them or a model folder",
        description="Answer prompts: those that are given, at once; or the lines of standard input, one by one.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("prompts", metavar="PROMPT", nargs="*", help="texts to continue; none: the lines of stdin")
    _add_model(parser)
    _add_answer(parser)
    add_ops_option(parser)
    parser.set_defaults(run=run)


def _add_model(parser: argparse.ArgumentParser) -> None:
    what = parser.add_argument_group("what runs (one of the first three)")
    what.add_argument("--model", metavar="PATH", help="a bundle, a model folder, a checkpoint folder or a YAML file")
    what.add_argument(*_spelled("--prefill-model-path"), metavar="FILE.psm", help="the bundle that reads prompts")
    what.add_argument(
        *_spelled("--model-name"), metavar="NAME", help="a model in the folders of PENSTOCK_MODELS; or a name for it"
    )
    what.add_argument(
        *_spelled("--increment-model-path"), metavar="FILE.psm", help="the one that makes tokens: may be the same"
    )
    what.add_argument(*_spelled("--model-type"), metavar="TYPE", help="penstock: what the paths name are bundles")
    what.add_argument(
        *_spelled("--config-path"), metavar="FILE.ini", help="a file with a section [model]: what memory is planned for"
    )
    what.add_argument(
        *_spelled("--seq-length"),
        *_spelled("--infer-seq-length"),
        dest="seq_length",
        type=int,
        metavar="N",
        help="tokens of prompt and answer; 0: what the model allows",
    )
    what.add_argument(*_spelled("--device-id"), type=int, metavar="N", help="0: the CPU is one device")
    what.add_argument(*_spelled("--rank-id"), type=int, metavar="N", help="0")
    what.add_argument("--target", help="cpu")
    what.add_argument("--backend", default="graph", help="graph (default), lite or eager: the same tokens")
    what.add_argument("--tokenizer", metavar="PATH", help="a tokenizer.json, folder or bundle; else the bundle's own")
    what.add_argument("--scheme", help="how a checkpoint folder's weights are stored; its own type unless given")
    what.add_argument("--network", metavar="FILE.py:CLASS", help="your own network script, for a checkpoint folder")
    what.add_argument("--threads", type=int, default=0, metavar="N", help="0: as many as allowed (default)")
    add_verify_option(what, default=None)


def _add_answer(parser: argparse.ArgumentParser) -> None:
    how = parser.add_argument_group("how")
    for name, note in (
        ("--is-sample-acceleration", "the graph chooses the tokens, always the likeliest"),
        ("--add-special-tokens", "begin a prompt as the tokenizer begins a text (default)"),
        ("--stream", "show the answer as it grows"),
    ):
        how.add_argument(*_spelled(name), type=_truth, nargs="?", const=True, metavar="True|False", help=note)
    how.add_argument(*_spelled("--max-tokens"), type=int, metavar="N", help="tokens to make at most (256)")
    how.add_argument("--temperature", type=float, metavar="T", help="0: greedy")
    how.add_argument(*_spelled("--top-k"), type=int, metavar="K", help="keep the K likeliest tokens; 0: all")
    how.add_argument(*_spelled("--top-p"), type=float, metavar="P", help="keep the smallest set that reaches P; 1: all")
    how.add_argument("--seed", type=int, metavar="S", help="the same seed gives the same text")
    how.add_argument("--json", action="store_true", help="print an object a line instead of text")


def _spelled(name: str) -> tuple[str, ...]:
    """An option as we write it, and with underscores, as the scripts of MindFormers are called."""
    other = "--" + name[2:].replace("-", "_")
    return (name,) if other == name else (name, other)


def _truth(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"expected True or False, not {text!r:.60}; prompts go before it")
    return text.lower() == "true"


def run(args: argparse.Namespace) -> int:
    """Answer all prompts; text on stdout."""
    from penstock.engine.params import SamplingParams
    from penstock.offline.pipeline import pipeline

    params = SamplingParams(
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        seed=args.seed,
    )
    if args.stream and args.json:
        raise InvalidArgumentError("--stream goes without --json")
    if args.model is None and args.prefill_model_path is None and args.model_name is None:
        raise InvalidArgumentError("--model is missing, or --prefill-model-path, or --model-name")
    prompts = [utf8_text(prompt, f"prompt {number}") for number, prompt in enumerate(args.prompts, 1)]
    names = {"seq_length": "infer_seq_length"}
    fields = ("prefill_model_path", "increment_model_path", "model_name", "config_path", "seq_length", "device_id")
    given = {names.get(name, name): getattr(args, name) for name in (*fields, "model_type", "rank_id", "target")}
    values = {name: value for name, value in given.items() if value is not None}
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


def _answer(generate: Any, prompt: str, stream: bool, as_json: bool, call: dict[str, Any]) -> None:
    if not stream:
        _show(generate(prompt, **call), as_json)
        return
    for delta in generate(prompt, stream=True, **call):
        write_text(delta.text)
    write_text("\n")


def _show(result: Result, as_json: bool) -> None:
    if as_json:
        found = {"text": result.text, "token_ids": result.token_ids, "finish_reason": result.finish_reason}
        print(json.dumps({**found, "seed": result.seed}, ensure_ascii=False), flush=True)
    else:
        write_text(f"{result.text}\n")


def _lines() -> Iterator[str]:
    """The lines of standard input; on a terminal each is asked for."""
    asks = sys.stdin.isatty()
    for number in itertools.count(1):
        if asks:
            print("prompt> ", end="", file=sys.stderr, flush=True)
        line = utf8_text(getattr(sys.stdin, "buffer", sys.stdin).readline(), f"line {number}")
        if not line:
            return
        if line.strip():
            yield line.rstrip("\r\n")
