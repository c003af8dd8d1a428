"""``penstock rerank MODEL FILE``: the lines of a text file by their relevance to a query."""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import nullcontext

from penstock.cli.options import LIMIT_OPTIONS, MODEL_OPTIONS, add_model, add_options, add_parser_of, open_llm
from penstock.cli.run.text_lines import text_lines
from penstock.engine.options import RequestOptions

__all__ = ["add_parser", "run"]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the subcommand."""
    parser = add_parser_of(
        subparsers,
        "rerank",
        "Print the lines of a text file in the order of their relevance to a query, as one JSON object per line. The "
        "model is a cross-encoder or a causal reranker.",
        'penstock rerank my-reranker documents.txt --query "where is the cat?" --top-n 3',
    )
    add_model(parser, parser)
    parser.add_argument(
        "file", metavar="FILE", help="a document in UTF-8 on each line; empty lines are skipped; - is standard input"
    )
    group = parser.add_argument_group("ranking")
    group.add_argument("--query", required=True, metavar="TEXT", help="what the documents should answer (required)")
    group.add_argument("--top-n", type=int, metavar="N", help="print only the N best documents (default: all)")
    group.add_argument(
        "--instruction", metavar="TEXT", help="what is relevant, for a causal reranker (default: the model's own)"
    )
    group.add_argument(
        "--truncate", action="store_true", help="cut documents that are too long (default: they are refused)"
    )
    add_options(parser.add_argument_group("model"), *MODEL_OPTIONS)
    add_options(parser.add_argument_group("memory"), "--max-requests", *LIMIT_OPTIONS, "--no-prefix-cache")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the documents; return the exit status."""
    with nullcontext(sys.stdin.buffer) if args.file == "-" else open(args.file, "rb") as file:
        documents = list(text_lines(file, args.file))
    with open_llm(args, args.max_requests) as llm:
        ranked = llm.rerank(
            args.query,
            documents,
            top_n=args.top_n,
            options=RequestOptions(truncate_prompt=args.truncate),
            instruction=args.instruction,
        )
    for result in ranked:
        print(json.dumps({"index": result.index, "score": result.score, "document": result.document}))
    return 0
