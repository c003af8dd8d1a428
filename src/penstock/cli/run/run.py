"""``penstock run MODEL "prompt"``: continue a prompt and print the text as it is generated."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.checkpoint.tokenizer_files.names import VOCABULARY_FILES
from penstock.cli.model_source import model_path
from penstock.cli.options import (
    GRAMMAR_OPTIONS,
    LIMIT_OPTIONS,
    MODEL_OPTIONS,
    SAMPLING_OPTIONS,
    add_model,
    add_options,
    add_parser_of,
    open_llm,
    sampling_params,
    utf8_text,
)
from penstock.cli.progress import format_bytes, format_seconds
from penstock.cli.run.task_output import CONTINUES, print_task
from penstock.cli.stage_server import add_stage_options
from penstock.errors import InvalidArgumentError, UnsupportedError
from penstock.file_kinds import is_gguf
from penstock.text.terminal import write_text

if TYPE_CHECKING:
    from penstock.llm.llm import LLM
    from penstock.llm.result import Result

__all__ = ["add_parser", "check_tokenizer", "run"]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the subcommand."""
    parser = add_parser_of(
        subparsers,
        "run",
        "Continue a prompt, or print the classes, entities, fillings or the vector of a text if the model is for "
        "that. A sampling option that is not given takes its value from the model's "
        "generation_config.json.",
        'penstock run demo/demo.psm "def add(a, b):" --max-tokens 32\n'
        'penstock run -m demo/demo.psm -p "def add(a, b):" -n 32 -t 2\n'
        'echo "def add(a, b):" | penstock run demo/demo.psm - --temperature 0.8 --seed 1\n'
        'penstock run demo/demo.psm "A bike as JSON: " --json-schema \'{"type": "object"}\'',
    )
    model = parser.add_argument_group("model and prompt")
    add_model(parser, model)
    model.add_argument("prompt", metavar="PROMPT", help="the text to continue; - reads standard input")
    parser.add_operand_flag(model, "-p", "--prompt", metavar="PROMPT", is_first=False)
    add_options(model, *MODEL_OPTIONS)
    model.add_argument(
        "--mode",
        choices=("graph", "eager"),
        default="graph",
        help="graph (default): the native core; eager: PyTorch, for a checkpoint folder or a GGUF file",
    )
    add_options(parser.add_argument_group("sampling"), *SAMPLING_OPTIONS)
    add_options(parser.add_argument_group("format of the answer (one of them)"), *GRAMMAR_OPTIONS)
    answer = parser.add_argument_group("prompt format and output")
    answer.add_argument(
        "--chat",
        action="store_true",
        help="format the prompt as a user message with the model's chat template (default: plain text)",
    )
    answer.add_argument(
        "--truncate-prompt",
        action="store_true",
        help="keep only the end of a prompt that is too long (default: refuse the prompt)",
    )
    answer.add_argument("--json", action="store_true", help="print one JSON object (default: text)")
    add_options(
        parser.add_argument_group("memory"), *LIMIT_OPTIONS, "--no-prefix-cache", "--weights", "--tp", "--pp", "--cp"
    )
    add_stage_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Continue the prompt; print text on standard output and figures on standard error."""
    from penstock.engine.options import RequestOptions
    from penstock.offline.text_tasks.natural import natural_task

    params = sampling_params(args)  # refuses wrong values before the model is opened
    if args.truncate_prompt and args.chat:
        raise InvalidArgumentError("--truncate-prompt cannot be combined with --chat: a message is not truncated")
    if args.mode == "eager" and Path(args.model).is_file() and not is_gguf(Path(args.model)):
        raise InvalidArgumentError("--mode eager: expected a checkpoint, because a bundle has no network script")
    prompt_text = _prompt_text(args.prompt)
    args.model = model_path(args, args.model)  # before the time of loading begins
    check_tokenizer(Path(args.model))
    start = time.perf_counter()
    with open_llm(args, 1, args.mode) as llm:
        load_s = time.perf_counter() - start - llm.populate_s - llm.verify_s
        if args.chat and llm.tokenizer.chat_template is None:
            reason = llm.tokenizer.chat_template_error
            raise InvalidArgumentError(
                "--chat: the model has no chat template that can be used; pass a plain prompt to continue"
                f"{reason and f' ({reason})'}",
                param="chat",
            )
        if (task := natural_task(llm)) not in CONTINUES:
            print_task(llm, task, prompt_text, as_json=args.json)
            return 0
        prompt = llm.chat_prompt([{"role": "user", "content": prompt_text}]) if args.chat else prompt_text
        stream = llm.stream(prompt, params, RequestOptions(truncate_prompt=args.truncate_prompt))
        if sys.stdout.isatty() and not args.json and not args.chat:
            write_text(prompt_text)  # a completion follows its prompt; a pipe gets only the answer
        for delta in stream:
            if not args.json:
                write_text(delta.text)
        result = stream.result()
        if args.truncate_prompt and (num_cut := len(llm.tokenizer.encode(prompt_text)) - len(result.prompt_token_ids)):
            print(f"penstock: dropped the first {num_cut:,} tokens of the prompt", file=sys.stderr)
        if args.json:
            print(json.dumps(_object(llm, result, load_s), ensure_ascii=False))
            return 0
        write_text("\n")
        if sys.stdout.isatty() and sys.stderr.isatty():
            print(file=sys.stderr)
        print(_figures(llm, result, load_s), file=sys.stderr)
        if llm.tokenizer.chat_templates and not args.chat and sys.stderr.isatty():
            print("The prompt was continued as plain text. --chat asks it as a message.", file=sys.stderr)
    return 0


def check_tokenizer(model: Path) -> None:
    """Refuse a checkpoint folder without a tokenizer before it is captured, which takes seconds."""
    from penstock.checkpoint.side_files import model_folder

    if not model.is_dir():
        return
    home = model_folder(model)
    names = ("tokenizer.json", *VOCABULARY_FILES)
    if (home / "config.json").exists() and not any((home / name).exists() for name in names):
        from penstock.checkpoint.tokenizer_files.byte_ranks import needs_code, vocabulary_of_code

        if file := vocabulary_of_code(home):
            raise UnsupportedError(f"{model}: {needs_code(file)}")
        raise UnsupportedError(
            f"{model}: expected tokenizer.json, which makes token ids of a prompt, got none. Copy the file from the "
            f"original model, or pass token ids in Python: LLM({str(model)!r}).generate([1, 2, 3])."
        )


def _prompt_text(prompt: str) -> str:
    """Return the prompt, decoded as UTF-8 whatever the locale is; ``-`` is standard input."""
    return utf8_text(getattr(sys.stdin, "buffer", sys.stdin).read() if prompt == "-" else prompt, "prompt")


def _object(llm: LLM, result: Result, load_s: float) -> dict[str, object]:
    from penstock.runtime.machine import peak_rss_bytes

    timings = {
        "load_s": load_s,
        "populate_s": llm.populate_s,
        "verify_s": llm.verify_s,
        **result.timings,
        "peak_rss_bytes": peak_rss_bytes(),
    }
    return {
        "text": result.text,
        "token_ids": result.token_ids,
        "finish_reason": result.finish_reason,
        "num_prompt_tokens": len(result.prompt_token_ids),
        "seed": result.seed,
        "scheme": llm.info.scheme,
        "mode": llm.info.mode,
        "timings": timings,
    }


def _figures(llm: LLM, result: Result, load_s: float) -> str:
    """Return two lines: the answer, and the model that gave it."""
    from penstock.runtime.machine import peak_rss_bytes

    timings, num_tokens = result.timings, len(result.token_ids)
    rate = f" at {timings['decode_tokens_per_s']:,.1f} tokens/s" if num_tokens > 1 else ""
    threads = _count(llm.info.num_threads, "thread")
    if llm.info.num_ranks > 1:
        threads = f"{llm.info.num_ranks} ranks of {threads}"
    verified = f" (and checksums verified in {format_seconds(llm.verify_s)})" if llm.verify_s else ""
    copied = f", weights copied in {format_seconds(llm.populate_s)}" if llm.populate_s else ""
    return (
        f"{_count(num_tokens, 'token')}{rate}, first token after {format_seconds(timings['first_token_s'])}, "
        f"prompt of {_count(len(result.prompt_token_ids), 'token')}; {_why_ended(llm, result)}\n"
        f"model loaded in {format_seconds(load_s)}{verified}{copied}, scheme {llm.info.scheme}, {threads}, "
        f"{format_bytes(peak_rss_bytes())} of memory"
    )


def _why_ended(llm: LLM, result: Result) -> str:
    if result.finish_reason != "length":
        return {"stop": "ended at an end token, a stop string or the end of its format"}.get(
            result.finish_reason, result.finish_reason
        )
    if len(result.prompt_token_ids) + len(result.token_ids) >= llm.engine.max_len:
        return f"ended at the context length of {llm.engine.max_len:,} tokens"
    return "ended at the limit of --max-tokens"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
