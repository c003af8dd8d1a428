"""A request: what the caller asks for, and where the engine stands with it.  No tensors here."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from penstock.engine.options import RequestOptions
from penstock.engine.params import ResolvedSampling
from penstock.errors import InternalError, PenstockError

if TYPE_CHECKING:
    from penstock.engine.logprobs import TokenLogprobs
    from penstock.engine.pages import PageTables
    from penstock.engine.pooling import Pooling
    from penstock.engine.prompt_logits import PromptRows
    from penstock.engine.row_state import RowState
    from penstock.text.text_stream import TextStream

__all__ = ["Request", "Status", "Timings", "to_penstock_error"]


class Status(Enum):
    """Where a request stands."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass
class Timings:
    """When things happened, in seconds of ``time.perf_counter``; 0 is not yet."""

    submitted: float = field(default_factory=time.perf_counter)
    scheduled: float = 0.0
    first_token: float = 0.0
    finished: float = 0.0

    def summary(self, num_tokens: int) -> dict[str, float]:
        """Seconds queued, from there to the first token (prefill), from submission to it, in all and per later token;
        tokens per second after the first.
        """
        decode_s = self.finished - self.first_token
        rate = (num_tokens - 1) / decode_s if num_tokens > 1 and decode_s > 0 else 0.0
        return {
            "queued_s": max(0.0, self.scheduled - self.submitted) if self.scheduled else 0.0,
            "prefill_s": max(0.0, self.first_token - self.scheduled) if self.first_token else 0.0,
            "first_token_s": self.first_token - self.submitted if self.first_token else 0.0,
            "total_s": self.finished - self.submitted,
            "per_token_s": 1 / rate if rate else 0.0,
            "decode_tokens_per_s": rate,
        }


@dataclass(eq=False)
class Request:
    """One prompt being continued.

    ``num_computed`` counts the leading tokens whose keys and values are in pages; a preempted request falls
    back to 0 and is computed again from its prompt and its answer so far.  ``num_cached`` of the prompt's tokens were
    not computed for it but shared.  ``order``, which the scheduler gives it, sorts requests by urgency, arrival and
    client; ``virtual_start`` is what FairQueue needs for that.
    ``slot`` is its place among the running ones, ``page_keys`` are the names of its leading pages, ``row`` is the
    sampler's, ``prompt_rows`` collects what is wanted of each position of the prompt.  With ``max_tokens`` 0 that is
    all: no token follows.  With ``pooling`` it ends with its prompt, whose hidden rows that takes.  ``family`` is the
    number that the answers to one prompt have in common, 0 for a prompt with one answer.
    """

    id: int
    prompt_ids: list[int]
    max_tokens: int
    sampling: ResolvedSampling = field(default_factory=ResolvedSampling)
    stop_ids: frozenset[int] = frozenset()
    text: TextStream | None = None
    status: Status = Status.WAITING
    output_ids: list[int] = field(default_factory=list)
    num_computed: int = 0
    pages: PageTables | None = None
    finish_reason: str | None = None
    error: PenstockError | None = None
    num_preemptions: int = 0
    timings: Timings = field(default_factory=Timings)
    options: RequestOptions = field(default_factory=RequestOptions)
    order: tuple[float, float, int] = (0.0, 0.0, 0)
    virtual_start: float = -1.0
    slot: int = -1
    num_cached: int = 0
    page_keys: list[bytes] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_rows: PromptRows | None = None
    row: RowState | None = None
    pooling: Pooling | None = None
    family: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens known so far: prompt and answer."""
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def samples(self) -> bool:
        """Whether a token is sampled once all known ones are computed."""
        return self.pooling is None

    @property
    def may_share(self) -> bool:
        """Whether pages that are known may stand in for computing its tokens."""
        return self.pooling is None or not self.pooling.takes_all

    @property
    def prompt_logprobs(self) -> list[TokenLogprobs | None] | None:
        """One entry per token of the prompt, None for the first; None when nobody asked for them."""
        return None if self.prompt_rows is None else self.prompt_rows.scores

    @property
    def first_wanted(self) -> int:
        """The first position whose logits are still wanted: of the prompt, or the last one for the next token; behind
        all when no token follows.
        """
        rows = self.prompt_rows
        if rows is not None and rows.num_taken < len(self.prompt_ids) - 1:
            return rows.num_taken
        return self.num_tokens - self.samples

    def token_at(self, position: int) -> int:
        """The token id at a position of prompt and answer."""
        prompt_len = len(self.prompt_ids)
        return self.prompt_ids[position] if position < prompt_len else self.output_ids[position - prompt_len]

    def tokens(self, start: int, stop: int) -> list[int]:
        """The token ids at positions ``start`` to ``stop``."""
        prompt_len = len(self.prompt_ids)
        if start >= prompt_len:
            return self.output_ids[start - prompt_len : stop - prompt_len]
        head = self.prompt_ids[start:stop]
        return head + self.output_ids[: stop - prompt_len] if stop > prompt_len else head

    def accept(self, token: int) -> None:
        """Take a sampled token: append it, stream its text, and see whether the request ends with it."""
        if not self.output_ids:
            self.timings.first_token = time.perf_counter()
        self.output_ids.append(token)
        try:
            completes = self.text is not None and self.text.push(token)  # an end token may be part of the text
            stops = completes or token in self.stop_ids
        except Exception as error:  # a damaged tokenizer, or no memory for its text: this request's misfortune alone
            self.finish("error", to_penstock_error("the answer's text", error))
            return
        if stops:
            self.finish("stop")
        elif len(self.output_ids) >= self.max_tokens:
            self.finish("length")

    def finish(self, reason: str, error: PenstockError | None = None) -> None:
        """End the request: "length", "stop", "abort" or "error"; whoever holds its pages gives them back.

        It ends whatever its text raises, which becomes its error unless it has one.
        """
        self.finish_reason = reason
        self.error = error
        self.timings.finished = time.perf_counter()
        try:
            if self.text is not None:
                self.text.finish()
        except Exception as damage:
            self.error = error or to_penstock_error("the end of the answer's text", damage)
        finally:
            self.status = Status.FINISHED  # last: who waits in another thread then finds all of it


def to_penstock_error(what: str, error: Exception) -> PenstockError:
    """Whatever ``what`` raised as an error that a request can end with."""
    if isinstance(error, PenstockError):
        return error
    ours = InternalError(f"{what} failed: {type(error).__name__}: {error}")
    ours.__cause__ = error
    return ours
