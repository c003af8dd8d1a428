"""``penstock embed MODEL FILE``: the vector of each line of a text file."""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import nullcontext
from itertools import islice
from typing import Any, Final

from penstock.cli.options import LIMIT_OPTIONS, MODEL_OPTIONS, add_model, add_options, add_parser_of, open_llm
from penstock.cli.run.text_lines import text_lines

__all__ = ["add_parser", "run"]

_LINES_AT_ONCE: Final = 256
"""The lines whose vectors are computed before they are printed, so that a file of any size needs little memory."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the subcommand."""
    parser = add_parser_of(
        subparsers,
        "embed",
        "Print a vector for each line of a text file, as one JSON object per line. The model's files say how vectors "
        "are made from the rows of tokens, unless --pooling does.",
        "penstock embed demo/demo.psm texts.txt > vectors.jsonl\n"
        "penstock embed demo/demo.psm texts.txt --pooling last --normalize",
    )
    add_model(parser, parser)
    parser.add_argument(
        "file", metavar="FILE", help="a text in UTF-8 on each line; empty lines are skipped; - is standard input"
    )
    group = parser.add_argument_group("vectors")
    group.add_argument(
        "--pooling",
        default="auto",
        choices=("auto", "mean", "last", "cls", "max"),
        help="which rows are taken; auto does what the model's files say, or else mean (default: auto)",
    )
    group.add_argument(
        "--normalize", action="store_true", help="scale vectors to length 1 (default: as the model's files say)"
    )
    group.add_argument("--prompt-name", metavar="NAME", help="the prompt before each text (default: the model's own)")
    group.add_argument("--dimensions", type=int, metavar="N", help="print only N elements of a vector (default: all)")
    add_options(parser.add_argument_group("model"), *MODEL_OPTIONS)
    add_options(parser.add_argument_group("memory"), "--max-requests", *LIMIT_OPTIONS, "--no-prefix-cache")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the vectors of the lines in their order; return the exit status."""
    with (
        nullcontext(sys.stdin.buffer) if args.file == "-" else open(args.file, "rb") as file,
        open_llm(args, args.max_requests) as llm,
    ):
        index, lines = 0, text_lines(file, args.file)
        while texts := list(islice(lines, _LINES_AT_ONCE)):
            embeddings: Any = llm.embed(
                texts,
                args.pooling,
                args.normalize or None,
                prompt_name=args.prompt_name,
                dimensions=args.dimensions,
            )
            for embedding in embeddings:
                values = {
                    "index": index,
                    "num_tokens": len(embedding.token_ids),
                    "embedding": embedding.vector.tolist(),
                }
                print(json.dumps(values))
                index += 1
    return 0
