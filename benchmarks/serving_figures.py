"""The outcome of requests to a service, and the figures of a run.  Depends only on ``peers/traces.py``."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from serving_client import Answer, body_of, events_of

sys.path.append(str(Path(__file__).parent / "peers"))

from traces import percentiles


@dataclass
class Outcome:
    """The outcome of a request; times in seconds from the start of its run.

    ``kind``: "done", or the reason: the HTTP status, "error in stream", "cut short", "connection lost", "given up".
    ``pieces_s``: when text arrived, for streams only; a piece may contain several tokens.
    """

    due_s: float
    sent_s: float
    ended_s: float
    kind: str = "done"
    pieces_s: list[float] = field(default_factory=list)
    num_tokens: int = 0


def outcome_of(answer: Answer, start_s: float) -> Outcome:
    """Parse an answer.  A stream is complete if it ended with [DONE] or contains its usage."""
    end_s = answer.ended_s or (answer.reads[-1][0] if answer.reads else answer.sent_s or answer.due_s)
    found = Outcome(answer.due_s - start_s, answer.sent_s - start_s, end_s - start_s)
    if answer.lost:
        found.kind = answer.lost
        return found
    status, body = body_of(answer.reads)
    if status != 200:
        found.kind = str(status)
        return found
    text = [*body]
    if text and text[0][1].lstrip().startswith(b"{"):  # a whole answer
        found.num_tokens = json.loads(b"".join(data for _, data in text))["usage"]["completion_tokens"]
        return found
    is_complete = False
    for at_s, data in events_of(text):
        if data == b"[DONE]":
            is_complete = True
            continue
        event = json.loads(data)
        if "error" in event:
            found.kind = "error in stream"
            return found
        if any(choice.get("text") or (choice.get("delta") or {}).get("content") for choice in event["choices"]):
            found.pieces_s.append(at_s - start_s)
        if event.get("usage"):
            found.num_tokens = event["usage"]["completion_tokens"]
    if not is_complete:
        found.kind = "cut short"
    return found


def figures(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Return the figures that a client observed.

    All seconds count from when a request was due, not from when it was sent: a client that falls behind, or a server
    that does not take connections, makes them longer.  ``late_s`` says by how much the client fell behind.  Throughput
    is of requests that were done, from the first that was due to the last end.
    """
    done = [one for one in outcomes if one.kind == "done"]
    refused = [one for one in outcomes if one.kind.isdigit()]
    seconds = max(one.ended_s for one in outcomes) - min(one.due_s for one in outcomes)
    num_tokens = sum(one.num_tokens for one in done)
    streamed = [one for one in done if one.pieces_s]
    return {
        "requests": len(outcomes),
        "done": len(done),
        "not_done": dict(sorted(Counter(one.kind for one in outcomes if one.kind != "done").items())),
        "seconds": seconds,
        "requests_per_s": len(done) / seconds if seconds else 0.0,
        "tokens": num_tokens,
        "tokens_per_s": num_tokens / seconds if seconds else 0.0,
        "tokens_per_piece": sum(one.num_tokens for one in streamed) / max(1, sum(len(s.pieces_s) for s in streamed)),
        "first_token_s": percentiles([one.pieces_s[0] - one.due_s for one in streamed]),
        "between_tokens_s": percentiles(
            [b - a for one in streamed for a, b in zip(one.pieces_s, one.pieces_s[1:], strict=False)]
        ),
        "request_s": percentiles([one.ended_s - one.due_s for one in done]),
        "refusal_s": percentiles([one.ended_s - one.due_s for one in refused]),
        "late_s": percentiles([one.sent_s - one.due_s for one in outcomes if one.sent_s > one.due_s]),
    }
