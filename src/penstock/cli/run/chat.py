"""``penstock chat MODEL``: a conversation in the terminal."""

from __future__ import annotations

import argparse
import signal
import sys
from contextlib import suppress

from penstock.cli.options import (
    LIMIT_OPTIONS,
    MODEL_OPTIONS,
    SAMPLING_OPTIONS,
    add_model,
    add_options,
    add_parser_of,
    open_llm,
    sampling_params,
    sampling_values,
)
from penstock.cli.run.message_input import MessageInput
from penstock.cli.stage_server import add_stage_options
from penstock.errors import PenstockError, UnsupportedError

__all__ = ["add_parser", "run"]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the subcommand."""
    parser = add_parser_of(
        subparsers,
        "chat",
        "Chat with a model in the terminal. A model without a chat template completes text instead. /help lists the "
        "commands. Ctrl-C stops an answer, a second Ctrl-C and Ctrl-D leave. Lines that you type are kept for the "
        "arrow keys in ~/.local/state/penstock/chat_history (XDG_STATE_HOME sets another folder).",
        'penstock chat model.psm --system "Be brief."\n'
        "penstock chat smollm2-135m --temperature 0.7 --top-p 0.9\n"
        "penstock chat -m demo/demo.psm -c 512 -n 64",
    )
    model = parser.add_argument_group("model")
    add_model(parser, model)
    add_options(model, *MODEL_OPTIONS)
    conversation = parser.add_argument_group("conversation")
    conversation.add_argument("--system", default="", metavar="TEXT", help="the system message (default: none)")
    conversation.add_argument(
        "--keep-oldest",
        action="store_true",
        help="refuse a message when the context is full (default: drop the oldest turns, never the system message)",
    )
    conversation.add_argument(
        "--no-history", action="store_true", help="do not keep the lines that you type (default: keep 1,000)"
    )
    sampling = parser.add_argument_group("sampling (/set changes it later)")
    sampling.add_argument(
        "-n",
        "--max-tokens",
        type=int,
        metavar="N",
        help="generate at most N tokens per answer (default: the model's default, or 1,024, at most half of the "
        "context; without a chat template 256)",
    )
    add_options(sampling, *(name for name in SAMPLING_OPTIONS if name != "--max-tokens"))
    add_options(
        parser.add_argument_group("memory"), *LIMIT_OPTIONS, "--no-prefix-cache", "--weights", "--tp", "--pp", "--cp"
    )
    add_stage_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Read and answer messages until the input ends."""
    from penstock.cli.run.chat_session import ChatSession, note
    from penstock.engine.pooling import check_heads

    sampling_params(args)  # refuses wrong values before the model is opened
    # Ctrl-C ends an answer here, not the process: disable the watchdog that main installs for long native calls.
    with suppress(ValueError):
        signal.set_wakeup_fd(-1)
    name = args.model  # as the user wrote it
    with open_llm(args, 1) as llm, MessageInput(keeps_history=not args.no_history) as messages:
        check_heads(None, llm.info.hidden_size, llm.engine.has_language_head)
        if llm.info.bidirectional:
            raise UnsupportedError(
                "The network's attention is not causal, so it cannot continue a text. Use run for one token, or embed.",
                param="model",
            )
        session = ChatSession(llm, args.system, sampling_values(args), drops_oldest=not args.keep_oldest)
        print(session.banner(name), file=sys.stderr)
        while (message := messages.read()) is not None:
            try:
                if session.is_command(message):
                    if not session.command(message):
                        break
                elif message.strip():
                    session.say(message)
            except (PenstockError, OSError) as error:
                is_too_long = getattr(error, "code", "") == "context_length_exceeded"
                note(f"{error}{'. /clear starts a new conversation.' * is_too_long}")
            except KeyboardInterrupt:  # before the first token
                note("\nStopped.")
                session.was_interrupted = True
            messages.was_interrupted = session.was_interrupted
    return 0
