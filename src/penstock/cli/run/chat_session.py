"""A chat in the terminal: the conversation, its sampling, and its commands."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from penstock.cli.progress import format_seconds, printable
from penstock.cli.run.word_wrap import AnswerWriter
from penstock.errors import FileAccessError, InvalidArgumentError, InvalidFileError, UnsupportedError
from penstock.validation import nearest
from penstock.version import __version__

if TYPE_CHECKING:
    from penstock.cli.run.answer_reader import AnswerReader
    from penstock.engine.params import SamplingParams
    from penstock.llm.conversation import Conversation, Turn
    from penstock.llm.llm import LLM
    from penstock.llm.result import Result
    from penstock.llm.stream import Stream

__all__ = ["ChatSession", "note"]

MAX_SHOWN_CHARS: Final = 200
"""The limit of a value in the list of settings."""
_COMMANDS: Final = (
    ("/set NAME VALUE", "set a sampling field (/set temperature 0.7); without VALUE: back to its default;\n"
                        "without NAME: list the fields"),
    ("/json SCHEMA", "answers follow a JSON schema, a file or the schema itself; without SCHEMA: they are any object;\n"
                     "/json off: they are text again"),
    ("/thoughts on|off", "show the thoughts of the next answers, or only how long they took"),
    ("/tools TOOLS", "the model may call tools: a JSON list, or a file with it. You type what a call returns.\n"
                     "/tools off: it may call none; either starts a new conversation"),
    ("/settings", "show the sampling fields that are set, and how full the context is"),
    ("/system TEXT", "start a new conversation with a system message; without TEXT: with none"),
    ("/clear, /new", "start a new conversation with the same system message"),
    ("/undo", "remove the last message and its answer"),
    ("/retry", "answer the last message again"),
    ("/save FILE", "write the conversation to a JSON file"),
    ("/load FILE", "continue a conversation from a file of /save"),
    ("/exit", "leave (so does Ctrl-D)"),
)  # fmt: skip
_OF_CONVERSATIONS: Final = ("system", "clear", "new", "reset", "undo", "save", "load", "thoughts", "tools")
"""The commands that only a model with a chat template has."""
_KEYS: Final = """A line that ends in \\ continues on the next line. To enter several lines, put \"\"\" on a line before
and after them, or paste them: a paste is one message.
Ctrl-C stops an answer and keeps the text so far; a second Ctrl-C leaves."""
_LEAVE: Final = ("exit", "quit", "bye")
_UNSHOWN: Final = ("echo", "logprobs", "prompt_logprobs")
_ANSWER_TOKENS: Final = 1024
"""The longest answer where neither the user nor the model says another length."""


class ChatSession:
    """A conversation, or a text to complete, and its sampling settings.

    ``settings``: sampling fields by name.  ``drops_oldest``: a full context drops the oldest turns.
    """

    def __init__(self, llm: LLM, system: str, settings: Mapping[str, Any], *, drops_oldest: bool) -> None:
        self._llm = llm
        self._has_template = llm.tokenizer.chat_template is not None
        self._drops_oldest = drops_oldest
        self._conversation: Conversation | None = None  # with a template
        self._settings = dict(settings)
        self._system = ""
        self._text = ""  # the last text to complete
        self._answer = ""  # the last answer
        self._num_tokens = 0
        self._own_files: dict[Path, int] = {}  # of /save and /load, with their time of change
        self._writer = AnswerWriter()
        self._shows_thoughts = True
        self._tools: list[dict[str, Any]] = []
        self._returned: list[str] = []  # what the first calls of the last answer returned
        self.was_interrupted = False
        self._begin(system)

    def banner(self, name: str) -> str:
        """Describe the model, the context and the commands."""
        from penstock.bench.open_model import describe_threads

        info = self._llm.info
        threads = describe_threads(info.num_threads, info.num_ranks)
        lines = [
            f"penstock {__version__}: {name}, {info.scheme}, {threads}, context of {self._llm.engine.max_len:,} tokens",
            f"Answers of up to {self._answer_tokens():,} tokens. /help lists the commands; Ctrl-D leaves.",
        ]
        if not self._has_template:
            state = (
                "'s chat template cannot be used"
                if self._llm.tokenizer.chat_template_error
                else " has no chat template"
            )
            lines.append(f"The model{state}. It completes your text.")
        return printable("\n".join(lines), keep="\n")

    def _answer_tokens(self) -> int:
        """Return the longest answer in tokens."""
        limit = self._settings.get("max_tokens") or self._llm.generation.max_new_tokens
        if limit is None:
            limit = min(_ANSWER_TOKENS, self._llm.engine.max_len // 2) if self._has_template else 256
        return int(limit)

    def _begin(self, system: str) -> None:
        if system and not self._has_template:
            raise InvalidArgumentError(
                "system: the model has no chat template, so it cannot take a system message", param="system"
            )
        self._system, self._text = system, ""
        self._open([{"role": "system", "content": system}] if system else [])

    def _begin_again(self, system: str) -> None:
        self._begin(system)
        note(f"New conversation with the system message {system!r:.60}." if system else "New conversation.")

    def _open(self, messages: list[dict[str, Any]]) -> None:
        """Start a conversation with these messages."""
        from penstock.llm.conversation import Conversation

        if self._has_template:
            read = self._reader.message if self._reader.keeps_parts else None
            self._conversation = Conversation(
                self._llm, messages, drop_oldest=self._drops_oldest, tools=self._tools, read_answer=read
            )
        self._num_tokens, self._returned = 0, []

    def _chat(self, command: str) -> Conversation:
        if self._conversation is None:
            raise InvalidArgumentError(f"{command}: the model has no chat template, so there is no conversation")
        return self._conversation

    def _params(self) -> SamplingParams:
        from penstock.engine.params import SamplingParams

        params = SamplingParams(**{"max_tokens": self._answer_tokens()} | self._settings)
        return params if self._conversation is None else self._reader.params(params)

    def say(self, message: str) -> None:
        """Answer a message; without a chat template, complete it as text.

        After calls of tools, the next messages are what these returned.
        """
        if calls := self._open_calls():
            returned = [*self._returned, message]
            if len(returned) < len(calls):
                self._returned = returned
                self._ask_result(calls)
                return
            self._answer = self._show(self._chat("").answer_calls(returned, self._params())).text
        elif self._conversation is not None:
            self._answer = self._show(self._conversation.stream(message, self._params())).text
        else:
            self._answer = self._show(self._llm.stream(message, self._params())).text
            self._text = message

    def _open_calls(self) -> list[dict[str, Any]]:
        """Return the calls of the last answer, which wait for what they return."""
        messages = self._conversation.messages if self._conversation is not None else []
        return [*(messages[-1].get("tool_calls") or ())] if messages else []

    def _ask_result(self, calls: Sequence[Mapping[str, Any]]) -> None:
        name = calls[len(self._returned)]["function"]["name"]
        note(f"Type what {name} returns. /undo takes the message back.")

    def _show(self, stream: Stream | Turn) -> Result:
        """Write an answer as it is generated; an answer that fails leaves the conversation unchanged."""
        from penstock.cli.run.answer_reader import AnswerView

        before = self._conversation.num_dropped if self._conversation is not None else 0
        self.was_interrupted = False
        parser = self._reader.parser() if self._conversation is not None and self._shows_parts() else None
        view = AnswerView(self._writer, shows_thoughts=self._shows_thoughts)
        try:
            for delta in stream:
                if parser is None:
                    self._writer.write(delta.text)
                else:
                    view.write(parser.push(delta.text))
            if parser is not None:
                view.write(parser.finish())
        except KeyboardInterrupt:
            stream.abort()
            self.was_interrupted = True
            self._writer.write(" ...")
        finally:
            view.end()
            self._writer.write("\n")
        result = stream.result()
        self._returned = []  # not before: after an error the results so far still count
        self._num_tokens = len(result.prompt_token_ids) + len(result.token_ids)
        note(self._figures(result))
        if self._conversation is not None and self._conversation.num_dropped > before:
            dropped = _count(self._conversation.num_dropped - before, "message")
            note(f"The context was full. The {dropped} at the beginning of the conversation were dropped.")
        if result.finish_reason == "length":
            note(self._why_cut())
        if calls := self._open_calls():
            self._ask_result(calls)
        return result

    def _shows_parts(self) -> bool:
        """Return True if thoughts and calls are shown apart; elsewhere than on a terminal, only where they must be."""
        return self._reader.has_parts and (self._writer.is_terminal or self._reader.keeps_parts)

    @cached_property
    def _reader(self) -> AnswerReader:
        from penstock.cli.run.answer_reader import AnswerReader

        return AnswerReader(self._llm.tokenizer, self._tools)

    def _figures(self, result: Result) -> str:
        timings, count, max_len = result.timings, len(result.token_ids), self._llm.engine.max_len
        rate = f" at {timings['decode_tokens_per_s']:,.1f} tokens/s" if count > 1 else ""
        first = f", first token after {format_seconds(timings['first_token_s'])}" if count else ""
        return f"[{_count(count, 'token')}{rate}{first}; context {self._num_tokens:,} of {max_len:,}]"

    def _why_cut(self) -> str:
        if self._num_tokens < self._llm.engine.max_len:
            limit = self._answer_tokens()
            return f"The answer reached its limit of {_count(limit, 'token')}. /set max_tokens N changes the limit."
        return (
            f"The context of {self._llm.engine.max_len:,} tokens is full.{' /clear empties it.' * self._has_template}"
        )

    def is_command(self, message: str) -> bool:
        """Return True for a command; the first of several lines, which may be pasted code, must have a known name."""
        if not message.startswith("/") or "\n" not in message:
            return message.startswith("/")
        return _split_command(message)[0] in (*self._commands(""), *_LEAVE)

    def command(self, line: str) -> bool:
        """Run a command; return False to leave."""
        name, argument = _split_command(line)
        if name in _LEAVE:
            return False
        commands = self._commands(argument)
        if name not in commands:
            from penstock.sampling_fields import FIELD_NAMES

            known = (name for name in commands if self._has_template or name not in _OF_CONVERSATIONS)
            near = f"set {name}" if name in FIELD_NAMES else nearest(name, [*known, "exit"])
            hint = f"did you mean /{near}?" if near else "/help lists the commands"
            raise InvalidArgumentError(f"unknown command /{name}; {hint}")
        commands[name]()
        return True

    def _commands(self, argument: str) -> dict[str, Callable[[], None]]:
        return {
            "help": self._show_help,
            "?": self._show_help,
            "settings": self._show_settings,
            "set": lambda: (
                self._set(*argument.replace("=", " ", 1).partition(" ")[::2]) if argument else self._show_fields()
            ),
            "json": lambda: self._set_format(argument),
            "thoughts": lambda: self._fold_thoughts(argument),
            "tools": lambda: self._set_tools(argument),
            "system": lambda: self._begin_again(argument),
            **dict.fromkeys(("clear", "new", "reset"), lambda: self._begin_again(self._system)),
            "undo": self._undo,
            "retry": self._retry,
            "save": lambda: self._save(argument),
            "load": lambda: self._load(argument),
        }

    def _show_help(self) -> None:
        """List the commands that the model has."""
        rows = []
        for form, text in _COMMANDS:
            if self._has_template or form[1:].split(",")[0].split()[0] not in _OF_CONVERSATIONS:
                rows += [f"{head:<17} {line}" for head, line in zip_longest([form], text.split("\n"), fillvalue="")]
        note("\n".join([*rows, _KEYS]))

    def _show_settings(self) -> None:
        listed = (
            ", ".join(f"{key} {_in_a_line(value)}" for key, value in self._settings.items()) or "the model's defaults"
        )
        note(f"sampling: {listed}; context: {self._num_tokens} of {self._llm.engine.max_len} tokens")

    def _show_fields(self) -> None:
        from penstock.sampling_fields import SAMPLING_FIELDS

        note("\n".join(f"{row.name:<26} {row.help}" for row in SAMPLING_FIELDS if row.name not in _UNSHOWN))

    def _retry(self) -> None:
        before = self._answer
        if self._conversation is not None:
            self._answer = self._show(self._conversation.retry(self._params())).text
        elif self._text:
            self.say(self._text)
        else:
            raise InvalidArgumentError("/retry: there is no answer yet")
        if self._answer == before and (reason := self._why_equal()):
            note(f"The answer is the same as before: {reason}")

    def _why_equal(self) -> str:
        """Return why an answer that is generated again is the same; "" if it may differ."""
        temperature = self._settings.get("temperature")
        if (self._llm.generation.temperature if temperature is None else temperature) == 0:
            return "temperature 0 always chooses the likeliest token. /set temperature 0.7 varies it."
        if self._settings.get("seed") is not None:
            return f"seed {self._settings['seed']} repeats the choices. /set seed takes a new one each time."
        return ""

    def _undo(self) -> None:
        messages = self._chat("/undo").messages
        last = max((i for i, message in enumerate(messages) if message["role"] == "user"), default=None)
        if last is None:
            raise InvalidArgumentError("/undo: there is no message to remove")
        self._open(messages[:last])
        note(f"Removed the message {printable(str(messages[last]['content']))!r:.60} and its answer.")

    def _save(self, name: str) -> None:
        messages = self._chat("/save").messages
        path = _file("/save", name)
        with _named("/save", path):
            is_replaced = path.exists()
            is_own = is_replaced and path.stat().st_mtime_ns == self._own_files.get(path)
        if is_replaced and not is_own:
            raise InvalidArgumentError(f"/save: {path} exists already and was not changed. Choose another name.")
        saved = {"messages": messages, "sampling": self._settings} | ({"tools": self._tools} if self._tools else {})
        text = json.dumps(saved, ensure_ascii=False, indent=1)
        with _named("/save", path):
            _write_whole(path, f"{text}\n".encode())
            self._own_files[path] = path.stat().st_mtime_ns
        old = ", in place of what this chat saved or loaded there" * is_replaced
        note(f"Saved {_count(len(messages), 'message')} to {path}{old}.")

    def _load(self, name: str) -> None:
        self._chat("/load")
        path = _file("/load", name)
        with _named("/load", path):
            content, changed_ns = path.read_bytes(), path.stat().st_mtime_ns
        try:
            data = json.loads(content)
            messages, settings = [*data["messages"]], data.get("sampling", {})
            system = next((str(message["content"]) for message in messages if message["role"] == "system"), "")
            settings = {str(key): value for key, value in settings.items()}
            self._check(settings)
            self._open_with(messages, data.get("tools", self._tools))
        except InvalidArgumentError as error:
            raise InvalidFileError(f"/load: {path}: {error}", param=error.param) from None
        except UnsupportedError as error:
            raise UnsupportedError(f"/load: {path}: {error}", param=error.param) from None
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise InvalidFileError(f"/load: {path} is not a conversation of /save") from None
        self._settings, self._system = settings, system
        self._own_files[path] = changed_ns
        self._answer = next((str(message.get("content", "")) for message in messages[-1:]), "")
        note(f"Loaded {_count(len(messages), 'message')} from {path}.")

    def _open_with(self, messages: list[dict[str, Any]], tools: Any) -> None:
        """Start a conversation with these messages and tools.  Raises the errors of both, and keeps those before."""
        from penstock.cli.run.answer_reader import AnswerReader, checked_tools

        reader_before, tools_before = self._reader, self._tools
        tools = checked_tools(tools)
        self._reader, self._tools = AnswerReader(self._llm.tokenizer, tools), tools
        try:
            self._open(messages)
        except BaseException:
            self._reader, self._tools = reader_before, tools_before
            raise

    def _set(self, name: str, value: str) -> None:
        from penstock.sampling_fields import FIELD_NAMES

        settings = {key: old_value for key, old_value in self._settings.items() if key != name}
        if value.strip():
            settings[name] = _value_of(value.strip())
        elif name not in FIELD_NAMES:
            settings[name] = None  # SamplingParams refuses the unknown name
        try:
            self._check(settings)
        except RecursionError:  # json parsed it, but the error message cannot be formatted
            raise InvalidArgumentError(f"{name}: the value is nested too deeply", param=name) from None
        self._settings = settings
        self._show_settings()

    def _set_format(self, schema: str) -> None:
        """Let the next answers follow a JSON schema.  Raises its errors, and keeps the format before it."""
        from penstock.cli.options import text_or_file
        from penstock.text.grammar.source import GRAMMAR_FIELDS

        settings = {key: value for key, value in self._settings.items() if key not in GRAMMAR_FIELDS}
        if not schema:
            settings["json_object"] = True
        elif schema != "off":
            settings["json_schema"] = text_or_file("json_schema", schema)
        grammar = self._llm.compile_grammar(self._check(settings))
        if grammar is not None:
            grammar.result()
        self._settings = settings
        self._show_settings()

    def _fold_thoughts(self, argument: str) -> None:
        self._chat("/thoughts")
        if argument not in ("on", "off"):
            raise InvalidArgumentError(f"/thoughts: expected on or off, got {argument!r:.60}")
        self._shows_thoughts = argument == "on"
        note("Thoughts are shown." if self._shows_thoughts else "Thoughts are folded: only their time is shown.")

    def _set_tools(self, argument: str) -> None:
        """Start a conversation with other tools.  Raises the errors of wrong ones, and keeps those before."""
        from penstock.cli.options import text_or_file
        from penstock.cli.run.answer_reader import read_tools

        self._chat("/tools")
        if not argument:
            note("\n".join(tool["function"]["name"] for tool in self._tools) or "The model may call no tools.")
            return
        tools = [] if argument == "off" else read_tools(text_or_file("tools", argument))
        self._open_with([{"role": "system", "content": self._system}] if self._system else [], tools)
        note(f"New conversation with {_count(len(tools), 'tool')}.")

    def _check(self, settings: Mapping[str, Any]) -> SamplingParams:
        """Return the parameters of fields.

        Raises InvalidArgumentError for those that do not exist, that have a wrong value, or that a chat lacks.
        """
        from penstock.engine.params import SamplingParams

        for name in _UNSHOWN:
            if name in settings:
                raise InvalidArgumentError(
                    f"{name}: not available in a chat, which shows only the text of answers", param=name
                )
        if settings.get("n", 1) != 1 or settings.get("best_of", 1) != 1:
            raise InvalidArgumentError("n and best_of must be 1 in a chat")
        return SamplingParams(**settings)


def _in_a_line(value: object) -> str:
    """Return a value in one line, such as of a schema from a file."""
    text = " ".join(str(value).split()) or repr(value)
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[:MAX_SHOWN_CHARS]}\N{HORIZONTAL ELLIPSIS}"


def _split_command(line: str) -> tuple[str, str]:
    """Return the name of a command and its argument."""
    words = line[1:].split(maxsplit=1)
    return words[0] if words else "", words[1].strip() if len(words) > 1 else ""


def _write_whole(path: Path, data: bytes) -> None:
    """Write a file at once, so that a full disk leaves the earlier one as it was."""
    path = Path(os.path.realpath(path))  # a link stays one
    file, name = tempfile.mkstemp(prefix=".penstock.", dir=path.parent)  # nobody can have put a link there
    part = Path(name)
    try:
        with open(file, "wb") as stream:
            if path.exists():
                os.fchmod(file, path.stat().st_mode & 0o777)
            stream.write(data)
        os.replace(part, path)
    except OSError:
        part.unlink(missing_ok=True)
        raise


@contextmanager
def _named(command: str, path: Path) -> Iterator[None]:
    """Name the command and the file in what the operating system refuses."""
    try:
        yield
    except OSError as error:
        raise FileAccessError(f"{command}: {path}: {error.strerror or error}") from None


def _file(command: str, name: str) -> Path:
    if not name:
        raise InvalidArgumentError(f"{command}: expected a file name")
    try:
        return Path(name).expanduser().absolute()
    except RuntimeError:  # "~" of a user without a home folder
        return Path(name).absolute()


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _value_of(text: str) -> Any:
    """Return a setting as its JSON value, or as text if it is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def note(text: str) -> None:
    """Print a line beside the conversation, on standard error."""
    print(printable(text, keep="\n"), file=sys.stderr, flush=True)
