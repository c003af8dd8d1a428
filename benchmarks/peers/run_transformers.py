"""transformers on PyTorch in bfloat16 for run.py: a plain greedy loop, without generate()'s overhead."""

from __future__ import annotations

import statistics
import time
from typing import Any

from protocol import START_TEXT, Launch, prompt, serve


def open_model(launch: Launch) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(launch.threads)
    return AutoModelForCausalLM.from_pretrained(launch.model, dtype=torch.bfloat16).eval()


def run(model: Any, prompts: list[list[int]], num_tokens: int) -> tuple[float, list[float]]:
    """Return the seconds to the first tokens, and of each later step."""
    import torch
    from transformers import DynamicCache

    with torch.inference_mode():
        ids, cache, times = torch.tensor(prompts), DynamicCache(config=model.config), []
        for _ in range(num_tokens):
            start = time.perf_counter()
            output = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
            ids = output.logits[:, -1:].argmax(-1)
            times.append(time.perf_counter() - start)
    return times[0], times[1:]


class Transformers:
    def __init__(self, launch: Launch) -> None:
        self.model = open_model(launch)
        run(self.model, [prompt(16, 0)], 4)

    def prefill_s(self, ids: list[int]) -> float:
        return run(self.model, [ids], 1)[0]

    def decode_step_s(self, prompts: list[list[int]], num_steps: int) -> float:
        return statistics.median(run(self.model, prompts, num_steps + 1)[1])


def first_token(launch: Launch) -> None:
    from transformers import AutoTokenizer

    ids = AutoTokenizer.from_pretrained(launch.model)(START_TEXT)["input_ids"]
    run(open_model(launch), [ids], 1)


if __name__ == "__main__":
    serve(Transformers, first_token)
