"""Compares penstock-lite with graph mode and the programs of llama.cpp: start, speed and memory.

    python benchmarks/devices.py BUNDLE --lite build/device/penstock-lite [--rounds 5] [--measure start,decode]
    python benchmarks/devices.py BUNDLE --lite ... --tools build/peers/llama.cpp/build/bin --gguf Q4_0.gguf

A round measures each system, one after the other.  Decode runs in one order and then in the reverse order; every second
round reverses both.  The bandwidth is probed before and after each figure.  Graph mode is a separate process that stays
open and sleeps between measurements; the other systems start anew.

start    time from starting the process to the first byte of its answer of one token, or to its end; page cache warm.
         For llama.cpp this is llama-completion without its warm-up run
decode   tokens per second after the first, greedy, after ``--prompt-tokens`` random ids: penstock-lite's own figure and
         the engine's own, whose tokens must be equal; llama-bench at the same depth with its own tokens
memory   peak of resident memory of the process that decoded, including the mapped weights that were read

Ratios compare figures of the same round; the result is their median.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

START_TEXT = "The quick brown fox jumps over"
PROBE = Path(__file__).parent / "peers" / "probe.py"
MEASURES = ("start", "decode")

Found = dict[str, dict[str, float]]
"""Figures of one round: by system, then by name."""


def first_byte_s(command: list[str]) -> float:
    """Seconds from starting the process to the first byte on its standard output, or to its end."""
    begin = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        if process.stdout is None:
            raise SystemExit(f"{command[0]}: no output")
        process.stdout.read(1)
        elapsed = time.perf_counter() - begin
        process.stdout.read()
    if process.returncode:
        raise SystemExit(f"{command} ended with {process.returncode}")
    return elapsed


def output_and_peak(command: list[str]) -> tuple[str, int]:
    """Return the output of a command and its peak resident memory, which is at least that of this process."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        if process.stdout is None:
            raise SystemExit(f"{command[0]}: no output")
        output = process.stdout.read()
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{command} ended with {process.returncode}")
    return output, used.ru_maxrss * 1024


class GraphMode:
    """The engine in a separate process (``answer_lines``): it answers each line of token ids with a line of figures."""

    def __init__(self, args: argparse.Namespace) -> None:
        command = [sys.executable, __file__, str(args.bundle), "--answer", "--threads", str(args.threads)]
        self.process = subprocess.Popen(
            [*command, "--tokens", str(args.tokens)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, prompt: list[int]) -> dict[str, Any]:
        if self.process.stdin is None or self.process.stdout is None:
            raise SystemExit("graph mode: no pipes")
        print(json.dumps(prompt), file=self.process.stdin, flush=True)
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit("graph mode ended")
        found: dict[str, Any] = json.loads(line)
        return found

    def close(self) -> None:
        if self.process.stdin is not None:
            self.process.stdin.close()
        self.process.wait()


def answer_lines(args: argparse.Namespace) -> None:
    """Run the process of GraphMode."""
    from penstock import LLM, SamplingParams

    params = SamplingParams(temperature=0, max_tokens=args.tokens, ignore_eos=True)
    with LLM(args.bundle, threads=args.threads) as llm:
        for line in sys.stdin:
            result = llm.generate(json.loads(line), params)
            status = Path("/proc/self/status").read_text()
            peak = int(status.split("VmHWM:")[1].split()[0]) * 1024
            figures = {"tokens_per_s": result.timings["decode_tokens_per_s"], "peak_rss_bytes": peak}
            print(json.dumps({**figures, "token_ids": list(result.token_ids)}), flush=True)


class Lite:
    """Measures the start and the decode speed of penstock-lite."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.command, self.tokens = [str(args.lite), str(args.bundle), "--threads", str(args.threads)], args.tokens
        self.command += ["--temperature", "0"]

    def start(self) -> float:
        return first_byte_s([*self.command, START_TEXT, "--max-tokens", "1", "--ignore-eos"])

    def decode(self, prompt: list[int]) -> dict[str, Any]:
        words = [",".join(map(str, prompt)), "--ids", "--json", "--ignore-eos", "--max-tokens", str(self.tokens)]
        output, _ = output_and_peak([*self.command, *words])
        found = json.loads(output)
        return {
            "tokens_per_s": found["timings"]["decode_tokens_per_s"],
            "peak_rss_bytes": found["memory"]["peak_rss_bytes"],
            "token_ids": found["token_ids"],
        }


class LlamaCpp:
    """Measures llama.cpp: the start with llama-completion, the decode speed with llama-bench."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.tools, self.common = args.tools, ["-m", str(args.gguf), "-t", str(args.threads)]
        self.args = args

    def start(self) -> float:
        words = ["-p", START_TEXT, "-n", "1", "-c", "2048", "-no-cnv", "--no-display-prompt", "--no-warmup"]
        return first_byte_s([str(self.tools / "llama-completion"), *self.common, *words, "--temp", "0"])

    def decode(self, prompt: list[int]) -> dict[str, Any]:
        words = ["-p", "0", "-n", str(self.args.tokens), "-d", str(len(prompt)), "-r", "1", "-o", "json"]
        output, peak = output_and_peak([str(self.tools / "llama-bench"), *self.common, *words])
        return {"tokens_per_s": json.loads(output)[0]["samples_ts"][0], "peak_rss_bytes": peak}


def bandwidth(threads: int) -> float:
    """Return the current read bandwidth in bytes per second."""
    done = subprocess.run(
        [sys.executable, str(PROBE), "--threads", str(threads)], stdout=subprocess.PIPE, text=True, check=True
    )
    return float(json.loads(done.stdout)["read"])


def one_round(args: argparse.Namespace, number: int, systems: dict[str, Any]) -> Found:
    """Return the figures of every system; every second round reverses the order."""
    found: Found = {name: {} for name in systems}
    order = list(systems) if number % 2 == 0 else list(reversed(systems))
    prompt = [random.Random(number).randrange(300, 4000) for _ in range(args.prompt_tokens)]
    if "start" in args.measure:
        for name in order:
            if hasattr(systems[name], "start"):
                found[name]["start_ms"] = 1e3 * systems[name].start()
    if "decode" in args.measure:
        ids: dict[str, list[int]] = {}
        for name in [*order, *reversed(order)]:  # both directions, so that a steady drift affects all equally
            run = systems[name].ask if isinstance(systems[name], GraphMode) else systems[name].decode
            figures = run(prompt)
            found[name]["tokens_per_s"] = found[name].get("tokens_per_s", 0.0) + figures["tokens_per_s"] / 2
            found[name]["memory_mb"] = figures["peak_rss_bytes"] / 1e6
            if "token_ids" in figures:
                ids[name] = figures["token_ids"]
        if len({tuple(tokens) for tokens in ids.values()}) > 1:
            raise SystemExit(f"round {number}: not the same tokens: {ids}")
    return found


def row(name: str, values: list[float], unit: str) -> None:
    if values:
        median, least, most = statistics.median(values), min(values), max(values)
        print(f"{name:<44} median {median:10.3f} {unit:<10} min {least:10.3f}   max {most:10.3f}")


def report(rounds: list[Found], probes: list[float]) -> None:
    """Print the figures of each system, then the ratios of penstock-lite to the others in the same round."""
    units = {"start_ms": "ms", "tokens_per_s": "tokens/s", "memory_mb": "MB"}
    titles = {"start_ms": "start to first byte", "tokens_per_s": "decode", "memory_mb": "peak memory"}
    for figure, unit in units.items():
        for name in rounds[0]:
            row(f"{titles[figure]}, {name}", [one[name][figure] for one in rounds if figure in one[name]], unit)
    for figure in units:
        for name in rounds[0]:
            pairs = [(one["penstock-lite"], one[name]) for one in rounds if name != "penstock-lite"]
            ratios = [lite[figure] / other[figure] for lite, other in pairs if figure in lite and figure in other]
            row(f"{titles[figure]}, penstock-lite to {name}", ratios, "x")
    row("bandwidth", [probe / 1e9 for probe in probes], "GB/s")


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--lite", type=Path, help="path of the program penstock-lite (default: do not measure it)")
    parser.add_argument(
        "--tools", type=Path, help="folder of llama-completion and llama-bench (default: do not measure llama.cpp)"
    )
    parser.add_argument("--gguf", type=Path, help="the same network for llama.cpp (default: none)")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--measure", default=",".join(MEASURES), help="start, decode or both (default: both)")
    parser.add_argument("--answer", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.measure = args.measure.split(",")
    if not set(args.measure) <= set(MEASURES):
        parser.error(f"--measure: expected some of {', '.join(MEASURES)}")
    if not args.answer and args.lite is None:
        parser.error("--lite is missing: the program penstock-lite")
    if (args.tools is None) != (args.gguf is None):
        parser.error("--tools and --gguf go together")
    return args


def main() -> None:
    args = parsed()
    if args.answer:
        answer_lines(args)
        return
    systems: dict[str, Any] = {"penstock-lite": Lite(args)}
    if "decode" in args.measure:
        systems["graph mode"] = GraphMode(args)
    if args.tools is not None:
        systems["llama.cpp"] = LlamaCpp(args)
    one_round(args, 0, systems)  # fills the page cache and touches the weights
    probes, rounds = [bandwidth(args.threads)], []
    for number in range(1, args.rounds + 1):
        rounds.append(one_round(args, number, systems))
        probes.append(bandwidth(args.threads))
    report(rounds, probes)
    closes: Callable[[], None] | None = getattr(systems.get("graph mode"), "close", None)
    if closes is not None:
        closes()


if __name__ == "__main__":
    main()
