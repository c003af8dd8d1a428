"""Clients of several services of one cluster: they send each request until it is answered, and note how tries end."""

from __future__ import annotations

import http.client
import json
import random
import threading
import time
from contextlib import closing
from dataclasses import dataclass, field

from tests.support.serve_command import ask, connection

NUM_PROMPTS = 12
PAUSE_S = 0.1


@dataclass
class Primary:
    """A service.  ``down_at``: when it was killed last, None while it serves."""

    name: str
    url: str = ""
    down_at: float | None = None

    def workers(self) -> list[dict[str, object]]:
        """Return the state of its workers."""
        workers: list[dict[str, object]] = ask(self.url, "/status")["models"][0]["workers"]
        return workers

    def num_ready(self) -> int:
        """Return how many of its workers accept requests."""
        return sum(worker["status"] == "ready" for worker in self.workers())


@dataclass
class Failure:
    """A try that failed, retriably: at which service, when, and with which error."""

    primary: str
    at: float
    error: str


@dataclass
class Traffic:
    """Threads that send requests to any primary that serves."""

    primaries: list[Primary]
    num_clients: int = 6
    num_answered: int = 0
    failures: list[Failure] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._lock, self._ending = threading.Lock(), threading.Event()
        self._expected: dict[int, str] = {}
        self._threads = [threading.Thread(target=self._client, args=(seed,)) for seed in range(self.num_clients)]

    def start(self) -> None:
        """Learn the answer to each prompt, and start the clients."""
        for number in range(NUM_PROMPTS):
            text, error = _complete(self.primaries[0].url, number, is_stream=False)
            assert not error, error
            self._expected[number] = text
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """End the clients after their present tries."""
        self._ending.set()
        for thread in self._threads:
            thread.join()

    def _client(self, seed: int) -> None:
        draw = random.Random(seed)
        while not self._ending.is_set():
            number, is_stream = draw.randrange(NUM_PROMPTS), draw.random() < 0.7
            is_answered = False
            while not is_answered and not self._ending.is_set():
                primary = draw.choice([one for one in self.primaries if one.down_at is None])
                is_answered = self._try(primary, number, is_stream)
                if not is_answered:
                    time.sleep(PAUSE_S)

    def _try(self, primary: Primary, number: int, is_stream: bool) -> bool:
        try:
            text, error = _complete(primary.url, number, is_stream)
            is_retriable = '"unavailable"' in error
        except (OSError, http.client.HTTPException) as reason:
            text, error = "", f"{type(reason).__name__}: {reason}"
            is_retriable = primary.down_at is not None  # it was killed with the request
        with self._lock:
            if error:
                self.failures.append(Failure(primary.name, time.monotonic(), error))
            if error and not is_retriable:
                self.wrong.append(f"{primary.name}: {error}")
            elif not error and text != self._expected[number]:
                self.wrong.append(f"{primary.name}: prompt {number}: {text!r} in place of {self._expected[number]!r}")
            self.num_answered += not error
        return not error


def _complete(url: str, number: int, is_stream: bool) -> tuple[str, str]:
    """Return the text of an answer, and the error that ended it or ""."""
    body = {
        "model": "demo", "prompt": f"def f{number}(", "max_tokens": 60, "temperature": 0, "ignore_eos": True,
        "stream": is_stream,
    }  # fmt: skip
    with closing(connection(url)) as link:
        link.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        answer = link.getresponse()
        data = answer.read().decode()
    if answer.status != 200:
        return "", data
    if not is_stream:
        return str(json.loads(data)["choices"][0]["text"]), ""
    lines = [line.removeprefix("data: ") for line in data.splitlines() if line.startswith("data: ")]
    if not lines or lines[-1] != "[DONE]":
        return "", lines[-1] if lines else "the stream ended without an event"
    return "".join(json.loads(line)["choices"][0]["text"] for line in lines[:-1]), ""
