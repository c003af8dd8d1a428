"""A request: the prompt, the options, and its state in the engine.  No tensors here."""

from __future__ import annotations

import time
from collections.abc import Sequence
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
    from penstock.text.answer.budget import ThoughtsState
    from penstock.text.grammar.matcher import GrammarMatcher
    from penstock.text.text_stream import TextStream

__all__ = ["BegunAnswer", "Request", "RequestStatus", "Timings", "to_penstock_error"]


class RequestStatus(Enum):
    """The state of a request."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(frozen=True)
class BegunAnswer:
    """The part of answer ``index`` that another engine delivered: its tokens and ``num_chars`` of its text.

    ``has_ended``: that was the whole answer.
    """

    index: int
    token_ids: Sequence[int] = ()
    num_chars: int = 0
    has_ended: bool = False


@dataclass
class Timings:
    """Times of events in seconds of ``time.perf_counter``; 0 means that the event has not happened."""

    submitted: float = field(default_factory=time.perf_counter)
    scheduled: float = 0.0
    first_token: float = 0.0
    finished: float = 0.0

    @property
    def queued_s(self) -> float:
        """The seconds from submission to scheduling."""
        return max(0.0, self.scheduled - self.submitted) if self.scheduled else 0.0

    @property
    def prefill_s(self) -> float:
        """The seconds from scheduling to the first token."""
        return max(0.0, self.first_token - self.scheduled) if self.first_token else 0.0

    def summary(self, num_tokens: int) -> dict[str, float]:
        """Return durations in seconds, and the rate of decoding ``num_tokens`` tokens.

        ``queued_s``: submission to scheduling.  ``prefill_s``: scheduling to the first token.  ``first_token_s``:
        submission to the first token.  ``total_s``: submission to the end.  ``per_token_s`` and
        ``decode_tokens_per_s``: time per token and tokens per second after the first token.
        """
        decode_s = self.finished - self.first_token
        rate = (num_tokens - 1) / decode_s if num_tokens > 1 and decode_s > 0 else 0.0
        return {
            "queued_s": self.queued_s,
            "prefill_s": self.prefill_s,
            "first_token_s": self.first_token - self.submitted if self.first_token else 0.0,
            "total_s": self.finished - self.submitted,
            "per_token_s": 1 / rate if rate else 0.0,
            "decode_tokens_per_s": rate,
        }


@dataclass(eq=False, slots=True)  # CPython is slower with more than 30 attributes in a dictionary
class Request:
    """One prompt that is continued.

    ``num_computed`` counts the leading tokens whose keys and values are in pages.  It returns to 0 when the request is
    preempted, which is then computed again from its prompt and its answer so far. ``num_cached`` of the prompt's tokens
    were shared and not computed. ``order``, set by the scheduler, sorts requests by urgency, arrival and client.
    ``virtual_start`` belongs to FairQueue. ``slot`` is its place among the running requests.  ``page_keys`` are the
    keys of its leading pages. ``row`` is the sampler's state.  ``prompt_rows`` collects rows of the prompt; with
    ``max_tokens`` 0 no token follows. ``pooling`` collects hidden rows; the request then ends with its prompt.
    ``family`` is a number that the answers to one prompt share, 0 for a prompt with one answer.  ``num_resumed``: the
    leading tokens of the answer that another engine sampled.  ``matcher`` has the tokens that the grammar allows next.
    ``group``: the requests that end together, this one included, if there are several.  ``is_parked``: it waits for
    others of its group, and needs no pages meanwhile.
    ``thoughts`` counts the tokens of the thoughts.  ``num_encoded``: the leading tokens of the prompt that only an
    encoder sees.
    """

    id: int
    prompt_ids: list[int]
    max_tokens: int
    sampling: ResolvedSampling = field(default_factory=ResolvedSampling)
    stop_ids: frozenset[int] = frozenset()
    text: TextStream | None = None
    status: RequestStatus = RequestStatus.WAITING
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
    num_resumed: int = 0
    matcher: GrammarMatcher | None = None
    group: Sequence[Request] = ()
    is_parked: bool = False
    thoughts: ThoughtsState | None = None
    num_encoded: int = 0

    def __post_init__(self) -> None:
        """Begin the answer in its grammar."""
        if self.sampling.grammar is not None:
            self.matcher = self.sampling.grammar.matcher()
        if self.sampling.thoughts is not None:
            self.thoughts = self.sampling.thoughts.begin(self.prompt_ids)

    def enter(self, num_encoded: int) -> None:
        """Join the requests that end together with it; call this once the queue has room for it."""
        self.num_encoded = num_encoded
        if self.sampling.hook is not None:
            self.group = self.sampling.hook.join(self)

    def resume(self, output_ids: list[int]) -> None:
        """Begin after the tokens that another engine sampled.  Raises the errors of a grammar that refuses them."""
        self.output_ids, self.num_resumed = output_ids, len(output_ids)
        if self.matcher is not None:
            self.matcher.accept(output_ids)
        if self.thoughts is not None:
            for token in output_ids:
                self.thoughts.accept(token)

    @property
    def forced_token(self) -> int | None:
        """The token of the text that ends the thoughts, if it comes next."""
        return None if self.thoughts is None else self.thoughts.forced_token

    @property
    def own_prompt_ids(self) -> list[int]:
        """The tokens of the prompt in the sequence that the answer continues: without those of an encoder."""
        return self.prompt_ids[self.num_encoded :] if self.num_encoded else self.prompt_ids

    @property
    def num_tokens(self) -> int:
        """The number of known tokens: prompt and answer so far."""
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def samples(self) -> bool:
        """True if a token is sampled once all known tokens are computed."""
        return self.pooling is None

    @property
    def num_sampled(self) -> int:
        """The number of tokens of the answer that this engine sampled."""
        return len(self.output_ids) - self.num_resumed

    @property
    def may_share(self) -> bool:
        """True if shared pages may replace the computation of its tokens."""
        return self.pooling is None or not self.pooling.takes_all

    @property
    def prompt_logprobs(self) -> list[TokenLogprobs | None] | None:
        """One entry for each token of the prompt, None for the first; None if they were not requested."""
        return None if self.prompt_rows is None else self.prompt_rows.scores

    @property
    def first_wanted(self) -> int:
        """The first position whose logits are still needed.

        This is a position of the prompt, or the last known position for the next token, or one after it if no token
        follows.
        """
        rows = self.prompt_rows
        if rows is not None and rows.num_taken < len(self.prompt_ids) - 1:
            return rows.num_taken
        return self.num_tokens - self.samples

    def token_at(self, position: int) -> int:
        """Return the token id at a position of prompt and answer."""
        prompt_len = len(self.prompt_ids)
        return self.prompt_ids[position] if position < prompt_len else self.output_ids[position - prompt_len]

    def tokens(self, start: int, stop: int) -> list[int]:
        """Return the token ids at positions ``start`` to ``stop``."""
        prompt_len = len(self.prompt_ids)
        if start >= prompt_len:
            return self.output_ids[start - prompt_len : stop - prompt_len]
        head = self.prompt_ids[start:stop]
        return head + self.output_ids[: stop - prompt_len] if stop > prompt_len else head

    def accept(self, token: int) -> None:
        """Append a sampled token, add it to the text, and end the request if it was the last."""
        if not self.timings.first_token:
            self.timings.first_token = time.perf_counter()
        self.output_ids.append(token)
        try:
            completes = self.text is not None and self.text.push(token)  # an end token may be part of the text
            stops = completes or token in self.stop_ids
            if self.matcher is not None and not stops:
                stops = self.matcher.accept([token])
            if self.thoughts is not None:
                self.thoughts.accept(token)
        except Exception as error:  # a damaged tokenizer, or no memory: only this request fails
            self.finish("error", to_penstock_error("Detokenizing the answer", error))
            return
        if stops:
            self.finish("stop")
        elif len(self.output_ids) >= self.max_tokens:
            self.finish("length")

    def accept_forced(self) -> int:
        """Accept the tokens behind the last one that the grammar allows as the only ones, as far as they are known.

        Returns their number.  The next step computes them as one chunk.
        """
        num_forced = 0
        while self.matcher is not None and (token := self.matcher.forced_token) is not None:
            self.accept(token)
            num_forced += 1
        return num_forced

    def finish(self, reason: str, error: PenstockError | None = None) -> None:
        """End the request with "length", "stop", "abort" or "error"; the caller frees its pages.

        The request ends even if its text raises; that error becomes the request's unless it has one.
        """
        self.finish_reason = reason
        self.error = error
        self.timings.finished = time.perf_counter()
        self.matcher = None
        try:
            if self.text is not None:
                self.text.finish()
        except Exception as damage:
            self.error = error or to_penstock_error("Detokenizing the end of the answer", damage)
        finally:
            self.status = (
                RequestStatus.FINISHED
            )  # last, because another thread that waits for it then reads the other fields


def to_penstock_error(what: str, error: Exception) -> PenstockError:
    """Return the error to end a request with after ``what`` raised ``error``."""
    if isinstance(error, PenstockError):
        return error
    internal = InternalError(f"{what} failed: {type(error).__name__}: {error}")
    internal.__cause__ = error
    return internal
