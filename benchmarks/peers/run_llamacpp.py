"""llama.cpp for run.py: its own tools, llama-bench for batch 1 and prefill, llama-batched-bench for batches.

MODEL is a GGUF file.  The tools make their prompts of random tokens, a different one for each sequence.  Each measure
is a separate process; the first token is the first byte of llama-completion's answer, or its end.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
from pathlib import Path

from protocol import CONTEXT_LEN, START_TEXT, Launch, batch_of, serve, steps_of

RUNS = 5
"""Of decoding at batch 1; the repetitions are llama-bench's own."""


class LlamaCpp:
    """``tools``: the folder of llama.cpp's programs, which the runner gives as an option."""

    def __init__(self, launch: Launch) -> None:
        self.tools, self.model, self.threads = Path(launch.options["tools"]), launch.model, str(launch.threads)
        self.peak_rss_bytes = 0

    def call(self, tool: str, *arguments: str) -> str:
        """Return the standard output of a tool; record its peak resident memory."""
        command = [str(self.tools / tool), "-m", str(self.model), "-t", self.threads, *arguments]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            if process.stdout is None:
                raise SystemExit(f"{tool}: no output")
            output = process.stdout.read()
            _, status, used = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise SystemExit(f"{tool} ended with {process.returncode}")
        self.peak_rss_bytes = used.ru_maxrss * 1024
        return output

    def rates(self, *arguments: str) -> list[float]:
        """Return the tokens per second of each repetition of llama-bench."""
        found: list[float] = json.loads(self.call("llama-bench", "-o", "json", *arguments))[0]["samples_ts"]
        return found

    def batch_rate(self, batch: int) -> float:
        """Return the tokens per second of all sequences together."""
        steps = steps_of(batch)
        sizes = ["-npp", str(CONTEXT_LEN), "-ntg", str(steps), "-npl", str(batch)]
        room = str(batch * (CONTEXT_LEN + 2 * steps))
        arguments = ["-c", room, "-b", "2048", "-ub", "512", "-tb", self.threads, *sizes]
        output = self.call("llama-batched-bench", "--output-format", "jsonl", *arguments)
        rows = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
        return float(rows[-1]["speed_tg"])


def measure(peer: LlamaCpp, name: str) -> dict[str, object]:
    kind, _, size = name.partition(":")
    if kind == "prefill":
        rates = peer.rates("-p", size, "-n", "0", "-r", "3")
    elif batch_of(name) == 1:
        rates = peer.rates("-p", "0", "-n", str(steps_of(1)), "-d", str(CONTEXT_LEN), "-r", str(RUNS))
    else:
        rates = [peer.batch_rate(batch_of(name))]
    return {"tokens_per_s": statistics.median(rates), "runs": rates, "peak_rss_bytes": peer.peak_rss_bytes}


def start_command(tools: Path, model: Path, threads: int) -> list[str]:
    """Return the command of llama-completion for one token; the runner times it without this script."""
    options = ["-n", "1", "-c", "2048", "-no-cnv", "--no-display-prompt", "--no-warmup", "--temp", "0"]
    return [str(tools / "llama-completion"), "-m", str(model), "-t", str(threads), "-p", START_TEXT, *options]


def first_token(launch: Launch) -> None:
    raise SystemExit("llama.cpp's start is timed without Python around it")


if __name__ == "__main__":
    serve(LlamaCpp, first_token, measure)
