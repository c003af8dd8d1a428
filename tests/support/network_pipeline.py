"""Rank 0 of a pipeline whose stages are on other hosts.

``python -m tests.support.network_pipeline CERTIFICATE KEY TOKEN ADDRESS PORT`` reads commands from standard input, and
answers each with lines of JSON.  ``answer TP``: what the pipeline answers.  ``stream TP``: a request, until a rank is
lost.  TP: the ranks of each stage.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

from penstock.engine.params import SamplingParams
from penstock.errors import UnavailableError
from penstock.llm.llm import LLM
from penstock.runtime.ranks.stage_server import StageServer
from tests.support.rank_processes import DEMO, LIMITS, PROMPTS, tokens_of

__all__ = ["answers"]

GREEDY = SamplingParams(max_tokens=20, temperature=0.0)
SAMPLED = SamplingParams(max_tokens=20, temperature=0.9, top_p=0.9, seed=3, n=2, logprobs=3)
LONG = SamplingParams(max_tokens=200, ignore_eos=True)


def answers(llm: LLM) -> dict[str, object]:
    """Tokens, and checksums of log-probabilities and logits."""
    sampled = repr(tokens_of(llm, PROMPTS, SAMPLED)).encode()
    return {
        "tokens": [result.token_ids for result in llm.generate(PROMPTS, GREEDY)],
        "sampled": hashlib.sha256(sampled).hexdigest(),
        "logits": hashlib.sha256(llm.logits(PROMPTS[1]).tobytes()).hexdigest(),
    }


def say(**values: object) -> None:
    print(json.dumps(values), flush=True)


def stream_until_lost(llm: LLM) -> None:
    try:
        while True:
            for delta in llm.stream(PROMPTS[0], LONG):
                say(token_ids=delta.token_ids)
    except UnavailableError as error:
        say(error=str(error), code=error.code)


def main() -> None:
    certificate, key, token, address, port = sys.argv[1:6]
    server = StageServer(address, int(port), Path(certificate), Path(key), token, 60.0)
    for line in sys.stdin:
        command, tp = line.split()
        sizes = {"tensor_parallel_size": int(tp), "pipeline_parallel_size": 2}
        with LLM(DEMO, threads=1, limits=LIMITS, stage_server=server, **sizes) as llm:
            if command == "answer":
                say(**answers(llm))
            else:
                stream_until_lost(llm)


if __name__ == "__main__":
    main()
