"""``penstock chat MODEL``: a conversation in the terminal."""

from __future__ import annotations

import argparse
import signal
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from penstock.cli.options import LIMIT_OPTIONS, MODEL_OPTIONS, add_options, add_parser_of, open_llm
from penstock.cli.progress import printable
from penstock.errors import InvalidArgumentError, PenstockError
from penstock.text.terminal import write_text

if TYPE_CHECKING:
    from penstock.engine.params import SamplingParams
    from penstock.llm.conversation import Conversation, Turn
    from penstock.llm.llm import LLM
    from penstock.llm.stream import Stream

__all__ = ["add_parser", "run"]

_HELP: Final = """/set NAME VALUE   set a sampling field (/set temperature 0.7); without VALUE: the model's default
/settings         show the sampling fields that are set, and how full the context is
/system TEXT      start a new conversation with a system message
/reset            start a new conversation
/retry            answer the last message again
/exit             exit (so does Ctrl-D)
A line that ends in \\ continues on the next line. To enter several lines, put \"\"\" on a line before and after them.
Ctrl-C stops an answer and keeps the text so far."""
_QUOTES: Final = '"""'
_UNSHOWN: Final = ("echo", "logprobs", "prompt_logprobs")


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the subcommand."""
    parser = add_parser_of(
        subparsers,
        "chat",
        "chat with a model",
        "Chat with a model in the terminal. A model without a chat template completes text instead. /help lists the "
        "commands.",
        'penstock chat model.psm --system "Be brief."\npenstock chat demo/demo.psm --context-len 512',
    )
    add_options(parser, *MODEL_OPTIONS)
    parser.add_argument("--system", default="", metavar="TEXT", help="the system message (default: none)")
    parser.add_argument(
        "--drop-oldest",
        action="store_true",
        help="drop the oldest turns when the context is full (default: refuse the message)",
    )
    add_options(parser, *LIMIT_OPTIONS, "--no-prefix-cache", "--tp")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Read and answer messages until the input ends."""
    # Ctrl-C ends an answer here, not the process: disable the watchdog that main installs for long native calls.
    with suppress(ValueError):
        signal.set_wakeup_fd(-1)
    with open_llm(args, 1) as llm:
        conversation = _ChatSession(llm, args.system, args.drop_oldest)
        if sys.stdin.isatty():
            with suppress(ImportError):
                import readline  # noqa: F401 - gives input() its history and editing
        _note(
            "/help lists the commands."
            if conversation.has_template
            else "The model has no chat template. It completes your text."
        )
        while (message := _read_message()) is not None:
            try:
                if message.startswith("/"):
                    if not conversation.command(message):
                        break
                elif message.strip():
                    conversation.say(message)
            except PenstockError as error:
                _note(str(error))
            except KeyboardInterrupt:  # before the first token
                _note("\nStopped. Ctrl-D or /exit exits.")
    return 0


class _ChatSession:
    """A conversation, or a text to complete, and its sampling settings."""

    def __init__(self, llm: LLM, system: str, drop_oldest: bool) -> None:
        self._llm = llm
        self.has_template = llm.tokenizer.chat_template is not None
        if drop_oldest and not self.has_template:
            raise InvalidArgumentError("--drop-oldest: the model has no chat template, so there are no turns to drop")
        self._drop_oldest = drop_oldest
        self._conversation: Conversation | None = None  # with a template
        self._settings: dict[str, Any] = {}
        self._system = ""
        self._text = ""  # the last text to complete
        self._num_tokens = 0
        self._begin(system)

    def _begin(self, system: str) -> None:
        if system and not self.has_template:
            raise InvalidArgumentError(
                "system: the model has no chat template, so it cannot take a system message", param="system"
            )
        self._system, self._text, self._num_tokens = system, "", 0
        if self.has_template:
            messages = [{"role": "system", "content": system}] if system else []
            self._conversation = self._llm.conversation(messages, drop_oldest=self._drop_oldest)

    def _params(self) -> SamplingParams:
        from penstock.engine.params import SamplingParams

        # An answer ends by itself, so only the context limits it unless max_tokens is set.  A text completion may never
        # end, so it keeps the default of max_tokens.
        limit = {} if self._conversation is None else {"max_tokens": self._llm.engine.max_len}
        return SamplingParams(**limit | self._settings)

    def say(self, message: str) -> None:
        """Answer a message; without a chat template, complete it as text."""
        if self._conversation is not None:
            self._show(self._conversation.stream(message, self._params()))
        else:
            self._show(self._llm.stream(message, self._params()))
            self._text = message

    def _retry(self) -> None:
        if self._conversation is not None:
            self._show(self._conversation.retry(self._params()))
        elif self._text:
            self.say(self._text)
        else:
            raise InvalidArgumentError("/retry: there is no answer yet")

    def _show(self, stream: Stream | Turn) -> None:
        """Write an answer as it is generated; an answer that fails leaves the conversation unchanged."""
        before = self._conversation.num_dropped if self._conversation is not None else 0
        try:
            for delta in stream:
                write_text(delta.text)
        except KeyboardInterrupt:
            stream.abort()
            write_text(" ...")
        finally:
            write_text("\n")
        result = stream.result()
        self._num_tokens = len(result.prompt_token_ids) + len(result.token_ids)
        if self._conversation is not None and self._conversation.num_dropped > before:
            _note(f"The context is full. The oldest {self._conversation.num_dropped - before} messages were dropped.")
        if result.finish_reason == "length" and self._num_tokens >= self._llm.engine.max_len:
            hint = " /reset starts a new conversation." if self.has_template else ""
            _note(f"The context of {self._llm.engine.max_len} tokens is full.{hint}")

    def command(self, line: str) -> bool:
        """Run a command; return False to exit."""
        name, _, rest = line[1:].strip().partition(" ")
        rest = rest.strip()
        if name in ("exit", "quit", "bye"):
            return False
        if name == "help":
            _note(_HELP)
        elif name == "settings":
            listed = ", ".join(f"{key} {value}" for key, value in self._settings.items()) or "the model's defaults"
            _note(f"sampling: {listed}; context: {self._num_tokens} of {self._llm.engine.max_len} tokens")
        elif name == "set":
            self._set(*rest.partition(" ")[::2])
        elif name == "system":
            self._begin(rest)
        elif name == "reset":
            self._begin(self._system)
        elif name == "retry":
            self._retry()
        else:
            raise InvalidArgumentError(f"unknown command /{name}; /help lists the commands")
        return True

    def _set(self, name: str, value: str) -> None:
        from penstock.engine.params import SamplingParams
        from penstock.sampling_fields import FIELD_NAMES

        if not name:
            raise InvalidArgumentError("/set: expected a field and a value, or only a field to restore its default")
        if name in _UNSHOWN:
            raise InvalidArgumentError(
                f"{name}: not available in a chat, which shows only the text of answers", param=name
            )
        settings = {key: kept for key, kept in self._settings.items() if key != name}
        if value.strip():
            settings[name] = _value_of(value.strip())
        elif name not in FIELD_NAMES:
            settings[name] = None  # SamplingParams refuses the unknown name
        if settings.get("n", 1) != 1 or settings.get("best_of", 1) != 1:
            raise InvalidArgumentError("n and best_of must be 1 in a chat")
        try:
            SamplingParams(**settings)
        except RecursionError:  # json parsed it, but the error message cannot be formatted
            raise InvalidArgumentError(f"{name}: the value is nested too deeply", param=name) from None
        self._settings = settings


def _value_of(text: str) -> Any:
    """Return a setting as its JSON value, or as text if it is not JSON."""
    import json

    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _note(text: str) -> None:
    print(printable(text, keep="\n"), file=sys.stderr, flush=True)


def _read_line(prompt: str) -> str:
    """Return a line without its newline; EOFError at the end of the input."""
    if sys.stdin.isatty():
        return input(prompt)
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.rstrip("\n")


def _read_more() -> str | None:
    """Return the next line of a multi-line message; None at the end of a file, which also ends the message."""
    try:
        return _read_line(". ")
    except EOFError:
        if sys.stdin.isatty():
            raise
        return None


def _read_message() -> str | None:
    """Return a line, lines joined by a backslash, or the lines between triple quotes; None at the end of the input.

    Ctrl-C discards the message being typed.
    """
    while True:
        try:
            line = _read_line("> ")
            if line.strip() == _QUOTES:
                lines: list[str] = []
                while (more := _read_more()) is not None and more.strip() != _QUOTES:
                    lines.append(more)
                return "\n".join(lines)
            parts = [line]
            while parts[-1].endswith("\\"):
                parts[-1] = parts[-1][:-1]
                if (more := _read_more()) is None:
                    break
                parts.append(more)
            return "\n".join(parts)
        except EOFError:
            if sys.stdin.isatty():
                _note("")  # the shell's prompt starts on a new line
            return None
        except KeyboardInterrupt:
            _note("\nCtrl-D or /exit exits.")
