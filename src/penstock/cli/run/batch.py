"""``penstock batch MODEL INPUT.jsonl OUTPUT.jsonl``: many requests in OpenAI's batch format, restartable."""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import stat
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from penstock.cli.open_model import open_llm
from penstock.cli.options import add_cache_option, add_limit_options, add_model_options
from penstock.errors import InvalidArgumentError, InvalidFileError, PenstockError

if TYPE_CHECKING:
    from penstock.engine.options import RequestOptions
    from penstock.engine.params import SamplingParams
    from penstock.llm.llm import LLM
    from penstock.llm.prompts import Prompt

__all__ = ["add_parser", "run"]

_LINE_START: Final = b'{"id": "batch_req_'
"""How each line that this command writes begins; nothing else is ever taken off a file."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the subcommand."""
    parser = subparsers.add_parser(
        "batch",
        help="answer a file of requests",
        description="Answer a file of requests in OpenAI's batch format. Results are appended as they are ready; "
        "started again, the command goes on with the requests that the output does not have yet. A line that is not "
        "a request gets a result with an error, as does a request that fails; the status is 1 then.",
    )
    add_model_options(parser)
    parser.add_argument("input", metavar="INPUT.jsonl", help="requests, one object a line")
    parser.add_argument("output", metavar="OUTPUT.jsonl", help="where results go; those that it has are kept")
    parser.add_argument("--max-requests", type=int, default=32, metavar="N", help="answered at once (32)")
    add_limit_options(parser)
    add_cache_option(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Answer what is not answered yet; status 1 when a request ended with an error, now or in an earlier run."""
    lines = _read_lines(args.input)
    if not lines:
        print(f"penstock: {args.input}: there are no requests in it", file=sys.stderr)
    with open(os.open(args.output, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644), "r+b", buffering=0) as output:
        _check_output(args, output)
        done, end = _read_done(args.output, output.read())
        todo = [line for line in lines if line.key not in done]
        num_failed = sum(done.get(line.key, False) for line in lines)
        if done:
            failed = f", {num_failed:,} of them failed: without their lines they are tried again" if num_failed else ""
            there = f"{len(lines) - len(todo):,} of {len(lines):,} are there already{failed}"
            print(f"penstock: {there}", file=sys.stderr)
        if todo:
            with open_llm(args, args.max_requests) as llm:
                output.truncate(end)  # not before: whatever was refused has left the file as it was
                num_failed += _answer(llm, todo, output)
    return 1 if num_failed else 0


def _check_output(args: argparse.Namespace, output: Any) -> None:
    """Lock a regular file that is not the input; InvalidFileError for anything else."""
    found = os.fstat(output.fileno())
    if not stat.S_ISREG(found.st_mode):
        raise InvalidFileError(f"{args.output}: the output must be a regular file")
    if os.path.samestat(found, os.stat(args.input)):
        raise InvalidFileError(f"{args.output}: the output must not be the input")
    try:
        fcntl.flock(output, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise InvalidFileError(f"{args.output}: another process writes it") from None


@dataclass(frozen=True)
class _Line:
    """A line of the input.  ``custom_id`` is None where it cannot be read; ``error`` says why it is not a request."""

    number: int
    custom_id: str | None = None
    request: dict[str, Any] = field(default_factory=dict)
    error: str = ""

    @property
    def key(self) -> str | int:
        """What a result of an earlier run has in common with it."""
        return self.number if self.error or self.custom_id is None else self.custom_id


def _read_lines(path: str) -> list[_Line]:
    """The lines that are not empty.  One that is not a request has the reason, and the others are answered."""
    lines: list[_Line] = []
    seen: dict[str, int] = {}
    with open(path, "rb") as file:
        for number, data in enumerate(file, 1):
            if not data.strip():
                continue
            line = _read_line(number, data)
            if not line.error and line.custom_id in seen:
                taken = f"line {number}: custom_id {line.custom_id!r:.100} is line {seen[line.custom_id]}'s already"
                line = replace(line, error=taken)
            if not line.error and line.custom_id is not None:
                seen[line.custom_id] = number
            lines.append(line)
    return lines


def _read_line(number: int, data: bytes) -> _Line:
    try:
        request = json.loads(data.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        return _Line(number, error=f"line {number} is not JSON: {error}")
    if not isinstance(request, dict) or "custom_id" not in request:
        return _Line(number, error=f"line {number} must be an object with a custom_id")
    name = request["custom_id"]
    if not isinstance(name, str) or not name:
        return _Line(number, error=f"line {number}: custom_id must be a string that is not empty, not {name!r:.100}")
    return _Line(number, name, request)


def _read_done(path: str, data: bytes) -> tuple[dict[str | int, bool], int]:
    """The lines that the output has by ``_Line.key``, and whether each failed; and where its whole lines end.

    InvalidFileError unless all lines are results, the last of which a kill may have cut short.
    """
    done: dict[str | int, bool] = {}
    end = 0
    *lines, rest = data.split(b"\n")
    for line in lines:
        try:
            result = json.loads(line)
            error = result["error"]
            key = result["custom_id"] if error is None else error.get("line", result["custom_id"])
            done[key if isinstance(key, int) else str(key)] = error is not None
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise _not_ours(path, end) from None
        end += len(line) + 1
    if not rest.startswith(_LINE_START[: len(rest)]):
        raise _not_ours(path, end)
    return done, end


def _not_ours(path: str, where: int) -> InvalidFileError:
    return InvalidFileError(f"{path}: byte {where}: expected a result of an earlier run, found something else")


def _answer(llm: LLM, todo: list[_Line], output: Any) -> int:
    from penstock.offline.batch_completions import answer_body, read_body

    def prepared() -> Iterator[tuple[Prompt, SamplingParams, RequestOptions] | PenstockError]:
        for line in todo:
            request = line.request
            try:
                if line.error:
                    raise InvalidArgumentError(line.error)
                if (method := request.get("method", "POST")) != "POST":
                    raise InvalidArgumentError(f"method must be POST, not {method!r:.100}", param="method")
                yield read_body(llm, str(request.get("url")), request.get("body"))
            except PenstockError as error:
                yield error

    start, num_failed, num_tokens, first_failure = time.monotonic(), 0, 0, ""
    for count, (index, outcome) in enumerate(llm.generate_each(prepared()), 1):
        line = todo[index]
        if isinstance(outcome, PenstockError):
            num_failed += 1
            first_failure = first_failure or (str(outcome) if line.error else f"{line.custom_id!r}: {outcome}")
            error: dict[str, Any] = {"code": type(outcome).__name__, "message": str(outcome)}
            if line.error:
                error["line"] = line.number
            result = _result(line, None, error)
        else:
            body = answer_body(llm, line.request["url"], line.request["body"], outcome)
            num_tokens += body["usage"]["completion_tokens"]
            result = _result(line, {"status_code": 200, "request_id": uuid.uuid4().hex, "body": body}, None)
        _write_whole(output, result)
        if sys.stderr.isatty() or count == len(todo):
            seconds = max(time.monotonic() - start, 1e-9)
            text = f"{count:,}/{len(todo):,} requests, {num_failed} failed, {num_tokens / seconds:,.0f} tokens/s"
            print(f"\r{text}" if sys.stderr.isatty() else text, end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    if first_failure:
        printable = "".join(char if char.isprintable() else "?" for char in first_failure)
        print(f"penstock: the first that failed: {printable:.500}", file=sys.stderr)
    return num_failed


def _result(line: _Line, response: dict[str, Any] | None, error: dict[str, Any] | None) -> bytes:
    value = {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": line.custom_id}
    # ASCII: a custom_id or a model's name may have half a surrogate pair, which UTF-8 cannot hold.
    return json.dumps(value | {"response": response, "error": error}, ensure_ascii=True).encode() + b"\n"


def _write_whole(output: Any, line: bytes) -> None:
    """A disk that fills up may take a part: then the rest is the error, and the next start takes the part off."""
    view = memoryview(line)
    while view:
        view = view[output.write(view) :]
