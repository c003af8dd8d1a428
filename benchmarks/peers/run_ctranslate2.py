"""CTranslate2 for run.py.  It shows no single steps: a step is the difference between two whole answers."""

from __future__ import annotations

import json
import time
from typing import Any

from protocol import START_TEXT, Launch, prompt, serve


def open_generator(launch: Launch) -> Any:
    import ctranslate2

    return ctranslate2.Generator(
        str(launch.model), device="cpu", compute_type=launch.mode, inter_threads=1, intra_threads=launch.threads
    )


def generate(generator: Any, prompts: list[list[str]], num_tokens: int, end: str) -> Any:
    return generator.generate_batch(
        prompts,
        max_length=num_tokens,
        min_length=num_tokens,
        end_token=[end],
        include_prompt_in_result=False,
        sampling_topk=1,
        beam_size=1,
    )


class CTranslate2:
    def __init__(self, launch: Launch) -> None:
        self.generator = open_generator(launch)
        self.vocabulary = json.loads((launch.model / "vocabulary.json").read_text())
        self._run([prompt(16, 0)], 4)

    def _run(self, prompts: list[list[int]], num_tokens: int) -> float:
        words = [[self.vocabulary[token] for token in ids] for ids in prompts]
        start = time.perf_counter()
        answers = generate(self.generator, words, num_tokens, self.vocabulary[1])
        elapsed = time.perf_counter() - start
        if any(len(answer.sequences_ids[0]) != num_tokens for answer in answers):
            raise SystemExit(f"expected answers of {num_tokens} tokens")
        return elapsed

    def prefill_s(self, ids: list[int]) -> float:
        return self._run([ids], 1)

    def decode_step_s(self, prompts: list[list[int]], num_steps: int) -> float:
        short = self._run(prompts, 1)
        return (self._run(prompts, num_steps + 1) - short) / num_steps


def first_token(launch: Launch) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(launch.options["tokenizer"])
    vocabulary = json.loads((launch.model / "vocabulary.json").read_text())
    generate(open_generator(launch), [tokenizer.encode(START_TEXT).tokens], 1, vocabulary[1])


if __name__ == "__main__":
    serve(CTranslate2, first_token)
