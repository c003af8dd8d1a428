"""Opens the model that the command line describes."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from penstock.cli.model_source import model_path
from penstock.cli.options import limits_of
from penstock.cli.progress import ProgressLine

if TYPE_CHECKING:
    from penstock.llm.llm import LLM

__all__ = ["open_llm"]


def open_llm(args: argparse.Namespace, max_requests: int, mode: str = "graph") -> LLM:
    """Open the model that the options describe; show progress on standard error.

    The parser has ``add_model_options``, ``add_limit_options`` and ``add_cache_option``.
    """
    from penstock.llm.llm import LLM

    path = model_path(args, args.model)
    progress = ProgressLine()
    try:
        return LLM(
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
        )
    finally:
        progress.close()
