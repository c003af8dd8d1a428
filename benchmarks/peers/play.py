"""Play a trace to a system.  No dependencies: runs in every environment.

A measure of ``load.py`` is the name of a trace file in the folder that the option ``traces`` names; what follows a
colon in it is sent only to that system ("shared:uncached").
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from protocol import Launch, peak_rss_bytes, serve
from traces import Event, Request, figures, read, warm_up


class Player(Protocol):
    """A system with its model open."""

    def play(self, requests: Sequence[Request]) -> list[Event]:
        """Send each request when it is due, and record the tokens as they arrive."""

    def forget(self) -> None:
        """Forget the prompts of earlier traces."""

    def figures(self) -> dict[str, object]:
        """Return the system's own figures of the last trace."""


class Steps(Protocol):
    """A system whose loop the caller drives in its own process."""

    def submit(self, number: int, request: Request) -> None:
        """Submit a request."""

    def step(self) -> list[tuple[int, int]]:
        """Run one step; return the numbers of the requests that got tokens, and how many."""


def play_steps(steps: Steps, requests: Sequence[Request]) -> list[Event]:
    """Submit due requests between steps; sleep while none is due."""
    start = time.perf_counter()
    left = {number: request.num_new for number, request in enumerate(requests)}
    events: list[Event] = []
    num_submitted = num_running = 0
    while left:
        now = time.perf_counter() - start
        while num_submitted < len(requests) and requests[num_submitted].due_s <= now:
            steps.submit(num_submitted, requests[num_submitted])
            num_submitted += 1
            num_running += 1
        if not num_running:
            time.sleep(max(0.0, requests[num_submitted].due_s - now))
            continue
        news = steps.step()
        now = time.perf_counter() - start
        for number, num_tokens in news:
            events.append(Event(now, number, num_tokens))
            left[number] -= num_tokens
            if left[number] <= 0:
                del left[number]
                num_running -= 1
    return events


def serve_traces(open_player: Callable[[Launch], Player]) -> None:
    """Run the main program of a ``load_<peer>.py``."""
    folders: list[Path] = []

    def opened(launch: Launch) -> Player:
        folders.append(Path(launch.options["traces"]))
        player = open_player(launch)
        player.play(warm_up())
        return player

    def measure(player: Player, name: str) -> dict[str, object]:
        requests = read(folders[0] / f"{name.partition(':')[0]}.jsonl")
        player.forget()
        found = figures(requests, player.play(requests))
        return {**found, "peak_rss_bytes": peak_rss_bytes(), **player.figures()}

    def first_token(launch: Launch) -> None:
        raise SystemExit("start is measured by run.py")

    serve(opened, first_token, measure)
