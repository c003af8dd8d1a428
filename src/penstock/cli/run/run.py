"""``penstock run MODEL "prompt"``: continue a prompt, streaming to the terminal."""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import TYPE_CHECKING

from penstock.cli.open_model import open_llm
from penstock.cli.options import add_cache_option, add_limit_options, add_model_options, add_weights_option, utf8_text
from penstock.cli.progress import format_bytes
from penstock.errors import InvalidArgumentError
from penstock.text.terminal import write_text

if TYPE_CHECKING:
    from penstock.engine.params import SamplingParams
    from penstock.llm.llm import LLM
    from penstock.llm.result import Result

__all__ = ["add_parser", "run"]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the subcommand."""
    parser = subparsers.add_parser(
        "run",
        help="continue a prompt",
        description="Continue a prompt. Sampling that is not given comes from the model's generation_config.json.",
    )
    add_model_options(parser)
    parser.add_argument("prompt", metavar="PROMPT", help="the text to continue; - reads it from standard input")
    parser.add_argument("--mode", choices=("graph", "eager"), default="graph", help="eager needs PyTorch and a folder")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="tokens to make at most (256)")
    parser.add_argument("--temperature", type=float, metavar="T", help="0: greedy")
    parser.add_argument("--top-k", type=int, metavar="K", help="keep the K likeliest tokens; 0: all")
    parser.add_argument("--top-p", type=float, metavar="P", help="keep the smallest set that reaches P; 1: all")
    parser.add_argument("--seed", type=int, metavar="S", help="the same seed gives the same text")
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before TEXT; may be repeated")
    parser.add_argument("--ignore-eos", action="store_true", help="go on past end tokens")
    parser.add_argument("--chat", action="store_true", help="the prompt is a message: use the model's chat template")
    parser.add_argument(
        "--truncate-prompt", action="store_true", help="of a prompt that is too long keep the end; else it is refused"
    )
    parser.add_argument("--json", action="store_true", help="print one object instead of text")
    add_limit_options(parser)
    add_cache_option(parser)
    add_weights_option(parser)
    parser.set_defaults(run=run)


def _params(args: argparse.Namespace) -> SamplingParams:
    from penstock.engine.params import SamplingParams

    return SamplingParams(
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        seed=args.seed,
        stop=args.stop,
        ignore_eos=args.ignore_eos,
    )


def run(args: argparse.Namespace) -> int:
    """Continue the prompt; text on stdout, figures on stderr."""
    from penstock.engine.options import RequestOptions

    params = _params(args)  # refuse bad values before anything is opened
    if args.truncate_prompt and args.chat:
        raise InvalidArgumentError("--truncate-prompt goes without --chat: a message is not cut")
    prompt_text = _prompt_text(args.prompt)
    start = time.perf_counter()
    with open_llm(args, 1, args.mode) as llm:
        load_s = time.perf_counter() - start - llm.populate_s - llm.verify_s
        for note in llm.notes:
            print(f"penstock: {note}", file=sys.stderr)
        prompt = llm.chat_prompt([{"role": "user", "content": prompt_text}]) if args.chat else prompt_text
        stream = llm.stream(prompt, params, RequestOptions(truncate_prompt=args.truncate_prompt))
        if sys.stdout.isatty() and not args.json and not args.chat:
            write_text(prompt_text)  # a completion reads on from its prompt; a pipe gets the answer alone
        for delta in stream:
            if not args.json:
                write_text(delta.text)
        result = stream.result()
        if args.truncate_prompt and (num_cut := len(llm.tokenizer.encode(prompt_text)) - len(result.prompt_token_ids)):
            print(f"penstock: the first {num_cut:,} tokens of the prompt were left out", file=sys.stderr)
        if args.json:
            print(json.dumps(_object(llm, result, load_s), ensure_ascii=False))
            return 0
        write_text("\n")
        if sys.stdout.isatty() and sys.stderr.isatty():
            print(file=sys.stderr)
        print(_figures(llm, result, load_s), file=sys.stderr)
    return 0


def _prompt_text(prompt: str) -> str:
    """The prompt, whatever the locale takes its bytes for; ``-`` is standard input."""
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
    from penstock.runtime.machine import peak_rss_bytes

    timings, num_tokens = result.timings, len(result.token_ids)
    rate = f"{timings['decode_tokens_per_s']:,.0f} tokens/s, " if num_tokens > 1 else ""
    threads = "1 thread" if llm.info.num_threads == 1 else f"{llm.info.num_threads} threads"
    copied = f"weights copied in {llm.populate_s * 1e3:.0f} ms, " if llm.populate_s else ""
    verified = f"checksums verified in {llm.verify_s * 1e3:.0f} ms, " if llm.verify_s else ""
    return (
        f"load {load_s * 1e3:.0f} ms, {verified}{copied}first token {timings['first_token_s'] * 1e3:.0f} ms, "
        f"{rate}memory {format_bytes(peak_rss_bytes())} "
        f"({llm.info.scheme}, {threads}; {len(result.prompt_token_ids)} + {num_tokens} tokens, {result.finish_reason})"
    )
