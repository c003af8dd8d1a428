"""Traces of requests, and their outcomes.  No dependencies: runs in every environment.

A trace is a file of one JSON object a line: ``due_s`` (seconds from the beginning), ``prompt`` (token ids) and
``num_new`` (tokens to make, whatever they are: nothing ends an answer early).  It is made once from a seed, and every
system is given the same file.
"""

from __future__ import annotations

import json
import math
import random
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

NUM_REQUESTS = 64
MEAN_PROMPT, MEAN_ANSWER = 256, 64
SPREAD = 0.8
"""Standard deviation of the logarithm of a length."""
MOST = 4
"""Lengths end at this many times their mean."""
SHARED_PROMPT, SHARED_TOKENS, SHARED_ANSWER = 1000, 900, 32
MAX_BATCH = 32
"""Requests side by side, in every system."""
STEP_TOKENS = 512
"""The most tokens of a step, in every system that has such a bound."""
MAX_LEN = MOST * (MEAN_PROMPT + MEAN_ANSWER)
CACHE_GIB = 2
"""For keys and values, in every system: 32 of the longest requests side by side, in bfloat16 at 348M."""


@dataclass(frozen=True)
class Request:
    """A request and its due time."""

    due_s: float
    prompt: list[int]
    num_new: int


@dataclass(frozen=True)
class Event:
    """The request with this number had ``num_tokens`` tokens at ``at_s``, in seconds from the start."""

    at_s: float
    number: int
    num_tokens: int


def _tokens(stream: random.Random, count: int) -> list[int]:
    """Return token ids without special tokens, within every measured vocabulary."""
    return [stream.randrange(300, 4000) for _ in range(count)]


def _length(stream: random.Random, mean: int) -> int:
    drawn = stream.lognormvariate(math.log(mean) - SPREAD**2 / 2, SPREAD)
    return max(1, min(MOST * mean, round(drawn)))


def mixed(rate: float = 0.0, seed: int = 0, num_requests: int = NUM_REQUESTS) -> list[Request]:
    """Return requests of lognormal lengths with Poisson arrivals at ``rate`` per second; 0 is all at once.

    The requests are those of the seed, and so is the pattern of their arrivals, whatever the rate.
    """
    asked, arriving = random.Random(seed), random.Random(f"arrivals {seed}")
    requests, due = [], 0.0
    for _ in range(num_requests):
        prompt = _tokens(asked, _length(asked, MEAN_PROMPT))
        requests.append(Request(due, prompt, _length(asked, MEAN_ANSWER)))
        due += arriving.expovariate(1.0) / rate if rate else 0.0
    return requests


def shared(seed: int = 0, num_requests: int = NUM_REQUESTS) -> list[Request]:
    """Return prompts of equal length that begin with the same tokens, all at once."""
    stream = random.Random(f"shared {seed}")
    head = _tokens(stream, SHARED_TOKENS)
    rest = SHARED_PROMPT - SHARED_TOKENS
    return [Request(0.0, head + _tokens(stream, rest), SHARED_ANSWER) for _ in range(num_requests)]


def warm_up() -> list[Request]:
    """Return the warm-up of every system: a long prompt and full batches, without prompts of a trace."""
    stream = random.Random("warm-up")
    lengths = [STEP_TOKENS, *(16 for _ in range(MAX_BATCH - 1))]
    return [Request(0.0, _tokens(stream, length), 8) for length in lengths]


def write(path: Path, requests: Iterable[Request]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(asdict(request)) + "\n" for request in requests))


def read(path: Path) -> list[Request]:
    return [Request(**json.loads(line)) for line in path.read_text().splitlines()]


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Return the 50th, 90th and 99th percentiles, interpolated between values."""
    if len(values) < 2:
        return dict.fromkeys(("50", "90", "99"), values[0] if values else 0.0)
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    return {name: cuts[int(name) - 1] for name in ("50", "90", "99")}


def figures(requests: Sequence[Request], events: Sequence[Event]) -> dict[str, object]:
    """Return the figures that a client observed; SystemExit if an answer has the wrong number of tokens.

    Seconds to the first token count from when a request was due, not from when the system took it.  Seconds between
    tokens are of all requests together; tokens that came at once are nothing apart.
    """
    first: dict[int, float] = {}
    last: dict[int, float] = {}
    made = dict.fromkeys(range(len(requests)), 0)
    between: list[float] = []
    for event in sorted(events, key=lambda event: event.at_s):
        number = event.number
        if number in last:
            between += [event.at_s - last[number], *[0.0] * (event.num_tokens - 1)]
        else:
            first[number] = event.at_s - requests[number].due_s
            between += [0.0] * (event.num_tokens - 1)
        last[number] = event.at_s
        made[number] += event.num_tokens
    for number, request in enumerate(requests):
        if made[number] != request.num_new:
            raise SystemExit(f"request {number}: expected {request.num_new} tokens, got {made[number]}")
    seconds = max(last.values())
    prompt_tokens = sum(len(request.prompt) for request in requests)
    new_tokens = sum(request.num_new for request in requests)
    return {
        "seconds": seconds,
        "requests_per_s": len(requests) / seconds,
        "tokens_per_s": new_tokens / seconds,
        "all_tokens_per_s": (prompt_tokens + new_tokens) / seconds,
        "first_token_s": percentiles(list(first.values())),
        "between_tokens_s": percentiles(between),
        "request_s": percentiles([last[number] - request.due_s for number, request in enumerate(requests)]),
    }
