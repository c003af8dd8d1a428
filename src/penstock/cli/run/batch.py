"""``penstock batch MODEL INPUT.jsonl ... OUTPUT``: many requests in OpenAI's batch format, restartable."""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import json
import os
import stat
import sys
import time
import uuid
from collections import deque
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from penstock.cli.options import LIMIT_OPTIONS, MODEL_OPTIONS, add_model, add_options, add_parser_of
from penstock.cli.progress import ProgressLine, printable
from penstock.cli.run.batch_models import OpenModels, add_worker_options, check_worker_options, file_pairs, open_models
from penstock.cli.run.batch_sources import local_sources
from penstock.errors import InvalidArgumentError, InvalidFileError, PenstockError, UnavailableError
from penstock.validation import refusal

if TYPE_CHECKING:
    from penstock.serving.openai.in_process import InProcessApi

__all__ = ["add_parser", "run"]

_LOOK_S: Final = 0.5
"""The interval at which to look for more ready workers, which allow more open requests."""
_LINE_START: Final = b'{"id": "batch_req_'
"""The start of each line that this command writes.  Only an incomplete line of this form is removed from a file."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the subcommand."""
    parser = add_parser_of(
        subparsers,
        "batch",
        "Answer a file of requests in OpenAI's batch format: completions, chat completions and embeddings. The command "
        "appends each result when it is ready. Started again, it continues with the requests that have no result yet. "
        "A request that fails and a line that is not a request get a result with an error; the exit status is then 1. "
        "Several files, or a folder of *.jsonl, are answered in turn into a folder, each into a file of its name. "
        "Inputs may be in S3 (penstock[s3]): s3://bucket/name.jsonl, s3://bucket/folder/ for all *.jsonl in it, or a "
        "pattern as s3://bucket/*.jsonl. If no worker answers any more, the command stops with status 1.",
        "penstock batch demo/demo.psm demo/requests.jsonl answers.jsonl\n"
        "penstock batch demo/demo.psm s3://bucket/requests/ answers/\n"
        "penstock batch demo/demo.psm 's3://bucket/*.jsonl' answers/\n"
        "penstock batch demo/demo.psm requests/ answers/ --workers 2\n"
        "penstock batch demo/demo.psm requests/ answers/ --replicas 1..4\n"
        "penstock batch demo/demo.psm demo/requests.jsonl answers.jsonl --max-requests 8",
    )
    add_model(parser, parser)
    parser.add_argument(
        "input",
        nargs="+",
        metavar="INPUT",
        help="files of requests, one JSON object per line, or folders of "
        "*.jsonl; paths, or addresses as s3://bucket/name.jsonl",
    )
    parser.add_argument(
        "output", metavar="OUTPUT", help="the file or folder for the results; results that it already has are kept"
    )
    add_options(parser.add_argument_group("model"), *MODEL_OPTIONS)
    add_options(parser.add_argument_group("memory"), "--max-requests", *LIMIT_OPTIONS, "--no-prefix-cache")
    add_worker_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Answer the requests without a result; return 1 if a request failed in this run or an earlier one."""
    check_worker_options(args)
    with local_sources(args.input, args.output) as sources:
        return asyncio.run(_answer_files(args, file_pairs(sources, args.output)))


async def _answer_files(args: argparse.Namespace, pairs: list[tuple[str, str]]) -> int:
    """Answer files in turn with one model, which is opened for the first request; return the exit status."""
    num_failed = 0
    opened: OpenModels | None = None
    async with AsyncExitStack() as stack:
        for source, path in pairs:
            with _Job(source, path) as job:
                if job.todo:
                    if opened is None:
                        opened = await stack.enter_async_context(open_models(args))
                    job.begin()
                    num_failed += await _answer_all(opened, job.todo, job.output)
                num_failed += job.num_failed
    return 1 if num_failed else 0


class _Job:
    """A file of requests and the file of its results, which is open and locked; ``todo`` are those without one."""

    def __init__(self, source: str, path: str) -> None:
        lines = _read_lines(source)
        if not lines:
            print(f"penstock: {source}: the file has no requests", file=sys.stderr)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        self.output = open(descriptor, "r+b", buffering=0)  # noqa: SIM115 - ``__exit__`` closes it
        try:
            _check_output(source, path, self.output)
            done, self._end = _read_done(path, self.output.read())
        except BaseException:
            self.output.close()
            raise
        self.todo = [line for line in lines if line.key not in done]
        num_failed = self.num_failed = sum(done.get(line.key, False) for line in lines)
        if done:
            failed = f", {num_failed:,} of them failed (delete their lines to try them again)" if num_failed else ""
            summary = f"{len(lines) - len(self.todo):,} of {len(lines):,} requests have a result already{failed}"
            print(f"penstock: {summary}", file=sys.stderr)

    def begin(self) -> None:
        """Remove an incomplete last line; only once the model is open, so that a refusal leaves the file unchanged."""
        self.output.truncate(self._end)

    def __enter__(self) -> _Job:
        return self

    def __exit__(self, *_: object) -> None:
        self.output.close()


def _check_output(source: str, path: str, output: Any) -> None:
    """Lock the output; InvalidArgumentError if it is the input, InvalidFileError if it is no regular file or locked."""
    status = os.fstat(output.fileno())
    if not stat.S_ISREG(status.st_mode):
        raise InvalidFileError(f"{path}: the output must be a regular file")
    if os.path.samestat(status, os.stat(source)):
        raise InvalidArgumentError(f"{path}: the output must not be the input")
    try:
        fcntl.flock(output, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise InvalidFileError(f"{path}: another process is writing this file") from None


@dataclass(frozen=True)
class _Line:
    """A line of the input.  ``custom_id`` is None if it cannot be read; ``error``: why the line is not a request."""

    number: int
    custom_id: str | None = None
    request: dict[str, Any] = field(default_factory=dict)
    error: str = ""

    @property
    def key(self) -> str | int:
        """The key that identifies the line's result in the output."""
        return self.number if self.error or self.custom_id is None else self.custom_id


def _read_lines(path: str) -> list[_Line]:
    """Return the lines that are not empty; a line that is not a request has its ``error`` set."""
    lines: list[_Line] = []
    line_of_id: dict[str, int] = {}
    with open(path, "rb") as file:
        for number, data in enumerate(file, 1):
            if not data.strip():
                continue
            line = _read_line(number, data)
            if not line.error and line.custom_id in line_of_id:
                error = (
                    f"line {number}: line {line_of_id[line.custom_id]} already has custom_id {line.custom_id!r:.100}"
                )
                line = replace(line, error=error)
            if not line.error and line.custom_id is not None:
                line_of_id[line.custom_id] = number
            lines.append(line)
    return lines


def _read_line(number: int, data: bytes) -> _Line:
    try:
        request = json.loads(data.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        return _Line(number, error=f"line {number} is not JSON: {error}")
    if not isinstance(request, dict) or "custom_id" not in request:
        return _Line(number, error=f"line {number}: expected an object with a custom_id")
    name = request["custom_id"]
    if not isinstance(name, str) or not name:
        return _Line(number, error=f"line {number}: custom_id must be a non-empty string, not {name!r:.100}")
    return _Line(number, name, request)


def _read_done(path: str, data: bytes) -> tuple[dict[str | int, bool], int]:
    """Return the results in the output as ``_Line.key`` to "it failed", and the offset at which the complete lines end.

    InvalidFileError if any line is not a result.  The last line may be incomplete, from a run that was killed.
    """
    done: dict[str | int, bool] = {}
    end = 0
    *lines, last = data.split(b"\n")
    for line in lines:
        try:
            result = json.loads(line)
            error = result["error"]
            key = result["custom_id"] if error is None else error.get("line", result["custom_id"])
            done[key if isinstance(key, int) else str(key)] = error is not None
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise _not_a_result(path, end) from None
        end += len(line) + 1
    if not last.startswith(_LINE_START[: len(last)]):
        raise _not_a_result(path, end)
    return done, end


def _not_a_result(path: str, where: int) -> InvalidFileError:
    return InvalidFileError(f"{path}: byte {where}: expected a result of an earlier run, got other data")


class _Report:
    """Counts the requests of a run, and shows the counts on standard error."""

    def __init__(self, num_requests: int) -> None:
        self._num_requests = num_requests
        self._start = time.monotonic()
        self._num_done = self._num_tokens = self.num_failed = 0
        self._first_failure = ""
        self._line = ProgressLine()

    def add_failure(self, message: str) -> None:
        """Count a request that ended with an error."""
        self.num_failed += 1
        self._first_failure = self._first_failure or message
        self._show()

    def add_response(self, body: dict[str, Any]) -> None:
        """Count a request that was answered."""
        self._num_tokens += body["usage"].get("completion_tokens", 0)
        self._show()

    def _show(self) -> None:
        from penstock.runtime.build import Progress

        self._num_done += 1
        self._line(Progress("answer", self._num_done, self._num_requests, "requests", self._figures()))

    def _figures(self) -> str:
        rate = self._num_tokens / max(time.monotonic() - self._start, 1e-9)
        return f"{self.num_failed} failed, {rate:,.0f} tokens/s"

    def __enter__(self) -> _Report:
        return self

    def __exit__(self, *_: object) -> None:
        """Remove the bar, print the counts, and name the first request that failed."""
        self._line.__exit__()
        print(f"{self._num_done:,}/{self._num_requests:,} requests, {self._figures()}", file=sys.stderr)
        if self._first_failure:
            print(f"penstock: first failure: {printable(self._first_failure):.500}", file=sys.stderr)


async def _answer_all(opened: OpenModels, todo: list[_Line], output: Any) -> int:
    """Answer the lines, several at a time; append each result when it is ready.  Return the number that failed."""
    from penstock.serving.openai.in_process import InProcessApi

    api = InProcessApi(opened.models)
    report = _Report(len(todo))
    lines = deque(todo)

    async def work() -> None:
        while lines:
            line = lines.popleft()
            request_id = uuid.uuid4().hex
            try:
                body = await opened.retried(partial(_response_body, api, line, request_id))
            except UnavailableError as error:  # an outage: no result, so that the next run answers the request
                raise _stopped(error) from error
            except PenstockError as error:
                value: dict[str, Any] = {"code": error.code, "message": str(error), "param": error.param}
                if line.error:
                    value["line"] = line.number
                _write_whole(output, _result(line, None, value))
                report.add_failure(str(error) if line.error else f"{line.custom_id!r}: {error}")
            else:
                response = {"status_code": 200, "request_id": request_id, "body": body}
                _write_whole(output, _result(line, response, None))
                report.add_response(body)

    tasks: set[asyncio.Task[None]] = set()
    with report:
        try:
            while lines or tasks:
                num_more = min(opened.limit() - len(tasks), len(lines))
                tasks |= {asyncio.create_task(work()) for _ in range(num_more)}
                done, _ = await asyncio.wait(tasks, timeout=_LOOK_S, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
                tasks -= done  # only now: an outage ends several at once, and ``gather`` takes the errors of the others
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    return report.num_failed


def _stopped(error: UnavailableError) -> UnavailableError:
    return UnavailableError(
        f"the batch stopped, because no worker answers ({str(error).rstrip('.'):.300}). The results so far are kept; "
        "run the same command again to continue"
    )


async def _response_body(api: InProcessApi, line: _Line, request_id: str) -> dict[str, Any]:
    """Return the response's body to a line; raise PenstockError for one that is not a request or that fails.

    One model is open, so ``model`` may be any name: the response repeats it.
    """
    if line.error:
        raise InvalidArgumentError(line.error)
    if (method := line.request.get("method", "POST")) != "POST":
        raise refusal("method", "POST", method)
    url, body = str(line.request.get("url")), line.request.get("body")
    if not isinstance(body, dict):
        raise refusal("body", "an object", body)
    body = _with_truncation(url, body)
    model = body.pop("model", None)
    if model is not None and not isinstance(model, str):
        raise refusal("model", "a string", model)
    answer = await api.answer(url, body, request_id)
    return answer | {"model": model} if model else answer


def _with_truncation(url: str, body: dict[str, Any]) -> dict[str, Any]:
    """Return a body with this command's ``truncate_prompt`` as the service's ``truncate_prompt_tokens``.

    Fields that are null are left out.
    """
    values = {name: value for name, value in body.items() if value is not None}
    truncate = values.pop("truncate_prompt", None)
    if truncate is None or truncate is False:
        return values
    if truncate is not True:
        raise refusal("truncate_prompt", "true or false", truncate)
    if url != "/v1/completions":
        raise InvalidArgumentError(
            f"truncate_prompt must be false: it applies to /v1/completions only, not to {url}", param="truncate_prompt"
        )
    if values.get("echo"):
        raise InvalidArgumentError(
            "truncate_prompt must be false with echo, which repeats the whole prompt", param="truncate_prompt"
        )
    if values.get("truncate_prompt_tokens") is not None:
        raise InvalidArgumentError("truncate_prompt must be false with truncate_prompt_tokens", param="truncate_prompt")
    return values | {"truncate_prompt_tokens": -1}


def _result(line: _Line, response: dict[str, Any] | None, error: dict[str, Any] | None) -> bytes:
    value = {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": line.custom_id}
    # ASCII: a custom_id or a model's name may contain half of a surrogate pair, which UTF-8 cannot encode.
    return json.dumps(value | {"response": response, "error": error}, ensure_ascii=True).encode() + b"\n"


def _write_whole(output: Any, line: bytes) -> None:
    """Write a complete line.

    A disk that fills up may take part of it; the rest then raises, and the next run removes the incomplete line.
    """
    view = memoryview(line)
    while view:
        view = view[output.write(view) :]
