"""One answer, piece by piece."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.engine.engine import Engine
from penstock.engine.params import SamplingParams
from penstock.engine.request import Request, RequestStatus
from penstock.errors import InvalidArgumentError
from penstock.llm.result import Delta, Result, make_result

__all__ = ["Stream"]


class Stream:
    """An answer as it grows: iterate for Deltas.  Any thread may call ``abort``."""

    def __init__(self, engine: Engine, request: Request, params: SamplingParams) -> None:
        self._engine = engine
        self._request = request
        self._params = params
        self._num_given = 0
        self._ended = False
        self._is_aborted = False

    def __iter__(self) -> Iterator[Delta]:
        return self

    def __next__(self) -> Delta:
        """Return the next Delta: one token or more, or the end."""
        if self._ended:
            raise StopIteration
        try:
            running = self._engine.wait(self._request, self._num_given)
        except BaseException:
            self.abort()
            self._ended = True
            raise
        self._ended = not running
        if self._request.error is not None:
            raise self._request.error
        ids = self._request.output_ids[self._num_given :]
        logprobs = None
        if self._params.logprobs is not None:
            logprobs = self._request.logprobs[self._num_given : self._num_given + len(ids)]
        self._num_given += len(ids)
        text = "" if self._request.text is None else self._request.text.take()
        return Delta(text, ids, self._request.finish_reason if self._ended else None, logprobs)

    @property
    def id(self) -> int:
        """The request's number in its engine."""
        return self._request.id

    @property
    def prompt_token_ids(self) -> list[int]:
        """The token ids of the prompt as it runs."""
        return list(self._request.prompt_ids)

    @property
    def is_finished(self) -> bool:
        """True if the request has ended, even if Deltas are left to read."""
        return self._request.status is RequestStatus.FINISHED

    @property
    def is_ready(self) -> bool:
        """True if the next Delta is available without a step."""
        request = self._request
        return self._ended or request.status is RequestStatus.FINISHED or len(request.output_ids) > self._num_given

    def abort(self) -> None:
        """End the answer here.  Its memory is free when the running step ends."""
        self._is_aborted = True
        self._engine.abort(self._request)

    def __del__(self) -> None:
        if self._request.status is not RequestStatus.FINISHED:
            self._engine.abort(self._request)

    def result(self) -> Result:
        """Return the whole answer once the stream has ended or was aborted; before that, raise InvalidArgumentError.

        After an abort it waits for the end of the running step, which may add a token.
        """
        if self._is_aborted:
            self._engine.await_abort(self._request)
        if self._request.status is not RequestStatus.FINISHED:
            raise InvalidArgumentError("The stream has not ended. Iterate over it or abort it first.", code="not_ended")
        return make_result([self._request], self._params)
