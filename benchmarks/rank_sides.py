"""One side of ``rank_pairs.py``, which its interpreter runs: decodes for each line of standard input.

It imports no other file of this folder, because vLLM's environment has no Penstock.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable

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


if __name__ == "__main__":
    side, model, num_ranks, num_tokens, number_type = sys.argv[1:]
    serve(side, model, int(num_ranks), number_type, int(num_tokens))
