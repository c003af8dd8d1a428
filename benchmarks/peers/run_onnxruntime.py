"""ONNX Runtime GenAI for run.py: one generator for a whole batch, each step timed from outside."""

from __future__ import annotations

import json
import statistics
import time
from typing import Any

from protocol import START_TEXT, Launch, prompt, serve


def open_model(launch: Launch) -> Any:
    """Return the model, after writing the number of threads into its configuration."""
    import onnxruntime_genai

    path = launch.model / "genai_config.json"
    config = json.loads(path.read_text())
    config["model"]["decoder"]["session_options"]["intra_op_num_threads"] = launch.threads
    path.write_text(json.dumps(config, indent=1))
    return onnxruntime_genai.Model(str(launch.model))


def generator_of(model: Any, prompts: list[list[int]], num_tokens: int) -> Any:
    """Return a greedy generator without prompts."""
    import onnxruntime_genai

    length = len(prompts[0]) + num_tokens + 1
    params = onnxruntime_genai.GeneratorParams(model)
    params.set_search_options(max_length=length, min_length=length, batch_size=len(prompts), do_sample=False)
    return onnxruntime_genai.Generator(model, params)


class OnnxRuntime:
    def __init__(self, launch: Launch) -> None:
        self.model = open_model(launch)
        self._run([prompt(16, 0)], 4)

    def _run(self, prompts: list[list[int]], num_tokens: int) -> tuple[float, list[float]]:
        """Return the seconds to the first tokens, and of each later step."""
        import numpy as np

        generator = generator_of(self.model, prompts, num_tokens)
        ids = np.array(prompts, dtype=np.int32)
        start = time.perf_counter()
        generator.append_tokens(ids if len(prompts) > 1 else ids[0])
        generator.generate_next_token()
        first = time.perf_counter() - start
        times = []
        for _ in range(num_tokens - 1):
            start = time.perf_counter()
            generator.generate_next_token()
            times.append(time.perf_counter() - start)
        return first, times

    def prefill_s(self, ids: list[int]) -> float:
        return self._run([ids], 2)[0]

    def decode_step_s(self, prompts: list[list[int]], num_steps: int) -> float:
        return statistics.median(self._run(prompts, num_steps + 1)[1])


def first_token(launch: Launch) -> None:
    import onnxruntime_genai

    model = open_model(launch)
    ids = onnxruntime_genai.Tokenizer(model).encode(START_TEXT)
    generator = generator_of(model, [ids], 1)
    generator.append_tokens(ids)
    generator.generate_next_token()


if __name__ == "__main__":
    serve(OnnxRuntime, first_token)
