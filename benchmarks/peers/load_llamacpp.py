"""llama.cpp for load.py: its server, over HTTP on this machine, token ids in, a stream of tokens out.

MODEL is a GGUF file.  Each request has its own connection.  Lines are noted with the time they came and read
afterwards, so that the client takes as little of the processors as it can.
"""

from __future__ import annotations

import asyncio
import atexit
import json
import socket
import subprocess
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from play import serve_traces
from protocol import Launch
from traces import MAX_BATCH, MAX_LEN, STEP_TOKENS, Event, Request

START_S = 60


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def count_tokens(lines: Sequence[tuple[float, bytes]], number: int) -> list[Event]:
    """Return the token events of one stream.  A token that ends inside a character is held back but counted."""
    events, made = [], 0
    for at_s, line in lines:
        if not line.startswith(b"data: "):
            if line.startswith(b"error: "):
                raise SystemExit(f"request {number}: {line.decode()}")
            continue
        message = json.loads(line[6:])
        count = int(message["tokens_predicted"])
        if count > made:
            events.append(Event(at_s, number, count - made))
            made = count
    return events


class LlamaCpp:
    """``tools``: the folder of llama.cpp's programs, which the runner gives as an option."""

    def __init__(self, launch: Launch) -> None:
        self.port = free_port()
        command = [str(Path(launch.options["tools"]) / "llama-server"), "-m", str(launch.model)]
        command += ["-t", str(launch.threads), "-tb", str(launch.threads), "--host", "127.0.0.1"]
        command += ["--port", str(self.port), "-c", str(MAX_BATCH * MAX_LEN), "-np", str(MAX_BATCH), "--cont-batching"]
        command += ["-b", str(STEP_TOKENS), "-ub", str(STEP_TOKENS), "--no-ui"]
        command += launch.options.get("server", "").split()
        self.server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        atexit.register(self.close)
        end = time.monotonic() + START_S
        while not self._is_ready():
            if self.server.poll() is not None or time.monotonic() > end:
                raise SystemExit(f"llama-server is not there; it ended with {self.server.poll()}")
            time.sleep(0.1)

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=1) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def play(self, requests: Sequence[Request]) -> list[Event]:
        return asyncio.run(self._play(requests))

    async def _play(self, requests: Sequence[Request]) -> list[Event]:
        bodies = [self._body(request) for request in requests]
        start = time.perf_counter()
        streams = await asyncio.gather(
            *(self._stream(body, request.due_s, start) for body, request in zip(bodies, requests, strict=True))
        )
        return [event for number, lines in enumerate(streams) for event in count_tokens(lines, number)]

    def _body(self, request: Request) -> bytes:
        wanted = {"prompt": request.prompt, "n_predict": request.num_new, "stream": True, "cache_prompt": True}
        greedy = {"ignore_eos": True, "samplers": ["top_k"], "top_k": 1}
        body = json.dumps(wanted | greedy).encode()
        head = f"POST /completion HTTP/1.1\r\nHost: 127.0.0.1:{self.port}\r\nContent-Type: application/json\r\n"
        return f"{head}Connection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body

    async def _stream(self, body: bytes, due_s: float, start: float) -> list[tuple[float, bytes]]:
        """Yield the lines of an answer with their times in seconds from ``start``."""
        await asyncio.sleep(max(0.0, start + due_s - time.perf_counter()))
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=1 << 22)
        writer.write(body)
        lines = []
        while line := await reader.readline():
            lines.append((time.perf_counter() - start, line))
        writer.close()
        return lines

    def forget(self) -> None:
        """Do nothing: a process measures one trace, so no prompt occurred before."""

    def figures(self) -> dict[str, object]:
        """Return the peak resident memory of the server instead of this client's."""
        text = Path(f"/proc/{self.server.pid}/status").read_text()
        peak = next(line for line in text.splitlines() if line.startswith("VmHWM:"))
        return {"peak_rss_bytes": int(peak.split()[1]) * 1024}

    def close(self) -> None:
        self.server.terminate()
        self.server.wait()


if __name__ == "__main__":
    serve_traces(LlamaCpp)
