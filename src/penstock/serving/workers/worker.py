"""A worker: a process that runs the engine of one model for a primary.

It reads its configuration as one line of standard input, connects to the primary, loads its model and serves requests
until the primary tells it to stop or goes away.  It ignores the signals that a terminal or a service manager sends to
the whole process group: the primary gets them too and drains first.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
import sys
import threading
import time
from contextlib import ExitStack, suppress
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

from penstock.checkpoint.generation import ADDITIONAL_TEMPLATES
from penstock.checkpoint.pooling.head import POOLING_FILE
from penstock.engine.page_copies import can_copy_pages
from penstock.env import writes_json_log
from penstock.errors import OutOfMemoryError, PenstockError, UnavailableError
from penstock.file_kinds import is_gguf
from penstock.graph.bundle_id import bundle_id
from penstock.logs import JsonLines, note
from penstock.processes.frames import FrameStream
from penstock.processes.parent import die_with_parent
from penstock.processes.supervision import LOST_RANK_STATUS
from penstock.serving.proto import wire_pb2 as pb
from penstock.serving.workers import handshake
from penstock.serving.workers.heartbeat import HEARTBEAT_S, Heartbeat
from penstock.serving.workers.messages import (
    MAX_MESSAGE_BYTES,
    beams_from,
    begun_from,
    card_to,
    error_from,
    error_to,
    event_to,
    options_from,
    pages_to,
    places_from,
    sampling_from,
    stats_to,
)
from penstock.serving.workers.moving.worker_pages import PAGE_KINDS, WorkerPages
from penstock.serving.workers.worker_config import WorkerConfig
from penstock.serving.workers.worker_profile import WorkerProfile
from penstock.version import __version__

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Sequence

    from penstock.core.native import MemoryPlan
    from penstock.engine.page_journal import PageJournal
    from penstock.llm.engine_thread import EngineThread, StepEvent
    from penstock.llm.llm import LLM
    from penstock.runtime.program import ProgramLimits
    from penstock.runtime.ranks.stage_server import StageServer
    from penstock.text.grammar.compiler import Grammar

__all__ = ["CONNECT_S", "Worker", "WorkerStream", "main", "ready", "serve_over_tls"]

CONNECT_S: Final = 10.0
"""Limit on the time to connect to one address of a primary on another machine, and on that of the TLS handshake."""

_EXIT_S: Final = 5.0
TEXT_FILES: Final = (
    "tokenizer.json", "tokenizer.bin", "tokenizer_config.json", "chat_template.jinja", "chat_template.json",
    ADDITIONAL_TEMPLATES, POOLING_FILE, "config.json", "generation_config.json",
)  # fmt: skip
"""The files with which the primary turns text into token ids, and reads the tasks of T5 and their defaults."""


class WorkerStream(Protocol):
    """A worker's stream to the primary."""

    def send(self, message: pb.FromWorker) -> object:
        """Send a message, from any thread and without waiting."""

    async def read(self) -> pb.ToWorker | None:
        """Return the next message, or None if the primary ended the stream.  Raises any other reason for its end."""


class Worker:
    """Serves one model over a stream to the primary that it has joined.

    ``page_secret``: the secret of page keys that the primary gave, b"" if it gave none.  ``starts_again``: when another
    rank has ended, this process starts its command again, because nothing else does.
    """

    def __init__(
        self, config: WorkerConfig, stream: WorkerStream, page_secret: bytes = b"", *, starts_again: bool = False
    ) -> None:
        self._config = config
        self._stream = stream
        self._page_secret = page_secret
        self._starts_again = starts_again
        self._journal: PageJournal | None = None
        self._sending = threading.Lock()  # reports of pages are sent in their order
        self._engine_thread: EngineThread | None = None
        self._pages: WorkerPages | None = None
        self._profile: WorkerProfile | None = None
        self._compiling: dict[int, asyncio.Future[Grammar]] = {}  # of requests that begin with it

    def leave(self) -> bool:
        """Tell the primary that this worker is about to end: it moves the requests and then ends the stream.

        Returns False if the model is not loaded yet, so that there is nothing to wait for.
        """
        if self._engine_thread is None:
            return False
        self._stream.send(pb.FromWorker(leave=pb.Leave()))
        return True

    async def run(self) -> int:
        """Load the model, serve requests and return the exit status."""
        try:
            return await self._serve()
        finally:
            if self._pages is not None:
                self._pages.close()
            if self._engine_thread is not None:
                await asyncio.to_thread(self._engine_thread.close)

    @property
    def _is_remote(self) -> bool:
        """True if the primary is on another machine."""
        return not self._config.address.startswith("unix:")

    async def _serve(self) -> int:
        from penstock.llm.engine_thread import EngineThread

        start = time.perf_counter()
        opening = asyncio.ensure_future(asyncio.to_thread(open_llm, self._config, self._send_plan))
        reading = asyncio.ensure_future(self._stream.read())
        await asyncio.wait((opening, reading), return_when=asyncio.FIRST_COMPLETED)
        if not opening.done():  # told to stop, or the primary is gone; loading ends with the process
            reading.result()  # raises the reason if the stream failed
            return 1
        try:
            llm, longest_iteration_s = opening.result()
        except Exception as error:
            if self._is_remote:  # on this machine the primary reports it
                note("penstock worker", str(error), logging.ERROR)
            self._stream.send(pb.FromWorker(failed=error_to(error)))
            await reading  # the primary ends the stream
            return 1
        _end_with_ranks(llm, self._starts_again)
        if self._page_secret:
            self._journal = llm.engine.journal
            self._journal.keys.use_secret(self._page_secret)
        self._engine_thread = EngineThread(llm, self._send_events, asyncio.get_running_loop().call_soon)
        self._pages = WorkerPages(self._engine_thread, self._stream.send)
        self._profile = WorkerProfile(self._engine_thread, self._stream.send)
        gc.freeze()  # objects of the load stay; without this each full collection looks at them while a step waits
        self._stream.send(pb.FromWorker(ready=ready(llm, self._config, time.perf_counter() - start)))
        if self._is_remote:
            note("penstock worker", f"{self._config.name} is loaded and joins the service at {self._config.address}")
        heartbeats = asyncio.ensure_future(self._send_heartbeats(Heartbeat(longest_iteration_s)))
        try:
            return await self._handle_messages(reading)
        finally:
            heartbeats.cancel()

    async def _handle_messages(self, reading: asyncio.Future[pb.ToWorker | None]) -> int:
        """Handle the primary's messages until it ends the stream or sends Stop; raises the reason of a refusal."""
        message = await reading
        while message is not None:
            if message.HasField("stop"):
                if message.stop.HasField("reason"):
                    raise error_from(message.stop.reason)
                return 0
            self._handle(message)
            message = await self._stream.read()
        return 1

    def _handle(self, message: pb.ToWorker) -> None:
        thread, kind = self._engine_thread, message.WhichOneof("kind")
        if thread is None:
            return
        if kind == "submit":
            self._submit(thread, message.submit)
        elif kind == "score":
            score = message.score
            self._begin(
                score.key,
                lambda key: thread.score(
                    key, list(score.prompt_ids), score.num_top, options_from(score.options), places_from(score)
                ),
            )
        elif kind == "embed":
            embed = message.embed
            self._begin(
                embed.key,
                lambda key: thread.embed(
                    key, list(embed.prompt_ids), embed.pooling, embed.normalize, options_from(embed.options)
                ),
            )
        elif kind == "abort":
            compiling = self._compiling.pop(message.abort.key, None)
            if compiling is not None:
                compiling.cancel()
            thread.abort(message.abort.key)
        elif kind == "ask_pages" and self._journal is not None:
            self._journal.ask()
        elif kind in PAGE_KINDS and self._pages is not None:
            self._pages.handle(message)
        elif kind == "profile" and self._profile is not None:
            self._profile.handle(message.profile)

    def _submit(self, thread: EngineThread, submit: pb.Submit) -> None:
        """Begin answers.  A grammar is compiled in another thread first, because that may take long."""
        try:
            params = sampling_from(submit.sampling)
            compiling = thread.llm.compile_grammar(params)
        except Exception as error:
            self._refuse(submit.key, error)
            return

        def call(key: int) -> None:
            ids, options = list(submit.prompt_ids), options_from(submit.options)
            thread.submit(key, ids, params, options, begun_from(submit.begun), beams_from(submit))

        def compiled(done: asyncio.Future[Grammar]) -> None:
            if self._compiling.pop(submit.key, None) is None:  # aborted meanwhile
                return
            error = asyncio.CancelledError() if done.cancelled() else done.exception()
            if error is None:
                self._begin(submit.key, call)  # it finds the grammar that ``done`` refers to
            else:
                self._refuse(submit.key, error)

        if compiling is None:
            self._begin(submit.key, call)
            return
        self._compiling[submit.key] = asyncio.wrap_future(compiling)
        self._compiling[submit.key].add_done_callback(compiled)

    def _refuse(self, key: int, error: BaseException) -> None:
        self._stream.send(pb.FromWorker(refused=pb.Refused(key=key, error=error_to(error))))

    def _begin(self, key: int, call: Callable[[int], None]) -> None:
        """Begin a request.  Only a refusal is reported: another message would delay the first step."""
        try:
            call(key)
        except Exception as error:
            self._refuse(key, error)

    def _send_plan(self, plan: pb.Plan) -> None:
        """Send the memory plan; called in the thread that loads."""
        self._stream.send(pb.FromWorker(planned=pb.Planned(plan=plan)))

    def _send_events(self, events: list[StepEvent]) -> None:
        """Send the events of a step from the engine's thread: another would wait for the interpreter and for a core."""
        message = pb.FromWorker()
        for event in events:
            event_to(event, message.step.events)
        self._send_with_pages(message, message.step)

    def _send_with_pages(self, message: pb.FromWorker, part: pb.Step | pb.Heartbeat) -> None:
        """Send a message of which ``part`` has room for what the pages have gained and dropped."""
        if self._journal is None:
            self._stream.send(message)
            return
        with self._sending:
            report = self._journal.take()
            if report is not None:
                pages_to(report, part.pages)
            self._stream.send(message)

    async def _send_heartbeats(self, heartbeat: Heartbeat) -> None:
        thread = self._engine_thread
        if thread is None:
            return
        at_start = thread.llm.engine.figures()  # includes the warm-up, which was no client's request
        while True:
            message = pb.FromWorker()
            beat = message.heartbeat
            beat.iteration_age_s, beat.longest_iteration_s = heartbeat.look(thread.last_turn), heartbeat.longest_s
            beat.stats.CopyFrom(stats_to(thread.llm.engine.figures().since(at_start)))
            self._send_with_pages(message, beat)
            await asyncio.sleep(HEARTBEAT_S)


def open_llm(config: WorkerConfig, on_plan: Callable[[pb.Plan], None]) -> tuple[LLM, float]:
    """Open the model and warm it up; return it and the seconds that a step may reasonably take.

    Memory is planned with what other workers leave; ``on_plan`` gets the plan before weights are read.  Warming up
    reads every weight once.  The estimate is the time of one token times the maximum number of tokens in a step, which
    is slower than one step for all of them.
    """
    from penstock.runtime.open import rank_notes

    with ExitStack() as stack:
        llm = _open_planned(config, on_plan, stack)
    known = [] if config.says_notes else rank_notes(llm.info)
    for text in (text for text in llm.notes if text not in known):
        note("penstock worker", f"{config.name}: {text}")
    try:
        if llm.has_text:
            _ = llm.tokenizer
            if llm.engine.has_language_head:
                llm.prepare_grammars()
        token_s = _warm_up(llm)
        llm.engine.forget_prefixes()
    except BaseException:
        llm.close()
        raise
    return llm, llm.engine.program.limits.max_tokens * token_s


def _warm_up(llm: LLM) -> float:
    """Compute two tokens, or one where no second can follow; return the seconds of the last."""
    from penstock.engine.params import SamplingParams

    if not llm.engine.has_language_head:
        start = time.perf_counter()
        llm.embed([0], "last")
        return time.perf_counter() - start
    is_single = llm.info.bidirectional
    warm = llm.generate([0], SamplingParams(max_tokens=1 if is_single else 2, ignore_eos=True))
    return warm.timings["prefill_s" if is_single else "per_token_s"]


def _end_with_ranks(llm: LLM, starts_again: bool) -> None:
    """End this process, or start its command again, as soon as one of its ranks has ended.

    The primary continues the requests elsewhere and starts another group.  Their errors, which follow the failed step,
    must not be sent.
    """
    from penstock.runtime.native import NativeProgram

    def end(reason: str) -> None:
        note("penstock worker", f"{reason}{'; starting again' * starts_again}", logging.WARNING)
        if starts_again:
            # It closes all connections.
            os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # noqa: S606 - its own command
        os._exit(LOST_RANK_STATUS if group is not None and group.was_killed else 1)

    program = llm.engine.program
    group = program.group if isinstance(program, NativeProgram) else None
    if group is not None:
        group.watch(end)


def _open_planned(config: WorkerConfig, on_plan: Callable[[pb.Plan], None], stack: ExitStack) -> LLM:
    """Open a bundle or folder.  A folder is made into a bundle first, so that the plan comes before the weights."""
    from penstock.serving.workers.memory_check import fit_beside

    options, hint = config.options, ""
    scheme, parts = options.scheme, list[Path]()
    if Path(config.path).is_dir() or is_gguf(Path(config.path)):
        from penstock.runtime.open import OpenOptions, bundle_of, is_cut, opens_whole, rank_bundles

        opening = OpenOptions(
            options.use_cache,
            verify=config.verify,
            tensor_parallel_size=options.tensor_parallel_size,
            pipeline_parallel_size=options.pipeline_parallel_size,
            context_parallel_size=options.context_parallel_size,
            stage_server=options.stage_server,
        )
        if is_cut(Path(config.path)) and not opens_whole(Path(config.path), opening):
            parts = stack.enter_context(rank_bundles(Path(config.path), scheme, options.network, opening))
            if not options.use_cache:
                config = replace(config, path=str(parts[0].parent))
        else:
            bundle = stack.enter_context(bundle_of(Path(config.path), scheme, options.network, opening))
            config = replace(config, path=str(bundle), verify="never")  # bundle_of has verified it
            scheme, hint = None, "" if scheme else "; --scheme w8a8 or w4a8 makes the weights smaller"
    if options.stage_server is not None:
        return _open_over_machines(config, options.stage_server, scheme, [*parts, Path(config.path)][0])
    limits = options.limits
    try:
        if Path(config.path).exists():
            limits, plans = fit_beside(config, parts)
            on_plan(_plan_message(limits, plans))
        return _open_model(config, limits, scheme=scheme)
    except OutOfMemoryError as error:
        raise OutOfMemoryError(f"{error}{hint}") from None


def _open_over_machines(config: WorkerConfig, server: StageServer, scheme: str | None, own: Path) -> LLM:
    """Open a model whose stages join from other machines.  The memory is theirs, so it is planned after they came.

    ``own``: the bundle of this machine, whose context length is the most that the limits may ask for.
    """
    from penstock.core import native

    options = config.options
    with native.Model.open(own) as model:
        context_len = min(options.limits.context_len, model.info.context_len)

    def tell_port(port: int) -> None:
        text = f"{config.name} waits for {options.pipeline_parallel_size} stages (penstock stage) at"
        note("penstock worker", f"{text} {server.host}:{port}")

    def tell_joined(address: str, num_joined: int) -> None:
        text = f"{config.name}: a stage has joined from {address} ({num_joined} of {options.pipeline_parallel_size})"
        note("penstock worker", text)

    weights = "mmap" if options.weights == "auto" else options.weights
    limits = replace(options.limits, weights=weights, context_len=context_len)
    server = replace(server, on_listen=tell_port, on_join=tell_joined)
    return _open_model(config, limits, scheme=scheme, stage_server=server)


def _open_model(config: WorkerConfig, limits: ProgramLimits, **more: Any) -> LLM:
    """Open the model; ``more`` are further arguments of LLM."""
    from penstock.llm.llm import LLM

    options = config.options
    return LLM(
        config.path,
        threads=options.threads,
        limits=limits,
        max_chunk=options.engine.max_chunk,
        max_mixed_tokens=options.engine.max_mixed_tokens,
        prefix_cache=options.engine.prefix_cache,
        max_waiting=options.engine.max_waiting,
        priority_s=options.engine.priority_s,
        verify=config.verify,
        tensor_parallel_size=options.tensor_parallel_size,
        pipeline_parallel_size=options.pipeline_parallel_size,
        context_parallel_size=options.context_parallel_size,
        **more,
    )


def _plan_message(limits: ProgramLimits, plans: Sequence[MemoryPlan]) -> pb.Plan:
    """Return the message of a plan; its bytes are those of all ranks."""
    return pb.Plan(
        num_pages=limits.num_pages,
        max_requests=limits.max_requests,
        total_bytes=sum(plan.total_bytes for plan in plans),
        weight_bytes=sum(plan.weight_bytes for plan in plans),
        kv_bytes=sum(plan.kv_bytes for plan in plans),
        num_ranks=len(plans),
    )


def ready(llm: LLM, config: WorkerConfig, load_s: float) -> pb.Ready:
    """Return the message that describes a loaded model; ``load_s`` is the time in seconds that opening it took.

    The bytes of its plan are those of this machine.
    """
    from penstock.llm.local_backend import card_of

    program, info = llm.engine.program, llm.info
    plan = _plan_message(program.limits, info.plans if config.options.stage_server is None else info.plans[:1])
    plan.num_threads, plan.cpu_level, plan.load_s = llm.info.num_threads, llm.info.cpu_level, load_s
    plan.populate_s, plan.num_ranks = llm.populate_s, info.num_ranks
    max_open = program.limits.max_requests + llm.engine.options.max_waiting
    files = {name: data for name, data in llm.files.items() if name in TEXT_FILES}
    card = card_to(card_of(llm, config.name, config.path, config.version))
    own_weights = bundle_id(config.path)
    return pb.Ready(
        card=card, files=files, plan=plan, max_open=max_open, weights_id=own_weights,
        state_id=_state_id(llm, own_weights), copies_pages=can_copy_pages(llm.engine),
    )  # fmt: skip


def _state_id(llm: LLM, own_weights: str) -> str:
    """Return a hash of everything that a token depends on besides its request; "" if the weights are not one file.

    Workers with equal ids sample the same tokens, so one of them can go on with an answer that another one began.  The
    bundle of a checkpoint is known by its file, which only workers of one machine share.
    """
    from penstock.runtime.native import NativeProgram

    program = llm.engine.program
    if not isinstance(program, NativeProgram):
        return ""
    weights = own_weights or repr(program.model.stamp)
    facts = (__version__, weights, program.limits.kv_layout, program.info.cpu_level, llm.engine.max_len)
    return sha256(repr(facts).encode()).hexdigest()


def _join(config: WorkerConfig, pid: int) -> pb.Join:
    return pb.Join(token=config.token, model=config.name, pid=pid, role=config.role)


def _watch_standard_input() -> None:
    """End this process when standard input ends: the primary, which holds the other end, is gone."""

    def watch() -> None:
        with suppress(OSError, ValueError):
            while os.read(sys.stdin.fileno(), 1):
                pass
        time.sleep(_EXIT_S)  # the stream ends first, and lets the worker exit normally
        os._exit(1)

    threading.Thread(target=watch, name="stdin-watch", daemon=True).start()


async def _serve_primary(config: WorkerConfig) -> int:
    """Join the primary that started this worker and serve it; the exit status."""
    if not config.address.startswith("unix:"):
        return await _serve_elsewhere(config)
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(config.address.removeprefix("unix:"))
    except OSError:  # the primary is gone
        connection.close()
        return 1
    stream = FrameStream(connection, pb.ToWorker.FromString, MAX_MESSAGE_BYTES)
    try:
        try:
            welcome = await handshake.join(stream, _join(config, os.getpid()))
        except UnavailableError:  # the primary is gone
            return 1
        return await Worker(config, stream, welcome.page_secret).run()
    finally:
        stream.close()


async def serve_over_tls(
    config: WorkerConfig,
    context: ssl.SSLContext,
    pid: int = 0,
    *,
    starts_again: bool = False,
    on_join: Callable[[Worker], None] = lambda worker: None,
) -> int:
    """Connect, join and serve until told to stop.  Raises OSError, UnavailableError and the error of a refusal.

    ``pid``: the id of this process, for a worker that was placed.  ``starts_again``: as for Worker.  ``on_join`` gets
    the worker before it loads.
    """
    from penstock.processes.tls import connect_tls

    connection, tls = await connect_tls(config.address, context, CONNECT_S)
    try:
        if tls.protocol == handshake.GRPC_ALPN:
            raise handshake.protocol_error(handshake.GRPC_PROTOCOL, handshake.PROTOCOL, config.name)
        stream = FrameStream(connection, pb.ToWorker.FromString, MAX_MESSAGE_BYTES, tls)
        try:
            welcome = await handshake.join(stream, _join(config, pid))
            worker = Worker(config, stream, welcome.page_secret, starts_again=starts_again)
            on_join(worker)
            return await worker.run()
        finally:
            stream.close()
    finally:
        connection.close()


async def _serve_elsewhere(config: WorkerConfig) -> int:
    """Join the primary on another machine and serve it; the exit status."""
    from penstock.processes.tls import client_context

    context = client_context(config.ca.encode(), [handshake.ALPN])
    try:
        return await serve_over_tls(config, context, os.getpid())
    except (UnavailableError, OSError) as error:  # the primary is gone, or cannot be reached from this machine
        note("penstock worker", f"{config.address}: {error}", logging.ERROR)
        return 1


def main() -> int:
    """Run the worker that standard input describes and return the exit status."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    die_with_parent()
    if writes_json_log():  # else a warning would be a line of text in the service's log
        handler = logging.StreamHandler()
        handler.setFormatter(JsonLines())
        logging.basicConfig(level=logging.WARNING, handlers=[handler])
        logging.captureWarnings(True)
    try:
        line = b""
        while not line.endswith(b"\n") and (more := os.read(sys.stdin.fileno(), 65536)):
            line += more
        config = WorkerConfig.from_json(line.decode())
    except PenstockError as error:
        note("penstock worker", str(error), logging.ERROR)
        return 2
    _watch_standard_input()
    try:
        return asyncio.run(_serve_primary(config))
    except PenstockError as error:  # the primary refuses this worker
        note("penstock worker", str(error), logging.ERROR)
        return 2


if __name__ == "__main__":
    sys.exit(main())
