"""A worker: a process that runs one model's engine for a primary.

It is started with its configuration as one line on standard input, dials the primary, loads its model and answers
requests until the primary tells it to stop or goes away.  Signals that a terminal or a service manager sends to the
whole group are left to the primary, which drains first.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
import struct
import sys
import threading
import time
from contextlib import ExitStack, suppress
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

from penstock.errors import OutOfMemoryError, PenstockError
from penstock.processes.frames import FrameStream
from penstock.processes.parent import die_with_parent
from penstock.serving.proto import wire_pb2 as pb
from penstock.serving.workers.heartbeat import BEAT_S, Heartbeat
from penstock.serving.workers.messages import (
    MAX_MESSAGE_BYTES,
    PROTOCOL,
    card_to,
    error_from,
    error_to,
    events_to,
    options_from,
    sampling_from,
    stats_to,
)
from penstock.serving.workers.worker_config import WorkerConfig

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.core.native import Plan
    from penstock.llm.engine_thread import EngineThread, StepEvent
    from penstock.llm.llm import LLM
    from penstock.runtime.program import ProgramLimits

__all__ = ["Stream", "Worker", "main", "ready", "weights_id"]

_HEAD: Final = struct.Struct("<16sQQ")
"""The beginning of a bundle: what it is, and where its metadata lies."""
_EXIT_S: Final = 5.0
TEXT_FILES: Final = ("tokenizer.json", "tokenizer.bin", "tokenizer_config.json", "chat_template.jinja")
"""What the primary needs to turn text into token ids."""


class Stream(Protocol):
    """The way to the primary and back."""

    def send(self, message: pb.FromWorker) -> object:
        """Send a message, from any thread and without waiting."""

    async def read(self) -> pb.ToWorker | None:
        """The next message; None when the primary ended the stream.  Raises why it ended otherwise."""


class Worker:
    """One model behind one stream to the primary."""

    def __init__(self, config: WorkerConfig, stream: Stream) -> None:
        self._config = config
        self._stream = stream
        self._feed: EngineThread | None = None

    async def run(self) -> int:
        """Join, load, serve; the exit status."""
        config = self._config
        join = pb.Join(protocol=PROTOCOL, model=config.name)
        if not self._is_far:  # another machine's token goes in front of its messages
            join.token, join.pid = config.token, os.getpid()
        self._stream.send(pb.FromWorker(join=join))
        try:
            return await self._serve()
        finally:
            if self._feed is not None:
                await asyncio.to_thread(self._feed.close)

    @property
    def _is_far(self) -> bool:
        """Whether the primary is on another machine."""
        return not self._config.address.startswith("unix:")

    async def _serve(self) -> int:
        from penstock.llm.engine_thread import EngineThread

        start = time.perf_counter()
        opening = asyncio.ensure_future(asyncio.to_thread(open_llm, self._config, self._hand_over_plan))
        asked = asyncio.ensure_future(self._stream.read())
        await asyncio.wait((opening, asked), return_when=asyncio.FIRST_COMPLETED)
        if not opening.done():  # told to stop, or the primary is gone: what loads goes with the process
            asked.result()  # or was refused
            return 1
        try:
            llm, longest_turn_s = opening.result()
        except Exception as error:
            if self._is_far:  # here the primary says it
                print(f"penstock worker: {error}", file=sys.stderr, flush=True)
            self._stream.send(pb.FromWorker(failed=error_to(error)))
            await asked  # the primary ends the stream
            return 1
        self._feed = EngineThread(llm, self._hand_over, asyncio.get_running_loop().call_soon)
        gc.freeze()  # what loading made stays: else full collections look at it, and a step waits for that
        self._stream.send(pb.FromWorker(ready=ready(llm, self._config, time.perf_counter() - start)))
        if self._is_far:
            told = f"penstock worker: {self._config.name} is loaded, and offered to {self._config.address}"
            print(told, file=sys.stderr, flush=True)
        beats = asyncio.ensure_future(self._beat(Heartbeat(longest_turn_s)))
        try:
            message = await asked
            while message is not None:
                if message.HasField("stop"):
                    if message.stop.HasField("why"):
                        raise error_from(message.stop.why)
                    return 0
                self._do(message)
                message = await self._stream.read()
        finally:
            beats.cancel()
        return 1

    def _do(self, message: pb.ToWorker) -> None:
        feed, what = self._feed, message.WhichOneof("what")
        if feed is None:
            return
        if what == "submit":
            one = message.submit
            self._take(
                one.key,
                lambda key: feed.submit(
                    key, list(one.prompt_ids), sampling_from(one.sampling), options_from(one.options)
                ),
            )
        elif what == "score":
            asked = message.score
            self._take(
                asked.key,
                lambda key: feed.score(key, list(asked.prompt_ids), asked.num_top, options_from(asked.options)),
            )
        elif what == "embed":
            two = message.embed
            self._take(
                two.key,
                lambda key: feed.embed(
                    key, list(two.prompt_ids), two.pooling, two.normalize, options_from(two.options)
                ),
            )
        elif what == "abort":
            feed.abort(message.abort.key)

    def _take(self, key: int, call: Callable[[int], None]) -> None:
        """Begin a request.  Only a refusal is told: a message more would delay the first step."""
        try:
            call(key)
        except Exception as error:
            self._stream.send(pb.FromWorker(taken=pb.Taken(key=key, error=error_to(error))))

    def _hand_over_plan(self, plan: pb.Plan) -> None:
        """In the thread that loads."""
        self._stream.send(pb.FromWorker(planned=pb.Planned(plan=plan)))

    def _hand_over(self, news: list[StepEvent]) -> None:
        """In the engine's thread, which sends them: another would wait for the interpreter, and for a core."""
        message = pb.FromWorker()
        for one in news:
            events_to(one, message.step.news)
        self._stream.send(message)

    async def _beat(self, pulse: Heartbeat) -> None:
        feed = self._feed
        if feed is None:
            return
        at_first = feed.llm.engine.figures()  # of warming up, which nobody asked for
        while True:
            beat = pb.Beat(turn_age_s=pulse.look(feed.last_turn), longest_turn_s=pulse.longest_s)
            beat.figures.CopyFrom(stats_to(feed.llm.engine.figures().since(at_first)))
            self._stream.send(pb.FromWorker(beat=beat))
            await asyncio.sleep(BEAT_S)


def open_llm(config: WorkerConfig, on_plan: Callable[[pb.Plan], None]) -> tuple[LLM, float]:
    """The model, its memory planned beside what others hold, and warm: every weight was read once; and the seconds that
    a step may well take: that of one token as often as a step has room for, which is slower than all at once.

    ``on_plan`` is told the plan before weights are read.
    """
    from penstock.engine.params import SamplingParams

    with ExitStack() as stack:
        llm = _open_planned(config, on_plan, stack)
    try:
        if llm.has_text:
            _ = llm.tokenizer
        is_single = llm.info.bidirectional  # no second token can follow
        warm = llm.generate([0], SamplingParams(max_tokens=1 if is_single else 2, ignore_eos=True))
        llm.engine.forget_prefixes()
    except BaseException:
        llm.close()
        raise
    token_s = warm.timings["prefill_s" if is_single else "per_token_s"]
    return llm, llm.engine.program.limits.max_tokens * token_s


def _open_planned(config: WorkerConfig, on_plan: Callable[[pb.Plan], None], stack: ExitStack) -> LLM:
    """A folder makes its bundle first, so that the plan of either is known before a weight is read."""
    from penstock.llm.llm import LLM
    from penstock.serving.workers.memory_check import fit_beside

    options, hint = config.options, ""
    scheme = options.scheme
    if Path(config.path).is_dir():
        from penstock.runtime.open import OpenOptions, bundle_of

        opening = OpenOptions(options.use_cache, verify=config.verify)
        bundle = stack.enter_context(bundle_of(Path(config.path), scheme, options=opening))
        config = replace(config, path=str(bundle), verify="never")  # it comes verified
        scheme, hint = None, "" if scheme else "; --scheme w8a8 or w4a8 makes the weights smaller"
    limits = options.limits
    try:
        if Path(config.path).is_file():
            limits, plan = fit_beside(config)
            on_plan(_plan_told(limits, plan))
        return LLM(
            config.path,
            scheme=scheme,
            threads=options.threads,
            limits=limits,
            max_chunk=options.engine.max_chunk,
            max_mixed_tokens=options.engine.max_mixed_tokens,
            prefix_cache=options.engine.prefix_cache,
            max_waiting=options.engine.max_waiting,
            priority_s=options.engine.priority_s,
            verify=config.verify,
        )
    except OutOfMemoryError as error:
        raise OutOfMemoryError(f"{error}{hint}") from None


def _plan_told(limits: ProgramLimits, plan: Plan | None) -> pb.Plan:
    told = pb.Plan(num_pages=limits.num_pages, max_requests=limits.max_requests)
    if plan is not None:
        told.total_bytes, told.weight_bytes, told.kv_bytes = plan.total_bytes, plan.weight_bytes, plan.kv_bytes
    return told


def ready(llm: LLM, config: WorkerConfig, load_s: float) -> pb.Ready:
    """What a worker tells once its model takes requests; ``load_s``: seconds that it took to open, copying included."""
    from penstock.llm.local_backend import card_of

    program = llm.engine.program
    told = _plan_told(program.limits, llm.info.plan)
    told.num_threads, told.cpu_level, told.load_s = llm.info.num_threads, llm.info.cpu_level, load_s
    told.populate_s = llm.populate_s
    most = program.limits.max_requests + llm.engine.options.max_waiting
    files = {name: data for name, data in llm.files.items() if name in TEXT_FILES}
    card = card_to(card_of(llm, config.name, config.path, config.version))
    return pb.Ready(card=card, files=files, plan=told, max_open=most, weights_id=weights_id(config.path))


def weights_id(path: str) -> str:
    """What tells bundles apart: a hash of the metadata, which holds the checksums of all that a bundle is made of."""
    if not Path(path).is_file():
        return ""
    with Path(path).open("rb") as file:
        head = file.read(_HEAD.size)
        _, offset, size = _HEAD.unpack(head)
        file.seek(offset)
        return sha256(head + file.read(size)).hexdigest()


def _watch_lifeline() -> None:
    """The primary holds the other end of standard input: its end is the primary's."""

    def watch() -> None:
        with suppress(OSError, ValueError):
            while os.read(sys.stdin.fileno(), 1):
                pass
        time.sleep(_EXIT_S)  # the stream's end comes first and ends in good order
        os._exit(1)

    threading.Thread(target=watch, name="lifeline", daemon=True).start()


async def _join(config: WorkerConfig) -> int:
    own = socket.socket(socket.AF_UNIX)
    try:
        own.connect(config.address.removeprefix("unix:"))
    except OSError:  # the primary is gone
        own.close()
        return 1
    stream = FrameStream(own, pb.ToWorker.FromString, MAX_MESSAGE_BYTES)
    try:
        return await Worker(config, stream).run()
    finally:
        stream.close()


def main() -> int:
    """Run the worker that standard input describes; the exit status."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    die_with_parent()
    try:
        line = b""
        while not line.endswith(b"\n") and (more := os.read(sys.stdin.fileno(), 65536)):
            line += more
        config = WorkerConfig.from_json(line.decode())
    except PenstockError as error:
        print(f"penstock worker: {error}", file=sys.stderr)
        return 2
    _watch_lifeline()
    return asyncio.run(_join(config))


if __name__ == "__main__":
    sys.exit(main())
