"""A worker's part in the profile of a service: it records steps of its engine, and sends the report."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from penstock.errors import PenstockError, UnavailableError, UnsupportedError
from penstock.serving.proto import wire_pb2 as pb
from penstock.serving.workers.messages import error_to

if TYPE_CHECKING:
    from penstock.bench.live_profile import StepRecorder
    from penstock.llm.engine_thread import EngineThread
    from penstock.runtime.native import NativeProgram

__all__ = ["WorkerProfile"]


class WorkerProfile:
    """At most one profile at a time.  ``send`` sends a message to the primary.  Use it in the event loop."""

    def __init__(self, thread: EngineThread, send: Callable[[pb.FromWorker], object]) -> None:
        self._thread, self._send = thread, send
        self._recorder: StepRecorder | None = None
        self._wants_limits = False
        self._number = 0
        self._limits: dict[str, float] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._reports: set[asyncio.Task[None]] = set()

    def handle(self, message: pb.Profile) -> None:
        """Begin a profile, or end it if ``steps`` is 0."""
        if not message.steps:
            self._end()
            return
        try:
            self._begin(message)
        except PenstockError as error:
            self._send(pb.FromWorker(profiled=pb.Profiled(error=error_to(error), number=message.number)))

    def _begin(self, message: pb.Profile) -> None:
        from penstock.bench.live_profile import StepRecorder
        from penstock.runtime.native import NativeProgram

        if self._recorder is not None or self._reports:
            raise UnavailableError("The worker is already being profiled. Retry later.", 5.0)
        program = self._thread.llm.engine.program
        if not isinstance(program, NativeProgram) or program.info.num_ranks > 1:
            raise UnsupportedError("profile: expected a model in graph mode on one rank", param="profile")
        loop = asyncio.get_running_loop()
        self._wants_limits = message.limits and not self._limits
        self._number = message.number
        recorder = StepRecorder(program, message.steps, lambda: loop.call_soon_threadsafe(self._end))
        self._recorder = recorder
        self._timer = loop.call_later(message.seconds, self._end)

        def begin() -> None:
            program.recorder = recorder

        self._thread.call(begin)

    def _end(self) -> None:
        """Stop recording between two steps, and make the report in another thread."""
        recorder, self._recorder = self._recorder, None
        if recorder is None:
            return
        if self._timer is not None:
            self._timer.cancel()
        loop = asyncio.get_running_loop()
        program: NativeProgram = recorder.program

        def end() -> None:  # it must not raise: the engine's thread would end
            program.recorder = None
            try:
                if self._wants_limits:
                    from penstock.bench.live_profile import measure_limits

                    self._limits = measure_limits(program)
            except Exception as error:
                recorder.error = recorder.error or error
            finally:
                loop.call_soon_threadsafe(done.set)

        done = asyncio.Event()
        self._thread.call(end)
        task = loop.create_task(self._report(recorder, done))
        self._reports.add(task)
        task.add_done_callback(self._reports.discard)

    async def _report(self, recorder: StepRecorder, done: asyncio.Event) -> None:
        from penstock.bench.live_profile import describe_program, report_of

        await done.wait()
        answer = pb.Profiled(number=self._number)
        try:
            about = describe_program(recorder.program, self._limits)
            answer.report = await asyncio.to_thread(report_of, recorder, about)
        except Exception as error:
            answer.error.CopyFrom(error_to(error))
        self._send(pb.FromWorker(profiled=answer))
